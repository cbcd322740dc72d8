"""Asynchronous GRPO: age 0 is the synchronous run, and a killed and resumed run has the bits of one that was not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_resume_is_exact import kill_and_compare
from tiny_runs import grpo, results_of, rows_of, run, trained_draws, weights_of

STEPS, PROMPTS = 8, 4
NEW_METRICS = ("trajectory_age", "stale_token", "num_open_groups", "num_carried")


def rounds(model: Path, data: Path, folder: Path, age: int, *extra: str) -> list[str]:
    return [
        *grpo(model, data, folder, steps=STEPS),
        "grpo.async_grpo.enabled=true",
        f"grpo.async_grpo.max_trajectory_age_steps={age}",
        *extra,
    ]


@pytest.mark.invariant
def test_age_0_is_the_synchronous_run(model: Path, data: Path, tmp_path: Path) -> None:
    plain, rounded = tmp_path / "plain", tmp_path / "rounds"
    assert run(grpo(model, data, plain, steps=STEPS)) == 0
    assert run(rounds(model, data, rounded, 0)) == 0
    added = {name for row in rows_of(rounded) for name in row if any(part in name for part in NEW_METRICS)}
    assert added, "rounds report their ages"
    kept = [{name: value for name, value in row.items() if name not in added} for row in results_of(rounded)]
    assert kept == results_of(plain)
    assert weights_of(rounded / f"step_{STEPS}") == weights_of(plain / f"step_{STEPS}")


def test_a_synchronous_run_says_that_it_drops_the_open_groups_of_a_checkpoint(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(rounds(model, data, folder, 2)) == 0
    for step in range(4, STEPS + 1, 2):
        shutil.rmtree(folder / f"step_{step}")
    capsys.readouterr()
    assert run([*grpo(model, data, folder, steps=STEPS), "--resume-with-changes"]) == 0
    shown = " ".join("".join(capsys.readouterr()).split())  # lines are as wide as the terminal
    assert "step_2 holds sampled groups for later steps (rounds)" in shown


@pytest.mark.invariant
@pytest.mark.parametrize("correction", [False, True], ids=["clipped", "importance weights"])
def test_a_killed_run_with_rounds_equals_the_uninterrupted_one(
    correction: bool, model: Path, data: Path, tmp_path: Path
) -> None:
    extra = ("loss_fn.use_importance_sampling_correction=true",) if correction else ()
    whole = tmp_path / "whole"
    assert run(rounds(model, data, whole, 2, *extra)) == 0
    ages = [row["train/trajectory_age_max"] for row in rows_of(whole) if "train/trajectory_age_max" in row]
    assert 0 < max(ages) <= 2, "groups are carried over"
    assert sorted(trained_draws(whole, STEPS)) == list(range(STEPS * PROMPTS)), "each draw is trained exactly once"
    kill_and_compare(lambda folder: rounds(model, data, folder, 2, *extra), whole, tmp_path, num_kills=5, seed=11)
