"""What every `Recorder` does: a whole run goes through it, and what it shows does not stop the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeAlgorithm, FakeRecorder, FakeSaver

from posttrain.checkpointing import SaveDeadline
from posttrain.loop import LoopSettings, TrainingLoop
from posttrain.recipes.grpo import GrpoRecipe
from posttrain.reporting.presentation import RecorderSettings
from posttrain.reporting.recorder import RunRecorder
from posttrain.reporting.rows import Hardware
from posttrain.roles import Recorder
from posttrain.types import StepReport


def run_folder(folder: Path) -> Recorder:
    return RunRecorder(
        folder / "run",
        RecorderSettings(
            GrpoRecipe.presentation, max_steps=3, hardware=Hardware(1), config_yaml="grpo: {}\n", quiet=True
        ),
    )


RECORDERS: dict[str, Callable[[Path], Recorder]] = {
    "run folder": run_folder,
    "fake": lambda folder: FakeRecorder([]),
}


@pytest.fixture(params=RECORDERS)
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Recorder:
    return RECORDERS[request.param](tmp_path)


def test_a_run_with_validations_is_recorded_to_its_end(recorder: Recorder, tmp_path: Path) -> None:
    settings = LoopSettings(3, val_period=2, val_start_at=0, val_at_start=True, val_at_end=True)
    saver = FakeSaver(tmp_path)
    loop = TrainingLoop(settings, FakeAlgorithm([]), recorder, saver, SaveDeadline(None))
    assert loop.run() == 0
    assert saver.events == [
        ("validated",),
        ("after_step", 1, False),
        ("validated",),
        ("after_step", 2, False),
        ("validated",),
        ("after_step", 3, True),
    ]


def test_messages_and_progress_may_come_before_the_run_starts(recorder: Recorder) -> None:
    recorder.say("reading the data")
    recorder.warn("data.train: 3 rows left out")
    with recorder.progress("loading", 4) as progress:
        progress(1)
        progress(3)
    recorder.start(0)
    recorder.begin_step(1)
    recorder.stage("Sampling")
    recorder.record_step(1, StepReport({"loss": float("nan")}, {"total_step_time": 1.0}), None)
    recorder.finish("finished")


def test_a_failing_step_is_reported_to_the_saver_and_raised(recorder: Recorder, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise RuntimeError("out of memory")

    settings = LoopSettings(3, val_period=0, val_start_at=0, val_at_start=False, val_at_end=False)
    saver = FakeSaver(tmp_path)
    loop = TrainingLoop(settings, FakeAlgorithm([], during_step=fail), recorder, saver, SaveDeadline(None))
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        loop.run()
    assert saver.abandoned == [caught.value]
