# edged in a container. BASE has a torch for the device, and Python 3.11 or newer; it is used as it is:
#   docker build --tag edged --build-arg BASE=IMAGE .
# IMAGE on a Jetson: docs/operations.md. The default has no torch and no GPU: torch's build for processors is installed.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ENV PIP_BREAK_SYSTEM_PACKAGES=1
# gcc: edged's kernels for processors, and Triton's; Python.h: Triton's.
USER root
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && (test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" \
        || apt-get install --yes --no-install-recommends python3-dev) \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/src
COPY . .
# The base's torch is pinned to itself, so that no package replaces it.
RUN python3 -c 'import torch; print("torch==" + torch.__version__)' > /opt/torch.txt 2>/dev/null \
        || python3 -m pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch \
    && python3 -m pip install --no-cache-dir --constraint /opt/torch.txt ".[quantized]" \
    && rm -rf /opt/src

RUN useradd --system --uid 10137 --create-home --home-dir /var/lib/edged --groups video edged \
    && mkdir -p /var/cache/edged /run/edged /etc/edged \
    && chown edged:edged /var/cache/edged /run/edged /etc/edged
COPY --chmod=755 docker/entrypoint /usr/local/bin/edged-entrypoint
USER edged
WORKDIR /var/lib/edged
ENV HF_HOME=/var/cache/edged/huggingface \
    TRITON_CACHE_DIR=/var/cache/edged/triton \
    CUDA_CACHE_PATH=/var/cache/edged/cuda \
    EDGED_STORE__DATA_DIR=/var/lib/edged/data \
    EDGED_CONFIG=/etc/edged/edged.toml \
    EDGED_API__LISTEN=0.0.0.0:8137 \
    EDGED_SOCKET=/run/edged/edged.sock \
    PYTHONUNBUFFERED=1
VOLUME ["/var/lib/edged", "/var/cache/edged", "/etc/edged"]
EXPOSE 8137
STOPSIGNAL SIGTERM
# While a model is downloaded or loaded, /readyz is 503.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8137/readyz', timeout=4)"]
ENTRYPOINT ["edged-entrypoint"]
CMD ["edged", "serve"]
