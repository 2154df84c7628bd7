# syntax=docker/dockerfile:1
# The worker image, on top of a base that brings Python 3.11 or newer, PyTorch where the workload needs it, and tini. The
# pipeline's own code is not in it: the installed, trusted version is mounted read-only. docker/wheels says what it is
# for: msgspec, safetensors and numpy make it an image for workers, everything that the pipeline needs one for a docker
# work pool (docs/supervision.md, docs/deployments.md). Fetch the wheels for the base's Python, build, and use the image
# by the digest that is printed:
#   pip download --dest docker/wheels --only-binary :all: msgspec safetensors numpy
#   docker build --quiet -f docker/worker.Dockerfile --build-arg BASE_IMAGE=NAME@sha256:... docker
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS packages
COPY wheels /opt/wheels
RUN python3 -m venv --system-site-packages /opt/worker \
 && /opt/worker/bin/pip install --no-cache-dir --no-index --no-deps /opt/wheels/*.whl

FROM ${BASE_IMAGE}
COPY --from=packages /opt/worker /opt/worker
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker
ENV PATH=/opt/worker/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER worker
ENTRYPOINT ["/usr/bin/tini", "-g", "--"]
