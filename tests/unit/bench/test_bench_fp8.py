"""bench/sampler_gap.py on a CPU, where the sampler is the trainer, and its measures; bench/fp8_products.py without a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch


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


def test_products_in_fp8_need_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8_products import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 64
    assert "needs a CUDA device" in capsys.readouterr().err
