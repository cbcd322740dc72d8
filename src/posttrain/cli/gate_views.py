"""A verdict of the gate, drawn in a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.gate import GateResult, Rule
from posttrain.gate.report import OUTCOMES, WORDS

STYLES = {"pass": "green", "fail": "red", "undecided": "yellow", "skipped": "bright_black"}
VERDICT_STYLES = {"promote": "bold green", "reject": "bold red", "needs_more_samples": "bold yellow"}


def show_result(result: GateResult) -> None:
    console = Console(
        markup=False, emoji=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for column in ("check", "metric", "demand", "candidate", "production", "estimate", "problems", "outcome"):
        numbers = column in ("candidate", "production", "estimate", "problems")
        table.add_column(column, justify="right" if numbers else "left")
    for rule in result.rules:
        table.add_row(*_cells(rule))
    console.print(table)
    console.print()
    console.print(WORDS[result.verdict], style=VERDICT_STYLES[result.verdict])
    for reason in result.reasons:
        console.print(f"  {reason}")
    for name, count in result.needed_problems.items():
        console.print(f"  to decide: about {count:,} problems in {name}")
    for note in result.notes:
        console.print(f"  note: {note}", style="bright_black")


def _cells(rule: Rule) -> list[str | Text]:
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
