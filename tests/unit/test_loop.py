"""The outer loop: what happens in which order, when it validates, saves and stops, and what it resumes."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.checkpointing import CheckpointStore, SaveDeadline
from posttrain.loop import LoopSettings, TrainingLoop, run_folder
from posttrain.types import StepReport

Events = list[tuple[Any, ...]]

SETTINGS = LoopSettings(
    max_steps=6,
    samples_per_step=4,
    steps_per_epoch=2.5,
    val_period=0,
    val_start_at=-1,
    val_at_start=False,
    val_at_end=False,
    save=True,
    save_period=100,
    save_optimizer=True,
    metric_name=None,
)


@dataclass
class FakeAlgorithm:
    events: Events
    validates: bool = True
    during_step: Callable[[int], None] = lambda step: None

    def step(self, step: int) -> StepReport:
        self.events.append(("step", step))
        self.during_step(step)
        return StepReport({"reward": step / 10, "loss": random.random()}, {"generation": 1.0}, num_tokens=10)

    def validate(self, step: int) -> StepReport | None:
        if not self.validates:
            return None
        self.events.append(("validate", step))
        return StepReport({"accuracy": step / 10, "loss": 1 - step / 10}, {})


@dataclass
class FakePolicy:
    events: Events
    num_updates: int = 0

    def save(self, folder: Path, *, optimizer: bool) -> None:
        self.events.append(("save", folder.name.removeprefix("tmp_"), optimizer))
        (folder / "weights").write_text("weights")

    def load(self, folder: Path) -> None:
        self.events.append(("load", folder.name))


@dataclass
class FakeStream:
    position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class FakeRecorder:
    events: Events
    rows: dict[int, tuple[StepReport, StepReport | None]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    reason: str = ""
    resumed_step: int = -1

    def start(self, resumed_step: int) -> None:
        self.resumed_step = resumed_step

    def begin_step(self, step: int) -> None: ...

    def stage(self, text: str) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def record_step(self, step: int, report: StepReport, validation: StepReport | None) -> None:
        self.events.append(("record", step))
        self.rows[step] = (report, validation)

    def record_validation(self, step: int, validation: StepReport) -> None:
        self.events.append(("record", step))

    def finish(self, reason: str) -> None:
        self.reason = reason


@dataclass
class Scene:
    """A loop among fakes, except for the checkpoint folder, which is real."""

    loop: TrainingLoop
    events: Events
    recorder: FakeRecorder
    algorithm: FakeAlgorithm
    policy: FakePolicy
    stream: FakeStream
    folder: Path

    def of_kind(self, *kinds: str) -> Events:
        return [event[:2] for event in self.events if event[0] in kinds]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*step_*"))

    def info(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder / f"step_{step}" / "training_info.json").read_text())


def scene(folder: Path, deadline: SaveDeadline | None = None, **settings: Any) -> Scene:
    events: Events = []
    recorder: Any = FakeRecorder(events)
    algorithm, policy, stream = FakeAlgorithm(events), FakePolicy(events), FakeStream()
    chosen = replace(SETTINGS, **settings)
    store = CheckpointStore(
        folder,
        keep_top_k=None,
        metric_name=chosen.metric_name,
        higher_is_better=True,
        save_period=chosen.save_period,
        say=recorder.say,
    )
    policy_role: Any = policy
    loop = TrainingLoop(
        chosen, algorithm, policy_role, stream, recorder, store, deadline or SaveDeadline(None), "config: 1\n"
    )

    def move_on(step: int) -> None:
        stream.position += 4
        policy.num_updates += 2

    algorithm.during_step = move_on
    return Scene(loop, events, recorder, algorithm, policy, stream, folder)


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_step_is_recorded_before_its_checkpoint_is_saved(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, val_period=2)
    assert run.loop.run() == 0
    assert [event[:2] for event in run.events[:5]] == [
        ("step", 1),
        ("record", 1),
        ("step", 2),
        ("validate", 2),
        ("record", 2),
    ]
    assert run.events[5] == ("save", "step_2", True)
    assert run.recorder.reason == "finished"


def test_checkpoints_are_saved_every_period_and_at_the_end(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=4)
    assert run.loop.run() == 0
    assert run.checkpoints() == ["step_4", "step_6"]
    assert (tmp_path / "step_4" / "config.yaml").read_text() == "config: 1\n"


def test_nothing_is_saved_when_checkpointing_is_off(tmp_path: Path) -> None:
    run = scene(tmp_path, save=False, save_period=1)
    assert run.loop.run() == 0
    assert not run.of_kind("save")
    assert run.checkpoints() == []


def test_the_optimizer_may_be_left_out(tmp_path: Path) -> None:
    run = scene(tmp_path, save_optimizer=False)
    run.loop.run()
    assert ("save", "step_6", False) in run.events


@pytest.mark.parametrize(
    ("settings", "validated"),
    [
        ({}, []),
        ({"val_period": 2}, [2, 4, 6]),
        ({"val_period": 4, "val_at_end": True}, [4, 6]),
        ({"val_period": 3, "val_at_end": True}, [3, 6]),
        ({"val_at_start": True}, [0]),
        ({"val_at_start": True, "val_at_end": True}, [0, 6]),
        ({"val_period": 2, "val_start_at": 3}, [4, 6]),
        ({"val_period": -1}, []),
    ],
)
def test_validation_comes_when_it_was_asked_for(settings: dict[str, Any], validated: list[int], tmp_path: Path) -> None:
    run = scene(tmp_path, **settings)
    run.loop.run()
    assert [step for _, step in run.of_kind("validate")] == validated
    with_rows = [step for step, (_, validation) in run.recorder.rows.items() if validation is not None]
    assert with_rows == [step for step in validated if step > 0]


def test_a_run_without_validation_data_records_no_validation(tmp_path: Path) -> None:
    run = scene(tmp_path, val_period=1, val_at_start=True)
    run.algorithm.validates = False
    assert run.loop.run() == 0
    assert run.of_kind("record") == [("record", step) for step in range(1, 7)]


def test_the_time_of_a_save_is_reported_with_the_next_step(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2)
    run.loop.run()
    with_time = [step for step, (report, _) in run.recorder.rows.items() if "checkpointing" in report.timings_s]
    assert with_time == [3, 5]


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_the_newest_checkpoint_was_saved(tmp_path: Path) -> None:
    first = scene(tmp_path, max_steps=3)
    first.loop.run()
    random_after = random.random()
    random.seed(99)

    second = scene(tmp_path, max_steps=5, val_at_start=True)
    assert second.loop.run() == 0
    assert second.events[0] == ("load", "step_3")
    assert second.recorder.resumed_step == 3
    assert [step for _, step in second.of_kind("step")] == [4, 5]
    assert not second.of_kind("validate"), "the validation before training belongs to the first start"
    assert second.stream.position == 20
    assert second.policy.num_updates == 10
    assert second.recorder.rows[4][0].metrics["loss"] == random_after, "random generators go on too"
    assert second.info(5)["total_valid_tokens"] == 50
    assert any("Resuming from" in line and "step_3" in line for line in second.recorder.said)


def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    scene(tmp_path).loop.run()
    again = scene(tmp_path)
    assert again.loop.run() == 0
    assert not again.of_kind("step", "save")
    assert again.recorder.reason == "nothing to do: the checkpoint is at step 6 of 6"


def test_a_checkpoint_beyond_the_end_is_a_finished_run(tmp_path: Path) -> None:
    scene(tmp_path).loop.run()
    shorter = scene(tmp_path, max_steps=4)
    assert shorter.loop.run() == 0
    assert "step 6 of 4" in shorter.recorder.reason


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    sent: signal.Signals, code: int, tmp_path: Path
) -> None:
    run = scene(tmp_path)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), sent) if step == 3 else None
    assert run.loop.run() == code
    assert run.events[-1] == ("save", "step_3", True)
    assert run.checkpoints() == ["step_3"]
    assert f"{sent.name} after step 3, saved" in run.recorder.reason


def test_a_signal_before_the_first_step_has_nothing_to_save(tmp_path: Path) -> None:
    run = scene(tmp_path, val_at_start=True)
    validate = run.algorithm.validate

    def interrupted(step: int) -> StepReport | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(step)

    run.algorithm.validate = interrupted  # type: ignore[method-assign]
    assert run.loop.run() == 128 + signal.SIGTERM
    assert not run.of_kind("step", "save")
    assert "nothing to save" in run.recorder.reason


def test_a_signal_without_checkpoints_promises_none(tmp_path: Path) -> None:
    run = scene(tmp_path, save=False)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None
    assert run.loop.run() == 128 + signal.SIGTERM
    assert "not saved" in run.recorder.reason


def test_a_signal_during_the_last_step_changes_nothing(tmp_path: Path) -> None:
    run = scene(tmp_path)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 6 else None
    assert run.loop.run() == 0
    assert run.recorder.reason == "finished"


def test_signals_are_as_they_were_after_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    scene(tmp_path).loop.run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_deadline_ends_the_run_with_a_checkpoint_and_success(tmp_path: Path) -> None:
    now = [0.0]
    run = scene(tmp_path, SaveDeadline("00:00:00:10", clock=lambda: now[0]))

    def take_three_seconds(step: int) -> None:
        now[0] += 3

    run.algorithm.during_step = take_three_seconds
    assert run.loop.run() == 0
    assert run.checkpoints() == ["step_3"], "9 s are over after step 3, and another step would take 3"
    assert "checkpoint_must_save_by" in run.recorder.reason


def test_a_good_enough_metric_ends_the_run(tmp_path: Path) -> None:
    run = scene(tmp_path, val_period=1, stop_metric="val:accuracy", stop_threshold=0.3)
    assert run.loop.run() == 0
    assert run.checkpoints() == ["step_3"]
    assert "val:accuracy reached 0.3" in run.recorder.reason


def test_a_step_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2)

    def fail(step: int) -> None:
        if step == 4:
            raise RuntimeError("out of memory")

    run.algorithm.during_step = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        run.loop.run()
    assert run.checkpoints() == ["step_2"]


# -- what a checkpoint says of itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric_name", "value"),
    [
        ("val:accuracy", 0.6),
        ("val:validation-default_loss", 0.4),
        ("val:val_loss", 0.4),
        ("train:reward", 0.6),
        ("val:no_such_metric", None),
        (None, None),
    ],
)
def test_training_info_has_the_metric_under_its_name(
    metric_name: str | None, value: float | None, tmp_path: Path
) -> None:
    run = scene(tmp_path, metric_name=metric_name, val_period=1)
    run.loop.run()
    info = run.info(6)
    assert info.get(metric_name or "") == (None if value is None else pytest.approx(value))
    assert info["val_reward"] == 0.6
    assert (info["current_step"], info["total_steps"], info["consumed_samples"]) == (6, 6, 24)
    assert info["current_epoch"] == 2
    assert info["total_valid_tokens"] == 60


def test_a_metric_that_was_not_measured_is_not_there(tmp_path: Path) -> None:
    run = scene(tmp_path, metric_name="val:accuracy")
    run.loop.run()
    assert "val:accuracy" not in run.info(6)
    assert "val_reward" not in run.info(6)


def test_a_metric_that_nobody_measures_is_told_with_those_that_are_measured(tmp_path: Path) -> None:
    run = scene(tmp_path, metric_name="val:nope", val_period=3)
    run.loop.run()
    assert len(run.recorder.warned) == 2, "at each validation; the recorder shows it once"
    assert "val:nope was not measured at step 3" in run.recorder.warned[0]
    assert "accuracy, loss" in run.recorder.warned[0]


def test_a_checkpoint_without_the_validation_that_ranks_it_is_told(tmp_path: Path) -> None:
    run = scene(tmp_path, metric_name="val:accuracy", val_period=3, save_period=2)
    run.loop.run()
    assert ["step 4 is saved without a validation" in text for text in run.recorder.warned] == [True]


@pytest.mark.parametrize("settings", [{"metric_name": "val:accuracy", "val_period": 2}, {"metric_name": "train:loss"}])
def test_a_metric_that_is_measured_is_not_mentioned(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = scene(tmp_path, save_period=2, **settings)
    run.loop.run()
    assert run.recorder.warned == []


def test_the_run_folder_is_that_of_the_checkpoints_unless_another_is_given() -> None:
    assert run_folder(None, "results/a") == Path("results/a")
    assert run_folder("logs/a", "results/a") == Path("logs/a")
