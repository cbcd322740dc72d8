"""Pods, Jobs and values inside objects of any shape. A value of the wrong type reads as an empty one: schemas report
it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.apps.launch.instances import GPU_RESOURCE, INSTANCES, Instance
from posttrain.apps.launch.lint.findings import ManifestPlace
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.apps.launch.quantities import quantity
from posttrain.files.json_files import JsonObject

INSTANCE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
KARPENTER_CAPACITY = "karpenter.sh/capacity-type"
GKE_SPOT = "cloud.google.com/gke-spot"
_KEY = re.compile(r"\['([^']+)'\]|\[(\*|\d+)\]|([^.\[\]]+)")


def map_of(value: object, *keys: str) -> JsonObject:
    """The map at `keys`; empty if something else is there."""
    found = get(value, *keys)
    return found if isinstance(found, dict) else {}


def list_of(value: object, *keys: str) -> list[Any]:
    found = get(value, *keys)
    return found if isinstance(found, list) else []


def get(value: object, *keys: str) -> Any:
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def number(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def keys_of(path: str) -> list[str | int]:
    """`a.b[0]['x/y']` as keys. `*` stands for every entry of a map, `[*]` for every item of a list."""
    return [
        text or (name if name else "[*]" if index == "*" else int(index)) for text, index, name in _KEY.findall(path)
    ]


def read(value: object, path: str) -> Any:
    """The value at a path; None where something is missing or has another type."""
    for key in keys_of(path):
        value = _step(value, key)
    return value


def _step(value: object, key: str | int) -> Any:
    if isinstance(key, int):
        return value[key] if isinstance(value, list) and key < len(value) else None
    return value.get(key) if isinstance(value, dict) else None


class Item(NamedTuple):
    """A value that a path with wildcards leads to."""

    place: ManifestPlace
    value: Any
    keys: tuple[str | int, ...] = ()  # in place of the wildcards
    siblings: Any = None  # the list or map around it


def every(item: Item, path: str) -> Iterator[Item]:
    items = [item]
    for key in keys_of(path):
        items = [inner for outer in items for inner in _inner(outer, key)]
    yield from items


def _inner(item: Item, key: str | int) -> Iterator[Item]:
    place, value, keys, siblings = item
    if key == "[*]":
        for index, inner in enumerate(value if isinstance(value, list) else []):
            yield Item(place.at(index), inner, (*keys, index), value)
    elif key == "*":
        for name, inner in (value if isinstance(value, dict) else {}).items():
            yield Item(place.at(str(name)), inner, (*keys, str(name)), value)
    else:
        yield Item(place.at(key), _step(value, key), keys, siblings)


@dataclass(frozen=True)
class Pods:
    """The pods of one template."""

    place: ManifestPlace  # of the template
    template: JsonObject
    count: int
    gang_size: int  # of the whole object: pods that need each other
    restarts_by_job: bool  # a Job or JobSet: restartPolicy has rules

    @property
    def spec(self) -> JsonObject:
        return map_of(self.template, "spec")

    @property
    def spec_place(self) -> ManifestPlace:
        return self.place.at("spec")

    @property
    def labels(self) -> JsonObject:
        return map_of(self.template, "metadata", "labels")

    @property
    def annotations(self) -> JsonObject:
        return map_of(self.template, "metadata", "annotations")

    def containers(self, *kinds: str) -> Iterator[tuple[ManifestPlace, JsonObject]]:
        for kind in kinds or ("initContainers", "containers"):
            for index, container in enumerate(list_of(self.spec, kind)):
                if isinstance(container, dict):
                    yield self.spec_place.at(kind, index), container

    def limit(self, resource: str) -> float:
        """Of all containers together."""
        found = (quantity(get(c, "resources", "limits", resource)) for _, c in self.containers("containers"))
        return sum(value or 0.0 for value in found)

    @property
    def selector(self) -> JsonObject:
        return map_of(self.spec, "nodeSelector")

    def selected(self, label: str) -> list[str]:
        """Values of a node's label that the pods accept; empty: any."""
        if label in self.selector:
            return [str(self.selector[label])]
        terms = list_of(
            self.spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
        )
        for term in terms:
            for expression in list_of(term, "matchExpressions"):
                if get(expression, "key") == label and get(expression, "operator") == "In":
                    return [str(value) for value in list_of(expression, "values")]
        return []

    @property
    def instance(self) -> Instance | None:
        names = self.selected(INSTANCE_LABEL)
        return INSTANCES.get(names[0]) if len(names) == 1 else None

    @property
    def is_spot(self) -> bool:
        return self.selected(KARPENTER_CAPACITY) == ["spot"] or self.selected(GKE_SPOT) == ["true"]

    @property
    def env(self) -> JsonObject:
        """Plain values of all containers."""
        return {
            str(get(entry, "name")): get(entry, "value")
            for _, container in self.containers("containers")
            for entry in list_of(container, "env")
        }


def is_kind(manifest: Manifest, group: str, *kinds: str) -> bool:
    return manifest.group == group and manifest.kind in kinds


def is_volcano_job(manifest: Manifest) -> bool:
    return is_kind(manifest, "batch.volcano.sh", "Job")


def job_specs(manifest: Manifest) -> Iterator[tuple[ManifestPlace, JsonObject]]:
    """Specs of batch/v1 Jobs: the object itself, and those inside a JobSet or CronJob."""
    root = ManifestPlace(manifest)
    if is_kind(manifest, "batch", "Job"):
        yield root.at("spec"), map_of(manifest.body, "spec")
    elif is_kind(manifest, "batch", "CronJob"):
        yield root.at("spec", "jobTemplate", "spec"), map_of(manifest.body, "spec", "jobTemplate", "spec")
    elif is_kind(manifest, "jobset.x-k8s.io", "JobSet"):
        for index, job in enumerate(list_of(manifest.body, "spec", "replicatedJobs")):
            yield root.at("spec", "replicatedJobs", index, "template", "spec"), map_of(job, "template", "spec")


RAY_SPECS = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec"), "RayService": ("spec", "rayClusterConfig")}


def ray_groups(manifest: Manifest) -> Iterator[tuple[ManifestPlace, JsonObject, bool]]:
    """(place, group, is the head)"""
    keys = RAY_SPECS.get(manifest.kind) if manifest.group == "ray.io" else None
    if keys is None:
        return
    place, spec = ManifestPlace(manifest).at(*keys), map_of(manifest.body, *keys)
    if "headGroupSpec" in spec:
        yield place.at("headGroupSpec"), map_of(spec, "headGroupSpec"), True
    for index, group in enumerate(list_of(spec, "workerGroupSpecs")):
        if isinstance(group, dict):
            yield place.at("workerGroupSpecs", index), group, False


def pods_of(manifest: Manifest) -> list[Pods]:
    """Every pod template of an object."""
    root, body = ManifestPlace(manifest), manifest.body
    found: list[tuple[ManifestPlace, Any, int, bool]] = []
    if is_kind(manifest, "", "Pod"):
        found = [(root, body, 1, False)]
    elif is_kind(manifest, "apps", "Deployment", "StatefulSet", "ReplicaSet", "DaemonSet"):
        found = [(root.at("spec", "template"), get(body, "spec", "template"), 1, False)]
    elif is_volcano_job(manifest):
        for index, task in enumerate(list_of(body, "spec", "tasks")):
            place = root.at("spec", "tasks", index, "template")
            found.append((place, get(task, "template"), number(get(task, "replicas"), 1), False))
    elif manifest.group == "ray.io":
        for place, group, is_head in ray_groups(manifest):
            found.append(
                (place.at("template"), group.get("template"), 1 if is_head else number(group.get("replicas"), 0), False)
            )
    else:
        for place, spec in job_specs(manifest):
            count = number(spec.get("parallelism"), number(spec.get("completions"), 1))
            found.append((place.at("template"), spec.get("template"), count, True))
    size = sum(count for _, _, count, _ in found)
    return [
        Pods(place, template if isinstance(template, dict) else {}, count, size, by_job)
        for place, template, count, by_job in found
    ]


def gpus_of(manifest: Manifest) -> float:
    return sum((pods.count * pods.limit(GPU_RESOURCE) for pods in pods_of(manifest)), 0.0)
