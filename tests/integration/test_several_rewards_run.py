"""Several rewards: their breakdown is in every rollout and in the metrics, and training uses the weighted sum."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tiny_runs import grpo, rows_of, run, save_data, save_model

from posttrain.cli.main import main
from posttrain.reporting.rows import read_rollouts

STEPS = 2
REWARDS = (
    "env.several.rewards={odd: {type: python, function: REWARDS}, "
    "short: {type: length, limit: 6, tolerance: 8, weight: 0.5}, digit: {type: regex, pattern: '[0-9]', weight: -0.25}}"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was scored by three rewards."""
    folder = tmp_path_factory.mktemp("several")
    data = save_data(folder / "data")
    arguments = grpo(save_model(folder / "model"), data, folder / "run", steps=STEPS)
    several = ["~env.mine", REWARDS.replace("REWARDS", f"{data / 'rewards.py'}:odd"), "data.default.env_name=several"]
    kept = [word for word in arguments if not word.startswith(("env.mine", "data.default.env_name"))]
    assert run([*kept, *several[1:]]) == 0
    return folder


def test_every_rollout_has_the_breakdown_and_the_weighted_sum(finished: Path) -> None:
    for step in range(1, STEPS + 1):
        groups = read_rollouts(finished / "run" / "rollouts" / f"step_{step}.jsonl.gz")
        for completion in (completion for group in groups for completion in group["completions"]):
            parts, length = completion["parts"], completion["num_tokens"]
            assert set(parts) == {"odd", "short", "digit"}
            assert parts["short"] == pytest.approx(min(1.0, max(0.0, 1 - (length - 6) / 8)))
            assert parts["digit"] == float(any(c in "0123456789" for c in completion["text"]))
            total = parts["odd"] + 0.5 * parts["short"] - 0.25 * parts["digit"]
            assert completion["reward"] == pytest.approx(total)


def test_the_metrics_have_the_mean_of_each_part(finished: Path) -> None:
    rows = {row["step"]: row for row in rows_of(finished / "run")}
    for step in range(1, STEPS + 1):
        groups = read_rollouts(finished / "run" / "rollouts" / f"step_{step}.jsonl.gz")
        parts = [completion["parts"] for group in groups for completion in group["completions"]]
        for name in ("odd", "short", "digit"):
            expected = statistics.fmean(part[name] for part in parts)
            assert rows[step][f"train/reward/{name}"] == pytest.approx(expected)


def test_the_rollouts_can_be_scored_again_and_agree(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = finished / "run"
    samples = run_folder / "rollouts" / "step_1.jsonl.gz"
    words = [
        "rewards",
        "test",
        "--config",
        str(run_folder / "config.yaml"),
        "--env",
        "several",
        str(samples),
        "--strict",
    ]
    # A stored answer comes without tokens, so its length in tokens is unknown.
    assert main(words) == 2
    assert "16 × short: the sample does not say what its tokens are" in capsys.readouterr().out
    # The other parts are compared with the parts that were recorded.
    in_words = "env.several.rewards.short.unit=words"
    for part in ("odd", "digit"):
        assert main([*words, "--part", part, in_words]) == 0
        assert "agree 16 of 16" in capsys.readouterr().out
    assert main([*words, "--part", "digit", in_words, 'env.several.rewards.digit.pattern="^$"']) == 2
