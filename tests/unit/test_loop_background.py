"""The outer loop when checkpoints are written in the background: order, waiting, errors, interruptions, and times."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from loop_scene import Scene, scene

from posttrain.checkpointing.save_and_resume import CopyRule
from posttrain.checkpointing.state import load_training_state


def test_steps_continue_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, max_steps=4, async_save=True)
    may_write = threading.Event()
    run.policy.writing = lambda name: None if may_write.wait(10) else pytest.fail("step 3 did not come")

    def release(step: int) -> None:
        if step == 3:
            assert run.checkpoints() == ["tmp_step_2"], "it has no name before it is complete"
            may_write.set()

    run.algorithm.during_step = release
    assert run.loop.run() == 0
    assert run.checkpoints() == ["step_2", "step_4"]
    kinds = [event[:2] for event in run.events]
    assert kinds.index(("record", 2)) < kinds.index(("begin", "step_2")) < kinds.index(("step", 3))
    assert kinds.index(("step", 3)) < kinds.index(("written", "step_2"))
    assert ("save", "step_4", True) in run.events, "nothing follows the last one that it could overlap with"
    assert (tmp_path / "step_2" / "config.yaml").read_text() == "config: 1\n"


def test_what_a_background_save_holds_is_of_its_step(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, max_steps=3, async_save=True)
    may_write = threading.Event()
    run.policy.writing = lambda name: may_write.wait(10) and None
    move_on = run.algorithm.during_step

    def move_and_release(step: int) -> None:
        move_on(step)
        if step == 3:
            may_write.set()

    run.algorithm.during_step = move_and_release
    run.loop.run()
    state = load_training_state(tmp_path / "step_2")
    assert (state.step, state.stream_state, state.extra["num_updates"]) == (2, {"position": 8}, 4)
    assert run.info(2)["total_valid_tokens"] == 20


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=1, max_steps=4, async_save=True)
    run.policy.writing = lambda name: time.sleep(0.05)
    assert run.loop.run() == 0
    order = [event[:2] for event in run.events if event[0] in ("begin", "written")]
    assert order == [(kind, f"step_{step}") for step in (1, 2, 3) for kind in ("begin", "written")]
    assert run.checkpoints() == ["step_1", "step_2", "step_3", "step_4"]


def test_memory_is_prepared_in_the_steps_before_the_first_save(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=3, max_steps=5, async_save=True)
    run.loop.run()
    assert [event[0] for event in run.events if event[0] in ("step", "prepare", "begin")][:3] == [
        "step",
        "prepare",
        "step",
    ]
    assert len(run.of_kind("prepare")) == 1


def fail_during_step(run: Scene, failing: str, step: int) -> None:
    """The write of the checkpoint `failing` fails while this step runs."""
    is_in_step = threading.Event()

    def fail(name: str) -> None:
        if name == failing:
            assert is_in_step.wait(10)
            raise OSError("stale file handle")

    def let_it_fail(current: int) -> None:
        if current == step:
            is_in_step.set()
            while not run.saver._background.is_over:
                time.sleep(0.001)

    run.policy.writing, run.algorithm.during_step = fail, let_it_fail


def test_after_a_failed_background_write_the_next_step_is_saved(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, max_steps=8, async_save=True)
    fail_during_step(run, "step_4", 5)
    assert run.loop.run() == 0
    assert run.checkpoints() == ["step_2", "step_5", "step_6", "step_8"]
    saves = [event[:2] for event in run.events if event[0] in ("begin", "save")]
    assert saves == [("begin", "step_2"), ("begin", "step_4"), *[("save", f"step_{step}") for step in (5, 6, 8)]]
    assert [warning for warning in run.recorder.warned if "stale file handle" in warning] == run.recorder.warned


def test_a_write_that_fails_before_a_signal_costs_nothing(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)
    fail_during_step(run, "step_2", 3)
    let_it_fail = run.algorithm.during_step

    def fail_and_interrupt(step: int) -> None:
        let_it_fail(step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run.algorithm.during_step = fail_and_interrupt
    assert run.loop.run() == 85
    assert run.checkpoints() == ["step_3"]


def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)
    fail_during_step(run, "step_4", 5)

    def full(folder: Path, *, optimizer: bool) -> None:
        raise OSError("no space left on device")

    run.policy.save = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        run.loop.run()
    assert [step for _, step in run.of_kind("step")] == [1, 2, 3, 4, 5]
    assert run.checkpoints() == ["step_2"], "the one before is as it was, and nothing is left of the others"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_write_before_the_last_save(sent: signal.Signals, tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)
    run.policy.writing = lambda name: time.sleep(0.1)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), sent) if step == 3 else None
    assert run.loop.run() in (85, 130)
    assert run.checkpoints() == ["step_2", "step_3"]
    assert run.events.index(("written", "step_2")) < run.events.index(("save", "step_3", True))


def test_a_step_that_fails_lets_the_write_finish(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)
    run.policy.writing = lambda name: time.sleep(0.1)

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("out of memory")

    run.algorithm.during_step = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        run.loop.run()
    assert run.checkpoints() == ["step_2"]


def test_when_step_and_write_both_fail_both_are_reported(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)
    has_failed = threading.Event()

    def fail_to_write(name: str) -> None:
        assert has_failed.wait(10)
        raise OSError("no space left on device")

    def fail(step: int) -> None:
        if step == 3:
            has_failed.set()
            raise RuntimeError("out of memory")

    run.policy.writing, run.algorithm.during_step = fail_to_write, fail
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        run.loop.run()
    assert "checkpoint that was being written is lost: no space left" in raised.value.__notes__[0]
    assert run.checkpoints() == []


def test_a_second_ctrl_c_does_not_wait_for_the_write(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)
    may_write = threading.Event()
    run.policy.writing = lambda name: may_write.wait(10) and None

    def interrupt_twice(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    run.algorithm.during_step = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        run.loop.run()
    assert run.checkpoints() == ["tmp_step_2"]
    may_write.set()
    run.saver._background.wait()


def test_an_obstacle_is_reported_once_and_saves_block(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=1, max_steps=3, async_save=True)
    run.policy.obstacle = "a copy needs 112 GiB"
    assert run.loop.run() == 0
    assert [event[:2] for event in run.events if event[0] in ("begin", "save")] == [
        ("save", f"step_{step}") for step in (1, 2, 3)
    ]
    assert len(run.recorder.warned) == 1
    assert "checkpointing.async_save" in run.recorder.warned[0]
    assert run.policy.obstacle in run.recorder.warned[0]


class FakeExporter:
    """Writes down in which way it was asked for copies of which checkpoints."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    def __call__(self, checkpoint: Path) -> None:
        self.made.append(("here", checkpoint.name))

    def beside(self, checkpoint: Path, is_given_up: Callable[[], bool]) -> None:
        self.made.append(("beside", checkpoint.name))


def test_copies_are_made_beside_training_and_the_last_one_here(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=1, max_steps=3, async_save=True)
    run.saver.export = exporter = FakeExporter()
    assert run.loop.run() == 0
    assert exporter.made == [("beside", "tmp_step_1"), ("beside", "tmp_step_2"), ("here", "tmp_step_3")]


def test_the_reason_for_no_copy_is_said_once(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=1, max_steps=3)
    run.saver.export = exporter = FakeExporter()
    run.saver.copy_rule = CopyRule(by_cost=True, model_bytes=10**12)
    assert run.loop.run() == 0
    assert exporter.made == []
    said = [line for line in run.recorder.said if "Hugging Face export" in line]
    assert len(said) == 1
    assert said[0].startswith("skipped Hugging Face export of step_1: it would take")


def test_both_times_of_a_background_save_are_reported(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, max_steps=6, async_save=True)

    def wait_for_the_write(step: int) -> None:
        while not run.saver._background.is_over:
            time.sleep(0.001)

    run.algorithm.during_step = wait_for_the_write
    run.loop.run()
    timings = {step: report.timings_s for step, (report, _) in run.recorder.rows.items()}
    assert [step for step, times in timings.items() if "checkpoint_write" in times] == [3, 5]
    assert timings[3]["checkpointing"] >= 100, "what the update waited for the copy is part of it"
    assert timings[3]["checkpoint_write"] < 10
