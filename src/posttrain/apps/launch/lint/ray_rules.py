"""Rules of KubeRay: what its operator refuses, and commands that it would wrap."""

from __future__ import annotations

import re

from posttrain.apps.launch.instances import GPU_RESOURCE
from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import RAY_SPECS, get, list_of, map_of, number, quantity, ray_groups
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonObject

RULES = {
    "ray-name": "names are DNS names of at most 53 characters (RayCluster), 47 (RayJob, RayService)",
    "ray-version": "ray.io/v1 is the version of the API",
    "ray-start-params": "rayStartParams are texts, and do not repeat the resources of the group",
    "ray-replicas": "minReplicas ≤ replicas ≤ maxReplicas",
    "ray-groups": "worker groups have unique names",
    "ray-command": "a container with a command of its own has the annotation ray.io/overwrite-container-cmd",
    "ray-first-container": "the container of Ray is the first",
    "rayjob-cluster": "a RayJob has rayClusterSpec or clusterSelector",
    "rayjob-settings": "settings of a RayJob fit each other",
    "ray-token": "tokens need Ray 2.52 or newer",
    "ray-kueue": "what Kueue admits ends by itself and does not change its size",
}

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
_OVERWRITE = "ray.io/overwrite-container-cmd"
_QUEUE = "kueue.x-k8s.io/queue-name"


def check_ray(manifest: Manifest) -> Findings:
    if manifest.group != "ray.io" or manifest.kind not in RAY_SPECS:
        return
    root = ManifestPlace(manifest)
    longest = 53 if manifest.kind == "RayCluster" else 47
    if len(manifest.name) > longest or not _DNS_1035.fullmatch(manifest.name):
        yield root.at("metadata", "name").error(
            "ray-name", manifest.name, f"must be a DNS name, a letter first, of at most {longest} characters"
        )
    if manifest.body.get("apiVersion") != "ray.io/v1":
        yield root.at("apiVersion").warning(
            "ray-version", manifest.body.get("apiVersion"), "is deprecated", "use ray.io/v1"
        )
    names: list[object] = []
    for place, group, is_head in ray_groups(manifest):
        yield from _check_group(place, group, is_head)
        if not is_head:
            name = group.get("groupName")
            if not name or name in names:
                yield place.at("groupName").error("ray-groups", name, "must be a name that no other group has")
            names.append(name)
    spec_place = root.at(*RAY_SPECS[manifest.kind])
    yield from _check_token(spec_place, map_of(manifest.body, *RAY_SPECS[manifest.kind]))
    if manifest.kind == "RayJob":
        yield from _check_job(root.at("spec"), map_of(manifest.body, "spec"))
    if get(manifest.body, "metadata", "labels", _QUEUE) is not None:
        yield from _check_kueue(manifest, names)


def _check_group(place: ManifestPlace, group: JsonObject, is_head: bool) -> Findings:
    params, resources = map_of(group, "rayStartParams"), map_of(group, "resources")
    for key, value in params.items():
        if not isinstance(value, str):
            yield place.at("rayStartParams", str(key)).error(
                "ray-start-params", value, "must be a text", f'write "{value}"'
            )
    for key in {"num-gpus", "num-cpus", "memory", "resources"} & set(params):
        if resources:
            yield place.at("rayStartParams", key).error(
                "ray-start-params", params[key], "the group has resources of its own", "keep one"
            )
    if not is_head:
        least, count, most = (
            number(group.get("minReplicas"), 0),
            number(group.get("replicas"), 0),
            number(group.get("maxReplicas"), 2**31),
        )
        if least > most:
            yield place.at("minReplicas").error("ray-replicas", least, f"is above maxReplicas {most}")
        elif group.get("replicas") is not None and not least <= count <= most:
            yield place.at("replicas").error("ray-replicas", count, f"must be between {least} and {most}")
    template = map_of(group, "template")
    containers = [container for container in list_of(template, "spec", "containers") if isinstance(container, dict)]
    if containers and containers[0].get("command") and get(template, "metadata", "annotations", _OVERWRITE) != "true":
        yield place.at("template", "metadata", "annotations", _OVERWRITE).error(
            "ray-command", get(template, "metadata", "annotations", _OVERWRITE),
            "KubeRay joins the command into one line without quotes", 'set "true"',
        )  # fmt: skip
    with_gpus = [index for index, c in enumerate(containers) if quantity(get(c, "resources", "limits", GPU_RESOURCE))]
    if with_gpus and with_gpus[0] != 0:
        yield place.at("template", "spec", "containers", 0).error(
            "ray-first-container",
            containers[0].get("name"),
            "KubeRay starts Ray in the first container",
            "put that of the GPUs first",
        )


def _check_token(place: ManifestPlace, spec: JsonObject) -> Findings:
    version = re.match(r"(\d+)\.(\d+)", str(spec.get("rayVersion", "")))
    if get(spec, "authOptions", "mode") == "token" and (
        version is None or (int(version[1]), int(version[2])) < (2, 52)
    ):
        yield place.at("rayVersion").error(
            "ray-token", spec.get("rayVersion"), "tokens need Ray 2.52", "use a newer Ray"
        )


def _check_job(place: ManifestPlace, spec: JsonObject) -> Findings:
    selector, cluster, mode = (
        spec.get("clusterSelector"),
        spec.get("rayClusterSpec"),
        spec.get("submissionMode", "K8sJobMode"),
    )
    if bool(selector) == bool(cluster):
        yield place.at("rayClusterSpec").error(
            "rayjob-cluster", None, "needs rayClusterSpec or clusterSelector, and not both"
        )
    name = "rayjob-settings"
    if mode not in _MODES:
        yield place.at("submissionMode").error(name, mode, f"must be one of {', '.join(_MODES)}")
    if not spec.get("entrypoint") and mode != "InteractiveMode":
        yield place.at("entrypoint").error(name, spec.get("entrypoint"), "is empty")
    if number(spec.get("ttlSecondsAfterFinished"), 0) > 0 and not spec.get("shutdownAfterJobFinishes"):
        yield place.at("ttlSecondsAfterFinished").error(
            name, spec["ttlSecondsAfterFinished"], "needs shutdownAfterJobFinishes: true"
        )
    if get(spec, "deletionStrategy", "deletionRules") and spec.get("shutdownAfterJobFinishes"):
        yield place.at("shutdownAfterJobFinishes").error(name, True, "deletionRules exclude it")
    if number(spec.get("backoffLimit"), 0) > 0 and (selector or mode == "InteractiveMode"):
        yield place.at("backoffLimit").error(
            name, spec["backoffLimit"], "a retry needs a new cluster: not with clusterSelector or InteractiveMode"
        )
    if spec.get("submitterPodTemplate") and mode in ("SidecarMode", "HTTPMode"):
        yield place.at("submitterPodTemplate").error(name, None, f"{mode} has no pod that submits", "remove it")
    if spec.get("activeDeadlineSeconds") is not None and number(spec["activeDeadlineSeconds"], 0) <= 0:
        yield place.at("activeDeadlineSeconds").error(name, spec["activeDeadlineSeconds"], "must be above 0")


def _check_kueue(manifest: Manifest, names: list[object]) -> Findings:
    root, spec = ManifestPlace(manifest), map_of(manifest.body, *RAY_SPECS[manifest.kind])
    if manifest.kind == "RayJob":
        if get(manifest.body, "spec", "shutdownAfterJobFinishes") is not True:
            yield root.at("spec", "shutdownAfterJobFinishes").error(
                "ray-kueue", get(manifest.body, "spec", "shutdownAfterJobFinishes"), "Kueue requires it", "set true"
            )
        if get(manifest.body, "spec", "clusterSelector"):
            yield root.at("spec", "clusterSelector").error(
                "ray-kueue", None, "Kueue admits jobs with clusters of their own"
            )
    if spec.get("enableInTreeAutoscaling") is True:
        yield root.at(*RAY_SPECS[manifest.kind], "enableInTreeAutoscaling").error(
            "ray-kueue", True, "Kueue admits a fixed size"
        )
    if "head" in names:
        index = names.index("head")
        yield root.at(*RAY_SPECS[manifest.kind], "workerGroupSpecs", index, "groupName").error(
            "ray-kueue", "head", "is reserved"
        )
