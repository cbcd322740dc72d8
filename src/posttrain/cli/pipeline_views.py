"""What `posttrain pipeline` prints: the plan of a dry run, the KPI, the stages of the newest iteration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.apps.ship.pipeline.kpi import KpiRow, kpi_rows
from posttrain.apps.ship.pipeline.page import HEADINGS, PAGE, PICTURE, cells
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations
from posttrain.config.pipeline import PipelineConfig
from posttrain.reporting.wording import duration

if TYPE_CHECKING:
    from posttrain.apps.ship.pipeline.iteration_plan import StageDecision
    from posttrain.apps.ship.pipeline.runner import DryRun, PipelineRunner, RunRequest, SelectedIteration

_STYLES = {"run": "yellow", "reuse": "green", "skip": "dim", "depends": "cyan"}
_FILE_WIDTH = 200
_WORDS = {"run": "run", "reuse": "unchanged", "skip": "skip", "depends": "depends"}


def show_plan(runner: PipelineRunner, request: RunRequest) -> int:
    console, found = _console(), runner.dry_run(request)
    if found.selected is None:
        _show_unmade(console, found, runner.config, request.until)
    else:
        _show_decisions(console, found.selected, found.decisions)
    console.print("nothing was changed")
    return 0


def _show_unmade(console: Console, found: DryRun, config: PipelineConfig, until: str) -> None:
    assert config.demo is not None, "only the demo has something to make"
    made = f"makes {', '.join(found.unmade)} in {config.demo.folder}; what follows depends on them"
    console.print(Text(f"{'demo':<10} ").append(f"{'run':<10}", style=_STYLES["run"]).append(f" {made}"))
    console.print(f"checked    the settings of every stage up to {until}, and of the configs that they name")
    if found.unchecked:
        console.print(f"unchecked  not made yet: {', '.join(found.unchecked)}")


def _show_decisions(console: Console, selected: SelectedIteration, decisions: Sequence[StageDecision]) -> None:
    iteration = selected.iteration
    compared = "nothing" if iteration.incumbent is None else iteration.incumbent.text
    for note in selected.notes:
        console.print(note)
    console.print(f"iteration {iteration.number}: trains {iteration.start.text}, compares with {compared}")
    for decision in decisions:
        line = Text(f"{decision.stage:<10} ")
        line.append(f"{_WORDS[decision.action]:<10}", style=_STYLES[decision.action])
        console.print(line + Text(f" {decision.why}"))


def show_result(config: PipelineConfig, rows: Sequence[KpiRow]) -> None:
    console = _console()
    _show_kpi(console, rows)
    home = Path(config.pipeline.folder)
    console.print(f"report  {home / PAGE}")
    console.print(f"plot    {home / PICTURE}")


def show_status(config: PipelineConfig) -> int:
    console = _console()
    home = Path(config.pipeline.folder)
    iterations = read_iterations(home)
    if not iterations:
        console.print(f"{home}: nothing has run yet; `posttrain pipeline run` begins")
        return 0
    _show_kpi(console, kpi_rows(config))
    _show_stages(console, iterations[-1])
    console.print(f"report  {home / PAGE}")
    return 0


def _show_kpi(console: Console, rows: Sequence[KpiRow]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEADINGS:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in cells(row)))
    console.print(table)


def _show_stages(console: Console, iteration: Iteration) -> None:
    state = "finished" if iteration.finished else "not finished"
    console.print(f"\niteration {iteration.number}, {state}; trains {iteration.start.text} ({iteration.start_why})")
    for name in STAGES:
        mark, record = iteration.stages.get(name), iteration.record(name)
        if record is not None:
            took = "reused" if mark is not None and mark.reused else duration(record.seconds)
            console.print(f"  {name:<9} {took:>8}  {record.outcome.headline}")
            if record.report is not None:
                console.print(f"  {'':<9} {'':>8}  {record.report}", style="dim")
        elif mark is not None and mark.skipped and not mark.outdated:
            console.print(f"  {name:<9} {'skipped':>8}  {mark.skipped}", style="dim")
        else:
            console.print(f"  {name:<9} {'–':>8}  {'under way, or stopped here' if iteration.running == name else ''}")


def _console() -> Console:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH  # a file has no width to keep to
    return console
