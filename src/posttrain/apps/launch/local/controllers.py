"""Kubernetes controllers as small state machines: Indexed Job and JobSet.

`reconcile` reads the state of the pods and requests the next action; it is called repeatedly and never blocks. Only
features that posttrain's manifests use are implemented. Deviations: delays between restarts are scaled, and no pod
waits for resources.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from posttrain.apps.launch.local.pods import Machine, Object, Pod

BACKOFF_S, MAX_BACKOFF_S = 10.0, 360.0  # of the Job controller, before scaling
POD_FAILURE_POLICY = "PodFailurePolicy"


@dataclass(frozen=True)
class WorkloadEnding:
    """How a workload ended: the type of its condition, its reason and message."""

    kind: str  # Complete, Failed
    reason: str
    message: str = ""


@dataclass
class Backoff:
    """Grows with failures that follow each other, as the Job controller's does."""

    scale: float
    num_failures: int = 0

    def next_s(self) -> float:
        self.num_failures += 1
        return self.scale * min(BACKOFF_S * 2.0 ** (self.num_failures - 1), MAX_BACKOFF_S)


class Controller(ABC):
    """A workload, from its start to the end of its last pod."""

    kind = "Job"
    name: str
    machine: Machine
    ending: WorkloadEnding | None = None
    is_restarting = False

    @property
    @abstractmethod
    def all_pods(self) -> list[Pod]: ...

    @abstractmethod
    def reconcile(self, now: float) -> None: ...

    @abstractmethod
    def status(self) -> Object:
        """The `status` of its object."""

    @property
    def is_over(self) -> bool:
        """The workload and its pods have ended."""
        return self.ending is not None and all(pod.is_over for pod in self.all_pods)

    def end(self, kind: str, reason: str, message: str = "") -> None:
        if self.ending is None:
            self.ending = WorkloadEnding(kind, reason, message)
            self.machine.note(reason, f"{self.kind} {self.name}: {message or kind}")

    def end_pods(self) -> bool:
        """Whether none is alive."""
        alive = [pod for pod in self.all_pods if not pod.is_over]
        for pod in alive:
            self.machine.end(pod)
        return not alive

    def end_or_restart(self, start_all: Callable[[], None]) -> None:
        """Where the pods of all attempts are started together: the end of `reconcile`."""
        none_alive = (self.ending is not None or self.is_restarting) and self.end_pods()
        if self.is_restarting and none_alive:
            self.is_restarting = False
            start_all()


# -- Job ---------------------------------------------------------------------------------------------------------------


class JobController(Controller):
    """An Indexed Job, alone or in a JobSet."""

    def __init__(
        self,
        name: str,
        spec: Object,
        machine: Machine,
        *,
        backoff_scale: float,
        subdomain: str | None = None,
        labels: dict[str, str] | None = None,
        num_restarts: int = 0,
    ) -> None:
        self.name, self.spec, self.machine = name, spec, machine
        self.pods: dict[int, list[Pod]] = {index: [] for index in range(spec["completions"])}
        self.succeeded: set[int] = set()
        self.num_failed = 0
        self._subdomain = subdomain or spec["template"]["spec"].get("subdomain", "")
        self._labels = labels or {}
        self._num_restarts = num_restarts  # of its JobSet: names of pods are not used again
        self._backoff = Backoff(backoff_scale)
        self._start_at: dict[int, float] = dict.fromkeys(self.pods, 0.0)
        self._seen: set[str] = set()

    @property
    def all_pods(self) -> list[Pod]:
        return [pod for pods in self.pods.values() for pod in pods]

    def reconcile(self, now: float) -> None:
        for index, pods in self.pods.items():
            if pods and pods[-1].is_over and pods[-1].uid not in self._seen:
                self._seen.add(pods[-1].uid)
                self._judge(index, pods[-1], now)
        if self.ending is not None:
            self.end_pods()
            return
        for index, pods in self.pods.items():
            is_free = not pods or pods[-1].is_over
            if is_free and index not in self.succeeded and now >= self._start_at[index]:
                pods.append(self._pod(index))
                self.machine.start(pods[-1])

    def _pod(self, index: int) -> Pod:
        hostname = f"{self.name}-{index}"
        key = "batch.kubernetes.io/job-completion-index"
        return Pod(
            name=f"{self.name}-{index}-{self._num_restarts + len(self.pods[index]) + 1:05d}",
            template=self.spec["template"],
            hostname=hostname,
            aliases=(f"{hostname}.{self._subdomain}",) if self._subdomain else (),
            labels={key: str(index), "batch.kubernetes.io/job-name": self.name, **self._labels},
            annotations={key: str(index)},
            env={"JOB_COMPLETION_INDEX": str(index)},
        )

    def _judge(self, index: int, pod: Pod, now: float) -> None:
        if pod.exit_code == 0:
            self.succeeded.add(index)
            self._backoff.num_failures = 0
            if self._is_success():
                self.end("Complete", "SuccessPolicy" if "successPolicy" in self.spec else "CompletionsReached")
            return
        rule = self._failure_rule(pod)
        if rule is not None and rule[1]["action"] == "FailJob":
            container = pod.template["spec"]["containers"][0]["name"]
            what = (
                f"Container {container} for pod {pod.name} failed with exit code {pod.exit_code}"
                if "onExitCodes" in rule[1]
                else f"Pod {pod.name} has condition DisruptionTarget"
            )
            self.end("Failed", POD_FAILURE_POLICY, f"{what} matching FailJob rule at index {rule[0]}")
            return
        if rule is None or rule[1]["action"] != "Ignore":
            self.num_failed += 1
            if self.num_failed > self.spec.get("backoffLimit", 6):
                self.end("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
                return
        self._start_at[index] = now + self._backoff.next_s()

    def _failure_rule(self, pod: Pod) -> tuple[int, Object] | None:
        for number, rule in enumerate(self.spec.get("podFailurePolicy", {}).get("rules", [])):
            if (codes := rule.get("onExitCodes")) is not None:
                if (pod.exit_code in codes["values"]) == (codes["operator"] == "In"):
                    return number, rule
            elif pod.is_disrupted:  # onPodConditions: DisruptionTarget is the only one there is here
                return number, rule
        return None

    def _is_success(self) -> bool:
        for rule in self.spec.get("successPolicy", {}).get("rules", []):
            wanted = _indexes(rule["succeededIndexes"]) if "succeededIndexes" in rule else set(self.pods)
            if len(wanted & self.succeeded) >= rule.get("succeededCount", len(wanted)):
                return True
        return len(self.succeeded) == len(self.pods)

    def status(self) -> Object:
        active = sum(not pod.is_over for pod in self.all_pods)
        status: Object = {"active": active, "succeeded": len(self.succeeded), "failed": self.num_failed}
        return {**status, "conditions": conditions_of(self.ending)}


def _indexes(text: str) -> set[int]:
    """`0,2-4` as Kubernetes writes indexes."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def conditions_of(ending: WorkloadEnding | None) -> list[Object]:
    if ending is None:
        return []
    return [{"type": ending.kind, "status": "True", "reason": ending.reason, "message": ending.message}]


# -- JobSet ------------------------------------------------------------------------------------------------------------


@dataclass
class JobSetController(Controller):
    """Jobs that are started and restarted together. No pod of the next attempt starts while one of the current is
    alive.
    """

    name: str
    spec: Object
    machine: Machine
    backoff_scale: float
    num_restarts: int = 0
    num_counted_restarts: int = 0
    jobs: list[JobController] = field(default_factory=list)
    kind = "JobSet"

    @property
    def all_pods(self) -> list[Pod]:
        return [pod for job in self.jobs for pod in job.all_pods]

    def reconcile(self, now: float) -> None:
        if not self.jobs:
            self._create_jobs()
        if self.ending is None and not self.is_restarting:
            for job in self.jobs:
                job.reconcile(now)
            failed = next((job for job in self.jobs if job.ending is not None and job.ending.kind == "Failed"), None)
            if failed is not None:
                self._on_failure(failed)
            elif all(job.is_over for job in self.jobs):
                self.end("Completed", "AllJobsCompleted", "jobset completed successfully")
        self.end_or_restart(self._create_jobs)

    def _create_jobs(self) -> None:
        subdomain = self.spec.get("network", {}).get("subdomain", self.name)
        self.jobs = []
        for part in self.spec["replicatedJobs"]:
            for number in range(part.get("replicas", 1)):
                name = f"{self.name}-{part['name']}-{number}"
                job = JobController(
                    name,
                    part["template"]["spec"],
                    self.machine,
                    backoff_scale=self.backoff_scale,
                    num_restarts=self.num_restarts,
                    subdomain=subdomain,
                    labels={
                        "jobset.sigs.k8s.io/jobset-name": self.name,
                        "jobset.sigs.k8s.io/replicatedjob-name": part["name"],
                        "jobset.sigs.k8s.io/restart-attempt": str(self.num_restarts),
                    },
                )
                self.jobs.append(job)

    def _on_failure(self, job: JobController) -> None:
        assert job.ending is not None
        policy = self.spec.get("failurePolicy", {})
        action = next(
            (rule["action"] for rule in policy.get("rules", []) if _matches(rule, job.ending)), "RestartJobSet"
        )
        if action == "FailJobSet":
            self.end("Failed", "FailJobSetFailurePolicyAction", job.ending.message)
            return
        if action == "RestartJobSet":
            if self.num_counted_restarts >= policy.get("maxRestarts", 0):
                self.end("Failed", "ReachedMaxRestarts", f"jobset failed due to {job.ending.message}")
                return
            self.num_counted_restarts += 1
        self.num_restarts += 1
        self.is_restarting = True
        self.machine.note("Restarting", f"JobSet {self.name}: restart {self.num_restarts}: {job.ending.message}")

    def status(self) -> Object:
        return {
            "restarts": self.num_restarts,
            "restartsCountTowardsMax": self.num_counted_restarts,
            "conditions": conditions_of(self.ending),
        }


def _matches(rule: Object, ending: WorkloadEnding) -> bool:
    if (reasons := rule.get("onJobFailureReasons")) and ending.reason not in reasons:
        return False
    patterns = rule.get("onJobFailureMessagePatterns")
    return not patterns or any(re.search(pattern, ending.message) for pattern in patterns)
