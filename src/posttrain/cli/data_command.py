"""`posttrain data inspect`, `advise`, `pairs`, `pack` and `screen`: traces, pairs and prompts, before any training."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli import data_pack, data_screen
from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonObject
from posttrain.models.hub import why_unavailable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.data.traces.files import ProgressCall
    from posttrain.data.traces.reading import Reading
    from posttrain.data.traces.statistics import TraceStatistics
    from posttrain.data.traces.values import PairRules

PATHS_HELP = "Parquet or jsonl(.gz): files, folders, patterns or URLs such as 's3://bucket/traces/*.parquet'"
EPILOG = """\
rows are recognised by their columns: messages and prompt_len; input and output (texts or messages); or prompt, chosen and
rejected. Each trace needs a reward in the column final_reward, unless --reward names another one. Rows that cannot be used
are counted and reported. Memory does not grow with the files.

examples:
"""
EXAMPLES = {
    "inspect": """\
  posttrain data inspect traces.jsonl.gz
  posttrain data inspect 's3://lake/labelled/*.parquet' --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct --picture rewards.svg
  posttrain data inspect traces/ --where model=gpt-4o --since 2026-03-01 --duplicates near --json
""",
    "advise": """\
  posttrain data advise traces.jsonl.gz
  posttrain data advise traces.jsonl.gz --preferred 0.8 --rejected-below 0.3 --quick
""",
    "pairs": """\
  posttrain data pairs traces.jsonl.gz pairs.jsonl
  posttrain data pairs traces/ pairs.jsonl.gz --strategy by_margin --min-margin 0.3 --max-pairs-per-prompt 4
  posttrain data pairs traces.parquet pairs.jsonl --format trl
""",
}


COLUMNS = ("input", "output", "messages", "prompt_len", "reward", "group_id", "trace_id", "model", "time")
FILTERS = ("min_reward_threshold", "since", "until", "where", "duplicates", "near_similarity")
RULES = ("preferred", "rejected_below", "strategy", "min_margin", "max_pairs_per_prompt")
DEFAULTS: JsonObject = {  # of the options whose default is not None
    "reward": "final_reward",
    "where": [],
    "duplicates": "keep",
    "near_similarity": 0.9,
    "preferred": 0.7,
    "rejected_below": 0.5,
    "strategy": "best_worst",
    "min_margin": 0.0,
}


def add_parser(subparsers: Subparsers) -> None:
    summary = "look at labelled traces, make preference pairs of them, pack pairs, screen prompts"
    parser = subparsers.add_parser("data", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    inspect = _add_command(actions, "inspect", "show what is in a set of labelled traces", _inspect)
    inspect.add_argument("paths", nargs="+", metavar="PATH", help=PATHS_HELP)
    inspect.add_argument("--tokenizer", metavar="NAME", help="measure lengths in its tokens: a folder or a hub name")
    inspect.add_argument("--picture", type=Path, metavar="FILE", help="draw the rewards into FILE.svg or FILE.png, too")

    advise = _add_command(actions, "advise", "recommend GRPO or DPO for a set of labelled traces", _advise)
    advise.add_argument("paths", nargs="+", metavar="PATH", help=PATHS_HELP)
    advise.add_argument("--quick", action="store_true", help="a quick first result matters most")

    pairs = _add_command(actions, "pairs", "make preference pairs of labelled traces", _pairs)
    pairs.add_argument("paths", nargs="+", metavar="IN", help=PATHS_HELP)
    pairs.add_argument("out", type=Path, metavar="OUT", help="the file to write, NAME.jsonl or NAME.jsonl.gz")
    pairs.add_argument(
        "--format",
        choices=("aligner", "trl"),
        default="aligner",
        help="aligner: prompt, chosen_response, rejected_response, chosen_reward, rejected_reward; "
        "trl: prompt, chosen, rejected, score_chosen, score_rejected (default: aligner)",
    )
    pairs.add_argument(
        "--templated",
        action="store_true",
        help="prompts that are text hold the chat template already; otherwise the aligner format writes them as messages",
    )
    pairs.add_argument(
        "--skip-broken-files", action="store_true", help="use what can be read of files that are cut off or damaged"
    )
    data_pack.add_parser(actions)
    data_screen.add_parser(actions)


def _add_command(actions: Subparsers, name: str, summary: str, run: Callable[..., int]) -> argparse.ArgumentParser:
    parser = add_command(
        actions,
        name,
        summary,
        epilog=EPILOG + EXAMPLES[name],
        usage=f"posttrain data {name} {'IN [IN …] OUT' if name == 'pairs' else 'PATH [PATH …]'} [options]",
    )
    parser.set_defaults(run=run)
    _add_columns(parser.add_argument_group("columns"))
    _add_filters(parser.add_argument_group("filters"))
    _add_rules(parser.add_argument_group("pairs"))
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("--scratch", metavar="FOLDER", help="where temporary files go (default: the system's place)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--reward", metavar="NAME", help="reward (default: final_reward)")
    for name, words in (
        ("input", "prompt"),
        ("output", "response"),
        ("messages", "whole conversation"),
        ("prompt-len", "how many leading messages are the prompt"),
        ("group-id", "what belongs together; '' groups by prompt"),
        ("trace-id", "name of a trace"),
        ("model", "who answered"),
        ("time", "when"),
    ):
        group.add_argument(f"--{name}", metavar="NAME", help=f"{words} (default: the usual name, where there is one)")


def _add_filters(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--min-reward-threshold", type=float, metavar="R", help="leave out traces with a reward below R")
    group.add_argument("--since", metavar="DATE", help="leave out what is older, such as 2026-03-01; UTC")
    group.add_argument("--until", metavar="DATE", help="leave out what is not older")
    group.add_argument(
        "--where",
        action="append",
        metavar="COLUMN=VALUE",
        help="only rows with this value; the same column again allows another one",
    )
    group.add_argument(
        "--duplicates",
        choices=("keep", "exact", "near"),
        help="of equal, or nearly equal, responses to a prompt keep the first (default: keep all)",
    )
    group.add_argument("--near-similarity", type=float, metavar="S", help="what counts as nearly equal (default: 0.9)")


def _add_rules(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--preferred", type=float, metavar="R", help="preferred from R on (default: 0.7)")
    group.add_argument("--rejected-below", type=float, metavar="R", help="rejected below R (default: 0.5)")
    group.add_argument(
        "--strategy",
        choices=("best_worst", "all", "one_per_preferred", "by_margin"),
        help="which preferred response meets which rejected one (default: best_worst, one pair a prompt)",
    )
    group.add_argument("--min-margin", type=float, metavar="D", help="least difference of two rewards")
    group.add_argument("--max-pairs-per-prompt", type=int, metavar="N", help="most pairs of one prompt")


# -- parsing options ---------------------------------------------------------------------------------------------------


def _reading(args: argparse.Namespace, on_progress: ProgressCall | None, *, skip_broken_files: bool) -> Reading:
    from posttrain.data.traces.reading import Reading
    from posttrain.data.traces.values import TraceColumns, TraceFilters

    if args.words:
        raise InputError(f"unexpected {' '.join(map(repr, args.words))}; options go before or after all paths")
    return Reading(
        args.paths[0] if len(args.paths) == 1 else tuple(args.paths),
        TraceColumns(**{name: getattr(args, name) for name in COLUMNS}),
        TraceFilters(
            min_reward_threshold=args.min_reward_threshold,
            since=args.since,
            until=args.until,
            where=_where(args.where),
            duplicates=args.duplicates,
            near_similarity=args.near_similarity,
        ),
        "skip" if skip_broken_files else "error",
        args.scratch,
        on_progress=on_progress,
    )


def _where(words: list[str]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for word in words:
        column, equals, value = word.partition("=")
        if not equals or not column:
            raise InputError(f"--where {word}: expected COLUMN=VALUE, such as model=gpt-4o")
        wanted.setdefault(column, []).append(value)
    return wanted


def _rules(args: argparse.Namespace) -> PairRules:
    from posttrain.data.traces.values import PairRules

    return PairRules(args.preferred, args.rejected_below, args.strategy, args.min_margin, args.max_pairs_per_prompt)


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[ProgressCall | None]:
    """A progress bar on standard error, if that is a terminal."""
    if args.quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def advance(done: int, total: int, rows: int) -> None:
            words = f"{rows:,} rows" if done < total else f"{rows:,} rows, grouping"
            bar.update(task, completed=done, total=total, description=words)

        yield advance


# -- commands ----------------------------------------------------------------------------------------------------------


def _statistics(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None = None) -> TraceStatistics:
    from posttrain.data.traces.statistics import collect_statistics

    rules = _rules(args)
    with _progress(args) as on_progress:
        return collect_statistics(_reading(args, on_progress, skip_broken_files=True), rules, tokenizer)


def _inspect(args: argparse.Namespace) -> int:
    """Broken files are reported, and what can be read of them is used."""
    from rich.console import Console

    from posttrain.cli.data_views import check_picture, show_statistics, write_picture

    if args.picture:
        check_picture(args.picture)
    found = _statistics(args, _tokenizer(args.tokenizer) if args.tokenizer else None)
    name = " ".join(args.paths)
    if args.picture:
        short = Path(args.paths[0]).name if len(args.paths) == 1 else f"{len(args.paths)} paths"
        write_picture(found, f"Rewards of {short}", args.picture)
    if args.json:
        print(json.dumps({"path": name, **found.as_dict()}, indent=2, ensure_ascii=False))
    else:
        show_statistics(Console(highlight=False), found, name)
        if args.picture:
            print(f"\npicture: {args.picture}")
    if not found.read.kept and not found.read.filtered:
        raise InputError(f"{name}: none of its {found.read.rows} rows can be used")
    return 0


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from posttrain.run import quieten_libraries

    quieten_libraries()
    from transformers import AutoTokenizer

    if (reason := why_unavailable(name, holding="a tokenizer")) is not None:
        raise InputError(f"--tokenizer: {reason}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        line = reason_of(error)
        raise InputError(f"--tokenizer {name}: no tokenizer there, in the cache or on the hub ({line})") from error


def _advise(args: argparse.Namespace) -> int:
    from rich.console import Console

    from posttrain.cli.data_views import show_advice
    from posttrain.data.traces.advice import advise

    found = _statistics(args)
    name = " ".join(map(shlex.quote, args.paths))
    if not found.traces:
        raise InputError(f"{name}: none of its {found.read.rows} rows can be used; `posttrain data inspect` shows why")
    options, settings = _options_given(args), _settings_given(args)
    advice = advise(found, name, quick=args.quick, options=options, settings=settings)
    if args.json:
        print(json.dumps({"path": name, **advice.as_dict()}, indent=2, ensure_ascii=False))
    else:
        show_advice(Console(highlight=False), advice)
    return 0


def _options_given(args: argparse.Namespace) -> str:
    """The options that define the pairs, as typed, for the next command."""
    words: list[str] = []
    for name in (*COLUMNS, *FILTERS, *RULES):
        value = getattr(args, name)
        if value != DEFAULTS.get(name):
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{name.replace('_', '-')}", shlex.quote(str(one))]
    return "".join(f" {word}" for word in words)


def _settings_given(args: argparse.Namespace) -> str:
    """The same as settings of a run, for paths, columns and filters. Of several paths each is a dataset of its own."""
    if len(args.paths) == 1:
        dataset, words = "data.train", ["data.train.dataset_name=TraceGroups", f"data.train.data_path={args.paths[0]}"]
    else:
        entries = (f"{{dataset_name: TraceGroups, data_path: {json.dumps(path)}}}" for path in args.paths)
        dataset, words = "data.default", [f"data.train=[{', '.join(entries)}]"]
    for section, names in (("trace_columns", COLUMNS), ("trace_filters", FILTERS)):
        for name in names:
            value = getattr(args, name)
            if name == "where":
                for column, wanted in _where(value).items():
                    # Quoted, or YAML would read `no` as a boolean, and a value with a comma as two.
                    values = ", ".join(json.dumps(one, ensure_ascii=False) for one in wanted)
                    words.append(f"{dataset}.{section}.where.{column}=[{values}]")
            elif value != DEFAULTS.get(name):
                words.append(f"{dataset}.{section}.{name}={value}")
    return "".join(f" {shlex.quote(word)}" for word in words)


def _pairs(args: argparse.Namespace) -> int:
    from rich.console import Console

    from posttrain.cli.data_views import show_losses, show_pairs
    from posttrain.data.traces.pair_files import write_pairs
    from posttrain.data.traces.report import PairReport, ReadReport

    report, counts, rules = ReadReport(), PairReport(), _rules(args)
    with _progress(args) as on_progress:
        reading = _reading(args, on_progress, skip_broken_files=args.skip_broken_files)
        lines = write_pairs(reading, args.out, rules, args.format, report, counts, templated=args.templated)
    if args.json:
        numbers = {"out": str(args.out), "lines": lines, "read": report.as_dict(), "pairs": counts.as_dict()}
        print(json.dumps(numbers, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        console.print(f"{report.kept:,} of {report.rows:,} traces used")
        show_losses(console, report)
        show_pairs(console, counts, heading="pairs")
        console.print(f"wrote {lines:,} lines to {args.out}", soft_wrap=True)
    return 0
