"""Submitting a run: which cluster its profile names, what it is and costs, and following it to its end."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from posttrain.apps.launch.cost import cost_on_cluster, price_of
from posttrain.apps.launch.launch_request import LaunchRequest
from posttrain.apps.launch.local.local_cluster import LocalCluster, claim_folder
from posttrain.apps.launch.pod_template import Object, control_secret
from posttrain.apps.launch.ray_jobs import ADDRESS_VARIABLE, RayJobs, render_job
from posttrain.apps.launch.runs import ENDED, NOT_STARTING, Cluster, ClusterUnreachable, RunPod, pods_by_rank, state_of
from posttrain.apps.launch.workloads import render_run
from posttrain.config import RunConfig
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.loader import load_standalone
from posttrain.errors import ExitCode, InputError, near_path
from posttrain.reporting.wording import in_order

UNREACHABLE_LIMIT_S = 60.0  # for which a run is followed though its cluster does not answer


def load_profile(name: str) -> ClusterProfile:
    if name == "local":
        return ClusterProfile.model_validate({"cluster": {"kind": "local"}})
    if not Path(name).exists():
        raise InputError(
            f"--on {name}: no such file{near_path(Path(name))}; a cluster profile is expected (docs/launch.md), or the "
            "word local"
        )
    return load_standalone(ClusterProfile, Path(name))


def cluster_of(profile: ClusterProfile) -> Cluster:
    if profile.cluster.kind == "slurm":
        raise InputError(
            "cluster.kind = 'slurm': this action is of Kubernetes; Slurm has squeue --name NAME, scancel JOB, "
            "sacct --name NAME, and the output is in the folder of the job (docs/slurm.md)"
        )
    if profile.scheduler.kind == "raycluster":
        return RayJobs(profile.scheduler.ray_address)
    if profile.cluster.kind == "local":
        return LocalCluster()
    return _kubernetes(profile.cluster.context, profile.cluster.namespace)


def clusters_to_search(profile: str | None, context: str | None, namespace: str | None) -> list[Cluster]:
    """Where to look for runs: what is named, else this machine, and the clusters of the kubeconfig and of Ray's own
    variable if there are any.
    """
    if profile is not None:
        return [cluster_of(load_profile(profile))]
    if context is not None or namespace is not None:
        return [_kubernetes(context, namespace)]
    clusters: list[Cluster] = [LocalCluster()]
    if os.environ.get(ADDRESS_VARIABLE):
        clusters.append(RayJobs(None))
    configured = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    if any(Path(path).is_file() for path in configured.split(os.pathsep)):
        clusters.append(_kubernetes(None, None))
    return clusters


def _kubernetes(context: str | None, namespace: str | None) -> Cluster:
    try:
        from posttrain.apps.launch.kubernetes_cluster import KubernetesCluster
    except ImportError as error:
        raise InputError(
            f"talking to a cluster needs the package kubernetes: pip install 'posttrain[k8s]' ({error}). render, "
            "check, setup, values and --on local work without it"
        ) from error
    return KubernetesCluster(context, namespace)


def objects_of(request: LaunchRequest) -> list[Object]:
    """What `create` of `cluster_of` takes: manifests, or a job for a Ray cluster that exists."""
    if request.profile.scheduler.kind == "raycluster":
        return render_job(request)
    *others, workload = render_run(request)
    return [*others, control_secret(request), workload]


def offer(request: LaunchRequest, config: RunConfig, where: str) -> list[str]:
    """What is about to be submitted, and what it costs."""
    profile = request.profile
    machine = request.instance.name or "machines of the profile"
    unit = "machine" if profile.cluster.kind == "slurm" else "pod"
    count = f"{request.num_nodes} {unit}{'s' if request.num_nodes > 1 else ''}"
    if profile.cluster.kind == "local":
        shared = f"{profile.storage.mount} is {claim_folder(profile.storage.claim)}"
        return [f"{request.name}: {count} on this machine, as a {profile.scheduler.kind}; {shared}"]
    gpus = f" with {request.gpus_per_node} GPUs" if request.gpus_per_node else ""
    capacity = profile.nodes.capacity.replace("_", "-")
    form = f"a {profile.scheduler.kind} in namespace {profile.cluster.namespace}"
    if profile.scheduler.kind in ("raycluster", "slurm"):
        form = "a job"
    lines = [f"{request.name}: {count}{gpus} on {machine} ({capacity}), as {form} of {where}"]
    return lines + _price_lines(request, config)


def _price_lines(request: LaunchRequest, config: RunConfig) -> list[str]:
    try:
        return cost_on_cluster(request.profile, config).lines()
    except InputError as error:
        unknown = str(error).splitlines()[0]
    try:
        prices = price_of(request.instance.name, request.profile.cost.price).range_of(request.profile.nodes.capacity)
    except InputError as error:
        return [f"  price: {error}"]
    if prices is None:
        return [f"  price: none is known for {request.profile.nodes.capacity} machines of this type; give cost.price"]
    hourly = "–".join(dict.fromkeys(f"{price * request.num_nodes:,.2f}" for price in prices))
    return [f"  price: ${hourly} an hour; for how many hours is not known ({unknown})"]


def follow(cluster: Cluster, name: str) -> int:
    """Print what rank 0 prints, attempt after attempt, until the run is over. Returns its exit code.

    After a lost connection each log goes on where it ended.
    """
    printed: dict[str, int] = {}
    complete: set[str] = set()
    reported, give_up_at = "", math.inf
    while True:
        try:
            found = cluster.workloads(name)
            pods = pods_by_rank(cluster.pods(found[0])) if found else []
            give_up_at = math.inf
        except ClusterUnreachable:
            give_up_at = min(give_up_at, time.monotonic() + UNREACHABLE_LIMIT_S)
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(cluster.poll_s)
            continue
        if not found:
            raise InputError(f"{name} was removed by another command")
        state = state_of(found[0])
        if problem := _start_problem(pods):
            cluster.delete(found[0])
            raise InputError(f"{problem}. What was created is removed")
        for pod in pods:
            if pod.rank == 0 and pod.phase != "Pending" and pod.uid not in complete:
                if pod.uid not in printed:
                    print(f"-- attempt {pod.attempt}, rank 0: pod {pod.name}", file=sys.stderr, flush=True)
                with suppress(ClusterUnreachable):  # the next round prints the rest
                    _print_log(cluster, pod, printed)
                    if not pod.is_alive:
                        complete.add(pod.uid)
        if state.phase in (*ENDED, "Lost"):
            why = f": {in_order(state.message)}" if state.message else ""
            print(f"-- {name}: {state.phase}{why}", file=sys.stderr)
            return _exit_code(state.phase, pods)
        waiting = "; ".join(f"rank {pod.rank}: {pod.waits_for}" for pod in pods if pod.waits_for)
        if waiting and waiting != reported:
            reported = waiting
            print(f"-- waiting: {in_order(waiting)}", file=sys.stderr, flush=True)
        time.sleep(cluster.poll_s)


def _print_log(cluster: Cluster, pod: RunPod, printed: dict[str, int]) -> None:
    known, seen = printed.setdefault(pod.uid, 0), 0
    for text in cluster.log(pod.body, follow=True):
        seen += len(text)
        if seen > known:
            print(in_order(text[known - seen :]), end="", flush=True)
            printed[pod.uid] = known = seen


def _start_problem(pods: list[RunPod]) -> str:
    """Why pods can never start; waiting would change nothing."""
    for pod in pods:
        if pod.waits_for.partition(":")[0] in NOT_STARTING:
            return f"pod {pod.name} cannot start ({pod.waits_for}): see image.name, image.pull_secret and secrets"
        if "executable file not found" in pod.end_message:
            return f"pod {pod.name} could not start `posttrain` ({pod.end_message}): the image lacks it; see Dockerfile"
    return ""


def _exit_code(phase: str, pods: list[RunPod]) -> int:
    if phase == "Succeeded":
        return 0
    last = max((pod.attempt for pod in pods), default=0)
    codes = {pod.exit_code for pod in pods if pod.attempt == last}
    return next((code for code in (ExitCode.BAD_INPUT, ExitCode.NO_PROGRESS) if code in codes), 1)
