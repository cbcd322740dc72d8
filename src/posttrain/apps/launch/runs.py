"""Runs in a cluster, read from its objects: phase, attempts, and pods by rank. The objects are those of the API server,
or the local cluster's, which have the same fields; found by the label `posttrain.dev/run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.apps.launch.pod_template import RUN_LABEL, Object
from posttrain.errors import ExitCode, InputError
from posttrain.files.json_files import JsonObject

WORKLOADS = {  # apiVersion and kind of what a run is
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "volcano": ("batch.volcano.sh/v1alpha1", "Job"),
    "rayjob": ("ray.io/v1", "RayJob"),
    "raycluster": ("ray.io/v1", "RayCluster"),
}


def plural_of(kind: str) -> str:
    """As it stands in paths of the API server."""
    return f"{kind.lower()}s".replace("policys", "policies")


ENDED = ("Succeeded", "Failed")
NOT_STARTING = (  # reasons for waiting that do not end by themselves
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)


class ClusterUnreachable(InputError):
    """The cluster does not answer or is not reachable."""

    exit_code = ExitCode.UNREACHABLE


@dataclass(frozen=True)
class Check:
    """Something that a run needs of a cluster."""

    what: str
    problem: str = ""  # with its remedy; empty: it is there
    unknown: str = ""  # why it could not be checked


class Cluster(Protocol):
    """Where runs are: a cluster of Kubernetes, or this machine."""

    title: str
    poll_s: float  # seconds between requests

    def examine(self, objects: Sequence[Object]) -> list[Check]:
        """Requirements of these objects, and whether the cluster meets them. Creates nothing."""

    def try_image(self, objects: Sequence[Object]) -> Check:
        """Whether posttrain starts in the image of these objects."""

    def create(self, objects: Sequence[Object]) -> None:
        """Create all objects, or none."""

    def workloads(self, name: str | None = None) -> list[Object]: ...

    def pods(self, workload: Object) -> list[Object]: ...

    def events(self, workload: Object) -> list[str]: ...

    def log(self, pod: Object, follow: bool) -> Iterator[str]: ...

    def delete(self, workload: Object) -> None: ...

    def interrupt(self, workload: Object, pod: Object, notice_s: float, evict: bool) -> str:
        """Remove a pod's machine. Returns a description of the effect."""

    def checkpoints(self, workload: Object) -> list[JsonObject]: ...


@dataclass(frozen=True)
class RunPod:
    rank: int
    attempt: int  # from 1
    body: Object

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def phase(self) -> str:
        if self.body["metadata"].get("deletionTimestamp") and self.exit_code is None:
            return "Terminating"
        return str(self.body.get("status", {}).get("phase", "Pending"))

    @property
    def is_alive(self) -> bool:
        return self.phase not in ENDED

    @property
    def exit_code(self) -> int | None:
        code = _container_state(self.body).get("terminated", {}).get("exitCode")
        return None if code is None else int(code)

    @property
    def uid(self) -> str:
        return str(self.body["metadata"].get("uid") or self.name)

    @property
    def end_message(self) -> str:
        return str(_container_state(self.body).get("terminated", {}).get("message") or "")

    @property
    def waits_for(self) -> str:
        """Why it does not run, as reported by the machine or the scheduler."""
        waiting = _container_state(self.body).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return ": ".join(text for text in (waiting["reason"], waiting.get("message", "")) if text)
        for condition in self.body.get("status", {}).get("conditions") or []:
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                return str(condition.get("message") or condition.get("reason") or "")
        return ""


def _container_state(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return dict(statuses[0].get("state") or {}) if statuses else {}


def name_of(workload: Object) -> str:
    return str(workload["metadata"]["labels"][RUN_LABEL])


def pods_by_rank(pods: Sequence[Object]) -> list[RunPod]:
    """Attempts in order, ranks within them. The labels are those of the scheduler that made the pods."""
    ordered = sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
    clusters: list[str] = []
    seen: dict[tuple[str, int], int] = {}
    found = []
    for pod in ordered:
        # Volcano has some of them as annotations, others as labels, or both, by its version.
        labels: Mapping[str, str] = {
            **(pod["metadata"].get("annotations") or {}),
            **(pod["metadata"].get("labels") or {}),
        }
        if (cluster := labels.get("ray.io/cluster")) is not None:
            if cluster not in clusters:
                clusters.append(cluster)
            attempt = clusters.index(cluster) + 1
            rank = 0
            if labels.get("ray.io/node-type") != "head":
                rank = seen[cluster, 0] = seen.get((cluster, 0), 0) + 1
        elif (task := labels.get("volcano.sh/task-spec")) is not None:
            index = labels.get("volcano.sh/task-index") or pod["metadata"]["name"].rpartition("-")[2]
            rank = int(index) + (task != "head")
            attempt = int(labels.get("volcano.sh/job-version", 0)) + 1
        else:
            rank = int(labels.get("batch.kubernetes.io/job-completion-index", 0))
            if (restart := labels.get("jobset.sigs.k8s.io/restart-attempt")) is not None:
                attempt = int(restart) + 1
            else:
                attempt = seen["", rank] = seen.get(("", rank), 0) + 1
        found.append(RunPod(rank, attempt, pod))
    return sorted(found, key=lambda one: (one.attempt, one.rank))


@dataclass(frozen=True)
class RunState:
    phase: str  # Queued, Running, Succeeded, Failed, Lost
    restarts: int
    message: str = ""


def state_of(workload: Object) -> RunState:
    """The status fields differ by scheduler."""
    status: Object = workload.get("status") or {}
    if why := workload.get("posttrainLost"):
        return RunState("Lost", 0, f"the process of the local cluster has ended: {why}")
    if "state" in status and isinstance(status["state"], dict):  # Volcano
        phase, message = status["state"].get("phase", ""), status["state"].get("message", "")
        named = {"Completed": "Succeeded", "Aborted": "Failed", "Terminated": "Failed", "Failed": "Failed"}
        named |= {"Pending": "Queued", "": "Queued"}
        return RunState(named.get(phase, "Running"), int(status.get("retryCount") or 0), str(message))
    if "jobDeploymentStatus" in status:  # RayJob
        phase = status["jobDeploymentStatus"]
        named = {"Complete": "Succeeded", "Failed": "Failed", "": "Queued", "Suspended": "Queued"}
        return RunState(named.get(phase, "Running"), int(status.get("failed") or 0), str(status.get("message", "")))
    restarts = int(status.get("restarts") or 0)
    for condition in status.get("conditions") or []:
        if condition.get("status") != "True":
            continue
        if condition["type"] in ("Complete", "Completed"):
            return RunState("Succeeded", restarts, str(condition.get("message", "")))
        if condition["type"] == "Failed":
            return RunState("Failed", restarts, str(condition.get("message") or condition.get("reason", "")))
    if workload.get("spec", {}).get("suspend"):
        return RunState("Queued", restarts, "suspended until its queue admits it")
    return RunState("Running", restarts)


def find_run(clusters: Sequence[Cluster], name: str) -> tuple[Cluster, Object]:
    """The one workload of this name, in the first cluster that has it."""
    known: list[str] = []
    unreachable: ClusterUnreachable | None = None
    for cluster in clusters:
        try:
            found = cluster.workloads(name)
            known += [name_of(one) for one in cluster.workloads()] if not found else []
        except ClusterUnreachable as error:
            unreachable = unreachable or error
            continue
        if len(found) > 1:
            placed = [(one["kind"], one["metadata"]) for one in found]
            places = ", ".join(
                f"{kind} {metadata['name']}" + (f" in {metadata['namespace']}" if metadata["namespace"] else "")
                for kind, metadata in placed
            )
            raise InputError(
                f"{name}: {len(found)} runs have this name ({places}); give --namespace, or the name of the job"
            )
        if found:
            return cluster, found[0]
    if unreachable is not None:
        raise unreachable
    where = ", ".join(cluster.title for cluster in clusters)
    hint = f"; there are {', '.join(sorted(known))}" if known else ""
    raise InputError(f"no run {name!r} in {where}{hint}. Runs of another cluster: --on PROFILE, or --context")


def choose_pod(pods: Sequence[RunPod], rank: int, attempt: int | None) -> RunPod:
    """The pod of a rank: of the attempt that is given, else of the newest."""
    if not pods:
        raise InputError("the run has no pods: it is queued, or they were removed; `launch status` tells")
    of_rank = [pod for pod in pods if pod.rank == rank]
    if not of_rank:
        ranks = sorted({pod.rank for pod in pods})
        raise InputError(f"--rank {rank}: the run has ranks {ranks[0]} to {ranks[-1]}")
    if attempt is None:
        return of_rank[-1]
    chosen = [pod for pod in of_rank if pod.attempt == attempt]
    if not chosen:
        there = ", ".join(str(pod.attempt) for pod in of_rank)
        raise InputError(
            f"--attempt {attempt}: there are pods of rank {rank} of attempt {there}. A scheduler removes the pods of "
            "earlier attempts, and their output with them, unless the cluster ships logs elsewhere"
        )
    return chosen[-1]
