"""Names of other objects, looked up in the same files.

A name that is missing is an error where the files contain objects of that kind, or where a run creates the object
itself (Service, ConfigMap). Otherwise the cluster may have it: `launch doctor` checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.apps.launch.instances import GPU_RESOURCE
from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.kueue_rules import GROUP as KUEUE
from posttrain.apps.launch.lint.reading import (
    get,
    is_kind,
    is_volcano_job,
    job_specs,
    list_of,
    map_of,
    number,
    pods_of,
    quantity,
)
from posttrain.apps.launch.lint.storage_rules import check_size
from posttrain.apps.launch.manifest_files import Manifest

RULES = {
    "headless-service": "ranks of an Indexed Job find each other by a headless Service with the name of their subdomain",
    "reference": "queues, claims, classes, flavors and ConfigMaps that are named exist in the same files",
    "twice": "an object stands once in the files",
    "volcano-deadlock": "Volcano creates pods before there are machines, as Karpenter buys them for waiting pods",
    "quota-too-small": "a run fits the quota of its queue",
    "namespace": "objects that name each other are in one namespace",
}

VOLCANO_CONFIG = "volcano-scheduler.conf"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


class _Index:
    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests

    def of(self, group: str, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if is_kind(manifest, group, kind)]

    def find(self, group: str, kind: str, name: str, namespace: str | None = None) -> Manifest | None:
        for manifest in self.of(group, kind):
            if manifest.name == name and namespace in (None, manifest.namespace):
                return manifest
        return None

    def check(
        self, place: ManifestPlace, group: str, kind: str, name: object, namespace: str | None = None
    ) -> Findings:
        """An error if objects of this kind are in the files, and none has this name."""
        known = self.of(group, kind)
        if not name or not known or self.find(group, kind, str(name), namespace):
            return
        elsewhere = self.find(group, kind, str(name))
        if elsewhere is not None:
            yield place.error(
                "namespace", name, f"{kind} {name} is in namespace {elsewhere.namespace}, this in {namespace}"
            )
        else:
            yield place.error(
                "reference", name, f"no {kind} of this name", f"there is {', '.join(m.name for m in known)}"
            )


def check_references(manifests: Sequence[Manifest]) -> Findings:
    index = _Index(manifests)
    seen: set[tuple[str, str, str, str]] = set()
    for manifest in manifests:
        key = (manifest.group, manifest.kind, manifest.namespace, manifest.name)
        if manifest.name and key in seen:
            yield (
                ManifestPlace(manifest)
                .at("metadata", "name")
                .error("twice", manifest.name, "stands twice in the files")
            )
        seen.add(key)
        yield from _check_services(manifest, index)
        yield from _check_volumes(manifest, index)
        yield from _check_queues(manifest, index)
        yield from _check_classes(manifest, index)
        yield from _check_volcano_config(manifest, index)


def _check_services(manifest: Manifest, index: _Index) -> Findings:
    if not is_kind(manifest, "batch", "Job"):
        return
    for (place, spec), pods in zip(job_specs(manifest), pods_of(manifest), strict=True):
        if spec.get("completionMode") != "Indexed" or pods.count < 2 or not pods.limit(GPU_RESOURCE):
            continue
        here, name = place.at("template", "spec", "subdomain"), pods.spec.get("subdomain")
        if not name:
            yield here.error(
                "headless-service", None, "ranks have no names to find rank 0 by",
                "set subdomain and add a headless Service of that name; an address in a file outlives its run",
            )  # fmt: skip
            continue
        service = index.find("", "Service", str(name), manifest.namespace)
        if service is None:
            yield here.error("headless-service", name, "no Service of this name in these files and this namespace")
            continue
        root, own = ManifestPlace(service).at("spec"), map_of(service.body, "spec")
        if own.get("clusterIP") != "None":
            yield root.at("clusterIP").error(
                "headless-service", own.get("clusterIP"), "the Service has one address", "None"
            )
        labels = {**pods.labels, "job-name": manifest.name, "batch.kubernetes.io/job-name": manifest.name}
        for key, value in map_of(own, "selector").items():
            if labels.get(key) != value:
                yield root.at("selector", key).error(
                    "headless-service", value, f"pods of Job {manifest.name} do not have this label"
                )
        if not map_of(own, "selector"):
            yield root.at("selector").error("headless-service", None, "selects no pods")
        if own.get("publishNotReadyAddresses") is not True:
            yield root.at("publishNotReadyAddresses").warning(
                "headless-service", None, "rank 0 is found late", "set true"
            )


def _check_volumes(manifest: Manifest, index: _Index) -> Findings:
    for pods in pods_of(manifest):
        for number_, volume in enumerate(list_of(pods.spec, "volumes")):
            place = pods.spec_place.at("volumes", number_)
            claim, config = get(volume, "persistentVolumeClaim", "claimName"), get(volume, "configMap", "name")
            yield from index.check(
                place.at("persistentVolumeClaim", "claimName"), "", "PersistentVolumeClaim", claim, manifest.namespace
            )
            yield from index.check(place.at("configMap", "name"), "", "ConfigMap", config, manifest.namespace)
            found = index.find("", "ConfigMap", str(config), manifest.namespace) if config else None
            if found is not None:
                keys = {**map_of(found.body, "data"), **map_of(found.body, "binaryData")}
                for third, item in enumerate(list_of(volume, "configMap", "items")):
                    if str(get(item, "key")) not in keys:
                        yield place.at("configMap", "items", third, "key").error(
                            "reference", get(item, "key"), "ConfigMap lacks it"
                        )
    if is_kind(manifest, "", "PersistentVolumeClaim"):
        spec, root = map_of(manifest.body, "spec"), ManifestPlace(manifest).at("spec")
        yield from index.check(
            root.at("storageClassName"), "storage.k8s.io", "StorageClass", spec.get("storageClassName")
        )
        yield from index.check(root.at("volumeName"), "", "PersistentVolume", spec.get("volumeName"))
        storage = index.find("storage.k8s.io", "StorageClass", str(spec.get("storageClassName")))
        size = get(spec, "resources", "requests", "storage")
        if storage is not None:
            yield from check_size(root.at("resources", "requests", "storage"), size, storage.body)


def _check_queues(manifest: Manifest, index: _Index) -> Findings:
    root = ManifestPlace(manifest)
    if is_volcano_job(manifest):
        name = get(manifest.body, "spec", "queue")
        if name == "root":
            yield root.at("spec", "queue").error("reference", name, "the root queue takes no jobs", "name a leaf")
        yield from index.check(root.at("spec", "queue"), "scheduling.volcano.sh", "Queue", name)
    queue = get(manifest.body, "metadata", "labels", QUEUE_LABEL)
    if queue is not None:
        place = root.at("metadata", "labels", QUEUE_LABEL)
        yield from index.check(place, KUEUE, "LocalQueue", queue, manifest.namespace)
        yield from _check_quota(manifest, place, str(queue), index)
    if is_kind(manifest, KUEUE, "LocalQueue"):
        yield from index.check(
            root.at("spec", "clusterQueue"), KUEUE, "ClusterQueue", get(manifest.body, "spec", "clusterQueue")
        )
    elif is_kind(manifest, KUEUE, "ClusterQueue"):
        for first, group in enumerate(list_of(manifest.body, "spec", "resourceGroups")):
            for second, flavor in enumerate(list_of(group, "flavors")):
                place = root.at("spec", "resourceGroups", first, "flavors", second, "name")
                yield from index.check(place, KUEUE, "ResourceFlavor", get(flavor, "name"))
    elif is_kind(manifest, KUEUE, "ResourceFlavor"):
        yield from index.check(
            root.at("spec", "topologyName"), KUEUE, "Topology", get(manifest.body, "spec", "topologyName")
        )


def _check_quota(manifest: Manifest, place: ManifestPlace, queue: str, index: _Index) -> Findings:
    local = index.find(KUEUE, "LocalQueue", queue, manifest.namespace)
    cluster = (
        index.find(KUEUE, "ClusterQueue", str(get(local.body, "spec", "clusterQueue"))) if local is not None else None
    )
    if cluster is None:
        return
    covered = {
        str(name)
        for group in list_of(cluster.body, "spec", "resourceGroups")
        for name in list_of(group, "coveredResources")
    }
    for pods in pods_of(manifest):
        for here, container in pods.containers("containers"):
            for name in map_of(container, "resources", "requests"):
                if name not in covered:
                    yield here.at("resources", "requests", str(name)).error(
                        "kueue-coverage",
                        name,
                        f"ClusterQueue {cluster.name} has no quota of it: the run is never admitted",
                    )
    needed = sum(pods.count * pods.limit(GPU_RESOURCE) for pods in pods_of(manifest))
    quota = sum(
        quantity(get(resource, "nominalQuota")) or 0
        for group in list_of(cluster.body, "spec", "resourceGroups")
        for flavor in list_of(group, "flavors")
        for resource in list_of(flavor, "resources")
        if get(resource, "name") == GPU_RESOURCE
    )
    if needed > quota and not get(cluster.body, "spec", "cohortName"):
        yield place.error(
            "quota-too-small",
            queue,
            f"the run needs {needed:g} GPUs, and the queue has {quota:g}: it is never admitted",
        )


def _check_volcano_config(manifest: Manifest, index: _Index) -> Findings:
    """Volcano's own configuration, a YAML text in a ConfigMap."""
    text = get(manifest.body, "data", VOLCANO_CONFIG) if is_kind(manifest, "", "ConfigMap") else None
    if not isinstance(text, str):
        return
    actions = re.search(r"^actions:\s*[\"']?([^\"'\n]*)", text, re.MULTILINE)
    if actions is None or "enqueue" not in actions[1] or not re.search(r"name:\s*overcommit", text):
        return
    place = ManifestPlace(manifest).at("data", VOLCANO_CONFIG)
    message = "a gang larger than the machines that exist is not enqueued, so no pods wait, and Karpenter buys nothing"
    has_pools = bool(index.of("karpenter.sh", "NodePool"))
    finding = place.error if has_pools else place.warning
    yield finding(
        "volcano-deadlock",
        actions[1].strip(),
        message,
        "leave enqueue out of actions, or overcommit out of the plugins",
    )


def _check_classes(manifest: Manifest, index: _Index) -> Findings:
    if not is_kind(manifest, "karpenter.sh", "NodePool"):
        return
    reference = map_of(manifest.body, "spec", "template", "spec", "nodeClassRef")
    place = ManifestPlace(manifest).at("spec", "template", "spec", "nodeClassRef", "name")
    if reference.get("kind") not in (None, "EC2NodeClass") or not reference.get("name"):
        return
    if not index.of("karpenter.k8s.aws", "EC2NodeClass"):
        yield place.warning(
            "reference", reference["name"], "no EC2NodeClass in these files", "the cluster must have it"
        )
    yield from index.check(place, "karpenter.k8s.aws", "EC2NodeClass", reference["name"])
    limits, size = map_of(manifest.body, "spec", "limits"), 0
    for other in index.manifests:
        size = max(size, sum(number(pods.count, 0) * int(pods.limit(GPU_RESOURCE)) for pods in pods_of(other)))
    most = quantity(limits.get(GPU_RESOURCE))
    if most is not None and size > most:
        yield (
            ManifestPlace(manifest)
            .at("spec", "limits", GPU_RESOURCE)
            .error(
                "quota-too-small",
                limits[GPU_RESOURCE],
                f"a run in these files needs {size} GPUs: its machines are never bought",
            )
        )
