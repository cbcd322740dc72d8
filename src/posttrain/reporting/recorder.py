"""The recorder of a run: writes each step to the run folder and shows it on the console.

Everything of a step is on disk when `record_step` returns. The row of `metrics.jsonl` is written last, so a row that
exists has its rollouts. The loop records a step before it saves the checkpoint of that step, so a resumed run finds a
row for every step that it does not repeat.
"""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from posttrain.config import LoggerConfig
from posttrain.errors import RESTART, ExitCode, Superseded, reason_of
from posttrain.files import durable
from posttrain.files.locks import now_text
from posttrain.reporting import results, wording
from posttrain.reporting.console import Console
from posttrain.reporting.examination import Examination
from posttrain.reporting.image_files import write_images
from posttrain.reporting.loggers import RECORD_ID, Loggers, recorded_run
from posttrain.reporting.machines import AskRanks, GpuMonitor, WorkerRows
from posttrain.reporting.presentation import RecorderSettings
from posttrain.reporting.report import write_report
from posttrain.reporting.rows import (
    num_all_unscored,
    training_row,
    validation_row,
    without_non_finite,
    write_rollouts,
)
from posttrain.reporting.run_data import load_run
from posttrain.reporting.run_files import (
    CONFIG_FILE,
    FINISHED,
    INFO_FILE,
    LOG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    ROLLOUTS_FOLDER,
    UNSCORED_FILE,
    Row,
    append_rows,
    complete_row,
    config_files,
    config_from_step,
    newest_config,
    open_run,
    read_info,
    write_text,
)
from posttrain.reporting.step_display import StepDisplay
from posttrain.reporting.token_files import Pieces, write_tokens
from posttrain.reporting.wording import Line

if TYPE_CHECKING:
    from posttrain.files.run_folder_lock import Attempt
    from posttrain.types import Group, StepReport, TokenTrace

REPORT_PERIOD_S = 10.0
REPORT_TIME_SHARE = 0.02  # of the run time that rendering the report may take
MAX_KEPT_WARNINGS = 100
MAX_REASONS_PER_STEP = 20
LOGGERS_LIMIT_S, CRASH_LIMIT_S = 60.0, 5.0  # for sending what trackers do not have yet, when a run ends
FENCE_PERIOD_S = 1.0  # a line of the log does not look for a newer attempt more often
LOST_STEP = "lost_up_to_step"  # in run.json


class RunRecorder:
    def __init__(
        self,
        folder: Path,
        run: RecorderSettings,
        *,
        loggers: Loggers | None = None,
        gpus: GpuMonitor | None = None,
        stream: TextIO | None = None,
        attempt: Attempt | None = None,
        pieces: Pieces | None = None,
        ask_ranks: AskRanks = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder)
        self._run = run
        self._examination = Examination(self.folder, run.presentation.kind, run.settings)
        self._problem: str | None = None  # an error that the doctor found in the latest step
        self._loggers = loggers or Loggers(LoggerConfig())
        self._gpus = gpus  # None: not looked at
        self._attempt = attempt  # None: nothing else writes to the folder
        self._looked: tuple[float, bool] | None = None  # when the attempt was looked up, and whether it may write
        self._pieces = pieces  # None: token data is not written
        self._workers = WorkerRows(self.folder, ask_ranks, self._may_write)
        self._clock = clock
        self._console = Console(stream or sys.stdout, quiet=run.quiet, clock=clock)
        self._display = StepDisplay(self._console, run, clock)
        if attempt is not None:
            self._console.log([Line(attempt.heading)])
        self._info: Row = {}
        self._step = 0
        self._started: float | None = None
        self._earlier_wall_s = 0.0
        self._next_report = 0.0
        self._warnings: dict[str, Row] = {}
        self._warnings_shown: set[str] = set()
        self._non_finite_named: set[str] = set()
        self._reasons_written: set[str] = set()
        self._num_losses = 0  # how often the folder was found deleted
        self._has_rows = False  # this process has written one
        self._lost_step: int | None = None  # the record of the steps up to this one was in a folder that was deleted
        self._is_complete = False  # the run in the folder needs no more steps, so no file is changed

    # ------------------------------------------------------------------ the life of a run

    def start(self, resumed_step: int) -> None:
        """Prepare the folder for step `resumed_step` + 1; 0 is a fresh run."""
        self._started = self._clock()
        self._step = resumed_step
        info = read_info(self.folder) if resumed_step else {}
        self._lost_step = info.get(LOST_STEP)
        is_finished = info.get("status") == FINISHED
        if resumed_step > self._run.max_steps or (resumed_step == self._run.max_steps and is_finished):
            self._is_complete = True
            return
        if self._attempt is not None:
            self._attempt.confirm()  # loading the model may have taken minutes
            self._attempt.has_begun = True
            self._num_losses = self._attempt.num_losses  # before there was anything to lose
        keeps_id = not resumed_step or not self._trains_rows_anew_with_changes(resumed_step)
        notes, losses = open_run(self.folder, resumed_step)
        if resumed_step:
            self._examination.resume()
        self._open_log()
        before = read_info(self.folder)  # empty for a fresh run: its predecessor was put aside
        if not before and (self.folder / INFO_FILE).exists():
            losses = [
                *losses,
                f"{INFO_FILE} is damaged: the warnings and changed settings of the steps before are lost",
            ]
        earlier_changes = [row for row in before.get("config_changes", []) if row["from_step"] <= resumed_step]
        changes = self._write_config(resumed_step)
        self._earlier_wall_s = float(before.get("wall_s", 0.0))
        for row in before.get("warnings", []):
            if row["step"] <= resumed_step:
                again = self._warnings.get(_kind_of(row["text"]), {"count": 0})  # given before start, in this process
                self._warnings[_kind_of(row["text"])] = {**row, "count": row["count"] + again["count"]}
        resumed_at = [*before.get("resumed_at_steps", []), *([resumed_step] if resumed_step else [])]
        self._info = {
            "title": self._run.title,
            "algorithm": self._run.presentation.kind,
            "headline": asdict(self._run.presentation.headline),
            "max_steps": self._run.max_steps,
            "device_word": self._run.device_word,
            **asdict(self._run.hardware),
            "started_at": before.get("started_at", now_text()),
            RECORD_ID: (keeps_id and before.get(RECORD_ID)) or uuid.uuid4().hex[:12],
            "resumed_at_steps": resumed_at,
            "config_changes": [*earlier_changes, *changes],
        }
        for loss in losses:
            self.warn(loss)
        self._write_info("running")
        if self._gpus is not None:
            self._gpus.start()
        for line in self._loggers.start(recorded_run(self.folder, self._run.settings)):
            self.warn(line)
        for note in notes:
            self.say(note)
        self._console.show([Line(line) for line in self._run.header])
        state = f"resumed after step {resumed_step}" if resumed_step else "new"
        changed = f"; changed: {', '.join(row['key'] for row in changes)}" if changes else ""
        self.say(f"{'folder':<9}{self.folder}, {state}{changed}")

    def begin_step(self, step: int) -> None:
        """Show the header of a step above its stages. Without this call the header comes with the results."""
        self._workers.step = step
        self._display.header(step)
        self.stage("Preparing batch")

    def record_step(self, step: int, report: StepReport, validation: StepReport | None) -> None:
        row = training_row(step, report, self._run.hardware, self._gpus.take() if self._gpus is not None else {})
        if validation is not None:
            row |= validation_row(step, validation)
        row = self._write(
            row,
            train_groups=report.groups,
            validation_groups=validation.groups if validation else (),
            tokens=report.tokens,
        )
        self._step = step
        self._display.step(row, report, validation, self._rollouts_file("step", step))
        self._follow_up(row, report.groups, (*report.warnings, *(validation.warnings if validation else ())))
        self._workers.step_done(step)

    def record_save(self, step: int, seconds: float, tokenizer: str) -> None:
        self._display.save(step, seconds, tokenizer)

    def reason_to_stop(self) -> str | None:
        return self._problem if self._run.stop_on_error else None

    def record_validation(self, step: int, validation: StepReport) -> None:
        """A validation that comes without its training step: the one before training (step 0), or one that was left
        out when the run was stopped, and completes the row of its step."""
        row = self._write(validation_row(step, validation), train_groups=None, validation_groups=validation.groups)
        self._display.validation(row, validation)
        self._follow_up(row, (), validation.warnings)

    def _follow_up(self, row: Row, groups: Sequence[Group], warnings: Sequence[str]) -> None:
        """What comes after a row is written and shown."""
        for warning in warnings:
            self.warn(warning)
        self._examine(row, groups)
        for line in self._loggers.wake():
            self.warn(line)
        self._refresh_report()

    def finish(self, reason: str, *, is_stopped: bool = False) -> ExitCode:
        """Write the final state of the run and show how it ended."""
        is_finished = self._step >= self._run.max_steps and not is_stopped
        if not self._is_complete:
            self._confirm_folder()
        run = load_run(self.folder)
        code = ExitCode.DONE
        if num_rollouts := num_all_unscored(run.rows):
            code = ExitCode.NO_PROGRESS
            reason += (
                f", but not one of the {num_rollouts:.0f} rollouts could be scored, so nothing was learnt. "
                f"{UNSCORED_FILE} has the reasons; fix the reward, and begin again with {RESTART}"
            )
        elif self._lost_step is not None:
            code = ExitCode.CRASHED
            lost = f"the record of the steps up to {self._lost_step} is lost"
            reason += f", but {self.folder} was deleted meanwhile, and {lost}"
        if not self._is_complete:
            if is_finished:
                self._examine(None, ())
            status = FINISHED if is_finished else "ended early"
            self._refresh_report(self._info_with(status, reason))
            self._write_info(status, reason)  # last: a run that is said to be finished is not written to again
            self._end_loggers(is_finished=is_finished, limit_s=LOGGERS_LIMIT_S)
            if is_finished:
                text = f"Max number of steps has been reached ({self._run.max_steps}), stopping training"
                self._display.long_form([Line(text)])
        repeated = [row for row in self._warnings.values() if row["count"] > 1]
        lines = [Line(f"  • {row['count']} warnings like: {row['text']}", "warning") for row in repeated]
        report = str(self.folder / REPORT_FILE)
        findings = run.findings if self._is_complete else self._examination.findings
        headline = self._run.presentation.headline
        lines = results.final_lines(headline, run.rows, reason, self._wall_s(), report, findings) + lines
        self._console.show(lines, even_if_quiet=True)
        return code

    def _end_loggers(self, *, is_finished: bool, limit_s: float) -> None:
        if self._gpus is not None:
            self._gpus.close()
        for line in self._loggers.finish(is_finished=is_finished, limit_s=limit_s):
            self.warn(line)

    def record_crash(self, error: BaseException, traceback: str) -> None:
        """Write why a run that has begun ends. What cannot be written is left out: the error itself counts more."""
        with suppress(OSError, Superseded):
            if self._attempt is not None:
                self._attempt.confirm()
            if not self._info:
                self._open_log()
            self._console.log([Line(line) for line in traceback.rstrip("\n").split("\n")])
            if not self._info:  # it was beginning; run.json is that of the attempt before
                return
            is_request = isinstance(error, KeyboardInterrupt)
            reason = (
                "stopped at once, by a second Ctrl-C" if is_request else f"{type(error).__name__}: {reason_of(error)}"
            )
            self._write_info("ended early" if is_request else "crashed", reason)
            self._end_loggers(is_finished=False, limit_s=CRASH_LIMIT_S)
            self._refresh_report(self._info)

    # ------------------------------------------------------------------ single lines and progress

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        if phase := wording.stage_of(label, total):
            self._workers.phase(phase)
        return self._display.progress(label, total)

    def stage(self, text: str) -> None:
        """One line when a stage begins, in the long form."""
        self._workers.phase(text)
        self._display.stage(text)

    def say(self, text: str) -> None:
        self._console.show([Line(text)])

    def warn(self, text: str) -> None:
        """Show a warning once; the report has the count.

        Warnings that differ in their numbers only, as in "step 7: 3 of 64 ...", are the same warning.
        """
        kind = _kind_of(text)
        if kind in self._warnings:
            self._warnings[kind]["count"] += 1
        elif len(self._warnings) < MAX_KEPT_WARNINGS:
            self._warnings[kind] = {"step": self._step, "text": text, "count": 1}
        if kind not in self._warnings_shown:
            self._warnings_shown.add(kind)
            self._console.show([Line(f"warning: {text}", "warning")], even_if_quiet=True)

    def _examine(self, row: Row | None, groups: Sequence[Group]) -> None:
        """Let the doctor look at a row, or (None) at the run as a whole. What it finds is written and shown."""
        self._problem = None
        try:
            found = self._examination.finish() if row is None else self._examination.examine(row, groups)
        except Exception as error:  # a failing rule must not end the run
            self.warn(f"the doctor failed: {type(error).__name__}: {error}")
            return
        for finding in found:
            line = Line(f"doctor: {finding.line}", results.FINDING_STYLES[finding.severity])
            self._console.show([line], even_if_quiet=finding.severity != "note")
        self._problem = next((finding.line for finding in found if finding.severity == "error"), None)

    # ------------------------------------------------------------------ files

    def _write(
        self,
        row: Row,
        *,
        train_groups: tuple[Group, ...] | None,
        validation_groups: tuple[Group, ...],
        tokens: tuple[TokenTrace, ...] = (),
    ) -> Row:
        """Write everything of one step, the row of metrics last. Returns the row as written.

        `train_groups` None: a validation alone, which is added to the row of its step if there is one.
        """
        assert self._started is not None, "start() was not called"
        row, non_finite = without_non_finite(row)
        for is_last_try in (False, False, True):
            try:
                self._confirm_folder()
                self._write_files(row, train_groups, validation_groups, tokens)
                break
            except FileNotFoundError:  # the folder is being deleted
                if is_last_try:
                    raise
        for key, value in non_finite.items():
            if key not in self._non_finite_named:
                self._non_finite_named.add(key)
                self.warn(f"{key} is {value} at step {row['step']}; {METRICS_FILE} holds null for it")
        return row

    def _write_files(
        self,
        row: Row,
        train_groups: tuple[Group, ...] | None,
        validation_groups: tuple[Group, ...],
        tokens: tuple[TokenTrace, ...],
    ) -> None:
        step = row["step"]
        for name, stage, groups in (
            ("step", "train", train_groups),
            ("validation_step", "validation", validation_groups),
        ):
            if groups:
                write_images(self.folder, (image for group in groups for image in group.task.images))
                write_rollouts(self._rollouts_file(name, step), groups)
                self._write_unscored(step, stage, groups)
        if tokens and self._pieces is not None:
            write_tokens(self.folder / ROLLOUTS_FOLDER / f"step_{step}.tokens.npz", tokens, self._pieces)
        if train_groups is None:
            complete_row(self.folder / METRICS_FILE, row)
        else:
            append_rows(self.folder / METRICS_FILE, [row])
        self._has_rows = True

    def _rollouts_file(self, name: str, step: int) -> Path:
        return self.folder / ROLLOUTS_FOLDER / f"{name}_{step}.jsonl.gz"

    def _confirm_folder(self) -> None:
        """Before writing: Superseded if a newer attempt has the folder. What can be restored of a deleted one is."""
        num_losses = self._num_losses
        if self._attempt is not None:
            self._attempt.confirm()
            num_losses = self._attempt.num_losses
        if num_losses == self._num_losses and (not self._has_rows or (self.folder / METRICS_FILE).exists()):
            return
        self._lost_step = self._step
        self.folder.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(self.folder / CONFIG_FILE, self._config_bytes())
        self._open_log()
        self.warn(
            f"{self.folder} or its {METRICS_FILE} was deleted or replaced after step {self._step}. It is made again "
            "and the run continues, but what was in it is lost, and the run will not end with exit code 0"
        )
        self._write_info("running")
        self._num_losses, self._has_rows = num_losses, False

    def _open_log(self) -> None:
        self._console.log_to(self.folder / LOG_FILE, self._may_write)

    def _may_write(self) -> bool:
        """Whether no newer attempt has the folder, for files that are no record; looked up at most once in a period."""
        if self._attempt is None:
            return True
        if self._looked is None or self._clock() - self._looked[0] >= FENCE_PERIOD_S:
            self._looked = self._clock(), not self._attempt.is_superseded
        return self._looked[1]

    def _config_bytes(self) -> bytes:
        return self._run.config_yaml.encode("utf-8", "backslashreplace")

    def _write_unscored(self, step: int, stage: str, groups: tuple[Group, ...]) -> None:
        """Write the counts per reason. Rare reasons are summed up: messages of a reward may all differ."""
        scores = [rollout.score for group in groups for rollout in group.rollouts]
        tracebacks = {
            score.error: score.traceback for score in reversed(scores) if not score.scored and score.traceback
        }
        reasons = wording.unscored_reasons(groups)
        is_taught = any(rollout.is_taught for group in groups for rollout in group.rollouts)
        rows: list[Row] = []
        for reason, count in reasons.most_common(MAX_REASONS_PER_STEP):
            traceback = tracebacks.get(reason)
            self._display.unscored(reason, traceback, is_taught=is_taught)
            if reason in self._reasons_written:
                traceback = None  # already in the file
            elif len(self._reasons_written) < MAX_KEPT_WARNINGS:
                self._reasons_written.add(reason)
            rows.append({"step": step, "stage": stage, "reason": reason, "count": count, "traceback": traceback})
        rest = reasons.total() - sum(row["count"] for row in rows)
        if rest:
            rows.append({"step": step, "stage": stage, "reason": "other reasons", "count": rest, "traceback": None})
        if rows:
            append_rows(self.folder / UNSCORED_FILE, rows)

    def _write_config(self, resumed_step: int) -> list[Row]:
        """Write the config unless it equals the one in force. A config that steps were trained with is never replaced.

        Returns the settings that differ from those of the step before.
        """
        path, content = self.folder / CONFIG_FILE, self._config_bytes()
        files = config_files(self.folder) if resumed_step else {}
        for from_step in [step for step in files if step > resumed_step]:
            files.pop(from_step).unlink()  # no remaining step was trained with it
        if not files:
            durable.write_bytes(path, content)
            return []
        changes = self._run.changes_since(next(reversed(files.values())).read_text("utf-8", "replace"))
        from_step = resumed_step + 1
        if changes:
            durable.write_bytes(self.folder / config_from_step(from_step), content)
            self.say(f"the config differs from that of the steps so far: see {config_from_step(from_step)}")
        return [{"from_step": from_step, "key": row.key, "old": row.old, "new": row.new} for row in changes]

    def _trains_rows_anew_with_changes(self, resumed_step: int) -> bool:
        """Whether trackers may have steps that are now trained with other settings: then they get a new run."""
        config = newest_config(self.folder)
        if load_run(self.folder).last_step <= resumed_step or not config.exists():
            return False
        return any(change.is_training for change in self._run.changes_since(config.read_text("utf-8", "replace")))

    def _info_with(self, status: str, reason: str) -> Row:
        return self._info | {
            "status": status,
            "reason": reason,
            LOST_STEP: self._lost_step,
            "updated_at": now_text(),
            "wall_s": self._earlier_wall_s + self._wall_s(),
            "warnings": list(self._warnings.values()),
            "findings": dict(Counter(finding.severity for finding in self._examination.findings)),
            "held_until": {finding.rule: finding.last_step for finding in self._examination.findings},
        }

    def _write_info(self, status: str, reason: str = "") -> None:
        self._info = self._info_with(status, reason)
        write_text(self.folder / INFO_FILE, json.dumps(self._info, indent=2) + "\n")

    def _wall_s(self) -> float:
        return self._clock() - self._started if self._started is not None else 0.0

    def _refresh_report(self, final: Row | None = None) -> None:
        started = self._clock()
        if final is None and started < self._next_report:
            return
        try:
            if final is None:
                self._write_info("running")
            write_report(self.folder, final)
        except Exception as error:  # a failing report must not end the run
            self.warn(f"{REPORT_FILE} could not be written: {type(error).__name__}: {error}")
        took_s = self._clock() - started
        self._next_report = started + max(REPORT_PERIOD_S, took_s / REPORT_TIME_SHARE)


def _kind_of(warning: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", warning)
