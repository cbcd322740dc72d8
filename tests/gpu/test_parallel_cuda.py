"""On two GPUs, with NCCL: ranks that share layers, or rows, make the curves of one GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tiny_runs import command, grpo, results_of, same_up_to_rounding, save_data, save_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ON_TWO = ["cluster.launcher=ray", "cluster.gpus_per_node=2"]


def test_two_gpus_that_share_layers_or_rows_make_the_curves_of_one(tmp_path: Path) -> None:
    """In float32, as on CPUs (`invariants/test_local_equals_ray.py`)."""
    model, data = save_model(tmp_path / "model", num_kv_heads=2), save_data(tmp_path / "data")
    arrangements = {
        "one": [],
        "layers": [*ON_TWO, "policy.dtensor_cfg.tensor_parallel_size=2"],
        "rows": [*ON_TWO, "policy.dtensor_cfg.context_parallel_size=2"],
    }
    for name, words in arrangements.items():
        arguments = [*grpo(model, data, tmp_path / name, steps=4), "policy.device=cuda", *words]
        ended = subprocess.run(command(arguments), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
    for name in ("layers", "rows"):
        for ours, theirs in zip(results_of(tmp_path / name), results_of(tmp_path / "one"), strict=True):
            for key in ("train/loss", "train/grad_norm", "train/reward"):
                if key in theirs:
                    assert ours[key] == same_up_to_rounding(theirs[key]), f"{name}: {key} at step {theirs['step']}"
