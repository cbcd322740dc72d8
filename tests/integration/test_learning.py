"""A small model really learns, with each algorithm. Read from metrics.jsonl, never from the console."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tiny_runs import LORA, dpo, grpo, preferences, results_of, run, save_data, sft, write_rows

LETTERS = """
def letters(prompt, response, reference):
    return sum(c in "abcdefghijklmnopqrstuvwxyz" for c in response) / max(1, len(response))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_data(tmp_path_factory.mktemp("data"))
    (folder / "rewards.py").write_text(LETTERS)
    write_rows(folder / "pairs.jsonl", preferences(200))
    write_rows(folder / "held_out_pairs.jsonl", preferences(40, seed=1))
    return folder


@pytest.mark.invariant
@pytest.mark.parametrize(("settings", "rate"), [([], 3e-3), (LORA, 1e-2)], ids=["full", "adapters"])
def test_grpo_raises_the_reward(settings: list[str], rate: float, model: Path, data: Path, tmp_path: Path) -> None:
    """The reward is the share of lower-case letters, a tenth of what a random model writes."""
    steps = 30
    arguments = [
        *grpo(model, data, tmp_path / "run", steps=steps, reward=f"{data / 'rewards.py'}:letters"),
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=64",
        f"policy.optimizer.kwargs.lr={rate}",
        "policy.scheduler=null",
        "grpo.val_period=0",
        "grpo.val_at_start=true",
        "grpo.val_at_end=true",
        "checkpointing.save_period=100",
        *settings,
    ]
    assert run(arguments) == 0
    rows = results_of(tmp_path / "run")
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert len(rewards) == steps
    first, last = statistics.fmean(rewards[:5]), statistics.fmean(rewards[-5:])
    assert first < 0.3
    assert last > 2 * first
    assert last > first + 0.2
    assert rows[-1]["validation/accuracy"] > rows[0]["validation/accuracy"] + 0.15, "on questions it was not trained on"
    assert rows[-1]["train/kl_penalty"] > 10 * abs(rows[1]["train/kl_penalty"]), "it has left the reference"


@pytest.mark.invariant
@pytest.mark.parametrize("settings", [[], LORA], ids=["full", "adapters"])
def test_dpo_learns_to_rank_pairs_it_has_not_seen(settings: list[str], model: Path, data: Path, tmp_path: Path) -> None:
    arguments = [
        *dpo(model, data, tmp_path / "run", steps=25),
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=8",
        "policy.optimizer.kwargs.lr=3e-3",
        "policy.scheduler=null",
        "dpo.val_period=25",
        "dpo.val_batches=0",
        "checkpointing.save_period=100",
        *settings,
    ]
    assert run(arguments) == 0
    rows = results_of(tmp_path / "run")
    assert rows[0]["step"] == 0
    assert rows[0]["validation/accuracy"] == 0.5, "policy and reference are equal: every pair is a tie"
    assert rows[0]["validation/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[1]["train/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[-1]["validation/accuracy"] > 0.8
    assert rows[-1]["validation/loss"] < 0.6
    assert rows[-1]["validation/rewards_chosen_mean"] > rows[-1]["validation/rewards_rejected_mean"]


def test_sft_lowers_the_loss(model: Path, data: Path, tmp_path: Path) -> None:
    """The answers are numbers: to know that much is worth several nats."""
    assert run([*sft(model, data, tmp_path / "run", steps=30), "sft.val_period=30"]) == 0
    rows = results_of(tmp_path / "run")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 30
    assert statistics.fmean(losses[-5:]) < statistics.fmean(losses[:5]) - 1
    held_out = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert held_out[-1] < held_out[0] - 1
