# Targets: cpu (default), gpu.   docker build -t octavo .   docker build --target gpu -t octavo:gpu .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
# no version: Debian's mirrors drop old ones, and the base pins the release
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY pyproject.toml README.md CMakeLists.txt ./
COPY server server
COPY engine engine
COPY kernels kernels
COPY monitoring monitoring
COPY loadtest loadtest

FROM build AS build-cpu
# Native kernels; torch (a CPU build) beside them for `--kernels torch`.
# hadolint ignore=DL3013
RUN pip install ".[tracing]" && pip install --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0"

FROM build AS build-gpu
# hadolint ignore=DL3013
RUN pip install ".[gpu,tracing]"

FROM python:${PYTHON}-slim-bookworm AS base
RUN useradd --create-home --uid 10001 octavo && mkdir -p /cache && chown octavo /cache
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 OCTAVO_CACHE_DIR=/cache OCTAVO_HOST=0.0.0.0 OCTAVO_PORT=8000 \
    OCTAVO_LOG_FORMAT=json
USER 10001
VOLUME /cache
EXPOSE 8000
# exec form: signals reach the server itself
ENTRYPOINT ["octavo"]
CMD ["serve"]
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]

FROM base AS gpu
COPY --from=build-gpu /opt/octavo /opt/octavo

FROM base AS cpu
COPY --from=build-cpu /opt/octavo /opt/octavo
