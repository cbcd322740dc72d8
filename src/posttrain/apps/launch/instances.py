"""Machines of AWS and Google Cloud: GPUs, network devices, what pods may request, and the environment of NCCL.

Allocatable CPU and memory of AWS are from the Karpenter reference; machines of 2 TiB are taken to have what
p5en.48xlarge has. Those of Google Cloud follow from GKE's published reservation (`_gke_memory_mib`). Network settings
of gIB are those of the set_nccl_env.sh that GKE installs on A3 Ultra and A4 nodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from posttrain.config.cluster_profile import NodesSection
from posttrain.errors import InputError

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


_A4, _A3U = "tuner_config_a4.txtpb", "tuner_config_a3u.txtpb"
INSTANCES = {
    instance.name: instance
    for instance in (
        Instance("p4d.24xlarge", "aws", "a100-40gb", 8, 95.69, 1_082_712, efa=4),
        Instance("p5.48xlarge", "aws", "h100", 8, 191.45, 1_937_332, efa=32),
        Instance("p5e.48xlarge", "aws", "h200", 8, 191.45, 1_937_332, efa=32),
        Instance("p5en.48xlarge", "aws", "h200", 8, 191.45, 1_937_332, efa=16),
        Instance("p6-b200.48xlarge", "aws", "b200", 8, 191.45, 1_937_332, efa=8),
        Instance("a3-highgpu-8g", "gcp", "h100", 8, _gke_cpu(208), _gke_memory_mib(1872),
                 accelerator="nvidia-h100-80gb"),
        Instance("a3-megagpu-8g", "gcp", "h100", 8, _gke_cpu(208), _gke_memory_mib(1872),
                 accelerator="nvidia-h100-mega-80gb"),
        Instance("a3-ultragpu-8g", "gcp", "h200", 8, _gke_cpu(224), _gke_memory_mib(2952),
                 accelerator="nvidia-h200-141gb", rdma=True, tuner=_A3U),
        Instance("a4-highgpu-8g", "gcp", "b200", 8, _gke_cpu(224), _gke_memory_mib(3968),
                 accelerator="nvidia-b200", rdma=True, tuner=_A4),
    )
}  # fmt: skip

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
    patient = {"RAY_worker_register_timeout_seconds": "1800"} if instance.gpus else {}
    if num_nodes == 1:
        return Fabric(env=patient)
    if instance.gpus:  # reasons: docs/launch.md, "Environment of the pods"
        patient |= {"NCCL_DEBUG": "WARN", "NCCL_TIMEOUT": "7200", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200"}
    if instance.efa:
        return Fabric(
            env={
                **patient,
                "NCCL_NET_PLUGIN": "ofi",
                "RDMAV_FORK_SAFE": "1",
                "FI_PROVIDER": "efa",
                "FI_EFA_USE_DEVICE_RDMA": "1",
                "FI_EFA_FORK_SAFE": "1",
                "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni",
            }
        )
    if instance.rdma:
        networks = ("default", *RDMA_NETWORKS)
        return Fabric(
            env={
                **patient,
                "NCCL_IB_GID_INDEX": "3",
                "TP_SOCKET_IFNAME": "eth0",
                "NCCL_NET": "gIB",  # without RDMA the run fails, instead of using TCP
                "NCCL_CROSS_NIC": "0",
                "NCCL_NET_GDR_LEVEL": "PIX",
                "NCCL_P2P_NET_CHUNKSIZE": "131072",
                "NCCL_NVLS_CHUNKSIZE": "524288",
                "NCCL_IB_ADAPTIVE_ROUTING": "1",
                "NCCL_IB_QPS_PER_CONNECTION": "4",
                "NCCL_IB_TC": "52",
                "NCCL_IB_FIFO_TC": "84",
                "NCCL_TUNER_CONFIG_PATH": f"/usr/local/gib/configs/{instance.tuner}",
                "NCCL_SOCKET_IFNAME": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "LD_LIBRARY_PATH": "/usr/local/gib/lib64:/usr/local/nvidia/lib64",
            },
            annotations={
                "networking.gke.io/default-interface": "eth0",
                "networking.gke.io/interfaces": json.dumps(
                    [{"interfaceName": f"eth{index}", "network": name} for index, name in enumerate(networks)]
                ),
            },
            host_paths={
                "/usr/local/gib": "/home/kubernetes/bin/gib",
                "/usr/local/nvidia": "/home/kubernetes/bin/nvidia",
            },
        )
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if instance.provider == "gcp" else ()
    return Fabric(env={**patient, **dict.fromkeys(names, "eth0")})
