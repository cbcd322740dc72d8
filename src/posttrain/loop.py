"""The outer loop of every algorithm: resume, step, validate, report, checkpoint, stop.

The order within a step matters for exact resumption. A step's row is written before its checkpoint. So whatever the moment
of a kill, the rows that a checkpoint needs are there, and rows beyond it are cut when the run goes on from it.

A checkpoint may be written in the background. Everything in it is copied, or written, before the next step begins; the copy
of tensors may still be under way then, but is over before an update changes them. It counts as saved when its folder has its
name, so until then a kill leaves the checkpoint before it, and the rows in between are cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.checkpointing import BackgroundWrite, CheckpointStore, Interruption, SaveDeadline
from posttrain.checkpointing.state import capture_rng, load_training_state, restore_rng, save_training_state
from posttrain.orchestration.sharded import ShardedPolicy
from posttrain.reporting import RunRecorder
from posttrain.roles import Algorithm, Stateful
from posttrain.types import StepReport

EXIT_DONE = 0
FINISHED = "finished"
STOPPED_BY = "stopped by signal"


@dataclass(frozen=True)
class LoopSettings:
    max_steps: int
    samples_per_step: int  # prompts, pairs or examples drawn from the stream in one step
    steps_per_epoch: float
    val_period: int  # 0 or less: never
    val_start_at: int
    val_at_start: bool
    val_at_end: bool
    save: bool
    save_period: int
    save_optimizer: bool
    metric_name: str | None  # "val:accuracy" or "train:reward"
    async_save: bool = False  # write checkpoints in the background
    stop_metric: str | None = None
    stop_threshold: float | None = None


@dataclass
class TrainingLoop:
    settings: LoopSettings
    algorithm: Algorithm
    policy: ShardedPolicy
    stream: Stateful
    recorder: RunRecorder
    store: CheckpointStore
    deadline: SaveDeadline
    config_yaml: str
    export: Callable[[Path], None] | None = None  # adds a copy of the model for use to a checkpoint that is written
    total_tokens: int = 0
    _background: BackgroundWrite = field(default_factory=BackgroundWrite)
    _in_background: bool | None = None  # None: not known yet
    _is_prepared: bool = False
    _is_copying: bool = False  # an update may have to wait for the copy of a save
    _checkpointing_s: float | None = None  # for which saving has held up the run since the last row
    _has_validated: bool = False

    def run(self) -> int:
        """Train to the end, or until told to stop. Returns the process's exit code."""
        first = self.resume() + 1
        with Interruption() as interruption:
            self.recorder.start(first - 1)
            if first > self.settings.max_steps:
                done = f"the checkpoint is at step {first - 1} of {self.settings.max_steps}"
                self.recorder.finish(f"nothing to do: {done}")
                return EXIT_DONE
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
                self._background.give_up()
                problem = self._background.wait()  # the checkpoint before the failure is worth waiting for
                if problem is not None:
                    error.add_note(f"and the checkpoint that was being written is lost: {problem}")
                raise
        self.recorder.finish(reason)
        if not reason.startswith(STOPPED_BY) or interruption.signal is None:
            return EXIT_DONE  # a signal that comes when the run ends anyway changes nothing
        # 85 would promise a checkpoint.
        return interruption.exit_code if self.settings.save else 128 + interruption.signal

    def _train(self, first: int, interruption: Interruption) -> str:
        """Steps until there is a reason to stop; the reason, in words."""
        for step in range(first, self.settings.max_steps + 1):
            self.recorder.begin_step(step)
            report = self._with_checkpoint_time(self.algorithm.step(step))
            self.total_tokens += report.num_tokens
            last = step == self.settings.max_steps
            validation = self._validate(step) if self._is_validation_due(step, last) else None
            self.recorder.record_step(step, report, validation)
            self._check_metric(step, report, validation)

            reason = self._reason_to_stop(step, report, validation, interruption)
            is_due = reason is not None or step % self.settings.save_period == 0 or self._background.has_failed
            if self.settings.save and is_due:
                self._save(step, report, validation, is_last=reason is not None)
            if reason:
                return reason
            self._prepare_background()
            self.deadline.mark_step()
        raise AssertionError("the last step is a reason to stop")

    def _reason_to_stop(
        self, step: int, report: StepReport, validation: StepReport | None, interruption: Interruption
    ) -> str | None:
        if step == self.settings.max_steps:
            return FINISHED
        saved = "saved" if self.settings.save else "not saved: checkpointing is off"
        if interruption.requested:
            assert interruption.signal is not None
            return f"{STOPPED_BY} {interruption.signal.name} after step {step}, {saved}; the same command goes on from here"
        if self.deadline.must_save_now():
            return f"stopped after step {step} by checkpointing.checkpoint_must_save_by, {saved}"
        name, threshold = self.settings.stop_metric, self.settings.stop_threshold
        if (
            name
            and threshold is not None
            and (value := _lookup(name, report, validation)) is not None
            and value >= threshold
        ):
            return f"{name} reached {value:g}, at least the threshold {threshold:g}"
        return None

    # -- validation ----------------------------------------------------------------------------------------------------

    def _is_validation_due(self, step: int, last: bool) -> bool:
        settings = self.settings
        periodic = settings.val_period > 0 and step % settings.val_period == 0 and step >= settings.val_start_at
        return periodic or (last and settings.val_at_end)

    def _validate(self, step: int) -> StepReport | None:
        self.recorder.stage(f"Starting validation at step {step}")
        validation = self.algorithm.validate(step)
        self._has_validated |= validation is not None
        return validation

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the newest complete checkpoint; the step it was saved after, or 0."""
        folder = self.store.latest()
        if folder is None:
            return 0
        state = load_training_state(folder)
        self.stream.load_state_dict(state.stream_state)
        self.policy.load(folder)
        self.policy.num_updates = int(state.extra["num_updates"])
        self.total_tokens = int(state.extra["total_tokens"])
        restore_rng(state.rng)
        self.recorder.say(f"Resuming from {folder} after step {state.step}")
        return state.step

    def _save(self, step: int, report: StepReport, validation: StepReport | None, *, is_last: bool) -> None:
        start = time.perf_counter()
        problem = self._background.wait()  # one at a time
        if problem is not None:
            self._stop_saving_in_background(problem)
        in_background = not is_last and self._may_save_in_background()
        self.recorder.stage(f"Saving checkpoint for step {step}{' in the background' if in_background else ''}")
        with ExitStack() as stack:
            folder = stack.enter_context(self.store.writing(step))
            (folder / "config.yaml").write_text(self.config_yaml)
            save_training_state(
                folder,
                step=step,
                stream_state=self.stream.state_dict(),
                rng=capture_rng(),
                extra={"num_updates": self.policy.num_updates, "total_tokens": self.total_tokens},
            )
            self.store.save_info(folder, self._training_info(step, report, validation))
            if in_background:
                write = self.policy.begin_save(folder, optimizer=self.settings.save_optimizer)
                completion = stack.pop_all()  # the checkpoint becomes one when the thread leaves this

                def write_and_complete(is_given_up: Callable[[], bool]) -> None:
                    with completion:
                        write(is_given_up)

                self._background.start(write_and_complete)
                self._is_prepared = self._is_copying = True
            else:
                self.policy.save(folder, optimizer=self.settings.save_optimizer)
                if self.export is not None:
                    self.export(folder)
        self._add_blocked(time.perf_counter() - start)

    def _may_save_in_background(self) -> bool:
        """Whether it was asked for and is possible. Looked at once, after a step: then the optimizer has all its state."""
        if not self.settings.async_save:
            return False
        if self._in_background is None:
            obstacle = (
                "checkpointing.save_consolidated converts each checkpoint in this process"
                if self.export is not None
                else self.policy.save_obstacle(optimizer=self.settings.save_optimizer)
            )
            if obstacle:
                self.recorder.warn(
                    f"checkpointing.async_save: checkpoints are written while training waits: {obstacle}"
                )
            self._in_background = not obstacle
        return self._in_background

    def _stop_saving_in_background(self, problem: BaseException) -> None:
        """It may have been a moment's trouble of the file system. If not, the save that comes now ends the run with its error.

        Threads of other ranks may still be waiting for the one that failed, so there is no second save in the background.
        """
        self.recorder.warn(
            f"a checkpoint could not be written in the background: {problem}. This step is saved instead, and training waits "
            "for it and for every checkpoint from here on"
        )
        self._in_background = False

    def _prepare_background(self) -> None:
        """Memory for the first save in the background is taken while the steps before it run."""
        if self._is_prepared or not self.settings.save or not self._may_save_in_background():
            return
        start = time.perf_counter()
        self._is_prepared = self.policy.prepare_save(optimizer=self.settings.save_optimizer)
        self._add_blocked(time.perf_counter() - start)

    def _add_blocked(self, seconds: float) -> None:
        self._checkpointing_s = (self._checkpointing_s or 0.0) + seconds

    def _check_metric(self, step: int, report: StepReport, validation: StepReport | None) -> None:
        """A metric that does not exist would rank no checkpoint: the user hears of it at once, not when one is gone."""
        name = self.settings.metric_name
        if name is None or not self.settings.save:
            return
        measured = report if name.startswith("train:") else validation
        if measured is not None and _lookup(name, report, validation) is None:
            known = ", ".join(sorted(measured.metrics))
            self.recorder.warn(
                f"checkpointing.metric_name: {name} was not measured at step {step}, so checkpoints cannot be ranked by it "
                f"and the newest are kept; measured there: {known}"
            )
        elif measured is None and self._has_validated and step % self.settings.save_period == 0:
            self.recorder.warn(
                f"checkpointing.metric_name: step {step} is saved without a validation, so {name} is not known of it and it "
                "ranks last; let the save_period be a multiple of the val_period"
            )

    def _training_info(self, step: int, report: StepReport, validation: StepReport | None) -> dict[str, Any]:
        info: dict[str, Any] = {
            "current_step": step,
            "total_steps": step,
            "consumed_samples": step * self.settings.samples_per_step,
            "current_epoch": math.floor(step / self.settings.steps_per_epoch),
            "total_valid_tokens": self.total_tokens,
        }
        if validation is not None and "accuracy" in validation.metrics:
            info["val_reward"] = validation.metrics["accuracy"]
        name = self.settings.metric_name
        if name is not None and (value := _lookup(name, report, validation)) is not None:
            info[name] = value
        return info

    def _with_checkpoint_time(self, report: StepReport) -> StepReport:
        """A save follows the row of its step, so its time is reported with the next one. An update that waited for the copy
        did so in this step; a write in the background is reported when it is over."""
        timings = dict(report.timings_s)
        if self._is_copying:
            self._add_blocked(self.policy.take_save_wait_s())
            self._is_copying = False
        if self._checkpointing_s is not None:
            timings["checkpointing"] = self._checkpointing_s
        if (write_s := self._background.take_write_s()) is not None:
            timings["checkpoint_write"] = write_s
        self._checkpointing_s = None
        return replace(report, timings_s=timings)


def _lookup(name: str, report: StepReport, validation: StepReport | None) -> float | None:
    """The value of "val:accuracy" or "train:reward"; None if it was not measured at this step."""
    where, _, metric = name.rpartition(":")
    metric = metric.removeprefix("validation-default_").removeprefix("val_")  # as DPO and SFT name them
    if where == "train":
        return report.metrics.get(metric)
    return validation.metrics.get(metric) if validation is not None else None
