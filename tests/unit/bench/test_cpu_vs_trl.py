"""The benchmark against TRL, on a tiny model: both sides run, do the same work, and are compared."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the bench extra is not installed")

BENCH = Path(__file__).parents[3] / "bench"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "cpu_vs_trl.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run of both jobs with both sides."""
    file = tmp_path_factory.mktemp("bench") / "numbers.json"
    done = run("--tiny", "--threads", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "goal" not in done.stdout
    return json.loads(file.read_text())


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_ratios_are_those_of_the_measured_steps_and_peaks(both: dict[str, Any], kind: str) -> None:
    job = both["jobs"][kind]
    trl, ours = job["sides"]["trl"], job["sides"]["posttrain"]
    # The first step is a warm-up and does not count.
    assert [len(side["steps"]) for side in (trl, ours)] == [2, 2]
    assert job["ratios"]["speed"] == pytest.approx(trl["steps"][1]["seconds"] / ours["steps"][1]["seconds"])
    assert job["ratios"]["memory"] == pytest.approx(ours["peak_gib"] / trl["peak_gib"])
    assert ours["peak_gib"] * 2**30 == ours["process_bytes"] + ours["helper_bytes"]


def test_both_sides_are_given_the_same_tokens(both: dict[str, Any]) -> None:
    for kind, expected in (("grpo", None), ("dpo", 2 * 2 * 32)):
        job = both["jobs"][kind]
        sides = job["sides"].values()
        assert job["same_work"] is True
        assert len({side["inputs"] for side in sides}) == 1
        (count,) = {step["tokens"] for side in sides for step in side["steps"]}
        assert count == expected or expected is None


def test_dpo_has_the_same_loss_and_gradient_on_both_sides(both: dict[str, Any]) -> None:
    sides = both["jobs"]["dpo"]["sides"]
    for trl, ours in zip(sides["trl"]["steps"], sides["posttrain"]["steps"], strict=True):
        assert ours["loss"] == pytest.approx(trl["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(trl["grad_norm"], rel=1e-3)


def test_the_scoring_process_of_posttrain_counts_as_its_memory(both: dict[str, Any]) -> None:
    sides = both["jobs"]["grpo"]["sides"]
    assert sides["posttrain"]["helper_bytes"] > 2**23
    # None of its own; a library may ask the system something in a process of a moment, which is small.
    assert sides["trl"]["helper_bytes"] < 2**23


# -- the comparison itself, with invented numbers ----------------------------------------------------------------------


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("side_by_side.comparison")


def outcome(comparison: Any, *seconds: float, gib: float = 1.0, tokens: int = 100, inputs: str = "same") -> Any:
    shares = {"generation": 0.5, "training": 0.5}
    step = {"tokens": tokens, "computed_tokens": tokens, "loss": 0.5, "grad_norm": 1.0}
    steps = [
        {**step, "seconds": s, "cpu_seconds": s, "stages": {name: share * s for name, share in shares.items()}}
        for s in seconds
    ]
    return comparison.Outcome("version", steps, inputs, int(gib * 2**30), 0, 0.0)


def job_with_goals(comparison: Any) -> Any:
    return comparison.Job("grpo", "model", 3, 1, goal_speed=1.6, goal_memory=0.5)


@pytest.mark.parametrize(
    ("ours", "gib", "speed_reached", "memory_reached"),
    [((9.0, 5.0, 6.0), 2.0, True, True), ((9.0, 7.0, 8.0), 2.1, False, False)],
)
def test_goals_are_judged_by_the_best_step_after_the_first(
    comparison: Any, ours: tuple[float, ...], gib: float, speed_reached: bool, memory_reached: bool
) -> None:
    outcomes = {
        "trl": outcome(comparison, 1.0, 10.0, 8.0, gib=4.0),  # its fast first step does not count
        "posttrain": outcome(comparison, *ours, gib=gib),
    }
    found = comparison.summary(job_with_goals(comparison), outcomes)
    assert found["ratios"]["speed"] == 8.0 / min(ours[1:])
    assert found["goals"]["speed"]["reached"] is speed_reached
    assert found["goals"]["memory"]["reached"] is memory_reached


def test_different_work_is_reported(comparison: Any) -> None:
    trl = outcome(comparison, 1.0)
    assert comparison.check_same_work({"trl": trl, "posttrain": outcome(comparison, 1.0)}) == []
    for other in ({"tokens": 99}, {"inputs": "other"}):
        assert len(comparison.check_same_work({"trl": trl, "posttrain": outcome(comparison, 1.0, **other)})) == 1
