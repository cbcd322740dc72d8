"""Rules that need several objects of the files, or sums over containers: `cel_rules.py` has all others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE
from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import (
    Item,
    Pods,
    every,
    get,
    is_kind,
    job_specs,
    list_of,
    map_of,
    pods_of,
    read,
)
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.apps.launch.pod_template import RUN_LABEL
from posttrain.apps.launch.quantities import quantity
from posttrain.apps.launch.storage_sizes import FSX, LUSTRE, is_fsx_size, is_lustre_size, lustre_step_gib

KUEUE = "kueue.x-k8s.io"
_QUEUE = f"{KUEUE}/queue-name"
_SECRET_FILE = "POSTTRAIN_CONTROL_SECRET_FILE"
_VOLCANO_CONFIG = "volcano-scheduler.conf"


class _Files:
    """The objects of the files by kind and name."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests

    def all(self, group: str, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if is_kind(manifest, group, kind)]

    def find(self, group: str, kind: str, name: object, namespace: str | None = None) -> Manifest | None:
        for manifest in self.all(group, kind):
            if manifest.name == str(name) and namespace in (None, manifest.namespace):
                return manifest
        return None


def check_references(manifests: Sequence[Manifest]) -> Findings:
    files = _Files(manifests)
    seen: set[tuple[str, str, str, str]] = set()
    for manifest in manifests:
        root = ManifestPlace(manifest)
        key = (manifest.group, manifest.kind, manifest.namespace, manifest.name)
        if manifest.name and key in seen:
            yield root.at("metadata", "name").error("twice", manifest.name, "stands twice in the files")
        seen.add(key)
        for pods in pods_of(manifest):
            yield from _check_machine(pods)
            yield from _check_config_keys(pods, files)
            yield from _check_control_secret(pods)
        yield from _check_quota(manifest, files)
        if is_kind(manifest, "batch", "Job"):
            yield from _check_service(manifest, files)
        elif is_kind(manifest, "", "PersistentVolumeClaim"):
            yield from _check_size(manifest, files)
        elif is_kind(manifest, "", "ConfigMap"):
            yield from _check_volcano_config(manifest, files)
        elif is_kind(manifest, "networking.k8s.io", "NetworkPolicy"):
            yield from _check_policy(manifest, files)
        elif is_kind(manifest, "karpenter.sh", "NodePool"):
            yield from _check_pool(manifest, files)


def _check_machine(pods: Pods) -> Findings:
    """What all containers ask for together fits the machine."""
    machine = pods.instance
    if machine is None:
        return
    available = {
        GPU_RESOURCE: float(machine.gpus),
        EFA_RESOURCE: float(machine.efa),
        "cpu": machine.cpu,
        "memory": machine.memory_mib * 1024.0**2,
    }
    for name, most in available.items():
        total = 0.0
        for place, container in pods.containers("containers"):
            resources = map_of(container, "resources")
            key = "requests" if name in map_of(resources, "requests") else "limits"
            value = get(resources, key, name)
            total += quantity(value) or 0.0
            if total > most:
                shown = f"{most / 1024**3:,.0f}Gi" if name == "memory" else f"{most:g}"
                message = f"{machine.name} has {shown}: no machine fits"
                yield place.at("resources", key, name).error(
                    "device-count", value, message, "ask for less, or another machine"
                )
                break


def _check_config_keys(pods: Pods, files: _Files) -> Findings:
    for item in every(Item(pods.spec_place, pods.spec), "volumes[*].configMap"):
        config = files.find("", "ConfigMap", get(item.value, "name"), pods.place.manifest.namespace)
        if config is None:
            continue
        for entry in every(item, "items[*].key"):
            if entry.value not in [*map_of(config.body, "data"), *map_of(config.body, "binaryData")]:
                yield entry.place.error("reference", entry.value, "ConfigMap lacks it")


def _check_control_secret(pods: Pods) -> Findings:
    """Pods of `posttrain node` mount the Secret that they prove to each other."""
    secrets = [get(volume, "name") for volume in list_of(pods.spec, "volumes") if get(volume, "secret", "secretName")]
    for place, container in pods.containers("containers"):
        env = {str(get(entry, "name")): get(entry, "value") for entry in list_of(container, "env")}
        if "POSTTRAIN_CONTROL_PORT" not in env:
            continue
        file, here = str(env.get(_SECRET_FILE) or ""), place.at("volumeMounts")
        mounts = list_of(container, "volumeMounts")
        folders = [str(get(mount, "mountPath")) for mount in mounts if get(mount, "name") in secrets]
        if not any(file.startswith(f"{folder}/") for folder in folders):
            message = "`posttrain node` does not start without the Secret of its run"
            remedy = f"mount a Secret, and name its file in {_SECRET_FILE}; `launch render` writes both"
            yield here.error("control-secret", file or None, message, remedy)


def _check_policy(manifest: Manifest, files: _Files) -> Findings:
    """A policy for the pods of a run selects some, and lets them reach each other on every port."""
    run = get(manifest.body, "spec", "podSelector", "matchLabels", RUN_LABEL)
    if run is None:
        return
    root = ManifestPlace(manifest).at("spec")
    runs = [pods.labels.get(RUN_LABEL) for other in files.manifests for pods in pods_of(other)]
    if runs and run not in runs:
        here = root.at("podSelector", "matchLabels", RUN_LABEL)
        yield here.error("network-policy", run, "no pods in these files have this label: the policy protects nothing")
    admitted = [
        get(peer, "podSelector", "matchLabels", RUN_LABEL)
        for rule in list_of(manifest.body, "spec", "ingress")
        if not get(rule, "ports")
        for peer in list_of(rule, "from")
    ]
    if run not in admitted:
        message = "the pods of the run cannot reach each other"
        yield root.at("ingress").error("network-policy", None, message, f"add a rule from pods with {RUN_LABEL}: {run}")


def _check_service(manifest: Manifest, files: _Files) -> Findings:
    for (place, spec), pods in zip(job_specs(manifest), pods_of(manifest), strict=True):
        if spec.get("completionMode") != "Indexed" or pods.count < 2 or not pods.limit(GPU_RESOURCE):
            continue
        here, name = place.at("template", "spec", "subdomain"), pods.spec.get("subdomain")
        if not name:
            remedy = "set subdomain and add a headless Service of that name; an address in a file outlives its run"
            yield here.error("headless-service", None, "ranks have no names to find rank 0 by", remedy)
            continue
        service = files.find("", "Service", name, manifest.namespace)
        if service is None:
            yield here.error("headless-service", name, "no Service of this name in these files and this namespace")
            continue
        root, own = ManifestPlace(service).at("spec"), map_of(service.body, "spec")
        if own.get("clusterIP") != "None":
            message = "the Service has one address"
            yield root.at("clusterIP").error("headless-service", own.get("clusterIP"), message, "None")
        labels = {**pods.labels, "job-name": manifest.name, "batch.kubernetes.io/job-name": manifest.name}
        for key, value in map_of(own, "selector").items():
            if labels.get(key) != value:
                message = f"pods of Job {manifest.name} do not have this label"
                yield root.at("selector", key).error("headless-service", value, message)
        if not map_of(own, "selector"):
            yield root.at("selector").error("headless-service", None, "selects no pods")
        if own.get("publishNotReadyAddresses") is not True:
            here = root.at("publishNotReadyAddresses")
            yield here.warning("headless-service", None, "rank 0 is found late", "set true")


def _check_size(claim: Manifest, files: _Files) -> Findings:
    """A size that the driver of the claim's class can make, and an access mode that it has."""
    storage = files.find("storage.k8s.io", "StorageClass", read(claim.body, "spec.storageClassName"))
    if storage is None:
        return
    place, size = (
        ManifestPlace(claim, "spec.resources.requests.storage"),
        read(claim.body, "spec.resources.requests.storage"),
    )
    gib, driver = (quantity(size) or 0) / 1024**3, storage.body.get("provisioner")
    modes = list_of(claim.body, "spec", "accessModes")
    if driver in (FSX, LUSTRE) and "ReadWriteMany" not in modes:
        here = ManifestPlace(claim, "spec.accessModes")
        yield here.error("storage-access", modes, "one machine alone could mount it", "[ReadWriteMany]")
    if driver == FSX and not is_fsx_size(gib):
        yield place.error("storage-size", size, "FSx has 1200Gi, or multiples of 2400Gi")
    tier = str(read(storage.body, "parameters.perUnitStorageThroughput"))
    if driver == LUSTRE and tier in ("125", "250", "500", "1000") and not is_lustre_size(gib, int(tier)):
        message = f"Managed Lustre of {tier} MB/s per TiB has multiples of {lustre_step_gib(int(tier))}Gi"
        yield place.error("storage-size", size, message)


def _check_quota(manifest: Manifest, files: _Files) -> Findings:
    """A run that Kueue can admit."""
    queue = get(manifest.body, "metadata", "labels", _QUEUE)
    local = files.find(KUEUE, "LocalQueue", queue, manifest.namespace) if queue is not None else None
    name = read(local.body, "spec.clusterQueue") if local is not None else None
    cluster = files.find(KUEUE, "ClusterQueue", name) if name is not None else None
    if cluster is None:
        return
    root = Item(ManifestPlace(cluster), cluster.body)
    covered = {str(item.value) for item in every(root, "spec.resourceGroups[*].coveredResources[*]")}
    for pods in pods_of(manifest):
        for place, container in pods.containers("containers"):
            for name in map_of(container, "resources", "requests"):
                if name not in covered:
                    message = f"ClusterQueue {cluster.name} has no quota of it: the run is never admitted"
                    yield place.at("resources", "requests", str(name)).error("kueue-coverage", name, message)
    needed = _gpus_of(manifest)
    quota = sum(
        quantity(get(resource.value, "nominalQuota")) or 0
        for resource in every(root, "spec.resourceGroups[*].flavors[*].resources[*]")
        if get(resource.value, "name") == GPU_RESOURCE
    )
    if needed > quota and not read(cluster.body, "spec.cohortName"):
        message = f"the run needs {needed:g} GPUs, and the queue has {quota:g}: it is never admitted"
        yield ManifestPlace(manifest).at("metadata", "labels", _QUEUE).error("quota-too-small", queue, message)


def _gpus_of(manifest: Manifest) -> float:
    return sum(pods.count * pods.limit(GPU_RESOURCE) for pods in pods_of(manifest))


def _check_volcano_config(manifest: Manifest, files: _Files) -> Findings:
    """Volcano's own configuration, a YAML text in a ConfigMap."""
    text = get(manifest.body, "data", _VOLCANO_CONFIG)
    actions = re.search(r"^actions:\s*[\"']?([^\"'\n]*)", text, re.MULTILINE) if isinstance(text, str) else None
    if actions is None or "enqueue" not in actions[1] or not re.search(r"name:\s*overcommit", text):
        return
    place = ManifestPlace(manifest).at("data", _VOLCANO_CONFIG)
    report = place.error if files.all("karpenter.sh", "NodePool") else place.warning
    yield report(
        "volcano-deadlock",
        actions[1].strip(),
        "a gang larger than the machines that exist is not enqueued, so no pods wait, and Karpenter buys nothing",
        "leave enqueue out of actions, or overcommit out of the plugins",
    )


def _check_pool(manifest: Manifest, files: _Files) -> Findings:
    reference, root = read(manifest.body, "spec.template.spec.nodeClassRef"), ManifestPlace(manifest)
    name = get(reference, "name")
    if get(reference, "kind") not in (None, "EC2NodeClass") or not name:
        return
    place = root.at("spec", "template", "spec", "nodeClassRef", "name")
    classes = files.all("karpenter.k8s.aws", "EC2NodeClass")
    if not classes:
        yield place.warning("reference", name, "no EC2NodeClass in these files", "the cluster must have it")
    elif str(name) not in [other.name for other in classes]:
        remedy = f"there is {', '.join(other.name for other in classes)}"
        yield place.error("reference", name, "no EC2NodeClass of this name", remedy)
    limit, needed = get(manifest.body, "spec", "limits", GPU_RESOURCE), max(map(_gpus_of, files.manifests))
    most = quantity(limit)
    if most is not None and needed > most:
        message = f"a run in these files needs {needed:g} GPUs: its machines are never bought"
        yield root.at("spec", "limits", GPU_RESOURCE).error("quota-too-small", limit, message)
