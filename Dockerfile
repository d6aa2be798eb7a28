# syntax=docker/dockerfile:1
# Images with runnerkit, for CPUs and for NVIDIA GPUs:
#   docker build --target cpu --tag runnerkit:cpu .
#   docker build --target cuda --tag runnerkit:cuda .
# A run in the current folder, by its owner:
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" runnerkit:cpu run config.yaml
#   docker run --rm --gpus all --shm-size 8g --user ... --volume ... --entrypoint python runnerkit:cuda train.py
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml setup.cfg setup.py README.md LICENSE ./
COPY engines ./engines
COPY callbacks ./callbacks
COPY loggers ./loggers
COPY docs ./docs
COPY runnerkit ./runnerkit
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS base
# torch.compile calls a compiler. Debian keeps only the latest version of a package, so none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# Users of `--user` have neither a name nor a home, and torch asks for both for its caches.
ENV HOME=/tmp \
    USER=runnerkit \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1
COPY constraints.txt /opt/constraints.txt
COPY --from=wheel /wheels /opt/wheels
WORKDIR /work
ENTRYPOINT ["runnerkit"]
CMD ["--help"]

FROM base AS cpu
ARG EXTRAS=tensorboard,metrics,parquet,safetensors,rich,config
# constraints.txt has the versions.
RUN python -m pip install --no-cache-dir --constraint /opt/constraints.txt \
        --index-url https://download.pytorch.org/whl/cpu torch torchvision \
    && python -m pip install --no-cache-dir --constraint /opt/constraints.txt "$(echo /opt/wheels/*.whl)[${EXTRAS}]"
USER 1000:1000

# PyPI's torch for Linux contains the libraries of CUDA; the host provides the driver, through the NVIDIA Container Toolkit.
FROM base AS cuda
ARG EXTRAS=tensorboard,metrics,parquet,safetensors,rich,config,gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python -m pip install --no-cache-dir --constraint /opt/constraints.txt torch torchvision \
    && python -m pip install --no-cache-dir --constraint /opt/constraints.txt "$(echo /opt/wheels/*.whl)[${EXTRAS}]"
USER 1000:1000
