"""Runs in a cluster: `launch list`, `status`, `logs`, `checkpoints`, `stop`, `interrupt`, and `doctor`. They are found
by label, here and in the cluster of the kubeconfig; no config is needed.
"""

from __future__ import annotations

import argparse
import json
import sys

from posttrain.apps.launch.instances import find_instance
from posttrain.apps.launch.launch_request import request_run
from posttrain.apps.launch.pod_template import Object
from posttrain.apps.launch.run_checkpoints import checkpoint_rows
from posttrain.apps.launch.runs import (
    Cluster,
    ClusterUnreachable,
    choose_pod,
    find_run,
    name_of,
    pods_by_rank,
    state_of,
)
from posttrain.apps.launch.submit import cluster_of, clusters_to_search, load_profile, objects_of
from posttrain.config import load_config
from posttrain.errors import InputError

_SHOWN_EVENTS = 12


def _find(args: argparse.Namespace) -> tuple[Cluster, Object]:
    """A run on this machine is found although the cluster of the kubeconfig does not answer."""
    return find_run(clusters_to_search(args.on, args.context, args.namespace), args.name)


def _list_runs(args: argparse.Namespace) -> int:
    rows, unreachable = [], None
    for cluster in clusters_to_search(args.on, args.context, args.namespace):
        try:
            found = cluster.workloads()
        except ClusterUnreachable as error:
            unreachable = error
            continue
        for workload in found:
            state, place = state_of(workload), workload["metadata"]["namespace"]
            row = {"name": name_of(workload), "kind": workload["kind"], "phase": state.phase}
            rows.append({**row, "restarts": state.restarts, "namespace": place, "cluster": cluster.title})
    if unreachable is not None:
        if not rows:
            raise unreachable
        print(f"warning: {unreachable}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print("no runs; `posttrain launch --on PROFILE KIND --config FILE` starts one")
        return 0
    for row in [{key: key.upper() for key in rows[0]}, *rows]:
        print(f"{row['name']:<32}{row['kind']:<12}{row['phase']:<11}{row['restarts']:<10}{row['cluster']}")
    return 0


def _status(args: argparse.Namespace) -> int:
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


def _logs(args: argparse.Namespace) -> int:
    cluster, workload = _find(args)
    pod = choose_pod(pods_by_rank(cluster.pods(workload)), args.rank, args.attempt)
    for text in cluster.log(pod.body, args.follow):
        print(text, end="", flush=True)
    return 0


def _checkpoints(args: argparse.Namespace) -> int:
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


def _interrupt(args: argparse.Namespace) -> int:
    cluster, workload = _find(args)
    pod = choose_pod(pods_by_rank(cluster.pods(workload)), args.rank, None)
    if not pod.is_alive:
        raise InputError(f"rank {args.rank} does not run (pod {pod.name} has ended with {pod.exit_code})")
    print(f"pod {pod.name}: {cluster.interrupt(workload, pod.body, args.notice, args.evict)}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    """Asks for what a run on one machine of the profile would need."""
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


ACTIONS = {
    "list": _list_runs,
    "status": _status,
    "logs": _logs,
    "checkpoints": _checkpoints,
    "stop": _stop,
    "interrupt": _interrupt,
    "doctor": _doctor,
}
