"""`posttrain doctor`: what is wrong with a run, and the setting that fixes it."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.errors import ExitCode, InputError, near_path

if TYPE_CHECKING:
    from posttrain.files.json_files import JsonObject
    from posttrain.reporting.doctor import Answer, Finding

WIDTH = 110
EPILOG = """\
examples:
  posttrain doctor results/grpo                 a run of posttrain, finished or not
  posttrain doctor outputs/trl-grpo             a run of TRL, NeMo RL, verl or prime-rl, as far as its logs go
  posttrain doctor results/grpo --json          the same for programs
  posttrain doctor --rules                      what is looked for, what it means and what to do

A run looks at itself with the same rules while it goes on;
doctor.on_error=stop lets an error save and stop it.
exit codes: 0 no error found · 3 an error found · 64 no run in the folder
"""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "doctor", "what is wrong with a run, and the setting that fixes it", epilog=EPILOG)
    parser.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="the folder of a run")
    parser.add_argument("--rules", action="store_true", help="print the rules instead")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.rules:
        print(rules_text())
        return 0
    if args.folder is None:
        raise InputError("doctor needs the folder of a run, e.g. posttrain doctor results/grpo")
    report = examined(args.folder)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(report.to_text())
    return ExitCode.ERROR_FOUND if report.has_errors else 0


def rules_text() -> str:
    from posttrain.apps.doctor.advice import ADVICE
    from posttrain.reporting.doctor.doctor import RULES

    blocks = [
        [f"{rule.id}, of {rule.of}: {rule.condition}", *_wrapped("", ADVICE[rule.id].replace("`", ""))]
        for rule in RULES
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


class Report:
    def __init__(self, folder: Path, system: str, kind: str, num_steps: int, findings: list[Finding]) -> None:
        self.folder, self.system, self.kind, self.num_steps = folder, system, kind, num_steps
        self.findings = findings

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> JsonObject:
        from posttrain.reporting.doctor import worst

        return {
            "run": str(self.folder),
            "system": self.system,
            "kind": self.kind,
            "steps": self.num_steps,
            "verdict": worst(self.findings) or "healthy",
            "findings": [finding.to_json() for finding in self.findings],
        }

    def to_text(self) -> str:
        from posttrain.reporting.results import verdict

        of = "" if self.system == "posttrain" else f" of {self.system}"
        steps = f"{self.num_steps:,} step{'' if self.num_steps == 1 else 's'}"
        lines = [f"{self.folder}: {self.kind.upper()}{of}, {steps}: {verdict(self.findings)}"]
        for finding in self.findings:
            lines += ["", *_finding_lines(finding)]
        return "\n".join(lines)


def examined(folder: Path) -> Report:
    from posttrain.apps.watch.foreign import EXPECTED, open_foreign_run
    from posttrain.reporting.doctor import Doctor
    from posttrain.reporting.doctor.findings import answers_that_show
    from posttrain.reporting.examination import examine_folder
    from posttrain.reporting.run_files import INFO_FILE, METRICS_FILE

    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder{near_path(folder)}")
    if (folder / INFO_FILE).exists() and (folder / METRICS_FILE).exists():
        data, findings = examine_folder(folder)
        return Report(folder, "posttrain", str(data.info.get("algorithm", "grpo")), data.last_step, findings)
    foreign = open_foreign_run(folder)
    if foreign is None or not foreign.rows:
        raise InputError(f"{folder} holds no run: expected {EXPECTED}")
    doctor = Doctor(foreign.kind, foreign.settings, foreign.names)
    doctor.replay(foreign.rows)
    doctor.finish()
    found = [
        replace(finding, answers=answers_that_show(foreign.groups(finding.step), doctor.shown[finding.rule]))
        for finding in doctor.findings
    ]
    return Report(folder, foreign.system, foreign.kind, foreign.rows[-1]["step"], found)


def _finding_lines(finding: Finding) -> list[str]:
    until = (
        f"s {finding.step} to {finding.last_step}"
        if finding.last_step not in (None, finding.step)
        else f" {finding.step}"
    )
    lines = [f"{finding.severity:<9}{finding.rule}, step{until}"]
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


def _shown(answer: Answer) -> str:
    from posttrain.reporting.wording import number, printable

    reward = "unscored" if answer.reward is None else f"reward {number(answer.reward)}"
    length = "" if answer.num_tokens is None else f", {answer.num_tokens} tokens"
    text = printable(" ".join(answer.text.split()))[:200]
    return f"{answer.id}, {reward}{length}: {text}"
