# The Headrace worker for CPUs, and a small image without torch for the gateway and the exporter.
#
#   docker build --build-arg TORCH_INDEX_URL=<index with torch's CPU wheels> -t headrace-worker .
#   docker build --target gateway -t headrace-gateway .
#
# TORCH_INDEX_URL: the package index that torch is taken from. torch publishes its CPU wheels on an index of its own (its
# installation page names it); without the argument the default index is asked, and on x86 that means a CUDA build,
# which works without a GPU and adds several gigabytes to the image. For GPUs: deploy/cuda/Dockerfile. For vLLM:
# deploy/vllm/Dockerfile.

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS gateway-build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY release/wheel_hook.py release/
COPY engine ./engine
COPY broker ./broker
COPY workers ./workers
COPY wire ./wire
COPY gateway ./gateway
COPY cli ./cli
COPY monitoring ./monitoring
RUN /opt/headrace/bin/pip install --constraint constraints.txt ".[gateway]"

FROM ${PYTHON_IMAGE} AS gateway
# a volume made at /files, for HEADRACE_GATEWAY_FILES, keeps this owner
RUN groupadd --system --gid 10001 headrace \
    && useradd --system --uid 10001 --gid 10001 --no-create-home headrace \
    && mkdir --mode 0700 /files && chown 10001:10001 /files
COPY --from=gateway-build /opt/headrace /opt/headrace
# beyond loopback it starts only with a key file
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HEADRACE_GATEWAY_HOST=0.0.0.0 \
    HEADRACE_GATEWAY_PORT=8000 \
    HEADRACE_GATEWAY_METRICS_HOST=0.0.0.0 \
    HEADRACE_GATEWAY_METRICS_PORT=9466
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 9466
# it is ready once a worker has loaded a model
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['HEADRACE_GATEWAY_PORT']}/ready\", timeout=4)"]
# exec form: the gateway is process 1 and gets the SIGTERM
ENTRYPOINT ["headrace", "gateway"]

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
WORKDIR /src
COPY constraints.txt ./
# torch first and by itself: the layer survives every change of our code, and the second install finds it satisfied
RUN /opt/headrace/bin/pip install ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY release/wheel_hook.py release/
COPY engine ./engine
COPY broker ./broker
COPY workers ./workers
COPY wire ./wire
COPY gateway ./gateway
COPY cli ./cli
COPY monitoring ./monitoring
RUN /opt/headrace/bin/pip install --constraint constraints.txt ".[worker,tracing]"
# torch's own tests and C++ headers, 190 MB. torch cannot be imported without torch_shm_manager.
RUN torch="$(echo /opt/headrace/lib/python3*/site-packages/torch)" \
    && rm -r "$torch/test" "$torch/include" \
    && find "$torch/bin" -mindepth 1 ! -name torch_shm_manager -delete \
    && /opt/headrace/bin/python -c "import torch"

FROM ${PYTHON_IMAGE}
# The kernels are compiled for the processor that they run on, at the worker's first start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
# Celery warns of a group without a name. A volume made at /cache, for compiled kernels, keeps this owner.
RUN groupadd --system --gid 10001 headrace \
    && useradd --system --uid 10001 --gid 10001 --no-create-home headrace \
    && mkdir --mode 0700 /cache && chown 10001:10001 /cache
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache \
    HF_HUB_OFFLINE=1 \
    HEADRACE_METRICS_HOST=0.0.0.0 \
    HEADRACE_METRICS_PORT=9464
WORKDIR /tmp
USER 10001:10001
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['HEADRACE_METRICS_PORT']}/health/ready\", timeout=4)"]
# exec form: the worker is process 1 and gets the SIGTERM that starts its drain
ENTRYPOINT ["headrace", "worker"]
