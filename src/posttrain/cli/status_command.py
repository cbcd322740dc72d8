"""`posttrain status FOLDER`: whether a run is alive, who holds its folder, how far it is, and why it stopped."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.errors import InputError
from posttrain.files.locks import now_text
from posttrain.files.run_folder_lock import AttemptRecord, holder_of, read_attempts

if TYPE_CHECKING:
    from posttrain.reporting.run_files import Row

SUMMARY = "is a run alive, who holds its folder, how far is it, why did it stop"
EPILOG = """\
FOLDER is the run's folder (checkpointing.checkpoint_dir; with logger.log_dir the metrics are in that one). Nothing is
written, and nothing is loaded: checkpoints are listed, not verified. The exit code is 0 whatever the state of the run is,
and 64 if there is no run in FOLDER.
"""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "status", SUMMARY, epilog=EPILOG)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of a run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.words:
        raise InputError(f"status takes one FOLDER; unexpected: {args.words[0]!r}")
    print("\n".join(status_lines(args.folder, time.time())))
    return 0


def status_lines(folder: Path, now: float) -> list[str]:
    from posttrain.checkpointing import CheckpointStore
    from posttrain.reporting.run_files import METRICS_FILE, read_info, read_rows

    attempts, info = read_attempts(folder), read_info(folder)
    store = CheckpointStore(
        folder, keep_top_k=None, metric_name=None, higher_is_better=True, save_period=1, say=lambda line: None
    )
    checkpoints = store.steps()
    if not (attempts or info or checkpoints):
        raise InputError(f"{folder}: there is no run in it; name the folder of one (checkpointing.checkpoint_dir)")
    held = holder_of(folder, lambda: now)
    last = attempts[-1] if attempts else None
    facts = {"state": _state(info, held, last), "held by": _held_by(held, now), "why": _why(info, held, last, now)}
    if last is not None:
        end = f", ended {last.ended} with {_code(last)}" if last.ended else ""
        facts["attempt"] = f"{last.number}, on {last.holder.host} since {last.started}{end}"
    if info:
        done = max((row["step"] for row in read_rows(folder / METRICS_FILE)), default=0)
        facts["step"] = f"{done} of {info.get('max_steps')}, written {info.get('updated_at')}"
    if checkpoints:
        newest = folder / f"step_{checkpoints[-1]}"
        saved = f", saved {now_text(newest.stat().st_mtime)}" if newest.exists() else ""
        facts["checkpoint"] = f"{newest.name}{saved}"
    else:
        facts["checkpoint"] = "none"
    return [str(folder), *(f"  {name:<11} {text}" for name, text in facts.items() if text)]


def _state(info: Row, held: AttemptRecord | None, last: AttemptRecord | None) -> str:
    if held is not None:
        return "alive"
    if last is not None and last.ended is None:
        return "killed"
    if last is not None and last.error is not None:
        return "crashed" if last.exit_code is None else "ended by an error"
    return str(info.get("status", "not begun")) if info.get("status") != "running" else "ended"


def _held_by(held: AttemptRecord | None, now: float) -> str:
    if held is None:
        return "no process: the folder is free"
    beat = f", heartbeat {now - held.heartbeat:.0f} s old" if held.is_judged_by_heartbeat else ""
    return f"{held.holder}{beat}"


def _why(info: Row, held: AttemptRecord | None, last: AttemptRecord | None, now: float) -> str:
    """Why it does not run."""
    if held is not None:
        return ""
    if last is not None and last.ended is None:
        causes = "a kill -9, out of memory, a lost machine, or storage that could not be written"
        return f"no heartbeat for {now - last.heartbeat:.0f} s and no end: {causes}"
    if last is not None and last.error is not None:
        return last.error
    return str(info.get("reason", ""))


def _code(last: AttemptRecord) -> str:
    return "a crash" if last.exit_code is None else f"exit code {last.exit_code}"
