"""Weights for an engine through pinned memory, and a run with a GPU that only samples."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_runs import command, grpo, results_of, same_up_to_rounding, save_data, save_model

from posttrain.policy.weight_files import Handover, WeightReceiver, WeightSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.no_grad()
def test_weights_arrive_through_pinned_memory_with_the_same_bits(tmp_path: Path) -> None:
    trained, sampled = tiny_model().cuda(), tiny_model().cuda()
    sender, receiver = WeightSender(trained), WeightReceiver(sampled)
    for _ in range(3):
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
        sent = sender.send(Handover(tmp_path.name, tmp_path, on_one_machine=True))
        assert sent is not None
        receiver.receive(sent)
        for ours, theirs in zip(sampled.state_dict().values(), trained.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
    sender.remove_file()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpu_that_only_samples_makes_the_curves_of_one(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    places = ["cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
    for name, words in (("one", []), ("two", places)):
        arguments = [*grpo(model, data, tmp_path / name, steps=4), "policy.device=cuda", *words]
        ended = subprocess.run(command(arguments), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
    for ours, theirs in zip(results_of(tmp_path / "two"), results_of(tmp_path / "one"), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/reward"):
            if key in theirs:
                assert ours[key] == same_up_to_rounding(theirs[key]), f"{key} at step {theirs['step']}"
