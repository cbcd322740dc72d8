# The image of a run on Kubernetes: posttrain, Ray, and what the fabric needs. Nothing is installed when a pod starts.
#
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:26.02-py3 --tag registry/posttrain:0.1 .
#
# BASE must have: Python 3.11 or 3.12, torch 2.11 to 2.14 with CUDA, NCCL. For EFA also libfabric and aws-ofi-nccl (AWS's deep
# learning containers have them). gIB needs nothing in the image: GKE mounts it from the machine.
ARG BASE
FROM ${BASE}

WORKDIR /opt/posttrain
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY configs ./configs
COPY examples ./examples
# torch is the one of BASE: a constraint keeps another from being pulled. ray[default] has the Jobs API, which KubeRay uses.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" > /tmp/constraints.txt \
 && python -m pip install --no-cache-dir --constraint /tmp/constraints.txt ".[ray,s3]" "ray[default]" \
 && python -c "import posttrain, ray, aiohttp_cors" \
 && rm /tmp/constraints.txt

# Pods run as this user; volumes get its group.
RUN (getent group 1000 || groupadd --gid 1000 posttrain) && (getent passwd 1000 || useradd --uid 1000 --gid 1000 --create-home posttrain)
USER 1000:1000
ENV HOME=/tmp PYTHONUNBUFFERED=1
ENTRYPOINT ["posttrain"]
