"""`posttrain log sync`: send the steps of a run to a tracker."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from posttrain.cli.overrides_parser import RAW, OverridesParser, Subparsers, add_command
from posttrain.errors import InputError, near_path

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
EPILOG = """\
examples:
  posttrain log sync results/grpo --to wandb
  posttrain log sync results/grpo --to mlflow logger.mlflow.tracking_uri=http://localhost:5000

The tracker is asked which steps it has of the run, and gets the others: after an outage, or for a run without this tracker.
Settings are those under `logger` of the run's config, and those given here. Run it while no process trains in the folder.
exit codes: 0 it has all steps · 1 it could not be reached · 64 bad input
"""
EXIT_NOT_SENT = 1


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "log", "send a run to TensorBoard, W&B, MLflow, Trackio or SwanLab", epilog=EPILOG)
    parser.actions["sync"] = _sync_parser
    parser.add_argument("words", nargs="*", metavar="sync RUN --to TRACKER")
    parser.set_defaults(run=_without_action)


def _sync_parser(prog: str) -> argparse.ArgumentParser:
    parser = OverridesParser(
        prog=prog, description="Send the steps that a tracker does not have.", epilog=EPILOG, formatter_class=RAW
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--to", required=True, choices=TRACKERS, help="the tracker")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings under `logger`")
    parser.set_defaults(run=run)
    return parser


def _without_action(args: argparse.Namespace) -> int:
    raise InputError("log needs an action: posttrain log sync RUN --to TRACKER")


def run(args: argparse.Namespace) -> int:
    from posttrain.config import load_config
    from posttrain.reporting.loggers import make_sink, missing_client, recorded_run
    from posttrain.reporting.loggers.follower import Follower
    from posttrain.reporting.run_files import METRICS_FILE, newest_config, read_info, read_rows

    folder: Path = args.folder
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder{near_path(folder)}")
    rows = read_rows(folder / METRICS_FILE)
    if not rows:
        raise InputError(f"{folder} holds no run with steps: there is no row in {METRICS_FILE}")
    if problem := missing_client(args.to):
        raise InputError(problem)
    config = newest_config(folder)
    kind = str(read_info(folder).get("algorithm", "grpo"))
    settings = load_config(kind, config if config.exists() else None, args.words).config.logger
    follower = Follower(
        args.to, partial(make_sink, args.to, settings), recorded_run(folder), num_answers=settings.num_rollouts_to_log
    )
    follower.send_all(is_finished=read_info(folder).get("status") == "finished")
    if follower.problem:
        print(f"{args.to} could not get the steps: {follower.problem}")
        return EXIT_NOT_SENT
    print(
        f"{args.to} has the steps {rows[0]['step']} to {rows[-1]['step']} of {folder}; {follower.num_sent:,} were sent now"
    )
    return 0
