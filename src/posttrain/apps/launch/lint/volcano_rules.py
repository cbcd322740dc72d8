"""Rules of Volcano: what its webhook refuses, and gangs that never start or never restart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import get, is_kind, is_volcano_job, list_of, map_of, number
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonObject

RULES = {
    "volcano-gang": "minAvailable is the number of all pods of a gang",
    "volcano-tasks": "tasks have unique DNS names",
    "volcano-plugins": "plugins are known, and a gang has svc so that pods find each other",
    "volcano-policy": "a policy has a known action and events or an exit code other than 0",
    "volcano-policy-order": "policies of exit codes stand before PodFailed, which matches every failure",
    "volcano-no-restart": "an evicted pod restarts the job",
    "volcano-retries": "maxRetry leaves room for interruptions",
    "volcano-scheduler": "schedulerName is volcano",
    "volcano-queue": "queues have a weight, and no namespace",
}

_PLUGINS = ("svc", "env", "ssh", "pytorch", "tensorflow", "mpi", "ray", "hcclrank")
_EVENTS = ("PodFailed", "PodEvicted", "PodPending", "Unknown", "TaskCompleted", "TaskFailed", "JobUpdated", "*")
_ACTIONS = (
    "AbortJob", "RestartJob", "RestartTask", "RestartPod", "RestartPartition", "TerminateJob", "CompleteJob", "ResumeJob",
)  # fmt: skip
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def check_volcano(manifest: Manifest) -> Findings:
    if is_kind(manifest, "scheduling.volcano.sh", "Queue"):
        yield from _check_queue(manifest)
    if not is_volcano_job(manifest):
        return
    root, spec = ManifestPlace(manifest).at("spec"), map_of(manifest.body, "spec")
    tasks = [task for task in list_of(spec, "tasks") if isinstance(task, dict)]
    if not tasks:
        yield root.at("tasks").error("volcano-tasks", spec.get("tasks"), "a job needs at least one task")
    yield from _check_gang(root, spec, tasks)
    yield from _check_tasks(root, tasks)
    yield from _check_plugins(root, spec, tasks)
    yield from _check_policies(root.at("policies"), list_of(spec, "policies"))
    for index, task in enumerate(tasks):
        yield from _check_policies(root.at("tasks", index, "policies"), list_of(task, "policies"))
    yield from _check_restarts(root, spec, tasks)


def _check_gang(root: ManifestPlace, spec: JsonObject, tasks: Sequence[JsonObject]) -> Findings:
    total = sum(number(task.get("replicas"), 1) for task in tasks)
    least = spec.get("minAvailable")
    if isinstance(least, int) and least > total:
        yield root.at("minAvailable").error(
            "volcano-gang", least, f"is above the {total} pods of all tasks: it never starts"
        )
    elif total > 1 and number(least, 0) < total:
        yield root.at("minAvailable").warning("volcano-gang", least, f"{total} pods need each other", f"set {total}")
    if spec.get("schedulerName") not in (None, "volcano"):
        yield root.at("schedulerName").error("volcano-scheduler", spec["schedulerName"], "must be volcano")


def _check_tasks(root: ManifestPlace, tasks: Sequence[JsonObject]) -> Findings:
    names = [task.get("name") for task in tasks]
    for index, name in enumerate(names):
        here = root.at("tasks", index, "name")
        if not isinstance(name, str) or not _DNS_LABEL.fullmatch(name):
            yield here.error("volcano-tasks", name, "must be a DNS name: a-z, 0-9 and '-'")
        elif name in names[:index]:
            yield here.error("volcano-tasks", name, "stands twice")


def _check_plugins(root: ManifestPlace, spec: JsonObject, tasks: Sequence[JsonObject]) -> Findings:
    plugins = map_of(spec, "plugins")
    for name in plugins:
        if name not in _PLUGINS:
            yield root.at("plugins", str(name)).error(
                "volcano-plugins", name, f"no such plugin; known: {', '.join(_PLUGINS)}"
            )
    if sum(number(task.get("replicas"), 1) for task in tasks) > 1 and not {
        "svc",
        "pytorch",
        "mpi",
        "ray",
        "tensorflow",
    } & set(plugins):
        yield root.at("plugins").error(
            "volcano-plugins", plugins, "pods have no names to find each other by", "add svc: []"
        )
    for argument in list_of(plugins, "pytorch"):
        name, _, value = str(argument).partition("=")
        if name == "--master" and value not in [task.get("name") for task in tasks]:
            yield root.at("plugins", "pytorch").error("volcano-plugins", argument, "no task has this name")


def _check_policies(place: ManifestPlace, policies: Sequence[object]) -> Findings:
    name, matches_all = "volcano-policy", False
    for index, policy in enumerate(policies):
        here = place.at(index)
        code = get(policy, "exitCode")
        events = _events(policy)
        if get(policy, "action") not in _ACTIONS:
            yield here.at("action").error(name, get(policy, "action"), f"must be one of {', '.join(_ACTIONS)}")
        if code is not None and events:
            yield here.at("exitCode").error(name, code, "a policy has events or an exit code, not both")
        elif code is None and not events:
            yield here.error(name, None, "a policy needs an event or an exit code")
        if code == 0:
            yield here.at("exitCode").error(name, 0, "0 is success, and not allowed")
        for event in events:
            if event not in _EVENTS:
                yield here.at("event").error(name, event, f"must be one of {', '.join(_EVENTS)}")
        if "*" in events and len(events) > 1:
            yield here.at("events").error(name, events, "* stands alone")
        if code is not None and matches_all:
            yield here.at("exitCode").error(
                "volcano-policy-order", code, "a policy before it matches every failure", "move it up"
            )
        matches_all = matches_all or bool({"*", "PodFailed"} & set(map(str, events)))


def _events(policy: object) -> list[Any]:
    return [*([get(policy, "event")] if get(policy, "event") is not None else []), *list_of(policy, "events")]


def _check_restarts(root: ManifestPlace, spec: JsonObject, tasks: Sequence[JsonObject]) -> Findings:
    policies = [*list_of(spec, "policies"), *(policy for task in tasks for policy in list_of(task, "policies"))]
    restarts = [
        policy
        for policy in policies
        if get(policy, "action") == "RestartJob" and {"PodEvicted", "*"} & set(map(str, _events(policy)))
    ]
    total = sum(number(task.get("replicas"), 1) for task in tasks)
    if total > 1 and not restarts:
        yield root.at("policies").warning(
            "volcano-no-restart",
            None,
            "an evicted pod leaves the others waiting",
            "add {event: PodEvicted, action: RestartJob}",
        )
    if restarts and number(spec.get("maxRetry"), 3) < 10:
        yield root.at("maxRetry").warning(
            "volcano-retries", spec.get("maxRetry"), "evictions count, and 3 is the default", "set 1000"
        )


def _check_queue(manifest: Manifest) -> Findings:
    root = ManifestPlace(manifest)
    weight = get(manifest.body, "spec", "weight")
    if weight is not None and number(weight, 0) < 1:
        yield root.at("spec", "weight").error("volcano-queue", weight, "must be a whole number of at least 1")
    if get(manifest.body, "metadata", "namespace") is not None:
        yield root.at("metadata", "namespace").warning(
            "volcano-queue", manifest.namespace, "queues have no namespace", "remove it"
        )
