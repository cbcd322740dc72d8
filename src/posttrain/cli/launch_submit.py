"""Submitting a run: what it is and costs, the question before it, and following it to its end."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from posttrain.errors import ExitCode, InputError

if TYPE_CHECKING:
    from posttrain.apps.launch.launch_request import LaunchRequest
    from posttrain.apps.launch.runs import Cluster, RunPod
    from posttrain.config import RunConfig

UNREACHABLE_LIMIT_S = 60.0  # for which a run is followed though its cluster does not answer


def offer(request: LaunchRequest, config: RunConfig, where: str) -> list[str]:
    """What is about to be submitted, and what it costs."""
    profile = request.profile
    machine = request.instance.name or "machines of the profile"
    count = f"{request.num_nodes} pod{'s' if request.num_nodes > 1 else ''}"
    if profile.cluster.kind == "local":
        from posttrain.apps.launch.local.local_cluster import claim_folder

        place = claim_folder(profile.storage.claim)
        return [
            f"{request.name}: {count} on this machine, as a {profile.scheduler.kind}; {profile.storage.mount} is "
            f"{place}"
        ]
    gpus = f" with {request.gpus_per_node} GPUs" if request.gpus_per_node else ""
    capacity = profile.nodes.capacity.replace("_", "-")
    form = f"a {profile.scheduler.kind} in namespace {profile.cluster.namespace}"
    if profile.scheduler.kind == "raycluster":
        form = "a job"
    lines = [f"{request.name}: {count}{gpus} on {machine} ({capacity}), as {form} of {where}"]
    return lines + _price_lines(request, config)


def _price_lines(request: LaunchRequest, config: RunConfig) -> list[str]:
    from posttrain.apps.launch.cost import cost_on_cluster, price_of

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


def is_confirmed() -> bool:
    if not sys.stdin.isatty():
        raise InputError("there is no terminal to ask at: give --yes to submit. Nothing was created")
    return input("go? [y/N] ").strip().lower() in ("y", "yes")


def follow(cluster: Cluster, name: str) -> int:
    """Print what rank 0 prints, attempt after attempt, until the run is over. Returns its exit code.

    After a lost connection each log goes on where it ended.
    """
    from posttrain.apps.launch.runs import ENDED, ClusterUnreachable, pods_by_rank, state_of

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
            print(f"-- {name}: {state.phase}{f': {state.message}' if state.message else ''}", file=sys.stderr)
            return _exit_code(state.phase, pods)
        waiting = "; ".join(f"rank {pod.rank}: {pod.waits_for}" for pod in pods if pod.waits_for)
        if waiting and waiting != reported:
            reported = waiting
            print(f"-- waiting: {waiting}", file=sys.stderr, flush=True)
        time.sleep(cluster.poll_s)


def _print_log(cluster: Cluster, pod: RunPod, printed: dict[str, int]) -> None:
    known, seen = printed.setdefault(pod.uid, 0), 0
    for text in cluster.log(pod.body, follow=True):
        seen += len(text)
        if seen > known:
            print(text[known - seen :], end="", flush=True)
            printed[pod.uid] = known = seen


def _start_problem(pods: list[RunPod]) -> str:
    """Why pods can never start; waiting would change nothing."""
    from posttrain.apps.launch.runs import NOT_STARTING

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
