"""bench/sampler_gap.py on a CPU, where the sampler is the trainer; bench/fp8_curves.py with FP8 in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from fp8_references import use_torch_fp8
from tiny_runs import save_data, save_model, sft


def test_the_difference_is_measured_by_its_definitions() -> None:
    from sampler_gap import difference

    found = difference(torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.0, -2.0 + math.log(3)]).double())
    assert found["exp|d|"] == pytest.approx((1 + 3) / 2)
    assert found["ess"] == pytest.approx(4**2 / (2 * (1 + 9)))
    assert found["kl"] == pytest.approx(-math.log(3) / 2)


def test_a_sampler_in_the_trainers_precision_is_the_trainer(tmp_path: Path) -> None:
    from sampler_gap import main

    words = ["--shape", "tiny", "--prompts", "2", "--prompt-tokens", "5", "--new-tokens", "3", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "gap.json")]) == 0
    samplers = json.loads((tmp_path / "gap.json").read_text())["samplers"]
    assert samplers["as the weights are"]["exp|d|"] == pytest.approx(1.0, abs=1e-4)
    assert samplers["as the weights are"]["tokens"] == 6


def test_products_in_fp8_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8_products import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 64


def test_loss_curves_in_fp8_are_near_those_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8_curves import difference, main

    use_torch_fp8(monkeypatch)
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    config = tmp_path / "sft.yaml"
    config.write_text("{}\n")
    settings = [word for word in sft(model, data, tmp_path / "unused")[1:] if not word.startswith("checkpointing")]
    words = ["--model", str(model), "--data", str(data / "questions.jsonl"), "--config", str(config), "--steps", "3"]
    for setting in [*settings, "policy.precision=bfloat16", "sft.max_num_steps=3"]:
        words += ["--set", setting]
    assert main([*words, "--out", str(tmp_path / "curves.json")]) == 0
    report = json.loads((tmp_path / "curves.json").read_text())
    plain, quantised, other = report["losses"].values()
    assert len(plain) == len(quantised) == len(other) == 3
    assert quantised != plain
    assert quantised == pytest.approx(plain, rel=0.05)
    assert other[0] != pytest.approx(plain[0], rel=1e-6), "other batches"
    assert report["differences"]["FP8"] == pytest.approx(difference(quantised, plain))
    assert difference([1.0, 3.0], [2.0, 1.0]) == {"mean_abs": 1.5, "mean": 0.5, "last": 0.5}
