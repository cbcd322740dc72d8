"""`posttrain launch`: a run on Kubernetes or on this machine as one; `render`, `check`, `setup` and `values` write
files. `posttrain node`: the first process of the pods that it makes.

What concerns runs that exist is in launch_runs.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import launch_runs, launch_submit
from posttrain.cli.overrides_parser import OverridesParser
from posttrain.config import KINDS, ConfigError, LoadedConfig, guess_kind, load_config
from posttrain.errors import InputError

if TYPE_CHECKING:
    from posttrain.apps.launch.launch_request import LaunchRequest
    from posttrain.apps.launch.lint.check import LintReport
    from posttrain.config.cluster_profile import ClusterProfile

CRDS = "CustomResourceDefinitions, for checking"
PROFILE = "cluster profile; local is this machine, without a file"
EPILOG = """\
actions (each has --help):
  render --on PROFILE KIND …   write the run's manifests      check FILE…   what a cluster would refuse, or cannot work
  setup --on PROFILE           machines, queues, storage      values --on … values for the chart charts/posttrain-ray
  doctor --on PROFILE          what the cluster lacks         list          runs, here and in the cluster
  status NAME                  pods, attempts, events         logs NAME     output of a rank
  checkpoints NAME             steps with metrics             stop NAME     end a run; checkpoints stay
  interrupt NAME --rank 1      take a machine away: a fire drill

examples:
  posttrain launch --on local grpo --config my.yaml cluster.num_nodes=2      the run's manifests, on this machine
  posttrain launch --on eks.yaml grpo --config my.yaml                       checked, priced, asked for, followed
  posttrain launch logs grpo-math --attempt 2 --rank 1                       found by label: no config is needed
  posttrain launch interrupt grpo-math --rank 1 --notice 120                 what the loss of a Spot machine does
  posttrain launch render --on eks.yaml grpo --config my.yaml --to manifests/     for kubectl, or another tool
  posttrain plan --on eks.yaml grpo --config my.yaml                         hours and dollars

PROFILE is a cluster profile (docs/launch.md), or the word local. A run goes on when this command ends. Exit codes: 0
done · 64 bad input, with its remedy; nothing was created · 65 the run ended without progress · 69 the cluster cannot
be reached · 1 the run failed.
"""


def add_arguments(parser: OverridesParser) -> None:
    parser.epilog = EPILOG
    parser.usage = (
        "posttrain launch --on PROFILE [KIND] [--config FILE] [--yes] [--detach] [key=value …]\n"
        "       posttrain launch ACTION …"
    )
    parser.actions |= {name: (summary, partial(_add_action, name)) for name, (summary, _, _) in _actions().items()}
    _add_run(parser)
    parser.option("--crds FOLDER", CRDS, type=Path)
    parser.switch("--yes", "submit without asking")
    parser.switch("--detach", "submit, and do not follow the run")
    parser.set_defaults(run=_launch, interrupted="no longer followed; the run goes on (posttrain launch list)")


def _actions() -> dict[str, launch_runs.Action]:
    return {**_ACTIONS, **launch_runs.ACTIONS}


def _add_action(name: str, parser: OverridesParser) -> None:
    _, add_options, run = _actions()[name]
    add_options(parser)
    parser.set_defaults(run=run)


def _add_render(parser: OverridesParser) -> None:
    _add_run(parser)
    _add_folder(parser)


def _add_check(parser: OverridesParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="YAML or JSON file, folder, or Helm chart")
    parser.option("--crds FOLDER", "CustomResourceDefinitions of the cluster's operators", type=Path)
    parser.option("--values FILE", "values for the Helm charts", type=Path, action="append", default=[])
    parser.switch("--json", "print the findings as JSON")
    parser.switch("--rules", "list the rules")


def _add_setup(parser: OverridesParser) -> None:
    parser.option("--on PROFILE", PROFILE, required=True)
    _add_folder(parser)


def _add_folder(parser: OverridesParser) -> None:
    parser.option("--to FOLDER", "new folder for the files; else they are printed", type=Path)
    parser.option("--crds FOLDER", CRDS, type=Path)


def _add_run(parser: OverridesParser) -> None:
    parser.option("--on PROFILE", PROFILE, required=True)
    parser.config_file("config of the run")
    parser.option("--name NAME", "name of the run in the cluster; else from its checkpoint folder")
    parser.words("KIND key=value", f"{', '.join(KINDS)}, then settings over the file's")


def load_profile(name: str) -> ClusterProfile:
    from posttrain.config.cluster_profile import ClusterProfile
    from posttrain.config.loader import load_standalone

    if name == "local":
        return ClusterProfile.model_validate({"cluster": {"kind": "local"}})
    if not Path(name).exists():
        raise InputError(
            f"--on {name}: no such file; a cluster profile is expected (docs/launch.md), or the word local"
        )
    return load_standalone(ClusterProfile, Path(name))


def _request(args: argparse.Namespace, *, submits: bool = False) -> tuple[LaunchRequest, LoadedConfig[Any]]:
    from posttrain.apps.launch.launch_request import CONFIG_FOLDER, request_run

    words = list(args.words)
    kind = words.pop(0) if words and words[0] in KINDS else None
    if words and "=" not in words[0]:
        actions = ", ".join(_actions())
        raise InputError(f"{words[0]!r} is no kind of run ({', '.join(KINDS)}), and no action of launch ({actions})")
    if kind is None and args.config is None:
        raise ConfigError(f"give the kind of run ({', '.join(KINDS)}), or --config FILE")
    profile = load_profile(args.on)
    loaded = load_config(kind or guess_kind(args.config), args.config, words)
    is_ray_job = submits and profile.scheduler.kind == "raycluster"
    request = request_run(loaded, profile, args.name, "" if is_ray_job else CONFIG_FOLDER)
    for warning in [*loaded.warnings, *request.warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    return request, loaded


def _launch(args: argparse.Namespace) -> int:
    request, loaded = _request(args, submits=True)
    objects = launch_runs.objects_of(request)
    if request.profile.scheduler.kind != "raycluster":  # a job is no manifest
        _check_own(args, objects, f"run {request.name}", "nothing was created")
    cluster = launch_runs.cluster_of(request.profile)
    if problems := [check.problem for check in cluster.examine(objects) if check.problem]:
        raise InputError("\n".join([*problems, "nothing was created"]))
    for line in launch_submit.offer(request, loaded.config, cluster.title):
        print(line)
    if not args.yes and not launch_submit.is_confirmed():
        print("nothing was created")
        return 0
    cluster.create(objects)
    print(f"{objects[-1]['kind']} {request.name} is created; it goes on without this command")
    return 0 if args.detach else launch_submit.follow(cluster, request.name)


def _render(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.workloads import render_run

    request, _ = _request(args)
    _write(args, render_run(request), f"run {request.name}")
    return 0


def _setup(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.admin_objects import gke_node_pool, render_setup

    profile = load_profile(args.on)
    _write(args, render_setup(profile), "setup", {"node-pool.txt": gke_node_pool(profile)})
    return 0


def _write(
    args: argparse.Namespace, objects: list[dict[str, Any]], what: str, texts: dict[str, str | None] | None = None
) -> None:
    """Checks the objects as any others, then writes or prints them."""
    from posttrain.apps.launch.manifest_files import to_yaml, write_manifests

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


def _check_own(args: argparse.Namespace, objects: list[dict[str, Any]], what: str, consequence: str) -> None:
    from posttrain.apps.launch.lint.check import CustomSchemas, check_manifests
    from posttrain.apps.launch.manifest_files import read_text, to_yaml

    report = check_manifests(
        read_text(to_yaml(objects), what), CustomSchemas(args.crds) if args.crds is not None else None
    )
    for finding in report.findings:
        print(finding, file=sys.stderr)
    if report.errors:
        raise InputError(f"{what}: {_counts(report)}; {consequence}")


def _check(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.lint.check import RULES, check_paths

    if args.rules:
        for rule, sentence in RULES.items():
            print(f"{rule:<24}{sentence}")
        return 0
    paths = [*args.files, *(Path(word) for word in args.words)]
    if not paths:
        raise InputError("give files, folders or Helm charts to check")
    report = check_paths(paths, args.crds, args.values)
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
    from posttrain.apps.launch.manifest_files import to_yaml
    from posttrain.apps.launch.workloads import chart_values

    print(to_yaml([chart_values(_request(args)[0])]), end="")
    return 0


_ACTIONS: dict[str, launch_runs.Action] = {
    "render": ("write the manifests of a run", _add_render, _render),
    "check": ("check manifests, folders of them and Helm charts", _add_check, _check),
    "setup": ("write what an administrator creates once: machines, queues, storage", _add_setup, _setup),
    "values": ("print values for the chart charts/posttrain-ray", _add_run, _values),
}


# -- node: the first process of the pods -------------------------------------------------------------------------------

NODE_EPILOG = """\
It has no settings: rank, sizes and ports are in environment variables (docs/decisions/0040). It checks the machine,
joins the other pods of the run, starts Ray and on rank 0 the driver, watches for the end of the machine, and lets the
run save.

  posttrain node            in every pod
  posttrain node driver     entrypoint of a RayJob or Ray job, in the head's pod

exit codes: that of the run, the same in all pods: 0 done · 64 bad config, or a machine without what it needs · 65 three
attempts without a new checkpoint · 85 interrupted: start all pods again
"""


def add_node(parser: OverridesParser) -> None:
    parser.epilog = NODE_EPILOG
    parser.add_argument("part", nargs="?", choices=["driver"], help="only the driver, beside the head of a Ray cluster")
    parser.set_defaults(run=_node)


def _node(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.node.contract import read_settings
    from posttrain.apps.launch.node.driver import DriverMember
    from posttrain.apps.launch.node.head import HeadMember
    from posttrain.apps.launch.node.member import Member

    settings = read_settings(os.environ)
    if args.part == "driver":
        return DriverMember(settings, os.environ).run()
    return (HeadMember if settings.rank == 0 else Member)(settings, os.environ).run()
