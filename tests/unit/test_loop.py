"""The outer loop: what happens in which order, when it validates, saves and stops, and what it resumes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from loop_scene import scene

from posttrain.checkpointing import SaveDeadline, StopAtOnce
from posttrain.errors import CheckpointError, ExitCode, StopRequested, Superseded, Terminated
from posttrain.files.run_folder_lock import Attempt
from posttrain.types import StepReport

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
def test_validation_runs_when_configured(settings: dict[str, Any], validated: list[int], tmp_path: Path) -> None:
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


def test_a_run_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
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


def stop_within(run: Any, step: int) -> None:
    """Asks for a stop while `step` samples: data and random numbers are drawn already, no update is made."""
    move_on = run.algorithm.during_step

    def during(number: int) -> None:
        if number != step:
            move_on(number)
            return
        run.stream.position += 4
        random.random()
        os.kill(os.getpid(), signal.SIGTERM)
        raise StopRequested

    run.algorithm.during_step = during


def test_a_step_without_an_update_is_left_undone_and_repeated(tmp_path: Path) -> None:
    random.seed(5)
    whole = scene(tmp_path / "whole")
    whole.loop.run()

    random.seed(5)
    run = scene(tmp_path / "stopped")
    stop_within(run, 4)
    assert run.loop.run() == 85
    assert run.checkpoints() == ["step_3"]
    assert list(run.recorder.rows) == [1, 2, 3]
    assert "after step 3, saved" in run.recorder.reason
    assert run.info(3)["total_valid_tokens"] == 30

    again = scene(tmp_path / "stopped")
    assert again.loop.run() == 0
    assert again.stream.position == whole.stream.position
    assert again.policy.num_updates == whole.policy.num_updates
    losses = [row.metrics["loss"] for rows in (run.recorder.rows, again.recorder.rows) for row, _ in rows.values()]
    assert losses == [row.metrics["loss"] for row, _ in whole.recorder.rows.values()]


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_saved_already_is_not_saved_again(async_save: bool, tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=1, async_save=async_save)
    stop_within(run, 3)
    assert run.loop.run() == 85
    assert run.checkpoints() == ["step_1", "step_2"]
    assert [event[1] for event in run.events if event[0] in ("save", "begin")] == ["step_1", "step_2"]
    resumed = scene(tmp_path, save_period=1)
    stop_within(resumed, 3)
    assert resumed.loop.run() == 85
    assert not resumed.of_kind("save")


def test_a_background_save_that_failed_is_made_again_when_the_run_stops(tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=True)

    def fail(name: str) -> None:
        raise OSError("the disk is gone")

    run.policy.writing = fail
    stop_within(run, 3)
    assert run.loop.run() == 85
    assert run.checkpoints() == ["step_2"]
    assert any("the disk is gone" in line for line in run.recorder.warned)


def test_a_stop_within_the_first_step_has_nothing_to_save(tmp_path: Path) -> None:
    run = scene(tmp_path)
    stop_within(run, 1)
    assert run.loop.run() == 128 + signal.SIGTERM
    assert run.checkpoints() == []
    assert "nothing to save" in run.recorder.reason


@pytest.mark.parametrize("within", [True, False])
def test_a_save_that_takes_longer_than_the_time_left_is_not_begun(
    within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_file = tmp_path / "stop.json"
    stop_file.write_text(json.dumps({"deadline": time.time() + 1000.0}))
    monkeypatch.setenv("POSTTRAIN_STOP_FILE", str(stop_file))
    run = scene(tmp_path / "run", save_period=2)
    if within:
        stop_within(run, 4)
    else:
        run.algorithm.during_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None
    move_on = run.algorithm.during_step

    def after_a_slow_save(step: int) -> None:
        run.saver._save_s = 2000.0 if step > 2 else None
        move_on(step)

    run.algorithm.during_step = after_a_slow_save
    assert run.loop.run() == 128 + signal.SIGTERM, "85 would promise a checkpoint"
    assert run.checkpoints() == ["step_2"]
    assert "not saved: the last checkpoint took 2000 s, and " in run.recorder.reason
    assert "the newest is that of step 2" in run.recorder.reason


def test_a_validation_that_was_due_is_made_up_for(tmp_path: Path) -> None:
    run = scene(tmp_path, val_period=3)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None
    assert run.loop.run() == 85
    assert not run.of_kind("validate")
    assert run.checkpoints() == ["step_3"]

    again = scene(tmp_path, val_period=3)
    assert again.loop.run() == 0
    assert [event[:2] for event in again.events[:4]] == [
        ("load", "step_3"),
        ("validate", 3),
        ("record", 3),
        ("step", 4),
    ]
    third = scene(tmp_path, val_period=3, max_steps=7)
    third.loop.run()
    assert not third.of_kind("validate"), "it is made once"


def test_a_validation_after_the_last_step_is_made_up_for(tmp_path: Path) -> None:
    run = scene(tmp_path, val_at_end=True)

    def interrupted(step: int) -> StepReport | None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise StopRequested

    run.algorithm.validate = interrupted  # type: ignore[method-assign]
    assert run.loop.run() == 85
    assert "after step 6, saved" in run.recorder.reason
    again = scene(tmp_path, val_at_end=True)
    assert again.loop.run() == 0
    assert again.of_kind("validate", "step") == [("validate", 6)]
    assert again.recorder.reason == "finished"


def test_a_validation_that_is_made_up_for_may_end_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_period": 3, "stop_metric": "val:accuracy", "stop_threshold": 0.3}
    run = scene(tmp_path, **settings)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None
    assert run.loop.run() == 85
    again = scene(tmp_path, **settings)
    assert again.loop.run() == 0
    assert not again.of_kind("step")
    assert "val:accuracy reached 0.3" in again.recorder.reason


def test_sigusr1_saves_after_the_step_and_goes_on(tmp_path: Path) -> None:
    run = scene(tmp_path)
    run.algorithm.during_step = lambda step: os.kill(os.getpid(), signal.SIGUSR1) if step == 2 else None
    assert run.loop.run() == 0
    assert run.checkpoints() == ["step_2", "step_6"]


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


def test_a_signal_while_a_checkpoint_is_verified_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = scene(tmp_path)
    monkeypatch.setattr(run.saver.store, "latest", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with StopAtOnce(), pytest.raises(Terminated) as stopped:
        run.loop.run()
    assert stopped.value.exit_code == 143
    assert not run.of_kind("step")


def test_a_signal_while_the_end_is_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = scene(tmp_path)
    finish = run.recorder.finish

    def interrupted(reason: str, **options: Any) -> ExitCode:
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(reason, **options)

    monkeypatch.setattr(run.recorder, "finish", interrupted)
    with StopAtOnce():
        assert run.loop.run() == 0
    assert run.recorder.reason == "finished"


def test_signals_are_as_they_were_after_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    scene(tmp_path).loop.run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_deadline_ends_the_run_with_a_checkpoint_and_success(tmp_path: Path) -> None:
    now = [0.0]
    run = scene(tmp_path, SaveDeadline(10, clock=lambda: now[0]))

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


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.CRASHED, ExitCode.NO_PROGRESS])
def test_exit_code_tells_what_is_wrong_with_a_run_that_has_all_its_steps(code: ExitCode, tmp_path: Path) -> None:
    for _ in range(2):  # the second has nothing to do, which is no success either
        run = scene(tmp_path, max_steps=1)
        run.recorder.exit_code = code
        assert run.loop.run() == code


# -- one writer --------------------------------------------------------------------------------------------------------


def newer_attempt(folder: Path) -> None:
    (folder / "attempts" / "0002.json").write_text("{}")


@pytest.mark.parametrize("async_save", [False, True])
def test_an_attempt_that_was_superseded_completes_no_checkpoint(async_save: bool, tmp_path: Path) -> None:
    run = scene(tmp_path, save_period=2, async_save=async_save, attempt=Attempt(tmp_path))
    run.policy.writing = lambda name: newer_attempt(tmp_path) if name.startswith("step_4") else None
    if not async_save:
        run.algorithm.during_step = lambda step: newer_attempt(tmp_path) if step == 4 else None
    with pytest.raises(Superseded, match="taken over"):
        run.loop.run()
    assert run.checkpoints() == ["step_2"]


def test_the_attempt_has_its_first_and_last_checkpoint(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    assert scene(tmp_path, save_period=2, attempt=attempt).loop.run() == 0
    assert (attempt.record.first_checkpoint, attempt.record.last_checkpoint) == (2, 6)


@pytest.mark.parametrize("when", ["in a step", "while saving"])
def test_a_deleted_folder_gets_a_checkpoint_at_once(when: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    attempt = Attempt(folder)
    run = scene(folder, save_period=3, attempt=attempt)
    save = run.policy.save

    def delete(step: int) -> None:
        if step == 4:
            shutil.rmtree(folder)
            attempt.confirm()  # as the recorder does

    def save_and_delete(target: Path, *, optimizer: bool) -> None:
        if not run.of_kind("save"):
            run.events.append(("save", "interrupted", optimizer))
            shutil.rmtree(folder)
        save(target, optimizer=optimizer)

    if when == "in a step":
        run.algorithm.during_step = delete
    else:
        run.policy.save = save_and_delete  # type: ignore[method-assign]
    assert run.loop.run() == 0
    assert run.checkpoints() == (["step_4", "step_6"] if when == "in a step" else ["step_3", "step_6"])
    assert attempt.num_losses == 1


def test_if_every_checkpoint_is_damaged_the_run_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    scene(tmp_path, save_period=3).loop.run()
    for step in (3, 6):
        (tmp_path / f"step_{step}" / "config.yaml").write_text("changed")
    with pytest.raises(
        CheckpointError, match=r"none of its 2 checkpoints is intact(?s:.*)step_6: config.yaml"
    ) as refused:
        scene(tmp_path).loop.run()
    assert "--restart" in str(refused.value)


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


def test_unknown_metric_warning_names_the_measured_ones(tmp_path: Path) -> None:
    run = scene(tmp_path, metric_name="val:nope", val_period=3)
    run.loop.run()
    assert len(run.recorder.warned) == 2, "at each validation; the recorder shows it once"
    assert "val:nope was not measured at step 3" in run.recorder.warned[0]
    assert "accuracy, loss" in run.recorder.warned[0]


def test_a_checkpoint_without_its_ranking_validation_gives_a_warning(tmp_path: Path) -> None:
    run = scene(tmp_path, metric_name="val:accuracy", val_period=3, save_period=2)
    run.loop.run()
    assert ["step 4 is saved without a validation" in text for text in run.recorder.warned] == [True]


@pytest.mark.parametrize("settings", [{"metric_name": "val:accuracy", "val_period": 2}, {"metric_name": "train:loss"}])
def test_a_metric_that_is_measured_is_not_mentioned(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = scene(tmp_path, save_period=2, **settings)
    run.loop.run()
    assert run.recorder.warned == []


def test_a_problem_that_the_doctor_finds_saves_and_stops_the_run(tmp_path: Path) -> None:
    made = scene(tmp_path, max_steps=6)
    made.recorder.problem = "kl-runaway (error) at step 1"
    assert made.loop.run() == 3
    assert made.recorder.reason == "stopped by the doctor after step 1, saved: kl-runaway (error) at step 1"
    assert made.checkpoints() == ["step_1"]


def test_a_problem_in_the_last_step_does_not_change_how_a_run_ends(tmp_path: Path) -> None:
    made = scene(tmp_path, max_steps=1)
    made.recorder.problem = "kl-runaway (error) at step 1"
    assert made.loop.run() == 0
