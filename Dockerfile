# The image of a run on Kubernetes: posttrain, Ray, and what the fabric needs. Nothing is installed when a pod starts.
#
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch@sha256:… --tag registry/posttrain:0.1 .
#
# BASE must have: Python 3.11 or 3.12, torch 2.11 to 2.14 with CUDA, NCCL. For EFA also libfabric and aws-ofi-nccl (AWS's deep
# learning containers have them). gIB needs nothing in the image: GKE mounts it from the machine. It is named by its digest, as a
# tag can be moved (`docker buildx imagetools inspect NAME:TAG` prints it), and everything else has a hash in
# requirements/image.txt: two builds contain the same files.
ARG BASE
FROM ${BASE}
ARG BASE
RUN echo "${BASE}" | grep -Eq '@sha256:[0-9a-f]{64}$' || { echo "BASE=${BASE}: give its digest, NAME@sha256:…" >&2; exit 64; }

WORKDIR /opt/posttrain
COPY requirements/image.txt ./requirements/
# torch is the one of BASE. Some bases constrain pip to other versions of what they contain themselves.
RUN PIP_CONSTRAINT= SOURCE_DATE_EPOCH=315532800 \
    python -m pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY configs ./configs
COPY examples ./examples
# Without an index pip can install posttrain only if all that it needs is there, in versions that fit.
RUN PIP_CONSTRAINT= SOURCE_DATE_EPOCH=315532800 \
    python -m pip install --no-cache-dir --no-index --no-build-isolation ".[ray,s3]" "ray[default]" \
 && python -c "import posttrain, ray, aiohttp_cors"

# Pods run as this user; volumes get its group.
RUN (getent group 1000 || groupadd --gid 1000 posttrain) && (getent passwd 1000 || useradd --uid 1000 --gid 1000 --create-home posttrain)
USER 1000:1000
ENV HOME=/tmp PYTHONUNBUFFERED=1
ENTRYPOINT ["posttrain"]
