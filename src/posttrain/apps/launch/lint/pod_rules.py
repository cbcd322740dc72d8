"""Rules of pods: containers, resources, environment, volumes, signals, names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import (
    GKE_SPOT,
    INSTANCE_LABEL,
    KARPENTER_CAPACITY,
    ZONE_LABEL,
    Pods,
    get,
    list_of,
    map_of,
    number,
    quantity,
)
from posttrain.files.json_files import JsonObject
from posttrain.files.redaction import is_secret_key, redact

RULES = {
    "pod-containers": "a pod has at least one container",
    "restart-policy": "pods of a Job have restartPolicy Never or OnFailure",
    "quantity": "amounts of resources are numbers with a known unit, requests at most limits",
    "no-limits": "containers have limits of CPU and memory",
    "env-text": "values of environment variables are texts",
    "env-twice": "an environment variable is set once",
    "literal-secret": "tokens and passwords are in Secrets, not in manifests",
    "node-label-on-pod": "labels of nodes choose nodes in nodeSelector or affinity, not as labels of the pod",
    "impending-termination": "nodes that are about to end are not tolerated",
    "privileged": "containers are not privileged, and use no network of the host",
    "root-user": "runAsNonRoot and runAsUser agree",
    "volume-missing": "a mount names a volume of the pod",
    "volume-twice": "names of volumes and containers, and mount paths, are unique",
    "volume-unused": "a volume is mounted",
    "shell-as-first-process": "the first process passes SIGTERM on; a shell does not",
    "installs-at-start": "pods install nothing when they start",
    "image-tag": "images have a digest or a fixed tag",
    "grace-period": "terminationGracePeriodSeconds fits what the provider leaves",
    "label-value": "labels are texts of at most 63 characters",
    "label-selector": "a Spot or instance label in nodeSelector is a text",
}

_NODE_LABELS = (KARPENTER_CAPACITY, GKE_SPOT, INSTANCE_LABEL, ZONE_LABEL, "cloud.google.com/gke-accelerator")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_INSTALLS = re.compile(
    r"\b(apt-get|apt|yum|dnf|apk)\s+(-\S+\s+)*(install|add|update)\b|\bpip3?\s+install\b|\buv\s+(venv|sync)\b|\bgit\s+(clone|pull)\b"
)
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash", "/usr/bin/env bash")
_GKE_SPOT_S, _AWS_NOTICE_S, _LONGEST_GKE_S = 15, 120, 120


def check_pods(pods: Pods) -> Findings:
    if not any(True for _ in pods.containers("containers")):
        value = pods.template.get("spec", None)
        yield pods.spec_place.at("containers").error(
            "pod-containers",
            value,
            "the pod has no containers",
            "give the whole pod spec; an empty one is stored and never runs",
        )
        return
    yield from _check_restart_policy(pods)
    yield from _check_labels(pods)
    yield from _check_tolerations(pods)
    yield from _check_security(pods)
    yield from _check_volumes(pods)
    yield from _check_grace(pods)
    for place, container in pods.containers():
        yield from _check_resources(place, container, pods)
        yield from _check_env(place, container)
        yield from _check_command(place, container)
        yield from _check_image(place, container)


def _check_restart_policy(pods: Pods) -> Findings:
    policy = pods.spec.get("restartPolicy")
    if pods.restarts_by_job and policy not in ("Never", "OnFailure"):
        yield pods.spec_place.at("restartPolicy").error(
            "restart-policy",
            policy,
            "a Job accepts Never or OnFailure",
            "set Never: the Job, not the kubelet, starts it again",
        )
    elif policy not in (None, "Always", "Never", "OnFailure"):
        yield pods.spec_place.at("restartPolicy").error("restart-policy", policy, "must be Always, OnFailure or Never")


def _check_labels(pods: Pods) -> Findings:
    place = pods.place.at("metadata", "labels")
    for label, value in pods.labels.items():
        if label in _NODE_LABELS:
            yield place.at(label).error(
                "node-label-on-pod", value, "this label of nodes chooses no node when it stands on a pod",
                f"put {label}: {value} under spec.nodeSelector",
            )  # fmt: skip
        elif not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            yield place.at(label).error(
                "label-value", value, "must be a text of at most 63 letters, digits, '-', '_' and '.'"
            )
    for label, value in pods.selector.items():
        if not isinstance(value, str):
            yield pods.spec_place.at("nodeSelector", label).error(
                "label-selector", value, "must be a text", f'write "{value}"'
            )


def _check_tolerations(pods: Pods) -> Findings:
    for index, toleration in enumerate(list_of(pods.spec, "tolerations")):
        key = get(toleration, "key")
        place = pods.spec_place.at("tolerations", index)
        if key == "cloud.google.com/impending-node-termination":
            yield place.at("key").error(
                "impending-termination",
                key,
                "new pods would start on nodes that are about to end",
                "remove this toleration",
            )
        if key is None and get(toleration, "operator") == "Exists":
            yield place.at("operator").warning(
                "impending-termination",
                "Exists",
                "every taint is tolerated, also those of nodes about to end",
                "name the taints",
            )


def _check_security(pods: Pods) -> Findings:
    if pods.spec.get("hostNetwork") is True:
        yield pods.spec_place.at("hostNetwork").warning(
            "privileged",
            True,
            "the pod shares ports and names of its machine",
            "EFA and RDMA need no network of the host",
        )
    inherited = map_of(pods.spec, "securityContext")
    for place, container in pods.containers():
        own = map_of(container, "securityContext")
        if own.get("privileged") is True:
            yield place.at("securityContext", "privileged").warning(
                "privileged",
                True,
                "the container owns its machine",
                "the EFA plugin with the capability IPC_LOCK is enough",
            )
        merged = {**inherited, **own}
        if merged.get("runAsNonRoot") is True and merged.get("runAsUser") == 0:
            yield place.at("securityContext", "runAsUser").error(
                "root-user", 0, "runAsNonRoot refuses user 0", "set another user"
            )


def _check_volumes(pods: Pods) -> Findings:
    names = [get(volume, "name") for volume in list_of(pods.spec, "volumes")]
    yield from _twice(pods, names, "volumes")
    yield from _twice(pods, [container.get("name") for _, container in pods.containers("containers")], "containers")
    used = set()
    for place, container in pods.containers():
        mounts = list_of(container, "volumeMounts")
        for index, mount in enumerate(mounts):
            name = get(mount, "name")
            used.add(str(name))
            if name not in names:
                yield place.at("volumeMounts", index, "name").error(
                    "volume-missing",
                    name,
                    "the pod has no volume of this name",
                    f"volumes: {', '.join(map(str, names)) or 'none'}",
                )
        paths = Counter(str(get(mount, "mountPath")) for mount in mounts)
        for path, count in paths.items():
            if count > 1:
                index = [str(get(mount, "mountPath")) for mount in mounts].index(path)
                yield place.at("volumeMounts", index, "mountPath").error("volume-twice", path, "stands twice")
    for index, name in enumerate(names):
        if name is not None and str(name) not in used:
            yield pods.spec_place.at("volumes", index, "name").warning(
                "volume-unused", name, "no container mounts it", "remove it"
            )


def _twice(pods: Pods, names: Sequence[object], key: str) -> Findings:
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            yield pods.spec_place.at(key, index, "name").error("volume-twice", name, "stands twice")


def _check_grace(pods: Pods) -> Findings:
    place, value = pods.spec_place.at("terminationGracePeriodSeconds"), pods.spec.get("terminationGracePeriodSeconds")
    if not pods.is_spot:
        return
    grace, on_gke = number(value, 30), pods.selected(GKE_SPOT) == ["true"]
    if on_gke and grace > _LONGEST_GKE_S:
        yield place.error(
            "grace-period",
            value,
            f"GKE allows {_LONGEST_GKE_S} s on Spot nodes at most",
            "set 15, or raise the node pool's",
        )
    elif on_gke and grace > _GKE_SPOT_S:
        yield place.warning(
            "grace-period",
            value,
            f"GKE Spot leaves {_GKE_SPOT_S} s unless the node pool raises it",
            "set 15, or raise the node pool's",
        )
    elif not on_gke and grace > _AWS_NOTICE_S:
        yield place.warning("grace-period", value, f"the notice of AWS is {_AWS_NOTICE_S} s", "set 110")
    elif value is None:
        yield place.warning("grace-period", None, "30 s is the default", "say how long a save may take")


def _check_resources(place: ManifestPlace, container: JsonObject, pods: Pods) -> Findings:
    limits, requests = map_of(container, "resources", "limits"), map_of(container, "resources", "requests")
    for key, amounts in (("limits", limits), ("requests", requests)):
        for name, value in amounts.items():
            amount = quantity(value)
            if amount is None or amount < 0:
                yield place.at("resources", key, str(name)).error(
                    "quantity", value, "is no amount", "write it like 8, 500m or 64Gi"
                )
    for name, value in requests.items():
        wanted, limit = quantity(value), quantity(limits.get(name))
        if "/" not in str(name) and wanted is not None and limit is not None and wanted > limit:
            yield place.at("resources", "requests", str(name)).error(
                "quantity", value, f"is above the limit {limits[name]}"
            )
    missing = [name for name in ("cpu", "memory") if name not in limits]
    if missing and pods.limit("nvidia.com/gpu"):
        yield place.at("resources", "limits").warning(
            "no-limits",
            None,
            f"no limit of {' and '.join(missing)}",
            "set limits equal to requests: the pod is then evicted last",
        )


def _check_env(place: ManifestPlace, container: JsonObject) -> Findings:
    seen: set[str] = set()
    for index, entry in enumerate(list_of(container, "env")):
        name, value = str(get(entry, "name")), get(entry, "value")
        here = place.at("env", index, "value")
        if value is not None and not isinstance(value, str):
            yield here.error("env-text", value, "must be a text", f'write "{value}"')
        elif (
            isinstance(value, str)
            and value
            and (is_secret_key(name) or redact(value) != value)
            and not value.startswith("$(")
        ):
            yield here.error("literal-secret", None, f"{name} is a secret in plain text", "use valueFrom.secretKeyRef")
        if name in seen:
            yield place.at("env", index, "name").warning("env-twice", name, "is set twice; the last one counts")
        seen.add(name)


def _check_command(place: ManifestPlace, container: JsonObject) -> Findings:
    command, args = list_of(container, "command"), list_of(container, "args")
    words = [str(word) for word in [*command, *args]]
    key = "command" if command else "args"
    if words and words[0] in _SHELLS and "-c" in words[1:3] and not re.match(r"\s*exec\s", words[-1]):
        yield place.at(key).warning(
            "shell-as-first-process", " ".join(words[:2]), "a shell as the first process keeps SIGTERM from the program",
            "start the program itself: command: [posttrain, node]",
        )  # fmt: skip
    for word in words:
        if match := _INSTALLS.search(word):
            where = place.at("command" if word in map(str, command) else "args")
            yield where.warning(
                "installs-at-start", match[0], "starts depend on a network and differ", "put it into the image"
            )
        if redact(word) != word:
            where = place.at("command" if word in map(str, command) else "args")
            yield where.error(
                "literal-secret", None, "a secret stands in the command", "use valueFrom.secretKeyRef and its variable"
            )


def _check_image(place: ManifestPlace, container: JsonObject) -> Findings:
    image = container.get("image")
    here = place.at("image")
    if not isinstance(image, str) or not image or re.search(r"[\s<>]", image):
        yield here.error("image-tag", image, "is no name of an image", "registry/name@sha256:… or registry/name:tag")
    elif "@sha256:" not in image and (":" not in image.rpartition("/")[2] or image.endswith(":latest")):
        yield here.warning(
            "image-tag", image, "pods of one run may get different images", "give a digest or a fixed tag"
        )
