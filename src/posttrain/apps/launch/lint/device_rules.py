"""Rules of GPUs, shared memory and the network between machines."""

from __future__ import annotations

import json

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE, Instance
from posttrain.apps.launch.lint.findings import Findings
from posttrain.apps.launch.lint.reading import ZONE_LABEL, Pods, get, list_of, map_of, quantity

RULES = {
    "device-limits": "GPUs and EFA devices have limits, and requests equal to them",
    "device-count": "a pod asks for no more devices, CPU and memory than its machine has",
    "shm-missing": "pods with GPUs have a memory-backed /dev/shm",
    "shm-size": "/dev/shm is smaller than the memory limit that it counts against",
    "efa-missing": "pods that use EFA, or several EFA machines, ask for EFA devices",
    "ipc-lock": "pods with EFA or RDMA have the capability IPC_LOCK",
    "rdma-interfaces": "NCCL_NET=gIB needs the interfaces of RDMA on the pod, and the files of gIB",
    "several-zones": "pods of one gang are in one zone",
    "gang-spread": "pods of one gang are on different machines",
}

INTERFACES = "networking.gke.io/interfaces"
_DEVICES = (GPU_RESOURCE, EFA_RESOURCE)
_RDMA_INTERFACES = 8


def check_devices(pods: Pods) -> Findings:
    if not any(True for _ in pods.containers("containers")):
        return
    yield from _check_limits(pods)
    yield from _check_machine(pods)
    if pods.limit(GPU_RESOURCE):
        yield from _check_shm(pods)
        yield from _check_efa(pods)
        yield from _check_rdma(pods)
        yield from _check_placement(pods)


def _check_limits(pods: Pods) -> Findings:
    for place, container in pods.containers():
        limits, requests = map_of(container, "resources", "limits"), map_of(container, "resources", "requests")
        for name, value in requests.items():
            if "/" not in str(name) and not str(name).startswith("hugepages-"):
                continue
            here = place.at("resources", "requests", str(name))
            if name not in limits:
                yield here.error(
                    "device-limits", value, "limit must be set for devices", f"add limits: {{{name}: {value}}}"
                )
            elif quantity(limits[name]) != quantity(value):
                yield here.error("device-limits", value, f"must be equal to the limit of {limits[name]}")
        for name in _DEVICES:
            amount = quantity(limits.get(name)) if name in limits else 0.0
            if amount is not None and amount != int(amount):
                yield place.at("resources", "limits", name).error(
                    "device-limits", limits[name], "must be a whole number"
                )


def _check_machine(pods: Pods) -> Findings:
    instance = pods.instance
    if instance is None:
        return
    available = {
        GPU_RESOURCE: float(instance.gpus),
        EFA_RESOURCE: float(instance.efa),
        "cpu": instance.cpu,
        "memory": instance.memory_mib * 1024.0**2,
    }
    for name, most in available.items():
        total = 0.0
        for place, container in pods.containers("containers"):
            requests, limits = map_of(container, "resources", "requests"), map_of(container, "resources", "limits")
            value = requests.get(name, limits.get(name))
            total += quantity(value) or 0.0
            if total > most:
                key = "requests" if name in requests else "limits"
                shown = f"{most / 1024**3:,.0f}Gi" if name == "memory" else f"{most:g}"
                yield place.at("resources", key, name).error(
                    "device-count",
                    value,
                    f"{instance.name} has {shown}: no machine fits",
                    "ask for less, or another machine",
                )
                break


def _check_shm(pods: Pods) -> Findings:
    volumes = {str(get(volume, "name")): volume for volume in list_of(pods.spec, "volumes")}
    for place, container in pods.containers("containers"):
        if not quantity(get(container, "resources", "limits", GPU_RESOURCE)):
            continue
        mounts = [mount for mount in list_of(container, "volumeMounts") if get(mount, "mountPath") == "/dev/shm"]
        volume = volumes.get(str(get(mounts[0], "name"))) if mounts else None
        if volume is None or get(volume, "emptyDir", "medium") != "Memory":
            yield place.at("volumeMounts").error(
                "shm-missing", None if not mounts else mounts[0], "/dev/shm has 64 MiB: NCCL and Ray fail",
                "mount an emptyDir with medium: Memory at /dev/shm",
            )  # fmt: skip
            continue
        index = list_of(pods.spec, "volumes").index(volume)
        here = pods.spec_place.at("volumes", index, "emptyDir", "sizeLimit")
        size, limit = get(volume, "emptyDir", "sizeLimit"), get(container, "resources", "limits", "memory")
        amount, most = quantity(size), quantity(limit)
        if size is None:
            yield here.warning("shm-size", None, "it may grow to half of the machine's memory", "set sizeLimit")
        elif amount is None:
            yield here.error("shm-size", size, "is no amount", "write it like 128Gi")
        elif most is not None and amount >= most:
            yield here.error("shm-size", size, f"counts against the memory limit of {limit}, and leaves nothing")


def _check_efa(pods: Pods) -> Findings:
    asked, instance = pods.limit(EFA_RESOURCE), pods.instance
    place, container = next(iter(pods.containers("containers")))
    here = place.at("resources", "limits", EFA_RESOURCE)
    if pods.env.get("FI_PROVIDER") == "efa" and not asked:
        yield here.error("efa-missing", None, "FI_PROVIDER=efa has no device", _efa_remedy(instance))
    elif instance is not None and instance.efa and pods.gang_size > 1:
        if not asked:
            yield here.error("efa-missing", None, f"{pods.gang_size} machines would use TCP", _efa_remedy(instance))
        elif asked < instance.efa:
            yield here.warning("efa-missing", int(asked), f"{instance.name} has {instance.efa}", _efa_remedy(instance))
    if asked or INTERFACES in pods.annotations:
        security = map_of(container, "securityContext")
        added = list_of(security, "capabilities", "add")
        if not security.get("privileged") and "IPC_LOCK" not in added:
            yield place.at("securityContext", "capabilities", "add").error(
                "ipc-lock", added, "memory of RDMA cannot be pinned", "add IPC_LOCK"
            )


def _efa_remedy(instance: Instance | None) -> str:
    count = instance.efa if instance is not None and instance.efa else "the number of devices"
    return f"ask for {EFA_RESOURCE}: {count}"


def _check_rdma(pods: Pods) -> Findings:
    here = pods.place.at("metadata", "annotations", INTERFACES)
    text, uses_gib = pods.annotations.get(INTERFACES), pods.env.get("NCCL_NET") == "gIB"
    if text is not None:
        try:
            interfaces = json.loads(text)
            networks = [str(interface["network"]) for interface in interfaces]
            names = [str(interface["interfaceName"]) for interface in interfaces]
        except (ValueError, TypeError, KeyError):
            yield here.error("rdma-interfaces", text, "must be a JSON list of {interfaceName, network}")
            return
        rdma = [network for network in networks if "rdma" in network]
        if len(set(rdma)) < _RDMA_INTERFACES and uses_gib:
            yield here.error(
                "rdma-interfaces", networks, f"{len(set(rdma))} networks of RDMA, {_RDMA_INTERFACES} are needed"
            )
        if len(set(names)) != len(names):
            yield here.error("rdma-interfaces", names, "an interface stands twice")
        if pods.annotations.get("networking.gke.io/default-interface") not in names:
            yield pods.place.at("metadata", "annotations", "networking.gke.io/default-interface").error(
                "rdma-interfaces",
                pods.annotations.get("networking.gke.io/default-interface"),
                "names none of the interfaces",
            )
    elif uses_gib:
        yield here.error(
            "rdma-interfaces",
            None,
            "NCCL_NET=gIB without interfaces: NCCL finds no network",
            "put the annotation on the pod",
        )
    elif pods.instance is not None and pods.instance.rdma and pods.gang_size > 1:
        yield here.error(
            "rdma-interfaces",
            None,
            f"{pods.gang_size} machines would use TCP",
            "put the annotation on the pod, and set NCCL_NET=gIB",
        )
    if uses_gib:
        place, container = next(iter(pods.containers("containers")))
        paths = [get(mount, "mountPath") for mount in list_of(container, "volumeMounts")]
        for path in ("/usr/local/gib", "/usr/local/nvidia"):
            if path not in paths:
                yield place.at("volumeMounts").error("rdma-interfaces", paths, f"{path} of the host is not mounted")


def _check_placement(pods: Pods) -> Findings:
    if pods.gang_size < 2:
        return
    if len(zones := pods.selected(ZONE_LABEL)) > 1:
        yield pods.spec_place.at("affinity", "nodeAffinity").warning(
            "several-zones", zones, "traffic of EFA and RDMA does not cross zones", "name one zone"
        )
    instance = pods.instance
    whole = instance is not None and pods.limit(GPU_RESOURCE) == instance.gpus
    if not whole and not map_of(pods.spec, "affinity", "podAntiAffinity"):
        yield pods.spec_place.at("affinity").warning(
            "gang-spread",
            None,
            "two pods may share a machine",
            "add podAntiAffinity with topologyKey kubernetes.io/hostname",
        )
