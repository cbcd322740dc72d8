"""Distillation on a GPU in bf16: an update trains on the teacher's divergence, whatever it is taken over."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import common, results_of, run, save_data, save_model


@pytest.mark.parametrize("over", ["vocabulary", "top_k", "sampled"])
@pytest.mark.parametrize("chunk", ["null", "16"])
def test_a_student_in_bf16_comes_near_its_teacher(over: str, chunk: str, tmp_path: Path) -> None:
    model, teacher = save_model(tmp_path / "model"), save_model(tmp_path / "teacher", hidden_size=48, seed=7)
    settings = [
        f"data={save_data(tmp_path / 'data') / 'questions.jsonl'}",
        f"teacher={teacher}",
        f"teacher.over={over}",
    ]
    steps = ["grpo.max_num_steps=10", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8"]
    policy = [
        "policy.device=cuda",
        "policy.precision=bfloat16",
        f"policy.logprob_chunk_size={chunk}",
        "policy.generation.max_new_tokens=16",
        "policy.optimizer.kwargs.lr=1e-2",
        "policy.scheduler=null",
    ]
    assert run(["distill", *common(model, tmp_path / "run"), *settings, *steps, *policy]) == 0
    rows = [row for row in results_of(tmp_path / "run") if "train/divergence" in row]
    assert rows[-1]["train/divergence"] < rows[0]["train/divergence"]
    assert all(row["train/grad_norm"] > 0 for row in rows)
