"""`posttrain config show`, `check` and `presets`: what a run would use, and where each value comes from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from posttrain.cli.overrides_parser import OverridesParser, Subparsers, add_command
from posttrain.config import KINDS, TRAINING_NAMES, LoadedConfig, RunConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.loader import ALL_NAMES, load_words, presets
from posttrain.data.named_datasets import check_dataset_names


def add_arguments(parser: OverridesParser) -> None:
    commands = parser.commands()
    show = _add(commands, "show", "print every value and where it came from", _show)
    show.switch("--all-origins", "comment on defaults too")
    show.switch("--json", "print {key: {value, origin}} instead of YAML")
    listing = add_command(commands, "presets", "list the settings of other systems that a run can start from")
    listing.add_argument(
        "kinds", nargs="*", choices=[*TRAINING_NAMES, []], metavar="KIND", help="only for this kind of run"
    )
    listing.set_defaults(run=_list_presets)
    _add(commands, "check", "check every key and value", _check)


def _add(commands: Subparsers, name: str, summary: str, action: Callable[..., int]) -> OverridesParser:
    usage = f"posttrain config {name} [{'|'.join(ALL_NAMES)}] [--config FILE] [options] [key=value …]"
    parser = add_command(commands, name, summary, usage=usage)
    parser.config_file()
    kinds = f"{', '.join(ALL_NAMES)} (guessed from the file if left out)"
    parser.words("KIND key=value", f"{kinds}, then settings that override the file's")
    parser.set_defaults(run=run, action=action)
    return parser


def run(args: argparse.Namespace) -> int:
    loaded = load_words(args.words, args.config, may_be_incomplete=args.action is _show)
    return int(args.action(loaded, args))


def _show(loaded: LoadedConfig[RunConfig], args: argparse.Namespace) -> int:
    loaded.print_warnings()
    if args.json:
        entries = {key: {"value": value, "origin": loaded.origins[key]} for key, value in loaded.flat().items()}
        print(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        print(loaded.annotated_yaml(all_origins=args.all_origins), end="")
    return 0


def _list_presets(args: argparse.Namespace) -> int:
    for kind in args.kinds or KINDS:
        found = presets(kind)
        if not found:
            if args.kinds:
                print(f"There are no presets for {kind}.\n")
            continue
        print(f"posttrain {kind} preset=NAME")
        width = max(len(preset.name) for preset in found)
        for preset in found:
            print(f"  {preset.name:<{width}}  {preset.summary}")
        print()
    print("Your own settings take precedence over a preset's. `posttrain config show grpo preset=NAME` shows its own.")
    return 0


def _check(loaded: LoadedConfig[RunConfig], args: argparse.Namespace) -> int:
    if isinstance(loaded.config, EvalRunConfig):
        from posttrain.apps.evaluate.problems import benchmark_of

        benchmark_of(loaded.config.data)
        called = loaded.kind
    else:
        check_dataset_names(loaded.config)
        called = loaded.config.called
    for warning in loaded.warnings:
        print(f"warning: {warning}")
    print(f"ok: {args.config or 'built-in defaults'} is a valid {called} config")
    return 0
