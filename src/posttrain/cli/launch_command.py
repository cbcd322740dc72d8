"""`posttrain launch`: a run on Kubernetes, on Slurm, or on this machine as a cluster; `render`, `check`, `setup` and
`values` write files. The other actions are about runs that exist: they are found by label, here and in the cluster of
the kubeconfig.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.apps.launch.admin_objects import gke_node_pool, render_setup
from posttrain.apps.launch.instances import find_instance
from posttrain.apps.launch.launch_request import CONFIG_FOLDER, LaunchRequest, request_run
from posttrain.apps.launch.lint.check import RULES, CustomSchemas, LintReport, check_manifests, check_paths
from posttrain.apps.launch.manifest_files import read_text, to_yaml, write_manifests
from posttrain.apps.launch.pod_template import Object, control_secret_command
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
from posttrain.apps.launch.slurm import SCRIPT, job_files, job_folder, job_script, submit_job, write_job
from posttrain.apps.launch.submit import cluster_of, clusters_to_search, follow, load_profile, objects_of, offer
from posttrain.apps.launch.workloads import chart_values, render_run
from posttrain.apps.options import Option
from posttrain.cli.overrides_parser import OverridesParser, number
from posttrain.config import TRAINING_NAMES, LoadedConfig, load_config
from posttrain.config.loader import load_words
from posttrain.errors import InputError
from posttrain.reporting.wording import in_order

_SHOWN_EVENTS = 12
CRDS = "CustomResourceDefinitions, for checking"
PROFILE = "cluster profile; local is this machine, without a file"


def add_arguments(parser: OverridesParser) -> None:
    parser.usage = (
        "posttrain launch --on PROFILE [KIND] [--config FILE] [--yes] [--detach] [key=value …]\n"
        "       posttrain launch ACTION …"
    )
    parser.actions |= {name: (summary, partial(_add_action, name)) for name, (summary, _) in ACTIONS.items()}
    _add_run(parser)
    parser.option("--crds FOLDER", CRDS, type=Path)
    parser.switch("--yes", "submit without asking")
    parser.switch("--detach", "submit, and do not follow the run")
    parser.set_defaults(run=_launch, interrupted="no longer followed; the run continues (posttrain launch list)")


def _add_action(name: str, parser: OverridesParser) -> None:
    parser.set_defaults(run=ACTIONS[name][1])
    if name in ("render", "values"):
        _add_run(parser)
    if name in ("setup", "doctor"):
        parser.option("--on PROFILE", PROFILE, required=True)
    if name in ("render", "setup"):
        parser.option("--to FOLDER", "new folder for the files; else they are printed", type=Path)
        parser.option("--crds FOLDER", CRDS, type=Path)
    if name == "check":
        files = "YAML or JSON file, folder, or Helm chart"
        parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=files)
        parser.option("--crds FOLDER", "CustomResourceDefinitions of the cluster's operators", type=Path)
        parser.option("--values FILE", "values for the Helm charts", type=Path, action="append", default=[])
        parser.switch("--rules", "list the rules")
    if name in ("status", "logs", "checkpoints", "stop", "interrupt"):
        number_of_names = "?" if name == "checkpoints" else None
        parser.add_argument("name", nargs=number_of_names, metavar="NAME", help="name of the run (launch list)")
    if name in ("list", "status", "logs", "checkpoints", "stop", "interrupt"):
        parser.option("--on PROFILE", "look there: a cluster profile, or local")
        parser.option("--context", "look in the cluster of this context of the kubeconfig")
        parser.option("--namespace", "look in this namespace")
    if name in ("check", "list", "status", "checkpoints"):
        parser.switch("--json", "print as JSON")
    if name in ("logs", "interrupt"):
        parser.option("--rank", "rank; 0 runs the driver", default=0)
    if name == "logs":
        parser.option("--attempt", "of which attempt, from 1; else of the newest", type=int)
        parser.switch("--follow", "stream until the pod exits")
    if name == "checkpoints":
        parser.option("--folder", "of checkpoints that are on this machine, instead of a run's name", type=Path)
        parser.option("--logs FOLDER", "of its metrics, if they are elsewhere", type=Path)
    if name == "interrupt":
        at_most_a_day = number(float, Option(at_least=0, at_most=86400))
        parser.option("--notice S", "seconds between notice and SIGKILL", type=at_most_a_day, default=120.0)
        parser.switch("--evict", "send SIGTERM, as a drain does, with the pod's own grace period")
    if name == "doctor":
        parser.switch("--image", "also start the image in a small pod, to see that posttrain is in it")


def _add_run(parser: OverridesParser) -> None:
    parser.option("--on PROFILE", PROFILE, required=True)
    parser.config_file("config of the run")
    parser.option("--name NAME", "name of the run in the cluster; else from its checkpoint folder")
    parser.words("KIND key=value", f"{', '.join(TRAINING_NAMES)}, then settings over the file's")


def _request(args: argparse.Namespace, *, submits: bool = False) -> tuple[LaunchRequest, LoadedConfig[Any]]:
    if args.words and "=" not in args.words[0] and args.words[0] not in TRAINING_NAMES:
        expected = f"no kind of run ({', '.join(TRAINING_NAMES)}), and no action of launch ({', '.join(ACTIONS)})"
        raise InputError(f"{args.words[0]!r} is {expected}")
    profile = load_profile(args.on)
    loaded = load_words(args.words, args.config, TRAINING_NAMES)
    is_job = profile.scheduler.kind == "slurm" or (submits and profile.scheduler.kind == "raycluster")
    request = request_run(loaded, profile, args.name, "" if is_job else CONFIG_FOLDER)
    for warning in [*loaded.warnings, *request.warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    return request, loaded


def _launch(args: argparse.Namespace) -> int:
    request, loaded = _request(args, submits=True)
    if request.profile.cluster.kind == "slurm":
        return _launch_on_slurm(args, request, loaded)
    objects = objects_of(request)
    if request.profile.scheduler.kind != "raycluster":  # a job is no manifest
        _check_own(args, objects, f"run {request.name}", "nothing was created")
    cluster = cluster_of(request.profile)
    if problems := [check.problem for check in cluster.examine(objects) if check.problem]:
        raise InputError("\n".join([*problems, "nothing was created"]))
    for line in offer(request, loaded.config, cluster.title):
        print(line)
    if not _is_confirmed(args):
        return 0
    cluster.create(objects)
    print(f"{objects[-1]['kind']} {request.name} is created; it continues after this command exits")
    return 0 if args.detach else follow(cluster, request.name)


def _is_confirmed(args: argparse.Namespace) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise InputError("there is no terminal to ask at: give --yes to submit. Nothing was created")
    if input("go? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print("nothing was created")
    return False


def _launch_on_slurm(args: argparse.Namespace, request: LaunchRequest, loaded: LoadedConfig[Any]) -> int:
    for line in offer(request, loaded.config, "Slurm"):
        print(line)
    if not _is_confirmed(args):
        return 0
    job = submit_job(request)
    print(f"job {job} of Slurm is submitted: squeue --job={job}, scancel {job}")
    print(f"script, config and output are in {job_folder(request)}: tail -F {job_folder(request)}/output-{job}.txt")
    return 0


def _render(args: argparse.Namespace) -> int:
    request, _ = _request(args)
    if request.profile.cluster.kind == "slurm":
        if args.to is None:
            print(job_script(request), end="")
            return 0
        for path in write_job(args.to, job_files(request)):
            print(path)
        print(f"copy the folder to {job_folder(request)}, then: sbatch {job_folder(request)}/{SCRIPT}", file=sys.stderr)
        return 0
    _write(args, render_run(request), f"run {request.name}", {"control-secret.txt": control_secret_command(request)})
    if args.to is not None and request.profile.cluster.kind != "local":
        secret, folder = shlex.quote(str(args.to / "control-secret.txt")), shlex.quote(str(args.to))
        print(f"next: sh {secret} && kubectl apply --filename {folder}", file=sys.stderr)
    return 0


def _setup(args: argparse.Namespace) -> int:
    profile = load_profile(args.on)
    if profile.cluster.kind == "slurm":
        raise InputError("cluster.kind = 'slurm' needs no setup: partitions and file systems exist")
    _write(args, render_setup(profile), "setup", {"node-pool.txt": gke_node_pool(profile)})
    return 0


def _write(
    args: argparse.Namespace, objects: list[Object], what: str, texts: Mapping[str, str | None] | None = None
) -> None:
    """Checks the objects as any others, then writes or prints them."""
    _check_own(args, objects, what, "nothing was written")
    others = {name: text for name, text in (texts or {}).items() if text is not None}
    if args.to is None:
        print(to_yaml(objects), end="")
        for text in others.values():
            print(text, file=sys.stderr)
        return
    for path in write_manifests(args.to, objects):
        print(path)
    for name, text in others.items():
        (args.to / name).write_text(text, encoding="utf-8")
        print(args.to / name)


def _check_own(args: argparse.Namespace, objects: list[Object], what: str, consequence: str) -> None:
    report = check_manifests(
        read_text(to_yaml(objects), what), CustomSchemas(args.crds) if args.crds is not None else None
    )
    for finding in report.findings:
        print(finding, file=sys.stderr)
    if report.errors:
        raise InputError(f"{what}: {_counts(report)}; {consequence}")


def _check(args: argparse.Namespace) -> int:
    if args.rules:
        for rule, sentence in RULES.items():
            print(f"{rule:<24}{sentence}")
        return 0
    if not args.files:
        raise InputError("give files, folders or Helm charts to check")
    report = check_paths(args.files, args.crds, args.values)
    if args.json:
        print(json.dumps({"findings": [asdict(f) for f in report.findings], "skipped": report.skipped}, indent=2))
    else:
        for finding in report.findings:
            print(finding)
        for skipped in report.skipped:
            print(f"not checked: {skipped}", file=sys.stderr)
        number = len(report.manifests)
        print(f"{number} object{'' if number == 1 else 's'}: {_counts(report)}")
    return InputError.exit_code if report.errors else 0


def _counts(report: LintReport) -> str:
    errors = len(report.errors)
    warnings = len(report.findings) - errors
    return f"{errors} error{'s' if errors != 1 else ''}, {warnings} warning{'s' if warnings != 1 else ''}"


def _values(args: argparse.Namespace) -> int:
    print(to_yaml([chart_values(_request(args)[0])]), end="")
    return 0


# -- runs that exist ---------------------------------------------------------------------------------------------------


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
    about = f": {in_order(state.message)}" if state.message else ""
    attempts = max((pod.attempt for pod in pods), default=0)
    print(f"{args.name}: {workload['kind']} in {cluster.title}, {state.phase}, attempt {attempts}{about}")
    for pod in pods:
        code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
        waits = f", waits: {in_order(pod.waits_for)}" if pod.waits_for else ""
        print(f"  attempt {pod.attempt}, rank {pod.rank}: {pod.phase}{code}{waits} ({pod.name})")
    for event in events[-_SHOWN_EVENTS:]:
        print(f"  {in_order(event)}")
    return 0


def _logs(args: argparse.Namespace) -> int:
    cluster, workload = _find(args)
    pod = choose_pod(pods_by_rank(cluster.pods(workload)), args.rank, args.attempt)
    for text in cluster.log(pod.body, args.follow):
        print(in_order(text), end="", flush=True)
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
    cluster = cluster_of(profile)
    gpus = find_instance(profile.nodes, profile.cluster.kind).gpus
    settings = [f"checkpointing.checkpoint_dir={profile.storage.mount}/doctor", f"cluster.gpus_per_node={gpus or 1}"]
    objects = objects_of(request_run(load_config("grpo", None, settings), profile, "doctor"))
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


ACTIONS: dict[str, tuple[str, Callable[[argparse.Namespace], int]]] = {
    "render": ("write the manifests of a run", _render),
    "check": ("check manifests, folders of them and Helm charts", _check),
    "setup": ("write what an administrator creates once: machines, queues, storage", _setup),
    "values": ("print values for the chart charts/posttrain-ray", _values),
    "doctor": ("check what a cluster lacks for a run with this profile; creates nothing", _doctor),
    "list": ("list runs, on this machine and in the cluster of the kubeconfig", _list_runs),
    "status": ("show the pods of a run, its attempts and events", _status),
    "logs": ("print the output of a rank", _logs),
    "checkpoints": ("list the checkpoints of a run, with metrics", _checkpoints),
    "stop": ("end a run and remove what was created for it; checkpoints are kept", _stop),
    "interrupt": ("simulate the loss of a rank's node, with or without notice", _interrupt),
}
