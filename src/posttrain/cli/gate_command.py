"""`posttrain gate`: may a candidate replace the model in production? `gate measure-kl`: its KL from a base."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from posttrain.cli.overrides_parser import OverridesParser
from posttrain.cli.tables import console, table
from posttrain.config.gate import GateConfig
from posttrain.config.loader import load_standalone
from posttrain.errors import VERDICT_CODES, InputError
from posttrain.files import durable
from posttrain.reporting.console import Console
from posttrain.run import quieten_libraries

if TYPE_CHECKING:
    from posttrain.apps.evaluate.results import Evaluation
    from posttrain.apps.ship.gate import BoundResult, GateResult

STYLES = {"pass": "green", "fail": "red", "undecided": "yellow", "skipped": "bright_black"}
VERDICT_STYLES = {"promote": "bold green", "reject": "bold red", "needs_more_samples": "bold yellow"}


def add_arguments(parser: OverridesParser) -> None:
    parser.usage = (
        "posttrain gate --config FILE --candidate [NAME=]FOLDER … (--production [NAME=]FOLDER … | --no-production) "
        "[options] [key=value …]\n       posttrain gate measure-kl FOLDER --base MODEL [options]"
    )
    parser.actions["measure-kl"] = (
        "measure how far the model of an evaluation has moved from its base, on the answers that it gave",
        _add_measure_kl,
    )
    parser.config_file("gate.yaml: the checks", required=True)
    parser.option("--candidate [NAME=]FOLDER", "evaluation of the new model", action="append", default=[])
    parser.option("--production [NAME=]FOLDER", "the same of the model in use", action="append", default=[])
    parser.switch("--no-production", "there is no model in use yet: checks against it are skipped")
    parser.option("--json FILE", "write the verdict as JSON; - prints it instead of the table")
    parser.option("--html FILE", "write a self-contained HTML page", type=Path)
    parser.words(help="settings that override those of gate.yaml")
    parser.set_defaults(run=run)


def _add_measure_kl(parser: OverridesParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `posttrain eval` has written")
    parser.option("--base MODEL", "the model that it was trained from", required=True)
    parser.option("--model MODEL", "the model that answered (default: the evaluation's)")
    parser.add_argument("--precision", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.set_defaults(run=run_measure_kl)


def run(args: argparse.Namespace) -> int:
    if not args.candidate:
        raise InputError("--candidate is missing: the folder that `posttrain eval` wrote for the new model")
    if bool(args.production) == args.no_production:
        raise InputError(
            "give what the candidate is compared with: --production FOLDER, or --no-production if nothing is in use yet"
            if not args.production
            else "--production and --no-production exclude each other"
        )
    config = load_standalone(GateConfig, args.config, args.words)

    from posttrain.apps.ship.gate import judge
    from posttrain.apps.ship.gate.report import as_html, as_json

    candidate = _evaluations("--candidate", args.candidate)
    production = None if args.no_production else _evaluations("--production", args.production)
    result = judge(config, candidate, production)
    report = as_json(result, config, candidate, production)
    if args.json == "-":
        print(json.dumps(report, indent=2))
    else:
        _show_result(result)
    if args.json not in (None, "-"):
        _write(Path(args.json), json.dumps(report, indent=2) + "\n")
    if args.html is not None:
        _write(args.html, as_html(report, result))
    return VERDICT_CODES[result.verdict]


def _show_result(result: GateResult) -> None:
    from posttrain.apps.ship.gate.report import WORDS

    out, numbers = console(), ("candidate", "production", "estimate", "problems")
    rows = table("check", "metric", "demand", *numbers, "outcome", right=numbers)
    for rule in result.rules:
        rows.add_row(*_cells(rule))
    out.print(rows)
    out.print()
    out.print(WORDS[result.verdict], style=VERDICT_STYLES[result.verdict])
    for reason in result.reasons:
        out.print(f"  {reason}")
    for name, count in result.needed_problems.items():
        out.print(f"  to decide: about {count:,} problems in {name}")
    for note in result.notes:
        out.print(f"  note: {note}", style="bright_black")


def _cells(rule: BoundResult) -> list[str | Text]:
    from posttrain.apps.ship.gate.report import OUTCOMES

    estimate = rule.estimate
    return [
        rule.check,
        f"{rule.metric} ({rule.evaluation})",
        rule.demand,
        _number(rule.candidate),
        _number(rule.production),
        "–" if estimate is None else f"{estimate.mean:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]",
        "–" if estimate is None else f"{estimate.num_problems:,}",
        Text(OUTCOMES[rule.outcome], style=STYLES[rule.outcome]),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _evaluations(option: str, words: Sequence[str]) -> dict[str, Evaluation]:
    from posttrain.apps.evaluate.results import read_evaluation

    found: dict[str, Evaluation] = {}
    for name, folder in [pair for word in words for pair in _named_folders(word)]:
        if name in found:
            raise InputError(
                f"{option}: two evaluations are called {name!r}; give them names, as in {option} safety={folder}"
            )
        found[name] = read_evaluation(folder)
    return found


def _named_folders(word: str) -> list[tuple[str, Path]]:
    """`NAME=FOLDER`, or a folder: one evaluation is `main`, a folder of evaluations gives each its own name."""
    from posttrain.apps.evaluate.results import SUMMARY_FILE

    name, equals, folder = word.partition("=")
    if equals and not Path(word).exists():
        return [(name, Path(folder))]
    path = Path(word)
    inside = [] if (path / SUMMARY_FILE).exists() else sorted(path.glob(f"*/{SUMMARY_FILE}"))
    return [(file.parent.name, file.parent) for file in inside] or [("main", path)]


def _write(path: Path, text: str) -> None:
    durable.write_for_user(path, text)
    print(f"written to {path}", file=sys.stderr)


def run_measure_kl(args: argparse.Namespace) -> int:
    quieten_libraries()
    from posttrain.apps.ship.gate.measure_divergence import measure_divergence

    console = Console(sys.stderr, quiet=False)
    found, path = measure_divergence(
        args.folder,
        args.base,
        model=args.model,
        precision=args.precision,
        device=args.device,
        show_progress=console.progress,
    )
    measured = sum(value is not None for value in found.values.values())
    print(f"KL({found.model} || {found.base}) = {found.mean:.6g} nats per token, over {measured} problems; {path}")
    return 0
