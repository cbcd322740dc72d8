"""What `posttrain pipeline` prints: the plan of a dry run, the KPI, the stages of the newest iteration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from posttrain.apps.ship.pipeline.kpi import KpiRow, kpi_rows
from posttrain.apps.ship.pipeline.page import HEADINGS, PAGE, PICTURE, cells
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations
from posttrain.cli.tables import console, table
from posttrain.config.pipeline import PipelineConfig
from posttrain.reporting.wording import duration

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.apps.ship.pipeline.iteration_plan import StageDecision
    from posttrain.apps.ship.pipeline.runner import DryRun, PipelineRunner, RunRequest, SelectedIteration

_STYLES = {"run": "yellow", "reuse": "green", "skip": "dim", "depends": "cyan"}
_WORDS = {"run": "run", "reuse": "unchanged", "skip": "skip", "depends": "depends"}


def show_plan(runner: PipelineRunner, request: RunRequest) -> int:
    out, found = console(), runner.dry_run(request)
    if found.selected is None:
        _show_unmade(out, found, runner.config, request.until)
    else:
        _show_decisions(out, found.selected, found.decisions)
    out.print("nothing was changed")
    return 0


def _show_unmade(out: Console, found: DryRun, config: PipelineConfig, until: str) -> None:
    assert config.demo is not None, "only the demo has something to make"
    made = f"makes {', '.join(found.unmade)} in {config.demo.folder}; what follows depends on them"
    out.print(Text(f"{'demo':<10} ").append(f"{'run':<10}", style=_STYLES["run"]).append(f" {made}"))
    out.print(f"checked    the settings of every stage up to {until}, and of the configs that they name")
    if found.unchecked:
        out.print(f"unchecked  not made yet: {', '.join(found.unchecked)}")


def _show_decisions(out: Console, selected: SelectedIteration, decisions: Sequence[StageDecision]) -> None:
    iteration = selected.iteration
    compared = "nothing" if iteration.incumbent is None else iteration.incumbent.text
    for note in selected.notes:
        out.print(note)
    out.print(f"iteration {iteration.number}: trains {iteration.start.text}, compares with {compared}")
    for decision in decisions:
        line = Text(f"{decision.stage:<10} ")
        line.append(f"{_WORDS[decision.action]:<10}", style=_STYLES[decision.action])
        out.print(line + Text(f" {decision.why}"))


def show_result(config: PipelineConfig, rows: Sequence[KpiRow]) -> None:
    out = console()
    _show_kpi(out, rows)
    home = Path(config.pipeline.folder)
    out.print(f"report  {home / PAGE}")
    out.print(f"plot    {home / PICTURE}")


def show_status(config: PipelineConfig) -> int:
    out = console()
    home = Path(config.pipeline.folder)
    iterations = read_iterations(home)
    if not iterations:
        out.print(f"{home}: nothing has run yet; `posttrain pipeline run` begins")
        return 0
    _show_kpi(out, kpi_rows(config))
    _show_stages(out, iterations[-1])
    out.print(f"report  {home / PAGE}")
    return 0


def _show_kpi(out: Console, rows: Sequence[KpiRow]) -> None:
    kpi = table(*HEADINGS, right=())
    for row in rows:
        kpi.add_row(*(Text(cell) for cell in cells(row)))
    out.print(kpi)


def _show_stages(out: Console, iteration: Iteration) -> None:
    state = "finished" if iteration.finished else "not finished"
    out.print(f"\niteration {iteration.number}, {state}; trains {iteration.start.text} ({iteration.start_why})")
    for name in STAGES:
        mark, record = iteration.stages.get(name), iteration.record(name)
        if record is not None:
            took = "reused" if mark is not None and mark.reused else duration(record.seconds)
            out.print(f"  {name:<9} {took:>8}  {record.outcome.headline}")
            if record.report is not None:
                out.print(f"  {'':<9} {'':>8}  {record.report}", style="dim")
        elif mark is not None and mark.skipped and not mark.outdated:
            out.print(f"  {name:<9} {'skipped':>8}  {mark.skipped}", style="dim")
        else:
            out.print(f"  {name:<9} {'–':>8}  {'under way, or stopped here' if iteration.running == name else ''}")
