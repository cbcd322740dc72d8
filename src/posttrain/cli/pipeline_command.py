"""`posttrain pipeline run` and `status`: from labelled traces to a canary, again and again."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from posttrain.apps.ship.pipeline.kpi import KpiRow, kpi_rows
from posttrain.apps.ship.pipeline.page import HEADINGS, PAGE, PICTURE, cells, write_views
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations
from posttrain.cli.overrides_parser import OverridesParser, Subparsers, add_command
from posttrain.cli.tables import console, table
from posttrain.config.loader import load_standalone
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import ExitCode, Terminated
from posttrain.reporting.console import Console
from posttrain.reporting.wording import Line, duration
from posttrain.run import quieten_libraries

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

    from posttrain.apps.ship.pipeline.runner import PipelineRunner, RunRequest

_STYLES = {"run": "yellow", "reuse": "green", "skip": "dim", "depends": "cyan"}
_WORDS = {"run": "run", "reuse": "unchanged", "skip": "skip", "depends": "depends"}


def add_arguments(parser: OverridesParser) -> None:
    commands = parser.commands()
    run = _add(commands, "run", "run stages that are out of date", run_pipeline)
    run.option("--until STAGE", "stop after this stage", choices=STAGES, default=STAGES[-1])
    run.option("--from STAGE", "this stage and those after it run again", dest="redo_from", choices=STAGES)
    run.switch("--dry-run", "show what would run, and why; change nothing")
    run.switch("--new-iteration", "begin the next iteration, whatever has changed")
    run.switch("--quiet", "print the result, warnings and errors only")
    run.set_defaults(output_is_result=False)
    status = _add(commands, "status", "show the iterations, their KPI, and how far the last one is", run_status)
    status.switch("--json", "print the KPI as JSON")


def _add(commands: Subparsers, name: str, summary: str, run: Callable[..., int]) -> OverridesParser:
    usage = f"posttrain pipeline {name} FILE [options] [key=value …]"
    parser = add_command(commands, name, summary, usage=usage)
    parser.texts = ("pipeline",)
    parser.add_argument("file", type=Path, metavar="FILE", help="pipeline.yaml; docs/pipeline.md explains its keys")
    parser.words()
    parser.set_defaults(run=run)
    return parser


def run_pipeline(args: argparse.Namespace) -> int:
    config = load_standalone(PipelineConfig, args.file, args.words)
    quieten_libraries()
    from posttrain.apps.ship.pipeline.runner import PipelineRunner, RunRequest
    from posttrain.apps.ship.pipeline.stage import Stop

    err = Console(sys.stderr, quiet=args.quiet)

    def say(text: str) -> None:
        err.show([Line(text, "warning" if text.startswith("warning") else "plain")])

    runner = PipelineRunner(config, say, err.progress, quiet=args.quiet)
    request = RunRequest(args.until, args.redo_from, args.new_iteration)
    if args.dry_run:
        _show_plan(runner, request)
        return 0
    if config.schedule is not None:
        say(f"schedule {config.schedule!r}: let a scheduler start this command at that time; it runs once, now")
    try:
        with _signals_raise():
            code = runner.run(request, after_stage=lambda: write_views(config))
    except Stop as stop:
        print(f"posttrain: {stop}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt as stopped:
        print("posttrain: stopped; finished stages are kept, and the same command resumes", file=sys.stderr)
        return ExitCode.SAVED if isinstance(stopped, Terminated) else ExitCode.INTERRUPTED
    out = console()
    _show_kpi(out, write_views(config))
    home = Path(config.pipeline.folder)
    out.print(f"report  {home / PAGE}")
    out.print(f"plot    {home / PICTURE}")
    return code


@contextmanager
def _signals_raise() -> Iterator[None]:
    def receive(number: int, frame: object) -> None:
        raise Terminated(number)

    stopping = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    previous = {number: signal.signal(number, receive) for number in stopping}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_status(args: argparse.Namespace) -> int:
    config = load_standalone(PipelineConfig, args.file, args.words)
    if args.json:
        print(json.dumps([asdict(row) for row in kpi_rows(config)], indent=2))
        return 0
    out, home = console(), Path(config.pipeline.folder)
    iterations = read_iterations(home)
    if not iterations:
        out.print(f"{home}: nothing has run yet; `posttrain pipeline run` begins")
        return 0
    _show_kpi(out, kpi_rows(config))
    _show_stages(out, iterations[-1])
    out.print(f"report  {home / PAGE}")
    return 0


def _show_plan(runner: PipelineRunner, request: RunRequest) -> None:
    out, found = console(), runner.dry_run(request)
    if found.selected is None:
        assert runner.config.demo is not None, "only the demo has something to make"
        made = f"makes {', '.join(found.unmade)} in {runner.config.demo.folder}; what follows depends on them"
        out.print(Text(f"{'demo':<10} ").append(f"{'run':<10}", style=_STYLES["run"]).append(f" {made}"))
        out.print(f"checked    the settings of every stage up to {request.until}, and of the configs that they name")
        if found.unchecked:
            out.print(f"unchecked  not made yet: {', '.join(found.unchecked)}")
    else:
        iteration = found.selected.iteration
        compared = "nothing" if iteration.incumbent is None else iteration.incumbent.text
        for note in found.selected.notes:
            out.print(note)
        out.print(f"iteration {iteration.number}: trains {iteration.start.text}, compares with {compared}")
    for decision in found.decisions:
        line = Text(f"{decision.stage:<10} ")
        line.append(f"{_WORDS[decision.action]:<10}", style=_STYLES[decision.action])
        out.print(line + Text(f" {decision.why}"))
    out.print("nothing was changed")


def _show_kpi(out: RichConsole, rows: Sequence[KpiRow]) -> None:
    kpi = table(*HEADINGS, right=())
    for row in rows:
        kpi.add_row(*(Text(cell) for cell in cells(row)))
    out.print(kpi)


def _show_stages(out: RichConsole, iteration: Iteration) -> None:
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
