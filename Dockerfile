# An image that has mindllm in /mindllm/.venv, and whose run is the quickstart: a small Llama trained on the CPU in minutes.
#   docker build -t mindllm . && docker run --rm mindllm
#   docker run --rm -it -v "$PWD":/work -w /work mindllm mindllm prove run.yaml
FROM python:3.11-slim

# the kernels of generation and the stand-ins of the dry run are compiled where they are used
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /mindllm
COPY . .
RUN bash -c 'source scripts/environment.sh && use_environment all' && rm -rf /root/.cache/pip
ENV PATH=/mindllm/.venv/bin:$PATH
CMD ["bash", "scripts/quickstart.sh"]
