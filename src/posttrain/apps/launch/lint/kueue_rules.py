"""Rules of Kueue: quotas that admit, queues, flavors and topologies."""

from __future__ import annotations

from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import get, list_of, map_of, quantity
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonObject

RULES = {
    "kueue-version": "v1beta2 is the version of the API",
    "kueue-renamed": "v1beta2 has cohortName and admissionChecksStrategy",
    "kueue-resources": "every flavor lists every covered resource, with a quota",
    "kueue-coverage": "a quota of GPUs comes with quotas of CPU and memory",
    "kueue-namespaces": "a ClusterQueue says which namespaces it admits",
    "kueue-flavor": "a flavor with a topology has node labels",
    "kueue-topology": "levels are unique, and the host name is the last",
    "kueue-queue": "a LocalQueue names its ClusterQueue",
}

GROUP = "kueue.x-k8s.io"
_RENAMED = {"cohort": "cohortName", "admissionChecks": "admissionChecksStrategy"}


def check_kueue(manifest: Manifest) -> Findings:
    if manifest.group != GROUP:
        return
    root, spec = ManifestPlace(manifest).at("spec"), map_of(manifest.body, "spec")
    version = str(manifest.body.get("apiVersion", "")).rpartition("/")[2]
    if version == "v1beta1":
        yield (
            ManifestPlace(manifest)
            .at("apiVersion")
            .warning("kueue-version", manifest.body["apiVersion"], "is deprecated", f"use {GROUP}/v1beta2")
        )
    elif version != "v1beta2":
        yield (
            ManifestPlace(manifest)
            .at("apiVersion")
            .error("kueue-version", manifest.body.get("apiVersion"), f"use {GROUP}/v1beta2")
        )
    if manifest.kind == "ClusterQueue":
        yield from _check_cluster_queue(root, spec, version)
    elif manifest.kind == "LocalQueue" and not spec.get("clusterQueue"):
        yield root.at("clusterQueue").error("kueue-queue", spec.get("clusterQueue"), "is required")
    elif manifest.kind == "ResourceFlavor" and spec.get("topologyName") and not map_of(spec, "nodeLabels"):
        yield root.at("nodeLabels").error(
            "kueue-flavor", None, "at least one nodeLabel is required when topology is set"
        )
    elif manifest.kind == "Topology":
        yield from _check_topology(root, spec)


def _check_cluster_queue(root: ManifestPlace, spec: JsonObject, version: str) -> Findings:
    for old, new in _RENAMED.items():
        if version == "v1beta2" and old in spec:
            yield root.at(old).error("kueue-renamed", spec[old], "unknown field in v1beta2", f"write {new}")
    if spec.get("namespaceSelector") is None:
        yield root.at("namespaceSelector").error(
            "kueue-namespaces", None, "no namespace is admitted", "write {} for all"
        )
    covered_in_all: set[str] = set()
    for index, group in enumerate(list_of(spec, "resourceGroups")):
        place = root.at("resourceGroups", index)
        covered = list_of(group, "coveredResources")
        covered_in_all |= set(map(str, covered))
        for number_, flavor in enumerate(list_of(group, "flavors")):
            listed = [get(resource, "name") for resource in list_of(flavor, "resources")]
            here = place.at("flavors", number_, "resources")
            if listed != covered:
                yield here.error(
                    "kueue-resources",
                    listed,
                    f"must be the coveredResources in their order: {', '.join(map(str, covered))}",
                )
            for third, resource in enumerate(list_of(flavor, "resources")):
                if quantity(get(resource, "nominalQuota")) is None:
                    yield here.at(third, "nominalQuota").error(
                        "kueue-resources", get(resource, "nominalQuota"), "is no amount"
                    )
    if any("gpu" in name for name in covered_in_all) and not {"cpu", "memory"} <= covered_in_all:
        missing = sorted({"cpu", "memory"} - covered_in_all)
        yield root.at("resourceGroups").error(
            "kueue-coverage", None, f"pods also ask for {' and '.join(missing)}: none is admitted", "cover them"
        )


def _check_topology(root: ManifestPlace, spec: JsonObject) -> Findings:
    labels = [get(level, "nodeLabel") for level in list_of(spec, "levels")]
    if not labels:
        yield root.at("levels").error("kueue-topology", labels, "needs at least one level")
    for index, label in enumerate(labels):
        place = root.at("levels", index, "nodeLabel")
        if label in labels[:index]:
            yield place.error("kueue-topology", label, "stands twice")
        elif label == "kubernetes.io/hostname" and index != len(labels) - 1:
            yield place.error("kueue-topology", label, "can only be the last level")
