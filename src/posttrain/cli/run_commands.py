"""Commands about the folder of a run: `posttrain status`, `posttrain doctor` and `posttrain log sync`."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.checkpointing import CheckpointStore
from posttrain.cli.overrides_parser import OverridesParser, add_command
from posttrain.errors import ExitCode, InputError, near_path
from posttrain.files.locks import now_text
from posttrain.files.run_folder_lock import AttemptRecord, holder_of, read_attempts
from posttrain.reporting.run_files import INFO_FILE, METRICS_FILE, Row, newest_config, read_info, read_rows

if TYPE_CHECKING:
    from posttrain.files.json_files import JsonObject
    from posttrain.reporting.doctor import Finding, ShownAnswer

# -- status: whether a run is alive, who holds its folder, how far it is, and why it stopped ---------------------------


def add_status(parser: OverridesParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of a run")
    parser.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    print("\n".join(status_lines(args.folder, time.time())))
    return 0


def status_lines(folder: Path, now: float) -> list[str]:
    attempts, info = read_attempts(folder), read_info(folder)
    checkpoints = CheckpointStore(folder).steps()
    if not (attempts or info or checkpoints):
        raise InputError(f"{folder}: there is no run in it; name the folder of one (checkpointing.checkpoint_dir)")
    held = holder_of(folder, lambda: now)
    last = attempts[-1] if attempts else None
    holder = "no process: the folder is free"
    if held is not None:
        beat = f", heartbeat {now - held.heartbeat:.0f} s old" if held.is_judged_by_heartbeat else ""
        holder = f"{held.holder}{beat}"
    facts = {"state": _state(info, held, last), "held by": holder, "why": _why(info, held, last, now)}
    if last is not None:
        code = "a crash" if last.exit_code is None else f"exit code {last.exit_code}"
        end = f", ended {last.ended} with {code}" if last.ended else ""
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


# -- doctor: diagnose a run and suggest settings that fix it ---------------------------------------------------

WIDTH = 110


def add_doctor(parser: OverridesParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="the folder of a run")
    parser.switch("--rules", "print the rules instead")
    parser.switch("--json", "print the findings as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    if args.rules:
        print(rules_text())
        return 0
    if args.folder is None:
        raise InputError("doctor needs the folder of a run, e.g. posttrain doctor results/grpo")
    report = examined(args.folder)
    print(json.dumps(report.to_json(), indent=2) if args.json else report.to_text())
    return ExitCode.ERROR_FOUND if report.has_errors else 0


def rules_text() -> str:
    from posttrain.reporting.doctor.doctor import RULES

    blocks = [
        [f"{rule.id}, of {rule.of}: {rule.condition}", *_wrapped("", rule.advice.replace("`", ""))] for rule in RULES
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


@dataclass
class Report:
    folder: Path
    system: str
    kind: str
    num_steps: int
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> JsonObject:
        from posttrain.reporting.doctor.findings import health

        return {
            "run": str(self.folder),
            "system": self.system,
            "kind": self.kind,
            "steps": self.num_steps,
            "verdict": health(self.findings, self.num_steps),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def to_text(self) -> str:
        from posttrain.reporting.results import verdict

        of = "" if self.system == "posttrain" else f" of {self.system}"
        steps = f"{self.num_steps:,} step{'' if self.num_steps == 1 else 's'}"
        lines = [f"{self.folder}: {self.kind.upper()}{of}, {steps}: {verdict(self.findings, self.num_steps)}"]
        for finding in self.findings:
            lines += ["", *_finding_lines(finding)]
        return "\n".join(lines)


def examined(folder: Path) -> Report:
    from posttrain.apps.watch.foreign import EXPECTED, open_foreign_run
    from posttrain.reporting.examination import examine, examine_folder

    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder{near_path(folder)}")
    if (folder / INFO_FILE).exists() and (folder / METRICS_FILE).exists():
        data, findings = examine_folder(folder)
        return Report(folder, "posttrain", str(data.info.get("algorithm", "grpo")), data.last_step, findings)
    foreign = open_foreign_run(folder)
    if foreign is None or not foreign.rows:
        raise InputError(f"{folder} holds no run: expected {EXPECTED}")
    found = examine(foreign.rows, foreign.kind, foreign.settings, foreign.groups, foreign.names)
    return Report(folder, foreign.system, foreign.kind, foreign.rows[-1]["step"], found)


def _finding_lines(finding: Finding) -> list[str]:
    lasts = finding.last_step not in (None, finding.step)
    steps = f"steps {finding.step} to {finding.last_step}" if lasts else f"step {finding.step}"
    lines = [f"{finding.severity:<9}{finding.rule}, {steps}"]
    lines += _wrapped("", finding.text[0].upper() + finding.text[1:] + ".")
    for index, fix in enumerate(finding.fixes):
        lines += _wrapped("fix" if index == 0 else "or", fix)
    for answer in finding.answers:
        lines += _wrapped("answer", _shown(answer))
    return [*lines, *_wrapped("source", f"{finding.metric}; {finding.source}")]


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{'':9}{label:<8}" if label else " " * 9,
        subsequent_indent=" " * (17 if label else 9),
    )


def _shown(answer: ShownAnswer) -> str:
    from posttrain.reporting.wording import number, printable

    reward = "unscored" if answer.reward is None else f"reward {number(answer.reward)}"
    length = "" if answer.num_tokens is None else f", {answer.num_tokens} tokens"
    text = printable(" ".join(answer.text.split()))[:200]
    return f"{answer.id}, {reward}{length}: {text}"


# -- log sync: send the steps of a run to a tracker --------------------------------------------------------------------

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
EXIT_NOT_SENT = 1


def add_log(parser: OverridesParser) -> None:
    sync = add_command(parser.commands(), "sync", "send the steps that a tracker does not have")
    sync.texts = ("log",)
    sync.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    sync.option("--to", "the tracker", required=True, choices=TRACKERS)
    sync.words(help="settings under `logger`")
    sync.set_defaults(run=_sync)


def _sync(args: argparse.Namespace) -> int:
    from posttrain.config import load_config
    from posttrain.reporting.loggers import make_sink, missing_client, recorded_run
    from posttrain.reporting.loggers.follower import Follower

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
    steps = f"{rows[0]['step']} to {rows[-1]['step']}"
    print(f"{args.to} has the steps {steps} of {folder}; {follower.num_sent:,} were sent now")
    return 0
