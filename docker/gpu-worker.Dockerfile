# syntax=docker/dockerfile:1
# The worker image for real GPUs: PyTorch 2.11 with CUDA 13, Megatron-Core 0.19.2, Transformer Engine 2.11 and the
# delta-net kernels. The base brings PyTorch, nvcc and cuDNN's headers; pin it by digest when you build for a cluster:
#   docker build -f docker/gpu-worker.Dockerfile --build-arg BASE_IMAGE=registry.example/pytorch@sha256:... .
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS wheels
# Transformer Engine's PyTorch part has no public wheel: it is built here against the base's CUDA.
COPY pyproject.toml /build/
WORKDIR /build
RUN CUDNN_HOME="$(python3 -c 'import nvidia, pathlib; print(pathlib.Path(list(nvidia.__path__)[0]) / "cudnn")')" \
 && NCCL_HOME="$(python3 -c 'import nvidia, pathlib; print(pathlib.Path(list(nvidia.__path__)[0]) / "nccl")')" \
 && export CUDNN_PATH="$CUDNN_HOME" CPATH="$CUDNN_HOME/include:$NCCL_HOME/include" \
 && python3 -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels transformer_engine_torch==2.11.0

FROM ${BASE_IMAGE}
RUN useradd --create-home --uid 10001 worker
COPY --from=wheels /wheels /wheels
COPY . /source
RUN python3 -m pip install --no-cache-dir /wheels/*.whl "/source[pipeline,megatron]" && rm -rf /wheels /source
USER worker
ENV NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 TRITON_CACHE_AUTOTUNING=1
ENTRYPOINT ["python3", "-m", "qualification.execution.worker"]
