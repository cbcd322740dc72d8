"""`posttrain data inspect`, `advise`, `pairs`, `pack` and `screen`: traces, pairs and prompts, before any training."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from posttrain.cli import data_pack, data_screen
from posttrain.cli.data_images import inspect_images
from posttrain.cli.data_views import check_picture, show_advice, show_losses, show_pairs, show_statistics, write_picture
from posttrain.cli.overrides_parser import OverridesParser, Subparsers, add_command, add_option
from posttrain.cli.tables import console
from posttrain.config.base import Section, members
from posttrain.config.data import PairRulesConfig, TraceColumnsConfig, TraceFiltersConfig
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonObject
from posttrain.models.hub import why_unavailable
from posttrain.run import quieten_libraries

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from transformers import PreTrainedTokenizerBase

    from posttrain.data.traces.files import ProgressCall
    from posttrain.data.traces.reading import Reading
    from posttrain.data.traces.statistics import TraceStatistics
    from posttrain.data.traces.values import PairRules

PATHS_HELP = "Parquet or jsonl(.gz): files, folders, patterns or URLs such as 's3://bucket/traces/*.parquet'"


# Options and settings of a run have the same names; the section of the config describes them.
SECTIONS: dict[str, type[Section]] = {
    "columns": TraceColumnsConfig,
    "filters": TraceFiltersConfig,
    "pairs": PairRulesConfig,
}
_METAVARS = {"since": "DATE", "until": "DATE", "near_similarity": "S", "max_pairs_per_prompt": "N", "min_margin": "D"}


def add_arguments(parser: OverridesParser) -> None:
    actions = parser.commands()
    inspect = _add_command(actions, "inspect", "show statistics of labelled traces, or of rows with images", _inspect)
    inspect.option("--html FILE", "of rows with images: a page with thumbnails", type=Path)
    inspect.option("--image-key NAME", "column with images (default: images or image)")
    inspect.option("--image-dir FOLDER", "folder of images that rows name (default: that of the data file)")
    inspect.option("--tokenizer NAME", "measure lengths in its tokens: a folder or a hub name")
    inspect.option("--picture FILE", "draw the rewards into FILE.svg or FILE.png, too", type=Path)
    advise = _add_command(actions, "advise", "recommend GRPO or DPO for a set of labelled traces", _advise)
    advise.switch("--quick", "a quick first result matters most")
    pairs = _add_command(actions, "pairs", "make preference pairs from labelled traces", _pairs)
    pairs.add_argument("out", type=Path, metavar="OUT", help="the file to write, NAME.jsonl or NAME.jsonl.gz")
    pairs.option(
        "--format",
        "aligner: prompt, chosen_response, rejected_response, chosen_reward, rejected_reward; "
        "trl: prompt, chosen, rejected, score_chosen, score_rejected",
        choices=("aligner", "trl"),
        default="aligner",
    )
    pairs.switch("--templated", "prompts that are text hold the chat template; else aligner rows have messages")
    pairs.switch("--skip-broken-files", "use what can be read of files that are cut off or damaged")
    data_pack.add_parser(actions)
    data_screen.add_parser(actions)


def _add_command(actions: Subparsers, name: str, summary: str, run: Callable[..., int]) -> OverridesParser:
    path = "IN" if name == "pairs" else "PATH"
    usage = f"posttrain data {name} {path} [{path} …]{' OUT' if name == 'pairs' else ''} [options]"
    parser = add_command(actions, name, summary, usage=usage)
    parser.texts = ("data-traces", f"data-{name}")
    parser.set_defaults(run=run)
    parser.add_argument("paths", nargs="+", metavar=path, help=PATHS_HELP)
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title, section.__doc__)
        for name, info in section.model_fields.items():
            _add_field(group, name, info)
    parser.option("--scratch FOLDER", "where temporary files go (default: the system's place)")
    parser.switch("--json", "print the numbers as JSON")
    parser.switch("--quiet", "no progress bar")
    return parser


def _add_field(group: argparse._ActionsContainer, name: str, info: FieldInfo) -> None:
    flag, text = f"--{name.replace('_', '-')}", (info.description or "").rstrip(".")
    kind: Any = next(member for member in members(info.annotation) if member is not NoneType)
    if name == "where":
        further = "only rows with this value; the same column again allows another one"
        add_option(group, f"{flag} COLUMN=VALUE", further, action="append", default=[])
    elif get_origin(kind) is Literal:
        add_option(group, flag, text, choices=get_args(kind), default=info.default)
    else:
        metavar = _METAVARS.get(name) or {str: "NAME", float: "R"}[kind]
        add_option(group, f"{flag} {metavar}", text, type=kind, default=info.default)


# -- parsing options ---------------------------------------------------------------------------------------------------


def _reading(args: argparse.Namespace, on_progress: ProgressCall | None, *, skip_broken_files: bool) -> Reading:
    from posttrain.data.traces.reading import Reading
    from posttrain.data.traces.values import TraceColumns, TraceFilters

    return Reading(
        args.paths[0] if len(args.paths) == 1 else tuple(args.paths),
        TraceColumns(**_given(args, "columns")),
        TraceFilters(**_given(args, "filters") | {"where": _where(args.where)}),
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


def _given(args: argparse.Namespace, section: str) -> JsonObject:
    return {name: getattr(args, name) for name in SECTIONS[section].model_fields}


def _rules(args: argparse.Namespace) -> PairRules:
    from posttrain.data.traces.values import PairRules

    return PairRules(**_given(args, "pairs"))


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
    if args.picture:
        check_picture(args.picture)
    if inspect_images(args):
        return 0
    found = _statistics(args, _tokenizer(args.tokenizer) if args.tokenizer else None)
    name = " ".join(args.paths)
    if args.picture:
        short = Path(args.paths[0]).name if len(args.paths) == 1 else f"{len(args.paths)} paths"
        write_picture(found, f"Rewards of {short}", args.picture)
    if args.json:
        print(json.dumps({"path": name, **found.as_dict()}, indent=2, ensure_ascii=False))
    else:
        show_statistics(console(soft_wrap=False), found, name)
        if args.picture:
            print(f"\npicture: {args.picture}")
    if not found.read.kept and not found.read.filtered:
        raise InputError(f"{name}: none of its {found.read.rows} rows can be used")
    return 0


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
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
        show_advice(console(soft_wrap=False), advice)
    return 0


def _options_given(args: argparse.Namespace) -> str:
    """The options that define the pairs, as typed, for the next command."""
    words: list[str] = []
    for section in SECTIONS.values():
        for name, info in section.model_fields.items():
            value = getattr(args, name)
            for one in value if name == "where" else [value] if value != info.default else []:
                words += [f"--{name.replace('_', '-')}", shlex.quote(str(one))]
    return "".join(f" {word}" for word in words)


def _settings_given(args: argparse.Namespace) -> str:
    """The same as settings of a run, for paths, columns and filters. Of several paths each is a dataset of its own."""
    if len(args.paths) == 1:
        dataset, words = "data.train", ["data.train.dataset_name=TraceGroups", f"data.train.data_path={args.paths[0]}"]
    else:
        entries = (f"{{dataset_name: TraceGroups, data_path: {json.dumps(path)}}}" for path in args.paths)
        dataset, words = "data.default", [f"data.train=[{', '.join(entries)}]"]
    for title in ("columns", "filters"):
        section = f"trace_{title}"
        for name, value in _given(args, title).items():
            if name == "where":
                for column, wanted in _where(value).items():
                    # Quoted, or YAML would read `no` as a boolean, and a value with a comma as two.
                    values = ", ".join(json.dumps(one, ensure_ascii=False) for one in wanted)
                    words.append(f"{dataset}.{section}.where.{column}=[{values}]")
            elif value != SECTIONS[title].model_fields[name].default:
                words.append(f"{dataset}.{section}.{name}={value}")
    return "".join(f" {shlex.quote(word)}" for word in words)


def _pairs(args: argparse.Namespace) -> int:
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
        out = console(soft_wrap=False)
        out.print(f"{report.kept:,} of {report.rows:,} traces used")
        show_losses(out, report)
        show_pairs(out, counts, heading="pairs")
        out.print(f"wrote {lines:,} lines to {args.out}", soft_wrap=True)
    return 0
