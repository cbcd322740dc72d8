"""gpt-oss is published with experts in MXFP4: two numbers of 4 bits a byte, a power of two for each 32 of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, tiny_model

from posttrain.models.loading import load_model

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])


@pytest.fixture
def quantised(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as published, and the weights that it stands for."""
    folder = tmp_path / "model"
    tiny_model("gpt-oss", vocab_size=260, hidden_size=64, intermediate_size=64).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    expected = {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, outputs = weights.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, width // 32), generator=generator, dtype=torch.uint8)
        numbers = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
        scaled = numbers * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = scaled.flatten(-2).transpose(1, 2)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, expected


def test_experts_in_mxfp4_are_dequantised_and_saved_as_they_are_trained(
    quantised: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, expected = quantised
    model = load_model(str(folder), torch.float32, torch.device("cpu"))
    found = dict(model.named_parameters())
    assert expected
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())
