"""On a GPU in the deterministic mode: a resumed run has the bits of the uninterrupted one.

Each run is a process of its own: cuBLAS reads its setting once in a process.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_runs import LORA, command, dpo, grpo, questions, results_of, save_data, save_model, weights_of, write_rows

STEPS, RESUMED_FROM = 6, 2
# Sequences of several blocks of attention whose prompts are shared: both add up with atomics unless told not to.
ON_GPU = ["policy.device=cuda", "policy.precision=bfloat16", "policy.deterministic=true"]
# Prompts differ in length: how attention is divided must not depend on the longest that a process has seen.
LONG = [
    "policy.max_total_sequence_length=1700",
    "policy.generation.max_new_tokens=400",
    "policy.generation.ignore_eos=true",
    "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=16",
    "policy.sequence_packing.enabled=true",
]
# Unfinished responses go on in the next step, which needs responses of different lengths.
ROUNDS = ["policy.generation.ignore_eos=false", "grpo.async_grpo.enabled=true"]
AGES = [[*ROUNDS, f"grpo.async_grpo.max_trajectory_age_steps={age}"] for age in (1, 2)]


def finish(arguments: list[str]) -> None:
    ended = subprocess.run(command(arguments), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("grpo", LONG), ("grpo", [*LONG, *LORA]), *(("grpo", [*LONG, *age]) for age in AGES), ("dpo", [])],
    ids=["grpo", "grpo with adapters", "asynchronous grpo, age 1", "asynchronous grpo, age 2", "dpo"],
)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(kind: str, settings: list[str], tmp_path: Path) -> None:
    assert_resumed_has_the_same_bits(kind, settings, tmp_path)


def assert_resumed_has_the_same_bits(kind: str, settings: list[str], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", hidden_size=256, num_layers=4, max_length=2048)
    data = save_data(tmp_path)
    rng = random.Random(0)
    rows = [{**row, "input": row["input"] + " and" * rng.randrange(300)} for row in questions(22)]
    write_rows(data / "questions.jsonl", rows)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def arguments(folder: Path, steps: int) -> list[str]:
        return [*{"grpo": grpo, "dpo": dpo}[kind](model, data, folder, steps=steps), *ON_GPU, *settings]

    finish(arguments(whole, STEPS))
    shutil.copytree(whole, resumed)
    for step in range(RESUMED_FROM + 2, STEPS + 1, 2):
        shutil.rmtree(resumed / f"step_{step}")
    finish(arguments(resumed, STEPS))
    assert results_of(resumed) == results_of(whole)
    if ROUNDS[-1] in settings:
        assert max(row.get("train/trajectory_age_max", 0) for row in results_of(whole)) > 0, "nothing was carried over"
    for step in range(RESUMED_FROM + 2, STEPS + 1, 2):
        assert weights_of(resumed / f"step_{step}") == weights_of(whole / f"step_{step}")
