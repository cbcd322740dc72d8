"""Parameters, gradients and optimizer state in host memory (`policy.dtensor_cfg.cpu_offload`), with a GPU."""

from __future__ import annotations

import gc
import subprocess
from pathlib import Path

import torch
from tiny_runs import command, grpo, results_of, same_up_to_rounding, save_data, save_model

from posttrain.config import load_config
from posttrain.policy.trainer import PolicyTrainer, RankSetup

OFFLOAD = "policy.dtensor_cfg.cpu_offload=true"


def test_a_run_makes_the_curves_of_one_without_it(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    for name, words in {"without": [], "with": [OFFLOAD]}.items():
        arguments = [*grpo(model, data, tmp_path / name, steps=4), "policy.device=cuda", *words]
        ended = subprocess.run(command(arguments), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
    for ours, theirs in zip(results_of(tmp_path / "with"), results_of(tmp_path / "without"), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/reward"):
            if key in theirs:
                assert ours[key] == same_up_to_rounding(theirs[key]), f"{key} at step {theirs['step']}"


def test_nothing_but_buffers_is_on_the_gpu_between_uses(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", hidden_size=1024, num_layers=4, num_heads=16)
    words = [f"policy.model_name={model}", f"policy.tokenizer.name={model}", "policy.device=cuda", OFFLOAD]
    words += ["policy.precision=bfloat16", "policy.optimizer.kwargs.lr=1e-3", "data.default.env_name=math"]
    words += [f"data.train={{dataset_name: ResponseDataset, data_path: {tmp_path}/none.jsonl}}"]
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    ones @ ones  # cuBLAS keeps 32 MiB for itself from its first product on
    gc.collect()  # what earlier tests left must not be freed in between
    before = torch.cuda.memory_allocated()
    trainer = PolicyTrainer(RankSetup(load_config("grpo", None, words).config.policy, seed=0, needs_reference=True))
    size = sum(parameter.numel() for parameter in trainer.model.parameters()) * 2
    assert all(parameter.device.type == "cpu" for parameter in trainer.model.parameters())
    assert torch.cuda.memory_allocated() - before < 0.1 * size
    with trainer.sampling():
        assert all(parameter.device.type == "cuda" for parameter in trainer.model.parameters())
        assert torch.cuda.memory_allocated() - before >= size
    assert torch.cuda.memory_allocated() - before < 0.1 * size
