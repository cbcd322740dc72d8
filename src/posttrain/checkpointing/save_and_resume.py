"""Checkpoints of a whole run: when one is due, what goes into it, writing it in the background, resuming from it.

A checkpoint may be written in the background. Everything in it is copied, or written, before the next step begins; the
copy of tensors may still be running then, but ends before an update changes them. The checkpoint exists once its folder
has its final name, so a kill before that leaves the previous one, and the rows in between are cut when the run resumes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from posttrain.checkpointing.background import BackgroundWrite
from posttrain.checkpointing.state import (
    TrainingState,
    capture_rng,
    load_training_state,
    restore_rng,
    save_training_state,
)
from posttrain.checkpointing.store import CheckpointStore
from posttrain.errors import RESTART, CheckpointError
from posttrain.roles import Finished, Recorder, Stateful, Trainer
from posttrain.types import StepReport

OWES_VALIDATION = "owes_validation"  # key in a checkpoint: a due validation was skipped because the run was stopped
_SAVING = ("checkpointing", "checkpoint_write")  # stages that are not training


@dataclass(frozen=True)
class SaverSettings:
    enabled: bool
    period: int  # steps
    optimizer: bool  # save the optimizer's state too
    samples_per_step: int  # prompts, pairs or examples drawn from the stream in one step
    steps_per_epoch: float
    metric_name: str | None = None  # "val:accuracy" or "train:reward": what checkpoints are ranked by
    in_background: bool = False


@dataclass
class CheckpointSaver:
    """`roles.Saver` over a folder of checkpoints."""

    settings: SaverSettings
    trainer: Trainer
    stream: Stateful
    recorder: Recorder
    store: CheckpointStore
    config_yaml: str
    export: Exporter | None = None  # adds a consolidated copy of the model to a checkpoint
    copy_rule: CopyRule = field(default_factory=lambda: CopyRule(by_cost=False, model_bytes=0))
    total_tokens: int = 0
    _background: BackgroundWrite = field(default_factory=BackgroundWrite)
    _may_use_background: bool | None = None  # None: not known yet
    _is_prepared: bool = False
    _is_copying: bool = False  # an update may have to wait for the copy of a save
    _blocked_s: float | None = None  # seconds for which saving blocked the run since the last report
    _has_validated: bool = False
    _trained_s: float = 0.0  # since the checkpoint before
    _has_said_why_no_copy: bool = False
    _num_losses: int = 0  # of the folder
    owes_validation: bool = False  # the checkpoint resumed from still needs its validation
    _saved_step: int = 0  # of the newest checkpoint, complete or being written in the background
    _save_s: float | None = None  # what the latest save took, to its end
    _at_start: TrainingState | None = None  # of the present step
    _latest: Finished | None = None  # the step before
    _is_in_a_hurry: bool = False  # the process is about to be killed

    @property
    def is_enabled(self) -> bool:
        return self.settings.enabled

    def resume(self) -> int:
        folder = self.store.latest()
        if folder is None:
            if self.store.damage:
                raise CheckpointError(_all_damaged(self.store))
            return 0
        state = load_training_state(folder)
        self.stream.load_state_dict(state.stream_state)
        if unused := sorted(set(state.stream_state) - set(self.stream.state_dict())):
            self.recorder.warn(
                f"{folder} holds sampled groups for later steps ({', '.join(unused)}); these settings do not use them, "
                "so they are not trained on"
            )
        self.trainer.load(folder)
        self.trainer.num_updates = int(state.extra["num_updates"])
        self.total_tokens = int(state.extra["total_tokens"])
        self.owes_validation = bool(state.extra.get(OWES_VALIDATION, 0))
        self._saved_step = state.step
        if self.settings.enabled:
            try:
                self.store.retain()  # a kill may have come after the save, before the surplus was removed
            except OSError as error:
                self.recorder.warn(f"surplus checkpoints in {self.store.folder} could not be removed: {error}")
        restore_rng(state.rng)
        self.recorder.say(f"Resuming from {folder} after step {state.step}")
        return state.step

    def with_timings(self, report: StepReport) -> StepReport:
        """A save follows the row of its step, so its time is reported with the next one. An update that waited for
        the copy did so in this step; a background write is reported when it is over."""
        timings = dict(report.timings_s)
        if self._is_copying:
            self._add_blocked(self.trainer.take_save_wait_s())
            self._is_copying = False
        if self._blocked_s is not None:
            timings["checkpointing"] = self._blocked_s
        if (write_s := self._background.take_write_s()) is not None:
            timings["checkpoint_write"] = self._save_s = write_s
        self._blocked_s = None
        return replace(report, timings_s=timings)

    def note_validation(self) -> None:
        self._has_validated = True

    def begin_step(self) -> None:
        if self.settings.enabled:
            self._at_start = self._state()

    def _state(self) -> TrainingState:
        """The driver's part of a checkpoint. It changes during a step; the model changes only in updates."""
        extra = {"num_updates": self.trainer.num_updates, "total_tokens": self.total_tokens}
        return TrainingState(-1, dict(self.stream.state_dict()), capture_rng(), extra)

    def save_and_stop(
        self, step: int, finished: Finished | None, *, owes_validation: bool, seconds_left: float | None
    ) -> str:
        if not self.settings.enabled:
            return "checkpointing is off"
        if finished is None and step == self._saved_step:
            if (problem := self._background.wait()) is None:
                return ""
            self._stop_saving_in_background(problem)
        if seconds_left is not None and self._save_s is not None and self._save_s > seconds_left:
            self._background.wait()  # one that is being written may still be in time
            took = f"the last checkpoint took {self._save_s:.0f} s, and {max(seconds_left, 0.0):.0f} s are left"
            return f"{took}; the newest is that of step {self._saved_step}" if self._saved_step else took
        self._is_in_a_hurry = seconds_left is not None
        if finished is not None:
            self._count(*finished)
            self.owes_validation = owes_validation
            self._save(step, *finished, self._state(), is_last=True)
            return ""
        assert self._latest is not None, "a step that was resumed from is saved"
        assert self._at_start is not None
        assert self._at_start.extra["num_updates"] == self.trainer.num_updates, (
            "a step that is left undone changes no model"
        )
        self._save(step, *self._latest, self._at_start, is_last=True)
        return ""

    def after_step(
        self, step: int, report: StepReport, validation: StepReport | None, *, is_last: bool, is_wanted: bool = False
    ) -> None:
        self._count(report, validation)
        if not self.settings.enabled:
            return
        self._check_metric(step, report, validation)
        is_lost = self._lost_checkpoints()
        if is_last or is_wanted or step % self.settings.period == 0 or self._background.has_failed or is_lost:
            state = self._state()
            try:
                self._save(step, report, validation, state, is_last=is_last)
            except Exception:
                self.store.confirm()
                if not self._lost_checkpoints():
                    raise
                self._save(step, report, validation, state, is_last=is_last)  # the folder was deleted during the save
        if not is_last:
            self._prepare_background()

    def _count(self, report: StepReport, validation: StepReport | None) -> None:
        self._latest, self.owes_validation = (report, validation), False
        self.total_tokens += report.num_tokens
        stages = (seconds for stage, seconds in report.timings_s.items() if stage not in _SAVING)
        self._trained_s += report.timings_s.get("total_step_time") or sum(stages)

    def _lost_checkpoints(self) -> bool:
        """Whether the folder was deleted since the last call; if so, save now."""
        before = self._num_losses
        self._num_losses = self.store.attempt.num_losses if self.store.attempt else 0
        return self._num_losses > before

    def abandon(self, error: Exception) -> None:
        self._background.give_up()
        problem = self._background.wait()  # wait for the checkpoint before the failure
        if problem is not None:
            error.add_note(f"and the checkpoint that was being written is lost: {problem}")

    # -- one checkpoint ------------------------------------------------------------------------------------------------

    def _save(
        self, step: int, report: StepReport, validation: StepReport | None, state: TrainingState, *, is_last: bool
    ) -> None:
        start = time.perf_counter()
        problem = self._background.wait()  # one at a time
        if problem is not None:
            self._stop_saving_in_background(problem)
        in_background = not is_last and self._can_save_in_background()
        trained_s, self._trained_s = self._trained_s, 0.0
        self.recorder.say(f"Saving checkpoint for step {step}{' in the background' if in_background else ''}...")
        with ExitStack() as stack:
            folder = stack.enter_context(self.store.writing(step))
            (folder / "config.yaml").write_text(self.config_yaml)
            owed = {OWES_VALIDATION: 1} if self.owes_validation else {}
            save_training_state(folder, replace(state, step=step, extra=state.extra | owed))
            info = self._training_info(step, report, validation, state.extra["total_tokens"])
            self.store.save_info(folder, info)
            if in_background:
                write = self.trainer.begin_save(folder, optimizer=self.settings.optimizer)
                completion = stack.pop_all()  # the folder gets its final name when the thread leaves this

                def write_and_complete(is_given_up: Callable[[], bool]) -> None:
                    with completion:
                        begin = time.perf_counter()
                        write(is_given_up)
                        if self._gets_copy(step, folder, time.perf_counter() - begin, trained_s, blocks=False):
                            self._make_copy(lambda export: export.beside(folder, is_given_up))

                self._background.start(write_and_complete)
                self._saved_step = step
                self._is_prepared = self._is_copying = True
            else:
                begin = time.perf_counter()
                self.trainer.save(folder, optimizer=self.settings.optimizer)
                if self._gets_copy(step, folder, time.perf_counter() - begin, trained_s, blocks=True):
                    self._make_copy(lambda export: export(folder))
        self._add_blocked(time.perf_counter() - start)
        self.recorder.record_save(step, time.perf_counter() - start, str(folder / "policy" / "tokenizer"))
        if not in_background:
            self._saved_step, self._save_s = step, time.perf_counter() - start

    # -- a copy of the model for use -----------------------------------------------------------------------------------

    def _gets_copy(self, step: int, folder: Path, save_s: float, trained_s: float, *, blocks: bool) -> bool:
        if self.export is None or self._is_in_a_hurry:
            return False
        saved_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        reason = self.copy_rule.reason_against(
            save_s=save_s, saved_bytes=saved_bytes, trained_s=trained_s, blocks=blocks
        )
        if reason is not None and not self._has_said_why_no_copy:
            self._has_said_why_no_copy = True
            self.recorder.say(f"skipped Hugging Face export of step_{step}: {reason}")
        return reason is None

    def _make_copy(self, make: Callable[[Exporter], None]) -> None:
        assert self.export is not None
        start = time.perf_counter()
        make(self.export)
        self.copy_rule.measured_s = time.perf_counter() - start

    def _training_info(
        self, step: int, report: StepReport, validation: StepReport | None, total_tokens: int
    ) -> dict[str, float]:
        info: dict[str, float] = {
            "current_step": step,
            "total_steps": step,
            "consumed_samples": step * self.settings.samples_per_step,
            "current_epoch": math.floor(step / self.settings.steps_per_epoch),
            "total_valid_tokens": total_tokens,
        }
        if validation is not None and "accuracy" in validation.metrics:
            info["val_reward"] = validation.metrics["accuracy"]
        name = self.settings.metric_name
        if name is not None and (value := named_metric(name, report, validation)) is not None:
            info[name] = value
        return info

    def _check_metric(self, step: int, report: StepReport, validation: StepReport | None) -> None:
        """Warn early of a metric that does not exist: unranked, good checkpoints would be removed."""
        name = self.settings.metric_name
        if name is None:
            return
        measured = report if name.startswith("train:") else validation
        if measured is not None and named_metric(name, report, validation) is None:
            known = ", ".join(sorted(measured.metrics))
            self.recorder.warn(
                f"checkpointing.metric_name: {name} was not measured at step {step}, so checkpoints cannot be ranked "
                f"by it and the newest are kept; measured there: {known}"
            )
        elif measured is None and self._has_validated and step % self.settings.period == 0:
            self.recorder.warn(
                f"checkpointing.metric_name: step {step} is saved without a validation, so {name} is not known of it "
                "and it ranks last; let the save_period be a multiple of the val_period"
            )

    # -- in the background ---------------------------------------------------------------------------------------------

    def _can_save_in_background(self) -> bool:
        """Whether it is configured and possible. Checked once, after a step: then the optimizer has all its state."""
        if not self.settings.in_background:
            return False
        if self._may_use_background is None:
            if obstacle := self.trainer.save_obstacle(optimizer=self.settings.optimizer):
                self.recorder.warn(
                    f"checkpointing.async_save: checkpoints are written while training waits: {obstacle}"
                )
            self._may_use_background = not obstacle
        return self._may_use_background

    def _stop_saving_in_background(self, problem: BaseException) -> None:
        """The failure may be temporary. If not, the following foreground save ends the run with its error.

        Threads of other ranks may still be waiting for the one that failed, so there is no second background save.
        """
        self.recorder.warn(
            f"a checkpoint could not be written in the background: {problem}. This step is saved instead, and training "
            "waits for it and for every checkpoint from here on"
        )
        self._may_use_background = False

    def _prepare_background(self) -> None:
        """Memory for the first background save is allocated while the steps before it run."""
        if self._is_prepared or not self._can_save_in_background():
            return
        start = time.perf_counter()
        self._is_prepared = self.trainer.prepare_save(optimizer=self.settings.optimizer)
        self._add_blocked(time.perf_counter() - start)

    def _add_blocked(self, seconds: float) -> None:
        self._blocked_s = (self._blocked_s or 0.0) + seconds


def _all_damaged(store: CheckpointStore) -> str:
    found = "".join(f"\n  {problem}" for _, problem in sorted(store.damage.items()))
    return (
        f"{store.folder}: none of its {len(store.damage)} checkpoints is intact:{found}\nPut the files back, or begin "
        f"at step 1: {RESTART} moves everything there to earlier_NNN/ first. Nothing was changed"
    )


def named_metric(name: str, report: StepReport | None, validation: StepReport | None) -> float | None:
    """The value of "val:accuracy" or "train:reward"; None if it was not measured at this step."""
    where, _, metric = name.rpartition(":")
    metric = metric.removeprefix("validation-default_").removeprefix("val_")  # as DPO and SFT name them
    if where == "train":
        return report.metrics.get(metric) if report is not None else None
    return validation.metrics.get(metric) if validation is not None else None


# -- copies ------------------------------------------------------------------------------------------------------------


_SHARE_BLOCKING, _SHARE_BESIDE = 0.02, 0.5
_START_S = 2.0  # a model is built, and a process started where it is made in one
_NUM_PASSES = 6  # over the model's bytes: read, write, hash; then it is loaded in float32 and compared


class Exporter(Protocol):
    """Adds the copy to the folder of a checkpoint, or warns why there is none."""

    def __call__(self, checkpoint: Path) -> None:
        """In this process."""

    def beside(self, checkpoint: Path, is_given_up: Callable[[], bool]) -> None:
        """In another process, which shares no random state, locks or GPU with training."""


@dataclass
class CopyRule:
    """Whether a checkpoint gets a consolidated copy of the model in `step_N/hf`: `checkpointing.save_consolidated`.

    With `auto` it does if the cost is low: up to 2 % of the training time since the previous checkpoint if the run
    waits for it; up to half of that training time in the background, so that the next save does not wait either. The
    cost is that of the latest copy of this run. Before the first, it is estimated from the rate at which the checkpoint
    itself was written.
    """

    by_cost: bool  # False: every checkpoint gets one
    model_bytes: int
    measured_s: float | None = None  # of the latest copy

    def cost_s(self, save_s: float, saved_bytes: int) -> float:
        if self.measured_s is not None:
            return self.measured_s
        return _START_S + _NUM_PASSES * self.model_bytes * save_s / max(saved_bytes, 1)

    def reason_against(self, *, save_s: float, saved_bytes: int, trained_s: float, blocks: bool) -> str | None:
        """None if the checkpoint gets a copy. `trained_s`: seconds of training since the checkpoint before."""
        share = _SHARE_BLOCKING if blocks else _SHARE_BESIDE
        cost_s = self.cost_s(save_s, saved_bytes)
        if not self.by_cost or cost_s <= share * trained_s:
            return None
        return (
            f"it would take {cost_s:.0f} s after {trained_s:.0f} s of training, more than {100 * share:g} %. "
            "`posttrain convert` makes one; checkpointing.save_consolidated=true makes one at every save, false none"
        )
