"""Runs in a cluster: `launch list`, `status`, `logs`, `checkpoints`, `stop`, `interrupt`, and `doctor`. They are found
by label, here and in the cluster of the kubeconfig; no config is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.options import Option
from posttrain.cli.overrides_parser import OverridesParser, number
from posttrain.errors import InputError

if TYPE_CHECKING:
    from posttrain.apps.launch.launch_request import LaunchRequest
    from posttrain.apps.launch.pod_template import Object
    from posttrain.apps.launch.runs import Cluster
    from posttrain.config.cluster_profile import ClusterProfile

_SHOWN_EVENTS = 12
# Its summary, what adds its arguments, and what runs it.
Action = tuple[str, Callable[[OverridesParser], None], Callable[[argparse.Namespace], int]]


# -- which cluster -----------------------------------------------------------------------------------------------------


def cluster_of(profile: ClusterProfile) -> Cluster:
    if profile.scheduler.kind == "raycluster":
        from posttrain.apps.launch.ray_jobs import RayJobs

        return RayJobs(profile.scheduler.ray_address)
    if profile.cluster.kind == "local":
        from posttrain.apps.launch.local.local_cluster import LocalCluster

        return LocalCluster()
    return _kubernetes(profile.cluster.context, profile.cluster.namespace)


def objects_of(request: LaunchRequest) -> list[Object]:
    """What `create` of `cluster_of` takes: manifests, or a job for a Ray cluster that exists."""
    from posttrain.apps.launch.ray_jobs import render_job
    from posttrain.apps.launch.workloads import render_run

    return (render_job if request.profile.scheduler.kind == "raycluster" else render_run)(request)


def _kubernetes(context: str | None, namespace: str | None) -> Cluster:
    try:
        from posttrain.apps.launch.kubernetes_cluster import KubernetesCluster
    except ImportError as error:
        raise InputError(
            f"talking to a cluster needs the package kubernetes: pip install 'posttrain[k8s]' ({error}). render, "
            "check, setup, values and --on local work without it"
        ) from error
    return KubernetesCluster(context, namespace)


def _clusters(args: argparse.Namespace) -> list[Cluster]:
    """Where to look for runs: what the arguments name, else this machine, and the clusters of the kubeconfig and of
    Ray's own variable if there are any.
    """
    from posttrain.apps.launch.local.local_cluster import LocalCluster
    from posttrain.apps.launch.ray_jobs import ADDRESS_VARIABLE, RayJobs
    from posttrain.cli.launch_command import load_profile

    if args.on is not None:
        return [cluster_of(load_profile(args.on))]
    if args.context is not None or args.namespace is not None:
        return [_kubernetes(args.context, args.namespace)]
    clusters: list[Cluster] = [LocalCluster()]
    if os.environ.get(ADDRESS_VARIABLE):
        clusters.append(RayJobs(None))
    configured = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    if any(Path(path).is_file() for path in configured.split(os.pathsep)):
        clusters.append(_kubernetes(None, None))
    return clusters


def _find(args: argparse.Namespace) -> tuple[Cluster, Object]:
    """A run on this machine is found although the cluster of the kubeconfig does not answer."""
    from posttrain.apps.launch.runs import find_run

    return find_run(_clusters(args), args.name)


def _add_place(parser: OverridesParser) -> None:
    parser.option("--on PROFILE", "look there: a cluster profile, or local")
    parser.option("--context", "look in the cluster of this context of the kubeconfig")
    parser.option("--namespace", "look in this namespace")


def _add_name(parser: OverridesParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the run (launch list)")
    _add_place(parser)


# -- actions -----------------------------------------------------------------------------------------------------------


def _add_list(parser: OverridesParser) -> None:
    _add_place(parser)
    parser.switch("--json", "print as JSON")


def _list(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.runs import ClusterUnreachable, name_of, state_of

    rows, unreachable = [], None
    for cluster in _clusters(args):
        try:
            found = cluster.workloads()
        except ClusterUnreachable as error:
            unreachable = error
            continue
        for workload in found:
            state = state_of(workload)
            row = {
                "name": name_of(workload),
                "kind": workload["kind"],
                "phase": state.phase,
                "restarts": state.restarts,
            }
            rows.append({**row, "namespace": workload["metadata"]["namespace"], "cluster": cluster.title})
    if unreachable is not None:
        if not rows:
            raise unreachable
        print(f"warning: {unreachable}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print("no runs; `posttrain launch --on PROFILE KIND --config FILE` starts one")
    for row in [
        {"name": "NAME", "kind": "KIND", "phase": "PHASE", "restarts": "RESTARTS", "cluster": "CLUSTER"},
        *rows,
    ]:
        if rows:
            print(f"{row['name']:<32}{row['kind']:<12}{row['phase']:<11}{row['restarts']:<10}{row['cluster']}")
    return 0


def _add_status(parser: OverridesParser) -> None:
    _add_name(parser)
    parser.switch("--json", "print as JSON")


def _status(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.runs import pods_by_rank, state_of

    cluster, workload = _find(args)
    state, pods = state_of(workload), pods_by_rank(cluster.pods(workload))
    events = cluster.events(workload)
    if args.json:
        rows = [
            {"rank": pod.rank, "attempt": pod.attempt, "pod": pod.name, "phase": pod.phase, "exit_code": pod.exit_code}
            for pod in pods
        ]
        result = {"name": args.name, "phase": state.phase, "restarts": state.restarts, "message": state.message}
        print(json.dumps({**result, "pods": rows, "events": events}, indent=2))
        return 0
    about = f": {state.message}" if state.message else ""
    attempts = max((pod.attempt for pod in pods), default=0)
    print(f"{args.name}: {workload['kind']} in {cluster.title}, {state.phase}, attempt {attempts}{about}")
    for pod in pods:
        code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
        waits = f", waits: {pod.waits_for}" if pod.waits_for else ""
        print(f"  attempt {pod.attempt}, rank {pod.rank}: {pod.phase}{code}{waits} ({pod.name})")
    for event in events[-_SHOWN_EVENTS:]:
        print(f"  {event}")
    return 0


def _add_logs(parser: OverridesParser) -> None:
    _add_name(parser)
    parser.option("--rank", "whose output (default 0, where the driver is)", default=0)
    parser.option("--attempt", "of which attempt, from 1; else of the newest", type=int)
    parser.switch("--follow", "go on while the pod lives")


def _logs(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.runs import choose_pod, pods_by_rank

    cluster, workload = _find(args)
    pod = choose_pod(pods_by_rank(cluster.pods(workload)), args.rank, args.attempt)
    for text in cluster.log(pod.body, args.follow):
        print(text, end="", flush=True)
    return 0


def _add_checkpoints(parser: OverridesParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the run (launch list)")
    _add_place(parser)
    parser.option("--folder", "of checkpoints that are on this machine, instead of a run's name", type=Path)
    parser.option("--logs FOLDER", "of its metrics, if they are elsewhere", type=Path)
    parser.switch("--json", "print as JSON")


def _checkpoints(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.run_checkpoints import checkpoint_rows

    if (args.name is None) == (args.folder is None):
        raise InputError("give the name of a run, or --folder")
    if args.folder is not None:
        rows = checkpoint_rows(args.folder, args.logs or args.folder)
    else:
        cluster, workload = _find(args)
        rows = cluster.checkpoints(workload)
    if args.json:
        print(json.dumps(rows))
        return 0
    if not rows:
        print("no complete checkpoint yet")
    for row in rows:
        metrics = "  ".join(f"{key} {value:.4g}" for key, value in row["metrics"].items())
        print(f"step {row['step']:<8}{row['saved']}  {row['bytes'] / 2**20:>10,.1f} MiB  {metrics}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    cluster, workload = _find(args)
    cluster.delete(workload)
    print(f"{args.name} is stopped and removed from {cluster.title}; its checkpoints are kept")
    return 0


def _add_interrupt(parser: OverridesParser) -> None:
    _add_name(parser)
    parser.option("--rank", "whose machine", default=0)
    parser.option(
        "--notice S",
        "seconds from the notice to the end",
        type=number(float, Option(at_least=0, at_most=86400)),
        default=120.0,
    )
    parser.switch("--evict", "send SIGTERM, as a drain does, with the pod's own grace period")


def _interrupt(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.runs import choose_pod, pods_by_rank

    cluster, workload = _find(args)
    pod = choose_pod(pods_by_rank(cluster.pods(workload)), args.rank, None)
    if not pod.is_alive:
        raise InputError(f"rank {args.rank} does not run (pod {pod.name} has ended with {pod.exit_code})")
    print(f"pod {pod.name}: {cluster.interrupt(workload, pod.body, args.notice, args.evict)}")
    return 0


def _add_doctor(parser: OverridesParser) -> None:
    parser.option("--on PROFILE", "cluster profile, or local", required=True)
    parser.switch("--image", "also start the image in a small pod, to see that posttrain is in it")


def _doctor(args: argparse.Namespace) -> int:
    """Asks for what a run on one machine of the profile would need."""
    from posttrain.apps.launch.instances import find_instance
    from posttrain.apps.launch.launch_request import request_run
    from posttrain.cli.launch_command import load_profile
    from posttrain.config import load_config

    profile = load_profile(args.on)
    gpus = find_instance(profile.nodes, profile.cluster.kind).gpus
    settings = [f"checkpointing.checkpoint_dir={profile.storage.mount}/doctor", f"cluster.gpus_per_node={gpus or 1}"]
    objects = objects_of(request_run(load_config("grpo", None, settings), profile, "doctor"))
    cluster = cluster_of(profile)
    checks = cluster.examine(objects)
    if args.image and not any(check.problem for check in checks):
        checks.append(cluster.try_image(objects))
    print(f"{args.on}: {cluster.title}")
    for check in checks:
        mark = "missing" if check.problem else "unknown" if check.unknown else "ok"
        print(f"  {mark:<9}{check.problem or check.what}{f' ({check.unknown})' if check.unknown else ''}")
    missing = sum(bool(check.problem) for check in checks)
    print(f"{missing} of {len(checks)} are missing" if missing else "nothing is missing")
    return InputError.exit_code if missing else 0


ACTIONS: dict[str, Action] = {
    "doctor": ("ask a cluster what a run of this profile would miss; creates nothing", _add_doctor, _doctor),
    "list": ("list runs, on this machine and in the cluster of the kubeconfig", _add_list, _list),
    "status": ("show the pods of a run, its attempts and events", _add_status, _status),
    "logs": ("print the output of a rank", _add_logs, _logs),
    "checkpoints": ("list the checkpoints of a run, with metrics", _add_checkpoints, _checkpoints),
    "stop": ("end a run and remove what was created for it; checkpoints are kept", _add_name, _stop),
    "interrupt": ("take the machine of a rank away, with or without notice: a fire drill", _add_interrupt, _interrupt),
}
