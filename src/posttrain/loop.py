"""The outer loop of every algorithm: resume, step, validate, record, save, stop.

The order within a step matters for exact resumption. A step's row is written before its checkpoint. So whatever the moment
of a kill, the rows that a checkpoint needs exist, and rows beyond it are cut when the run resumes from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.checkpointing import Interruption, SaveDeadline
from posttrain.checkpointing.save_and_resume import named_metric
from posttrain.errors import EXIT_ERROR_FOUND
from posttrain.roles import Algorithm, Ending, Recorder, Saver
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

    def run(self) -> int:
        """Train to the end, or until there is a reason to stop. Returns the process's exit code."""
        first = self.saver.resume() + 1
        with Interruption() as interruption:
            self.recorder.start(first - 1)
            if first > self.settings.max_steps:
                done = f"the checkpoint is at step {first - 1} of {self.settings.max_steps}"
                return EXIT_CODES[self.recorder.finish(f"nothing to do: {done}")]
            if first == 1 and self.settings.val_at_start and (validation := self._validate(0)) is not None:
                self.recorder.record_validation(0, validation)
            if interruption.signal is not None:
                self.recorder.finish(
                    f"stopped by {interruption.signal.name} before the first step; there is nothing to save"
                )
                return 128 + interruption.signal
            self.deadline.start()
            try:
                reason = self._train(first, interruption)
            except Exception as error:
                self.saver.abandon(error)
                raise
            ending = self.recorder.finish(reason)
        if reason.startswith(STOPPED_BY_DOCTOR):
            return EXIT_ERROR_FOUND
        if not reason.startswith(STOPPED_BY) or interruption.signal is None:
            return EXIT_CODES[ending]  # a signal that comes when the run ends anyway changes nothing
        # 85 would promise a checkpoint.
        return interruption.exit_code if self.saver.is_enabled else 128 + interruption.signal

    def _train(self, first: int, interruption: Interruption) -> str:
        """Steps until there is a reason to stop; returns the reason."""
        for step in range(first, self.settings.max_steps + 1):
            self.recorder.begin_step(step)
            report = self.saver.with_timings(self.algorithm.step(step))
            validation = self._validate(step) if self._is_validation_due(step) else None
            self.recorder.record_step(step, report, validation)
            reason = self._reason_to_stop(step, report, validation, interruption)
            self.saver.after_step(step, report, validation, is_last=reason is not None)
            if reason:
                return reason
            self.deadline.mark_step()
        raise AssertionError("the last step is a reason to stop")

    def _reason_to_stop(
        self, step: int, report: StepReport, validation: StepReport | None, interruption: Interruption
    ) -> str | None:
        if step == self.settings.max_steps:
            return FINISHED
        saved = "saved" if self.saver.is_enabled else "not saved: checkpointing is off"
        if interruption.signal is not None:
            return f"{STOPPED_BY} {interruption.signal.name} after step {step}, {saved}; the same command goes on from here"
        if self.deadline.must_save_now():
            return f"stopped after step {step} by checkpointing.checkpoint_must_save_by, {saved}"
        if (problem := self.recorder.reason_to_stop()) is not None:
            return f"{STOPPED_BY_DOCTOR} after step {step}, {saved}: {problem}"
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
