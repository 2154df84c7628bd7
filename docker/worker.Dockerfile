# The worker image: what a rank needs inside its container, on top of a base that brings Python 3.11 or newer, PyTorch
# where the workload needs it, and tini. The pipeline's own code is not in it: the provider mounts the installed, trusted
# version read-only. Fetch the three wheels for the base's Python, build, and use the image by the digest that is printed:
#   pip download --dest docker/wheels --only-binary :all: msgspec safetensors numpy
#   docker build --quiet -f docker/worker.Dockerfile --build-arg BASE_IMAGE=NAME@sha256:... docker
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY wheels /opt/wheels
RUN python3 -m venv --system-site-packages /opt/worker \
 && /opt/worker/bin/pip install --no-cache-dir --no-index --find-links /opt/wheels msgspec safetensors numpy \
 && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker
ENV PATH=/opt/worker/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER worker
ENTRYPOINT ["/usr/bin/tini", "-g", "--"]
