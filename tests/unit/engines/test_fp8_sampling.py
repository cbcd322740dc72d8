"""Sampling in FP8 where it cannot be had: refused before anything is sampled, with the reason."""

from __future__ import annotations

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.errors import InputError

IN_FP8 = NativeSettings(precision="fp8")


def test_a_cpu_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"precision = fp8: it needs a GPU with FP8 matrix units .* the model is on cpu"
    ):
        NativeEngine(tiny_model(), byte_tokenizer(), IN_FP8)


@pytest.mark.parametrize(
    ("capability", "model", "reason"),
    [
        ((8, 0), tiny_model(dtype=torch.bfloat16), r"\(compute capability 8.0\) has no FP8 matrix units"),
        ((9, 0), tiny_model(), "these are float32"),
        ((9, 0), tiny_model("gemma2", dtype=torch.bfloat16), "0 of 2 layers of gemma2"),
    ],
    ids=["older GPU", "weights in fp32", "other layers"],
)
def test_other_obstacles_are_named(
    capability: tuple[int, int], model: torch.nn.Module, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.engines.native.forward import ForwardPass

    monkeypatch.setattr(ForwardPass, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(InputError, match=reason):
        NativeEngine(model, byte_tokenizer(), IN_FP8)


def test_some_layer_must_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.engines.native import fp8

    monkeypatch.setattr(fp8, "fp8_obstacle", lambda *_, **__: None)
    settings = NativeSettings(precision="fp8", num_first_layers_in_bf16=1, num_last_layers_in_bf16=1)
    with pytest.raises(InputError, match="num_last_layers_in_bf16 = 1 leave none of the 2 layers"):
        NativeEngine(tiny_model(), byte_tokenizer(), settings)
