"""Machines of AWS and Google Cloud, from `machines.yaml`: GPUs, network devices, what pods may request, and the
environment of NCCL. What GKE reserves of a machine is published (`_gke_memory_mib`, `_gke_cpu`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import yaml

from posttrain.config.cluster_profile import NodesSection
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject

GPU_RESOURCE = "nvidia.com/gpu"
EFA_RESOURCE = "vpc.amazonaws.com/efa"
RDMA_NETWORKS = ("gvnic-1", *(f"rdma-{index}" for index in range(8)))  # of GKE, beside the default one
_SHARE_OF_PODS = 0.95  # of CPU and memory: agents of the node need the rest


@dataclass(frozen=True)
class Instance:
    name: str
    provider: Literal["aws", "gcp", "other"]
    gpu: str  # name in the planner
    gpus: int
    cpu: float  # allocatable cores
    memory_mib: int  # allocatable
    efa: int = 0  # EFA devices
    accelerator: str = ""  # GKE: value of cloud.google.com/gke-accelerator
    rdma: bool = False  # GKE: gIB over eight RDMA interfaces
    tuner: str = ""  # gIB: file of its tuner

    @property
    def cpu_request(self) -> int:
        return int(self.cpu * _SHARE_OF_PODS)

    @property
    def memory_request_gib(self) -> int:
        return int(self.memory_mib * _SHARE_OF_PODS / 1024)

    @property
    def shm_gib(self) -> int:
        """Memory-backed /dev/shm. It counts against the pod's memory."""
        return max(1, self.memory_request_gib // 8)


@dataclass(frozen=True)
class Fabric:
    """What a pod needs so that NCCL uses the machine's network; not needed on one machine."""

    env: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    host_paths: dict[str, str] = field(default_factory=dict)  # mount path -> path on the host


def _gke_memory_mib(gib: int) -> int:
    """Allocatable memory of a machine on GKE: 25 % of the first 4 GiB are reserved, 20 % of the next 4, and so on, and
    100 MiB.
    """
    reserved, rest = 0.0, float(gib)
    for size, share in ((4, 0.25), (4, 0.20), (8, 0.10), (112, 0.06), (float("inf"), 0.02)):
        part = min(rest, size)
        reserved += part * share
        rest -= part
    return int((gib - reserved) * 1024 - 100)


def _gke_cpu(cores: int) -> float:
    return round(cores - 0.06 - 0.01 - 2 * 0.005 - (cores - 4) * 0.0025, 2)


def _instance(name: str, row: JsonObject) -> Instance:
    if row["provider"] == "gcp":
        row |= {"cpu": _gke_cpu(row.pop("cores")), "memory_mib": _gke_memory_mib(row.pop("memory_gib"))}
    return Instance(name, gpus=8, **row)


MACHINES: JsonObject = yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text("utf-8"))
NCCL: JsonObject = yaml.safe_load(Path(__file__).with_name("nccl.yaml").read_text("utf-8"))
INSTANCES = {name: _instance(name, dict(row)) for name, row in MACHINES["instances"].items()}
_PROVIDER_OF_KIND = {"eks": "aws", "gke": "gcp"}


def find_instance(nodes: NodesSection, cluster_kind: str) -> Instance:
    """The machine that a profile names or describes."""
    if nodes.instance_type is None:
        assert nodes.gpus is not None
        assert nodes.cpu is not None
        assert nodes.memory_gib is not None
        return Instance("", "other", "", nodes.gpus, nodes.cpu, int(nodes.memory_gib * 1024))
    found = INSTANCES.get(nodes.instance_type)
    if found is None:
        near = get_close_matches(nodes.instance_type, INSTANCES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"nodes.instance_type = {nodes.instance_type!r} is not in the table: {hint}Known: {', '.join(INSTANCES)}. "
            "For another machine leave it out, and give nodes.gpus, nodes.cpu, nodes.memory_gib and nodes.selector"
        )
    expected = _PROVIDER_OF_KIND.get(cluster_kind)
    if expected is not None and found.provider != expected:
        fitting = ", ".join(name for name, other in INSTANCES.items() if other.provider == expected)
        raise InputError(
            f"nodes.instance_type = {found.name!r} does not exist on cluster.kind = {cluster_kind!r}; it has {fitting}"
        )
    return found


def fabric_of(instance: Instance, num_nodes: int) -> Fabric:
    env = dict(NCCL["gpus"]) if instance.gpus else {}
    if num_nodes == 1:
        return Fabric(env)
    if instance.gpus:
        env |= NCCL["gpus of several machines"]
    kind = "efa" if instance.efa else "rdma" if instance.rdma else instance.provider
    env |= {name: value.replace("{tuner}", instance.tuner) for name, value in NCCL.get(kind, {}).items()}
    if kind != "rdma":
        return Fabric(env)
    networks = [{"interfaceName": f"eth{at}", "network": name} for at, name in enumerate(("default", *RDMA_NETWORKS))]
    names = ("networking.gke.io/default-interface", "networking.gke.io/interfaces")
    annotations = dict(zip(names, ("eth0", json.dumps(networks)), strict=True))
    return Fabric(env, annotations, dict(MACHINES["host_paths_of_rdma"]))
