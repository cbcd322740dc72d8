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
from posttrain.errors import Ending, ExitCode, StopRequested
from posttrain.roles import Algorithm, Finished, Recorder, Saver
from posttrain.types import StepReport

FINISHED = Ending("finished", "finished")


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

    def run(self) -> int:
        """Train to the end, or until there is a reason to stop. Returns the process's exit code."""
        first = self.saver.resume() + 1
        with self.interruption:
            self.recorder.start(first - 1)
            if first > self.settings.max_steps and not self.saver.owes_validation:
                done = f"the checkpoint is at step {first - 1} of {self.settings.max_steps}"
                return self.recorder.finish(f"nothing to do: {done}")
            self.deadline.start()
            try:
                ending = self._begin(first) or self._train(first)
            except Exception as error:
                self.saver.abandon(error)
                raise
            # A signal that comes from here on has no effect.
            code = self.recorder.finish(ending.text, is_stopped=ending.kind == "signal")
        return ending.exit_code or code

    def _begin(self, first: int) -> Ending | None:
        """The validation before training, or the one skipped when the run was stopped. Returns why to stop."""
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

    def _train(self, first: int) -> Ending:
        """Steps until there is a reason to stop."""
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
            ending = None if is_owed else self._ending_after(step, report, validation)
            if ending is None and self.interruption.is_asked():
                return self._stopped(step, (report, validation), is_owed=is_owed)
            is_wanted = self.interruption.take_save_request()
            self.saver.after_step(step, report, validation, is_last=ending is not None, is_wanted=is_wanted)
            if ending:
                return ending
            self.deadline.mark_step()
        raise AssertionError("the last step is a reason to stop")

    def _validation_after(self, step: int) -> tuple[StepReport | None, bool]:
        """The validation of a step, and whether a due validation is skipped because the run stops."""
        settings = self.settings
        is_periodic = settings.val_period > 0 and step % settings.val_period == 0 and step >= settings.val_start_at
        if not is_periodic and not (step == settings.max_steps and settings.val_at_end):
            return None, False
        if self.interruption.is_asked():
            return None, True
        try:
            return self._validate(step), False
        except StopRequested:
            return None, True

    def _stopped(self, step: int, finished: Finished | None, *, is_owed: bool = False) -> Ending:
        """Save the state after `step`, the last finished step. Exit code 85 would indicate a checkpoint."""
        assert self.interruption.signal is not None
        reason, unsaved = f"stopped by signal {self.interruption.signal.name}", 128 + self.interruption.signal
        if step == 0:
            text = f"{reason} before the first step was finished; there is nothing to save"
            return Ending("signal", text, unsaved)
        obstacle = self.saver.save_and_stop(
            step, finished, owes_validation=is_owed, seconds_left=self.interruption.seconds_left()
        )
        saved = f"not saved: {obstacle}" if obstacle else "saved"
        text = f"{reason} after step {step}, {saved}; the same command resumes from here"
        return Ending("signal", text, unsaved if obstacle else self.interruption.exit_code)

    def _ending_after(self, step: int, report: StepReport, validation: StepReport | None) -> Ending | None:
        if step == self.settings.max_steps:
            return FINISHED
        saved = "saved" if self.saver.is_enabled else "not saved: checkpointing is off"
        if self.deadline.must_save_now():
            return Ending("deadline", f"stopped after step {step} by checkpointing.checkpoint_must_save_by, {saved}")
        if (problem := self.recorder.reason_to_stop()) is not None:
            text = f"stopped by the doctor after step {step}, {saved}: {problem}"
            return Ending("doctor", text, ExitCode.ERROR_FOUND)
        return self._reached_threshold(report, validation)

    def _reached_threshold(self, report: StepReport | None, validation: StepReport | None) -> Ending | None:
        name, threshold = self.settings.stop_metric, self.settings.stop_threshold
        if (
            name
            and threshold is not None
            and (value := named_metric(name, report, validation)) is not None
            and value >= threshold
        ):
            return Ending("threshold", f"{name} reached {value:g}, at least the threshold {threshold:g}")
        return None

    def _validate(self, step: int) -> StepReport | None:
        self.recorder.stage(f"Starting validation at step {step}")
        validation = self.algorithm.validate(step)
        if validation is not None:
            self.saver.note_validation()
        return validation
