"""`posttrain pipeline run` and `status`: from labelled traces to a canary, again and again."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.ship.pipeline.records import STAGES
from posttrain.cli.overrides_parser import OverridesParser, Subparsers, add_command
from posttrain.errors import ExitCode, Terminated

if TYPE_CHECKING:
    from posttrain.config.pipeline import PipelineConfig

EPILOG = """\
examples:
  posttrain pipeline run configs/pipelines/demo.yaml              a few minutes on a CPU, with a model of its own
  posttrain pipeline run pipeline.yaml --dry-run                  what would run, and why
  posttrain pipeline run pipeline.yaml --until evaluate train.algorithm=grpo
  posttrain pipeline run pipeline.yaml --from gate                the gate and what follows, once more
  posttrain pipeline status pipeline.yaml

Each stage is stored with a hash of its inputs, and runs again only if they have changed. After an interruption the
same command resumes: training from its checkpoint, evaluation with the remaining problems. When an iteration is
finished and the traces have changed, the next one begins, from the model in production or from the base model
(pipeline.start_from).
exit codes of run: 0 promoted, or done as far as asked · 3 rejected · 4 more samples needed · 64 bad input ·
65 not one rollout could be scored · 75, 76 another process is running or training this pipeline ·
85 stopped by SIGTERM or SIGHUP · 130 stopped by Ctrl-C · 1 crash
"""


def add_arguments(parser: OverridesParser) -> None:
    parser.epilog = EPILOG
    commands = parser.commands()
    run = _add(commands, "run", "run what has to run", run_pipeline)
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
    parser = add_command(commands, name, summary, epilog=EPILOG, usage=usage)
    parser.add_argument("file", type=Path, metavar="FILE", help="pipeline.yaml; docs/pipeline.md explains its keys")
    parser.words()
    parser.set_defaults(run=run)
    return parser


def _load(args: argparse.Namespace) -> PipelineConfig:
    from posttrain.config.loader import load_standalone
    from posttrain.config.pipeline import PipelineConfig

    return load_standalone(PipelineConfig, args.file, args.words)


def run_pipeline(args: argparse.Namespace) -> int:
    config = _load(args)

    from posttrain.cli.pipeline_views import show_plan, show_result
    from posttrain.run import quieten_libraries

    quieten_libraries()
    from posttrain.apps.ship.pipeline.page import write_views
    from posttrain.apps.ship.pipeline.runner import PipelineRunner, RunRequest
    from posttrain.apps.ship.pipeline.stage import Stop
    from posttrain.reporting.console import Console
    from posttrain.reporting.wording import Line

    console = Console(sys.stderr, quiet=args.quiet)

    def say(text: str) -> None:
        console.show([Line(text, "warning" if text.startswith("warning") else "plain")])

    runner = PipelineRunner(config, say, console.progress, quiet=args.quiet)
    request = RunRequest(args.until, args.redo_from, args.new_iteration)
    if args.dry_run:
        return show_plan(runner, request)
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
    show_result(config, write_views(config))
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
    config = _load(args)

    from dataclasses import asdict

    from posttrain.apps.ship.pipeline.kpi import kpi_rows
    from posttrain.cli.pipeline_views import show_status

    if args.json:
        print(json.dumps([asdict(row) for row in kpi_rows(config)], indent=2))
        return 0
    return show_status(config)
