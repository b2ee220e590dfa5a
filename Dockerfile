# CPU image: the environment of `make setup`, and a training run that needs no download.
#
#   docker build -t specrl .
#   docker run --rm -v "$PWD/outputs:/app/outputs" specrl config=grpo_math name=first

FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*

# A fixed id, so that a mounted outputs directory can be given to it: chown 1000 outputs
RUN useradd --create-home --uid 1000 specrl && install --directory --owner=specrl /app
USER specrl
WORKDIR /app

# The default torch for Linux brings CUDA along: pass the address of PyTorch's CPU wheels as this build argument.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 HF_HUB_OFFLINE=1

COPY --chown=specrl . .
RUN make setup

ENTRYPOINT [".venv/bin/python", "-m", "specrl.train"]
CMD ["config=grpo_math"]
