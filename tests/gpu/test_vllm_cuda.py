"""A vLLM of two GPUs that only samples: one rank trains on a third."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import vllm_pythons
from tiny_runs import LORA, command, grpo, results_of, save_data, save_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices"),
    pytest.mark.skipif(not vllm_pythons.REAL, reason=vllm_pythons.NO_REAL),
]


@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_a_vllm_of_two_gpus_samples_from_the_weights_of_each_step(adapters: list[str], tmp_path: Path) -> None:
    """Each step compares log-probabilities with the trainer's; those of dummy or stale weights are far away."""
    model, data = save_model(tmp_path / "model", hidden_size=128, num_kv_heads=2), save_data(tmp_path / "data")
    words = [
        *grpo(model, data, tmp_path / "run", steps=4),
        *("policy.device=cuda", "policy.precision=bfloat16", "cluster.gpus_per_node=3"),
        "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
        *("policy.generation.backend=vllm", f"policy.generation.vllm_cfg.python={vllm_pythons.REAL}"),
        *("policy.generation.vllm_cfg.tensor_parallel_size=2", "policy.generation.vllm_cfg.enforce_eager=true"),
        *("policy.generation.vllm_cfg.check_period=1", "policy.generation.vllm_cfg.max_prob_error=1.3"),
        *("grpo.async_grpo.enabled=true", *adapters),
    ]
    ended = subprocess.run(command(words), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert len([row for row in results_of(tmp_path / "run") if "train/loss" in row]) == 4
