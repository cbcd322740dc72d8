"""The outer loop of every algorithm: resume, step, validate, record, save, stop.

The order within a step matters for exact resumption. A step's row is written before its checkpoint. So after a kill at
any point, the rows of a checkpoint exist, and later rows are removed when the run resumes from it.

A run that is asked to stop does so within the step. Before the first update the model is unchanged: the step is
abandoned, and repeated when the run resumes. After the updates, the step is saved; a validation that was due runs when
the run resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.checkpointing import Interruption, SaveDeadline
from posttrain.checkpointing.save_and_resume import named_metric
from posttrain.errors import EXIT_ERROR_FOUND, StopRequested
from posttrain.roles import Algorithm, Ending, Finished, Recorder, Saver
from posttrain.types import StepReport

EXIT_DONE = 0
EXIT_CODES: dict[Ending, int] = {"complete": EXIT_DONE, "record lost": 1, "nothing scored": 65}
FINISHED = "finished"
STOPPED_BY = "stopped by signal"
STOPPED_BY_DOCTOR = "stopped by the doctor"


@dataclass(frozen=True)
class LoopSettings:
    max_steps: int
    val_period: int  # 0 or less: never
    val_start_at: int
    val_at_start: bool
    val_at_end: bool
    stop_metric: str | None = None  # "val:accuracy" or "train:reward"
    stop_threshold: float | None = None


@dataclass
class TrainingLoop:
    settings: LoopSettings
    algorithm: Algorithm
    recorder: Recorder
    saver: Saver
    deadline: SaveDeadline
    interruption: Interruption = field(default_factory=Interruption)
    _is_saved: bool = False  # the state at the requested stop is saved

    def run(self) -> int:
        """Train to the end, or until there is a reason to stop. Returns the process's exit code."""
        first = self.saver.resume() + 1
        with self.interruption as interruption:
            self.recorder.start(first - 1)
            if first > self.settings.max_steps and not self.saver.owes_validation:
                done = f"the checkpoint is at step {first - 1} of {self.settings.max_steps}"
                return EXIT_CODES[self.recorder.finish(f"nothing to do: {done}")]
            self.deadline.start()
            try:
                reason = self._begin(first) or self._train(first)
            except Exception as error:
                self.saver.abandon(error)
                raise
            is_stopped = reason.startswith(STOPPED_BY)
            ending = self.recorder.finish(reason, is_stopped=is_stopped)
        if reason.startswith(STOPPED_BY_DOCTOR):
            return EXIT_ERROR_FOUND
        if not is_stopped or interruption.signal is None:
            return EXIT_CODES[ending]  # a signal at the end of the run has no effect
        # Exit code 85 would indicate a checkpoint.
        return interruption.exit_code if self._is_saved else 128 + interruption.signal

    def _begin(self, first: int) -> str | None:
        """The validation before training, or the one skipped when the run was stopped. Returns a reason to stop."""
        is_due = self.saver.owes_validation or (first == 1 and self.settings.val_at_start)
        try:
            validation = self._validate(first - 1) if is_due else None
        except StopRequested:
            return self._stopped(first - 1, None)
        if validation is not None:
            self.recorder.record_validation(first - 1, validation)
        if self.interruption.is_asked():
            return self._stopped(first - 1, None)
        if first > self.settings.max_steps:
            return FINISHED
        return self._reached_threshold(None, validation) if first > 1 else None

    def _train(self, first: int) -> str:
        """Steps until there is a reason to stop; returns the reason."""
        for step in range(first, self.settings.max_steps + 1):
            self.recorder.begin_step(step)
            self.saver.begin_step()
            try:
                report = self.saver.with_timings(self.algorithm.step(step))
            except StopRequested:
                return self._stopped(step - 1, None)
            self.interruption.end_step()
            validation, is_owed = self._validation_after(step)
            self.recorder.record_step(step, report, validation)
            reason = None if is_owed else self._reason_to_stop(step, report, validation)
            if reason is None and self.interruption.is_asked():
                return self._stopped(step, (report, validation), is_owed=is_owed)
            is_wanted = self.interruption.take_save_request()
            self.saver.after_step(step, report, validation, is_last=reason is not None, is_wanted=is_wanted)
            if reason:
                return reason
            self.deadline.mark_step()
        raise AssertionError("the last step is a reason to stop")

    def _validation_after(self, step: int) -> tuple[StepReport | None, bool]:
        """The validation of a step, and whether a due validation is skipped because the run stops."""
        if not self._is_validation_due(step):
            return None, False
        if self.interruption.is_asked():
            return None, True
        try:
            return self._validate(step), False
        except StopRequested:
            return None, True

    def _stopped(self, step: int, finished: Finished | None, *, is_owed: bool = False) -> str:
        """Save the state after `step`, the last finished step. Returns the reason to stop."""
        assert self.interruption.signal is not None
        reason = f"{STOPPED_BY} {self.interruption.signal.name}"
        if step == 0:
            return f"{reason} before the first step was finished; there is nothing to save"
        obstacle = self.saver.save_and_stop(
            step, finished, owes_validation=is_owed, seconds_left=self.interruption.seconds_left()
        )
        self._is_saved = not obstacle
        saved = f"not saved: {obstacle}" if obstacle else "saved"
        return f"{reason} after step {step}, {saved}; the same command goes on from here"

    def _reason_to_stop(self, step: int, report: StepReport, validation: StepReport | None) -> str | None:
        if step == self.settings.max_steps:
            return FINISHED
        saved = "saved" if self.saver.is_enabled else "not saved: checkpointing is off"
        if self.deadline.must_save_now():
            return f"stopped after step {step} by checkpointing.checkpoint_must_save_by, {saved}"
        if (problem := self.recorder.reason_to_stop()) is not None:
            return f"{STOPPED_BY_DOCTOR} after step {step}, {saved}: {problem}"
        return self._reached_threshold(report, validation)

    def _reached_threshold(self, report: StepReport | None, validation: StepReport | None) -> str | None:
        name, threshold = self.settings.stop_metric, self.settings.stop_threshold
        if (
            name
            and threshold is not None
            and (value := named_metric(name, report, validation)) is not None
            and value >= threshold
        ):
            return f"{name} reached {value:g}, at least the threshold {threshold:g}"
        return None

    def _is_validation_due(self, step: int) -> bool:
        settings = self.settings
        periodic = settings.val_period > 0 and step % settings.val_period == 0 and step >= settings.val_start_at
        return periodic or (step == settings.max_steps and settings.val_at_end)

    def _validate(self, step: int) -> StepReport | None:
        self.recorder.stage(f"Starting validation at step {step}")
        validation = self.algorithm.validate(step)
        if validation is not None:
            self.saver.note_validation()
        return validation
