# tfpfl with TensorFlow Federated, from requirements.lock:
#   docker build --tag tfpfl .
#   docker run --rm tfpfl                                          # what `make demo` does
#   docker run --rm --volume "$PWD/runs:/home/tfpfl/tfpfl/runs" tfpfl tfpfl run --engine tff --rounds 20
# In a container, TFF's worker usually cannot be isolated (Docker allows no network namespaces): it is reached by whoever
# reaches the container.
FROM python:3.11-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 tfpfl

USER tfpfl
WORKDIR /home/tfpfl/tfpfl
COPY --chown=tfpfl:tfpfl . .
ENV PIP_NO_CACHE_DIR=1 PATH="/home/tfpfl/tfpfl/.venv/bin:$PATH"
RUN make .venv/installed-from-lock PYTHON=/usr/local/bin/python3.11

CMD ["make", "demo"]
