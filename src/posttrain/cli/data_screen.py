"""`posttrain data screen`: the prompts of a GRPO run that are neither too hard nor too easy for its model."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.data_pack import POSITIVE
from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.config import GrpoRunConfig, load_config
from posttrain.config.command_line import short_names
from posttrain.files.json_files import JsonObject
from posttrain.models.accepted_names import from_checkpoints
from posttrain.reporting.console import Console
from posttrain.run import fitted, quieten_libraries

if TYPE_CHECKING:
    from posttrain.apps.evaluate.screening import Screening

KIND: str = "grpo"


def add_parser(actions: Subparsers) -> None:
    parser = add_command(
        actions,
        "screen",
        "keep the prompts that are neither too hard nor too easy for the model of a GRPO run",
        usage="posttrain data screen [--config FILE] --out OUT [options] [key=value …]",
    )
    parser.short_names = short_names(KIND)
    parser.config_file("YAML file of the GRPO run")
    parser.option("--out OUT", "the file to write, NAME.jsonl", type=Path, required=True)
    parser.option("--samples N", "answers to each prompt (default: grpo.num_generations_per_prompt)", type=int)
    parser.option(
        "--keep LOW:HIGH",
        "mean rewards to keep, in units of the reward, ends included (default: 0.05:0.95, for rewards from 0 to 1; "
        "a negative one as --keep=-1:0.5)",
        type=_range,
    )
    parser.option("--limit N", "measure at most N prompts", type=POSITIVE)
    parser.option("--minutes M", "stop measuring after M minutes, loading not counted", type=float)
    parser.switch("--json", "print NAME.screen.json instead of the table")
    parser.switch("--quiet", "print the result, warnings and errors only")
    parser.words()
    parser.set_defaults(run=run, interrupted="stopped; what was measured is saved, and the same command resumes")


def run(args: argparse.Namespace) -> int:
    loaded = from_checkpoints(fitted(lambda extra: load_config(KIND, args.config, [*args.words, *extra])))([])
    config = loaded.config
    assert isinstance(config, GrpoRunConfig)
    loaded.print_warnings()

    quieten_libraries()
    from posttrain.apps.evaluate.screening import RewardRange, Screening

    console = Console(sys.stderr, quiet=args.quiet)  # results go to standard output
    screening = Screening(
        config,
        args.out,
        num_samples=config.grpo.num_generations_per_prompt if args.samples is None else args.samples,
        keep=RewardRange() if args.keep is None else RewardRange(args.keep[0], args.keep[1], is_default=False),
        say=console.note,
        limit=args.limit,
        minutes=args.minutes,
    )
    code, summary = screening.execute(console.progress)
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print("\n".join([*table(summary), *_next(args, screening, summary)]))
    return code


def table(summary: JsonObject) -> list[str]:
    """The mean rewards, and what became of the prompts."""
    bars = summary["histogram"]
    widest = max((count for _, _, count in bars), default=1)
    lines = ["  mean reward     prompts"]
    for low, high, count in bars:
        name = f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"
        lines.append(f"  {name:<16}{count:>7,}  {'#' * math.ceil(40 * count / widest)}")
    low, high = summary["keep"]
    meaning = {
        "kept": f"mean reward from {low:g} to {high:g}",
        "too hard": f"below {low:g}",
        "too easy": f"above {high:g}",
        "no difference": "within, but all answers earn the same",
        "unscored": "fewer than two answers have a reward",
        "not measured": "the same command resumes",
    }
    lines += [f"  {name:<16}{count:>7,}  {meaning[name]}" for name, count in summary["prompts"].items() if count]
    if summary["num_unscored_answers"]:
        lines.append(f"  {summary['num_unscored_answers']:,} answers could not be scored and are ignored")
    return lines


def _next(args: argparse.Namespace, screening: Screening, summary: JsonObject) -> list[str]:
    counts = summary["prompts"]
    if not counts["kept"]:
        return ["no prompt was kept, so no file was written"]
    lines = []
    per_step = screening.config.grpo.num_prompts_per_step
    if counts["kept"] < per_step:
        lines.append(f"a step takes {per_step} prompts, more than were kept: set grpo.num_prompts_per_step")
    settings = training_settings(screening)
    replaced = {setting.partition("=")[0] for setting in settings}
    given = [word for word in args.words if word.partition("=")[0] not in replaced]
    words = [*(["--config", str(args.config)] if args.config else []), *given, *settings]
    return [*lines, f"wrote {args.out}; next:", f"  posttrain grpo {shlex.join(words)}"]


def training_settings(screening: Screening) -> list[str]:
    """What makes the run train on the kept rows."""
    entry, train = screening.entry, screening.config.data.train
    changes: JsonObject = {"data_path": str(screening.out)}
    if entry.subset:  # of the hub; a file has none
        changes["subset"] = None
    if "[" in (entry.split or ""):
        changes["split"] = None
    if entry.data_path is None and entry.local_path is not None:  # the name was a path
        changes["dataset_name"] = None
    if isinstance(train, list):
        return [f"data.train={json.dumps([{**train[0].model_dump(exclude_unset=True), **changes}])}"]
    return [f"data.train.{name}={'null' if value is None else value}" for name, value in changes.items()]


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH, such as 0.05:0.95") from None
    if not -math.inf < low <= high < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: two finite numbers are needed, the lower one first")
    return low, high
