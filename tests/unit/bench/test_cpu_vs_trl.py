"""The benchmark against TRL, on a tiny model: both sides run, do the same work, and are compared."""

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
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The table and the JSON of one run of both jobs with both sides."""
    file = tmp_path_factory.mktemp("bench") / "numbers.json"
    done = run("--tiny", "--threads", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_the_table_has_both_sides_and_their_ratio(both: tuple[str, dict[str, Any]], kind: str) -> None:
    text, numbers = both
    part = text[text.index(f"{kind.upper()}: ") :]
    header, step = part.splitlines()[1], part.splitlines()[2]
    assert "TRL" in header
    assert "posttrain" in header
    assert step.startswith("seconds per step")
    assert f"{numbers['jobs'][kind]['ratios']['speed']:.2f}x" in step


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_ratios_are_those_of_the_measured_steps_and_peaks(both: tuple[str, dict[str, Any]], kind: str) -> None:
    job = both[1]["jobs"][kind]
    trl, ours = job["sides"]["trl"], job["sides"]["posttrain"]
    # The first step is a warm-up and does not count.
    assert [len(side["steps"]) for side in (trl, ours)] == [2, 2]
    assert job["ratios"]["speed"] == pytest.approx(trl["steps"][1]["seconds"] / ours["steps"][1]["seconds"])
    assert job["ratios"]["memory"] == pytest.approx(ours["peak_gib"] / trl["peak_gib"])
    assert ours["peak_gib"] * 2**30 == ours["process_bytes"] + ours["helper_bytes"]


def test_both_sides_are_given_the_same_tokens(both: tuple[str, dict[str, Any]]) -> None:
    for kind, expected in (("grpo", None), ("dpo", 2 * 2 * 32)):
        job = both[1]["jobs"][kind]
        sides = job["sides"].values()
        assert job["same_work"] is True
        assert len({side["inputs"] for side in sides}) == 1
        counts = {step["tokens"] for side in sides for step in side["steps"]}
        assert len(counts) == 1
        if expected is not None:
            assert counts == {expected}


def test_dpo_has_the_same_loss_and_gradient_on_both_sides(both: tuple[str, dict[str, Any]]) -> None:
    sides = both[1]["jobs"]["dpo"]["sides"]
    for trl, ours in zip(sides["trl"]["steps"], sides["posttrain"]["steps"], strict=True):
        assert ours["loss"] == pytest.approx(trl["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(trl["grad_norm"], rel=1e-3)


def test_the_scoring_process_of_posttrain_counts_as_its_memory(both: tuple[str, dict[str, Any]]) -> None:
    sides = both[1]["jobs"]["grpo"]["sides"]
    assert sides["posttrain"]["helper_bytes"] > 2**20
    assert sides["trl"]["helper_bytes"] == 0


def test_a_tiny_job_has_no_goals(both: tuple[str, dict[str, Any]]) -> None:
    assert "goal" not in both[0]
