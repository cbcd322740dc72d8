"""`posttrain launch render`, `check`, `setup` and `values`: a run as Kubernetes manifests."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.overrides_parser import OverridesParser, Subparsers, add_command
from posttrain.config import KINDS, ConfigError, guess_kind, load_config
from posttrain.errors import InputError

if TYPE_CHECKING:
    from posttrain.config.cluster_profile import ClusterProfile
    from posttrain.launch.launch_request import LaunchRequest
    from posttrain.launch.lint.check import LintReport

SUMMARY = "a run on Kubernetes: render its manifests, check others, prepare a cluster"
EPILOG = """\
examples:
  posttrain launch render --on eks.yaml grpo --config my.yaml --to manifests/     the run's objects, checked, as files
  posttrain launch check manifests/ chart/ other.yaml --crds crds/               what a cluster would refuse, or cannot work
  posttrain launch setup --on eks.yaml --to admin/                                machines, queues and storage, created once
  posttrain launch values --on eks.yaml grpo --config my.yaml > values.yaml       values for the chart charts/posttrain-ray
  posttrain plan --on eks.yaml grpo --config my.yaml                              hours and dollars

eks.yaml is a cluster profile (docs/launch.md). No command here talks to a cluster. Exit codes: 0 no errors (there may be
warnings) · 64 errors, each with its path and remedy.
"""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "launch", SUMMARY, epilog=EPILOG)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=OverridesParser)
    render = add_command(actions, "render", "write the manifests of a run")
    _add_run(render)
    _add_folder(render)
    render.set_defaults(run=_render)
    check = add_command(actions, "check", "check manifests, folders of them and Helm charts")
    check.add_argument("files", nargs="*", type=Path, metavar="FILE", help="YAML or JSON file, folder, or Helm chart")
    check.add_argument(
        "--crds", type=Path, metavar="FOLDER", help="CustomResourceDefinitions of the cluster's operators"
    )
    check.add_argument(
        "--values", type=Path, action="append", default=[], metavar="FILE", help="values for the Helm charts"
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("--rules", action="store_true", help="list the rules")
    check.set_defaults(run=_check)
    setup = add_command(actions, "setup", "write what an administrator creates once: machines, queues, storage")
    _add_profile(setup)
    _add_folder(setup)
    setup.set_defaults(run=_setup)
    values = add_command(actions, "values", "print values for the chart charts/posttrain-ray")
    _add_run(values)
    values.set_defaults(run=_values)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--on", type=Path, required=True, metavar="PROFILE", help="cluster profile")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="new folder for the files; else they are printed")
    parser.add_argument("--crds", type=Path, metavar="FOLDER", help="CustomResourceDefinitions, for checking")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_profile(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="config of the run")
    parser.add_argument(
        "--name", metavar="NAME", help="name of the run in the cluster; else from its checkpoint folder"
    )
    parser.add_argument(
        "words", nargs="*", metavar="KIND key=value", help=f"{', '.join(KINDS)}, then settings over the file's"
    )


def _profile(path: Path) -> ClusterProfile:
    from posttrain.config.cluster_profile import ClusterProfile
    from posttrain.config.standalone import load_standalone

    return load_standalone(ClusterProfile, path)


def _request(args: argparse.Namespace) -> LaunchRequest:
    from posttrain.launch.launch_request import request_run

    words = list(args.words)
    kind = words.pop(0) if words and words[0] in KINDS else None
    if kind is None and args.config is None:
        raise ConfigError(f"give the kind of run ({', '.join(KINDS)}), or --config FILE")
    profile = _profile(args.on)
    loaded = load_config(kind or guess_kind(args.config), args.config, words)
    request = request_run(loaded, profile, args.name)
    for warning in [*loaded.warnings, *request.warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    return request


def _render(args: argparse.Namespace) -> int:
    from posttrain.launch.workloads import render_run

    request = _request(args)
    _write(args, render_run(request), f"run {request.name}")
    return 0


def _setup(args: argparse.Namespace) -> int:
    from posttrain.launch.admin_objects import gke_node_pool, render_setup

    profile = _profile(args.on)
    _write(args, render_setup(profile), "setup", {"node-pool.txt": gke_node_pool(profile)})
    return 0


def _write(
    args: argparse.Namespace, objects: list[dict[str, Any]], what: str, texts: dict[str, str | None] | None = None
) -> None:
    """Checks the objects as any others, then writes or prints them."""
    from posttrain.launch.lint.check import CustomSchemas, check_manifests
    from posttrain.launch.manifest_files import read_text, to_yaml, write_manifests

    report = check_manifests(
        read_text(to_yaml(objects), what), CustomSchemas(args.crds) if args.crds is not None else None
    )
    for finding in report.findings:
        print(finding, file=sys.stderr)
    if report.errors:
        raise InputError(f"{what}: {_counts(report)}; nothing was written")
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


def _check(args: argparse.Namespace) -> int:
    from posttrain.launch.lint.check import RULES, check_paths

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
        print(f"{len(report.manifests)} objects: {_counts(report)}")
    return InputError.exit_code if report.errors else 0


def _counts(report: LintReport) -> str:
    errors = len(report.errors)
    warnings = len(report.findings) - errors
    return f"{errors} error{'s' if errors != 1 else ''}, {warnings} warning{'s' if warnings != 1 else ''}"


def _values(args: argparse.Namespace) -> int:
    from posttrain.launch.chart_values import chart_values
    from posttrain.launch.manifest_files import to_yaml

    print(to_yaml([chart_values(_request(args))]), end="")
    return 0
