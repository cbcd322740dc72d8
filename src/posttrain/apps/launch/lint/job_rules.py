"""Rules of batch/v1 Jobs and JobSets: ranks, retries, success, names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.apps.launch.instances import GPU_RESOURCE
from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import get, is_kind, job_specs, list_of, map_of, number, pods_of
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonObject

RULES = {
    "completion-mode": "completionMode is Indexed or NonIndexed",
    "indexed-completions": "an Indexed Job says how many completions it has",
    "gang-parallelism": "all ranks of a gang run at once: completions equal parallelism",
    "no-rank": "several GPU pods of a Job have ranks: completionMode Indexed",
    "failure-policy-restart": "podFailurePolicy needs restartPolicy Never and podReplacementPolicy Failed",
    "failure-policy-rule": "a rule of podFailurePolicy has a known action and one condition, and never exit code 0",
    "needs-indexed": "successPolicy and backoffLimitPerIndex need completionMode Indexed",
    "workers-fail-job": "the end of rank 0 is the success of a gang: successPolicy",
    "interruptions-count": "interruptions of Spot machines do not use up backoffLimit",
    "job-name": "names leave room for the index and suffix of a pod's host name",
    "jobset-names": "replicated Jobs have unique names, and policies name existing ones",
    "jobset-failure-policy": "failurePolicy of a JobSet has known actions, reasons, strategy and patterns",
    "jobset-dns": "pods of a JobSet find each other by DNS",
}

_ACTIONS = ("FailJob", "FailIndex", "Ignore", "Count")
_SET_ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
_STRATEGIES = ("Recreate", "BlockingRecreate", "InPlaceRestart")
_REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MAX_LABEL = 63


def check_jobs(manifest: Manifest) -> Findings:
    pods_by_path = {pods.place.path: pods for pods in pods_of(manifest)}
    for place, spec in job_specs(manifest):
        pods = pods_by_path.get(place.at("template").path)
        has_gpus = pods is not None and pods.limit(GPU_RESOURCE) > 0
        yield from _check_shape(place, spec, has_gpus)
        yield from _check_failure_policy(place, spec)
        if has_gpus and pods is not None and pods.count > 1 and is_kind(manifest, "batch", "Job"):
            yield from _check_gang_end(place, spec, pods.is_spot)
    if is_kind(manifest, "batch", "Job"):
        longest = len(manifest.name) + 1 + len(str(number(get(manifest.body, "spec", "completions"), 1)))
        if longest > _MAX_LABEL or (manifest.name and not _DNS_LABEL.fullmatch(manifest.name)):
            yield (
                ManifestPlace(manifest)
                .at("metadata", "name")
                .error(
                    "job-name",
                    manifest.name,
                    "is no host name with an index behind it",
                    f"at most {_MAX_LABEL - 5} of a-z, 0-9, '-'",
                )
            )
    if is_kind(manifest, "jobset.x-k8s.io", "JobSet"):
        yield from _check_jobset(manifest)


def _check_shape(place: ManifestPlace, spec: JsonObject, has_gpus: bool) -> Findings:
    mode, completions, parallelism = spec.get("completionMode"), spec.get("completions"), spec.get("parallelism")
    if mode not in (None, "Indexed", "NonIndexed"):
        yield place.at("completionMode").error("completion-mode", mode, "must be Indexed or NonIndexed")
    if mode == "Indexed" and completions is None:
        yield place.at("completions").error("indexed-completions", None, "required when completionMode is Indexed")
    if mode == "Indexed" and has_gpus and completions is not None and number(parallelism, 1) != number(completions, 1):
        yield place.at("parallelism").error(
            "gang-parallelism", parallelism, f"{completions} ranks need each other and {number(parallelism, 1)} run at once",
            f"set parallelism: {completions}",
        )  # fmt: skip
    if mode != "Indexed" and has_gpus and number(parallelism, 1) > 1:
        started = min(number(parallelism, 1), number(completions, number(parallelism, 1)))
        yield place.at("completionMode").error(
            "no-rank", mode, f"{started} of {parallelism} pods would start, and none knows its rank",
            f"set completionMode: Indexed, completions: {parallelism}, and a headless Service",
        )  # fmt: skip
    if mode != "Indexed":
        for key in ("successPolicy", "backoffLimitPerIndex", "maxFailedIndexes"):
            if spec.get(key) is not None:
                yield place.at(key).error("needs-indexed", spec[key], "requires indexed completion mode")
    elif spec.get("maxFailedIndexes") is not None and spec.get("backoffLimitPerIndex") is None:
        yield place.at("maxFailedIndexes").error(
            "needs-indexed", spec["maxFailedIndexes"], "needs backoffLimitPerIndex"
        )
    succeeded = list_of(spec, "successPolicy", "rules")
    for index, rule in enumerate(succeeded):
        text = get(rule, "succeededIndexes")
        highest = max([int(part) for part in re.findall(r"\d+", str(text or ""))], default=0)
        if text is not None and completions is not None and highest >= number(completions, 1):
            yield place.at("successPolicy", "rules", index, "succeededIndexes").error(
                "needs-indexed", text, f"indexes end at {number(completions, 1) - 1}"
            )


def _check_failure_policy(place: ManifestPlace, spec: JsonObject) -> Findings:
    policy = spec.get("podFailurePolicy")
    if not isinstance(policy, dict):
        return
    restart = get(spec, "template", "spec", "restartPolicy")
    if restart != "Never":
        yield place.at("template", "spec", "restartPolicy").error(
            "failure-policy-restart", restart, 'only "Never" is supported when podFailurePolicy is specified'
        )
    if spec.get("podReplacementPolicy") not in (None, "Failed"):
        yield place.at("podReplacementPolicy").error(
            "failure-policy-restart",
            spec["podReplacementPolicy"],
            'must be "Failed" when podFailurePolicy is specified',
        )
    containers = [
        get(c, "name") for key in ("containers", "initContainers") for c in list_of(spec, "template", "spec", key)
    ]
    for index, rule in enumerate(list_of(policy, "rules")):
        yield from _check_failure_rule(place.at("podFailurePolicy", "rules", index), rule, containers, spec)


def _check_failure_rule(place: ManifestPlace, rule: object, containers: Sequence[object], spec: JsonObject) -> Findings:
    name, action = "failure-policy-rule", get(rule, "action")
    if action not in _ACTIONS:
        yield place.at("action").error(name, action, f"must be one of {', '.join(_ACTIONS)}")
    if action == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
        yield place.at("action").error(name, action, "needs backoffLimitPerIndex")
    codes, conditions = get(rule, "onExitCodes"), get(rule, "onPodConditions")
    if bool(codes) == bool(conditions):
        yield place.error(name, None, "needs onExitCodes or onPodConditions, and not both")
    if isinstance(codes, dict):
        operator, values = codes.get("operator"), list_of(codes, "values")
        if operator not in ("In", "NotIn"):
            yield place.at("onExitCodes", "operator").error(name, operator, "must be In or NotIn")
        if not values:
            yield place.at("onExitCodes", "values").error(name, values, "needs at least one exit code")
        if operator == "In" and 0 in values:
            yield place.at("onExitCodes", "values").error(name, values, "0 is success, and forbidden with In")
        if codes.get("containerName") is not None and codes["containerName"] not in containers:
            yield place.at("onExitCodes", "containerName").error(
                name, codes["containerName"], "the pod has no such container"
            )
    for number_, condition in enumerate(conditions if isinstance(conditions, list) else []):
        if not isinstance(get(condition, "status"), str | None):
            yield place.at("onPodConditions", number_, "status").error(
                name, get(condition, "status"), 'must be a text: "True"'
            )


def _check_gang_end(place: ManifestPlace, spec: JsonObject, is_spot: bool) -> Findings:
    if spec.get("completionMode") != "Indexed":
        return
    if not spec.get("successPolicy"):
        message = "workers that end after rank 0 fail a Job that succeeded"
        remedy = 'add successPolicy: {rules: [{succeededIndexes: "0", succeededCount: 1}]}'
        here = place.at("successPolicy")
        yield (here.error if spec.get("backoffLimit") == 0 else here.warning)("workers-fail-job", None, message, remedy)
    rules = list_of(spec, "podFailurePolicy", "rules")
    ignored = any(
        get(rule, "action") == "Ignore"
        and any(get(c, "type") == "DisruptionTarget" for c in list_of(rule, "onPodConditions"))
        for rule in rules
    )
    if is_spot and not ignored:
        yield place.at("podFailurePolicy").warning(
            "interruptions-count",
            None,
            "each interruption uses up backoffLimit",
            "add a rule: Ignore, DisruptionTarget",
        )


# -- JobSet --------------------------------------------------------------------------------------------------------------


def _check_jobset(manifest: Manifest) -> Findings:
    root, spec = ManifestPlace(manifest).at("spec"), map_of(manifest.body, "spec")
    jobs = list_of(spec, "replicatedJobs")
    names = [str(get(job, "name")) for job in jobs]
    if not jobs:
        yield root.at("replicatedJobs").error("jobset-names", jobs, "has no replicated Job")
    for index, job in enumerate(jobs):
        here = root.at("replicatedJobs", index, "name")
        if names[index] in names[:index]:
            yield here.error("jobset-names", names[index], "stands twice")
        pods = number(get(job, "template", "spec", "completions"), 1)
        longest = f"{manifest.name}-{names[index]}-{max(0, number(get(job, 'replicas'), 1) - 1)}-{pods - 1}"
        if len(longest) > _MAX_LABEL or not _DNS_LABEL.fullmatch(longest):
            yield here.error(
                "jobset-names", longest, f"is the host name of a pod and must be one of at most {_MAX_LABEL} characters"
            )
        for number_, other in enumerate(list_of(job, "dependsOn")):
            if get(other, "name") not in names[:index]:
                yield root.at("replicatedJobs", index, "dependsOn", number_, "name").error(
                    "jobset-names", get(other, "name"), "must name a replicated Job that stands before this one"
                )
    for index, name in enumerate(list_of(spec, "successPolicy", "targetReplicatedJobs")):
        if name not in names:
            yield root.at("successPolicy", "targetReplicatedJobs", index).error(
                "jobset-names", name, f"has {', '.join(names)}"
            )
    pods_in_all = sum(pods.count for pods in pods_of(manifest))
    if pods_in_all > 1 and get(spec, "network", "enableDNSHostnames") is False:
        yield root.at("network", "enableDNSHostnames").error("jobset-dns", False, "pods do not find rank 0", "set true")
    if pods_in_all > 1 and get(spec, "network", "publishNotReadyAddresses") is False:
        yield root.at("network", "publishNotReadyAddresses").warning(
            "jobset-dns", False, "rank 0 is found late", "set true"
        )
    yield from _check_set_failures(root.at("failurePolicy"), map_of(spec, "failurePolicy"), names)


def _check_set_failures(place: ManifestPlace, policy: JsonObject, names: list[str]) -> Findings:
    rule_id = "jobset-failure-policy"
    if policy.get("restartStrategy") not in (None, *_STRATEGIES):
        yield place.at("restartStrategy").error(
            rule_id, policy["restartStrategy"], f"must be one of {', '.join(_STRATEGIES)}"
        )
    seen: list[object] = []
    for index, rule in enumerate(list_of(policy, "rules")):
        here, name = place.at("rules", index), get(rule, "name")
        if get(rule, "action") not in _SET_ACTIONS:
            yield here.at("action").error(rule_id, get(rule, "action"), f"must be one of {', '.join(_SET_ACTIONS)}")
        if not name or name in seen:
            yield here.at("name").error(rule_id, name, "must be a name that no other rule has")
        seen.append(name)
        for number_, reason in enumerate(list_of(rule, "onJobFailureReasons")):
            if reason not in _REASONS:
                yield here.at("onJobFailureReasons", number_).error(
                    rule_id, reason, f"must be one of {', '.join(_REASONS)}"
                )
        for number_, pattern in enumerate(list_of(rule, "onJobFailureMessagePatterns")):
            try:
                re.compile(str(pattern))
            except re.error as error:
                yield here.at("onJobFailureMessagePatterns", number_).error(rule_id, pattern, f"is no pattern: {error}")
        for number_, target in enumerate(list_of(rule, "targetReplicatedJobs")):
            if target not in names:
                yield here.at("targetReplicatedJobs", number_).error(rule_id, target, f"has {', '.join(names)}")
