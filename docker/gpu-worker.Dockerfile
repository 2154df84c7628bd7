# The worker image for real GPUs, on top of a base that brings Python 3.12, PyTorch 2.11 for CUDA 13, nvcc 13.0, the
# headers of cuDNN and NCCL, and tini. As with worker.Dockerfile, nothing is fetched while it is built, and the
# pipeline's own code is mounted into it. docker/wheels holds gpu-packages.txt as wheels, and transformer_engine_torch
# as a wheel or as its source, which is compiled here (80 to 90 s on 16 cores):
#   python3 -m pip download --dest docker/wheels --no-deps --only-binary :all: --python-version 3.12 \
#     --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -r docker/gpu-packages.txt
#   docker build --quiet -f docker/gpu-worker.Dockerfile --build-arg BASE_IMAGE=NAME@sha256:... docker
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS packages
COPY wheels /opt/wheels
RUN python3 -m venv --system-site-packages /opt/worker \
 && /opt/worker/bin/pip install --no-cache-dir --no-index --no-deps /opt/wheels/*.whl
RUN set -e; for source in /opt/wheels/transformer_engine_torch-*.tar.gz; do \
      [ -e "$source" ] || continue; \
      nvidia="$(/opt/worker/bin/python -c 'import nvidia; print(list(nvidia.__path__)[0])')"; \
      CUDNN_PATH="$nvidia/cudnn" CPATH="$nvidia/cudnn/include:$nvidia/nccl/include" \
        /opt/worker/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation "$source"; \
    done

FROM ${BASE_IMAGE}
COPY --from=packages /opt/worker /opt/worker
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker
ENV PATH=/opt/worker/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    NCCL_NVLS_ENABLE=0 \
    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 \
    NVSHMEM_DISABLE_NVLS=1 \
    TRITON_CACHE_AUTOTUNING=1
USER worker
ENTRYPOINT ["/usr/bin/tini", "-g", "--"]
