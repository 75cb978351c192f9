# The Headrace worker for CPUs, a small image of the gateway, which has no torch, and a worker on vLLM's own image.
#
#   docker build --build-arg TORCH_INDEX_URL=<index with torch's CPU wheels> -t headrace-worker .
#   docker build --target gateway -t headrace-gateway .
#   docker build --target vllm -t headrace-worker-vllm .
#
# TORCH_INDEX_URL: the package index that torch is taken from. torch publishes its CPU wheels on an index of its own (its
# installation page names it); without the argument the default index is asked, and on x86 that means a CUDA build,
# which works without a GPU and adds several gigabytes to the image. For GPUs: deploy/cuda/Dockerfile.

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS gateway-build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY broker ./broker
COPY workers ./workers
COPY gateway ./gateway
COPY monitoring ./monitoring
RUN /opt/headrace/bin/pip install --constraint constraints.txt ".[gateway]"

FROM ${PYTHON_IMAGE} AS gateway
# a volume made at /files, for HEADRACE_GATEWAY_FILES, keeps this owner
RUN useradd --system --uid 10001 --user-group --no-create-home headrace \
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
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['HEADRACE_GATEWAY_PORT']}/ready\", timeout=4)"]
# exec form: the gateway is process 1 and gets the SIGTERM
ENTRYPOINT ["headrace", "gateway"]

# Never built or run by us. vLLM stays in the system's Python, as its image has it. What serves the queue gets an environment
# of its own, since the two need different versions of llguidance; the engine's process runs with the system's Python.
FROM ${VLLM_IMAGE} AS vllm-build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN /usr/bin/python3 -m venv /opt/headrace
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY broker ./broker
COPY workers ./workers
COPY gateway ./gateway
COPY monitoring ./monitoring
RUN /opt/headrace/bin/pip install --constraint constraints.txt ".[vllm,tracing]" \
    && /usr/bin/python3 -c "from importlib.metadata import version; print('vLLM', version('vllm'))"

FROM ${VLLM_IMAGE} AS vllm
# torch asks the password database for the user's name; a volume made at /compile-cache keeps this owner
RUN useradd --system --uid 10001 --user-group --no-create-home headrace \
    && mkdir /compile-cache && chown 10001:10001 /compile-cache
COPY --from=vllm-build /opt/headrace /opt/headrace
# the two HEADRACE_ENGINE variables are --engine vllm --engine-python /usr/bin/python3
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    HEADRACE_ENGINE=vllm \
    HEADRACE_ENGINE_PYTHON=/usr/bin/python3 \
    HEADRACE_METRICS_HOST=0.0.0.0 \
    HEADRACE_METRICS_PORT=9464
WORKDIR /tmp
USER 10001:10001
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['HEADRACE_METRICS_PORT']}/health/ready\", timeout=4)"]
ENTRYPOINT ["headrace", "worker"]

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
WORKDIR /src
COPY constraints.txt ./
# torch first and by itself: the layer survives every change of our code, and the second install finds it satisfied
RUN /opt/headrace/bin/pip install ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY broker ./broker
COPY workers ./workers
COPY gateway ./gateway
COPY monitoring ./monitoring
RUN /opt/headrace/bin/pip install --constraint constraints.txt ".[worker,tracing]"

FROM ${PYTHON_IMAGE}
# The attention kernel is compiled for the processor that it runs on, at the worker's first start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --user-group --no-create-home headrace
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
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
