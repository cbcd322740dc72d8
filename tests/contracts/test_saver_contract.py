"""What every `Saver` does: a run that is saved, and started again, continues where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes import Events, FakeRecorder, FakeSaver, FakeStream, FakeTrainer

from posttrain.checkpointing import CheckpointStore
from posttrain.checkpointing.save_and_resume import CheckpointSaver, CopyRule, SaverSettings
from posttrain.roles import Saver
from posttrain.types import StepReport

REPORT = StepReport({"reward": 0.5}, {"generation": 1.0}, num_tokens=10)


def checkpoints(folder: Path, *, in_background: bool, keep_top_k: int | None = None) -> Saver:
    events: Events = []
    recorder = FakeRecorder(events)
    store = CheckpointStore(folder, keep_top_k, save_period=2, say=recorder.say)
    settings = SaverSettings(
        enabled=True, period=2, optimizer=True, samples_per_step=4, steps_per_epoch=2.5, in_background=in_background
    )
    return CheckpointSaver(settings, FakeTrainer(events), FakeStream(), recorder, store, "config: 1\n")


SAVERS: dict[str, Callable[[Path], Saver]] = {
    "in the foreground": lambda folder: checkpoints(folder, in_background=False),
    "in the background": lambda folder: checkpoints(folder, in_background=True),
    "fake": FakeSaver,
}


@pytest.fixture(params=SAVERS)
def new_saver(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Saver]:
    return lambda: SAVERS[request.param](tmp_path)


def test_without_a_checkpoint_a_run_starts_at_its_first_step(new_saver: Callable[[], Saver]) -> None:
    saver = new_saver()
    assert saver.is_enabled
    assert saver.resume() == 0


def test_the_last_step_is_saved_and_resumed_from(new_saver: Callable[[], Saver]) -> None:
    saver = new_saver()
    for step in (1, 2, 3):
        saver.after_step(step, REPORT, None, is_last=step == 3)
    assert new_saver().resume() == 3


@pytest.mark.parametrize("killed_at", ["before the removal", "in the removal"])
def test_surplus_that_a_killed_run_left_is_removed(killed_at: str, tmp_path: Path) -> None:
    saver = checkpoints(tmp_path, in_background=False)
    for step in (2, 4):
        saver.after_step(step, REPORT, None, is_last=step == 4)
    if killed_at == "in the removal":
        (tmp_path / "step_2").rename(tmp_path / "removing_step_2")
    assert checkpoints(tmp_path, in_background=False, keep_top_k=1).resume() == 4
    assert [path.name for path in tmp_path.glob("*step_*")] == ["step_4"]


def test_timings_are_added_and_nothing_else_changes(new_saver: Callable[[], Saver]) -> None:
    saver = new_saver()
    first = saver.with_timings(REPORT)
    assert first == REPORT
    saver.after_step(1, first, None, is_last=False)
    saver.after_step(2, first, None, is_last=False)
    later = saver.with_timings(REPORT)
    assert later.metrics == REPORT.metrics
    assert {**REPORT.timings_s, **later.timings_s} == later.timings_s
    saver.after_step(3, REPORT, None, is_last=True)


def test_a_failed_run_keeps_its_error(new_saver: Callable[[], Saver]) -> None:
    saver = new_saver()
    saver.after_step(1, REPORT, None, is_last=False)
    saver.after_step(2, REPORT, None, is_last=False)
    error = RuntimeError("the step failed")
    saver.abandon(error)
    assert str(error) == "the step failed"
    assert not hasattr(error, "__notes__"), "the checkpoint that was being written is complete"
    assert new_saver().resume() == 2


def test_a_copy_is_weighed_against_each_second_of_training_once(tmp_path: Path) -> None:
    weighed: list[float] = []

    class Rule(CopyRule):
        def reason_against(self, *, save_s: float, saved_bytes: int, trained_s: float, blocks: bool) -> str:
            weighed.append(trained_s)
            return "no"

    saver = checkpoints(tmp_path, in_background=False)
    assert isinstance(saver, CheckpointSaver)
    saver.export, saver.copy_rule = Mock(), Rule(by_cost=True, model_bytes=1)
    stages = {"prepare_for_generation/total": 2.0, "prepare_for_generation/transfer": 1.0, "generation": 5.0}
    saver.after_step(1, replace(REPORT, timings_s={**stages, "total_step_time": 8.0}), None, is_last=False)
    saver.after_step(2, replace(REPORT, timings_s={"generation": 3.0, "checkpointing": 9.0}), None, is_last=True)
    assert weighed == [8.0 + 3.0]
