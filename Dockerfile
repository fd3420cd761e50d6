# CPU ranks: plan, train and test without a GPU.
#
#   docker build -t zero-bubble .
#   docker run --rm zero-bubble                            # trains under 1F1B and ZB-H1, and compares
#   docker run --rm zero-bubble zero-bubble advise -- ...  # any other command
#
# For GPUs, install into an image that has torch: docs/clusters.md
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# An index with CPU builds of torch saves gigabytes: docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
WORKDIR /zero-bubble
COPY . .
RUN bash scripts/setup_env.sh
ENV PATH=/zero-bubble/.venv/bin:$PATH
CMD ["bash", "scripts/quickstart.sh"]
