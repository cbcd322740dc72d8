"""Compiles the fused kernels for a Hopper GPU, without having one, with the sizes of an 8B model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton_without_gpu import WITHOUT_TRITON, Compiled, only_compile

pytest.importorskip("triton", reason=WITHOUT_TRITON)

BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    return only_compile(monkeypatch, tmp_path)


def test_kernels_of_a_layer_compile(compiled: Compiled) -> None:
    from posttrain.policy.fused import kernels

    rows, width, inner, head = 3, 4096, 14336, 128
    x, weight = torch.empty(rows, width), torch.empty(width, dtype=BF16)
    delta = torch.empty(rows, width, dtype=BF16)
    for add in (None, delta):
        total, y, scale = kernels.norm_forward(x, add, weight, 1e-5, BF16)
        kernels.norm_backward(y, None if add is None else x, total, weight, scale, BF16, needs_weight=add is None)
    kernels.norm_again(x, weight, scale, BF16)
    qkv, angles = torch.empty(rows, 48 * head, dtype=BF16), torch.empty(rows, head)
    kernels.rotate(qkv, angles, angles, 40, out=qkv)
    gate_up = torch.empty(rows, 2 * inner, dtype=BF16)
    product = kernels.swiglu_forward(*gate_up.chunk(2, dim=1))
    kernels.swiglu_backward(product, *gate_up.chunk(2, dim=1), *gate_up.chunk(2, dim=1), again=True)
    kernels.add_into(x, delta)
    layer = {"_norm_forward", "_norm_apply", "_norm_backward", "_rotate", "_swiglu_forward", "_swiglu_backward"}
    assert {*layer, "_add"} == set(compiled)


def test_activations_are_quantised_sixteen_bytes_at_a_time(compiled: Compiled) -> None:
    from posttrain.policy.fused import fp8_kernels

    fp8_kernels.quantise(torch.empty(3, 4096, dtype=BF16))
    fp8_kernels.quantise_columns(torch.empty(6144, 4096, dtype=BF16))
    weight = torch.empty(4096, dtype=BF16)
    fp8_kernels.norm_quantised(torch.empty(3, 4096), torch.empty(3, 4096, dtype=BF16), weight, 1e-5, BF16)
    fp8_kernels.swiglu_quantised(torch.empty(3, 2 * 14336, dtype=BF16), None)
    fp8_kernels.quantise_weight(weight[None])
    assert set(compiled) == {"_quantise_rows", "_quantise_columns", "_norm_quantised", "_swiglu_quantised"}
    for kernel in compiled.values():
        assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.asm["ptx"]
        assert "v4.b32" in kernel.asm["ptx"]


def test_kernels_that_apply_the_factors_of_a_product_compile(compiled: Compiled) -> None:
    from posttrain.policy.fused import fp8_kernels
    from posttrain.policy.fused.fp8 import ScaledRows

    delta, gate_up = (ScaledRows(torch.empty(3, width, dtype=BF16), torch.empty(3)) for width in (4096, 2 * 14336))
    fp8_kernels.norm_quantised(torch.empty(3, 4096), delta, torch.empty(4096, dtype=BF16), 1e-5, None)
    fp8_kernels.swiglu_quantised(gate_up, None)
    fp8_kernels.apply_factors(delta)
    assert set(compiled) == {"_norm_quantised", "_swiglu_quantised", "_apply_factors"}


def test_kernels_of_the_head_compile(compiled: Compiled) -> None:
    from posttrain.policy.fused import softmax

    logits, targets = torch.empty(3, 128_256), torch.zeros(3, dtype=torch.long)
    normalisers, chosen = softmax.logprobs(logits, targets, 0.5)
    softmax.logit_gradient(logits, targets, normalisers, chosen, 0.5, BF16)
    assert set(compiled) == {"_logprobs", "_gradient"}


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "no masters"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_an_update_of_adam_compiles(moments: Any, masters: bool, compiled: Compiled) -> None:
    from posttrain.policy.fused import adam_kernels
    from posttrain.policy.optimizer import compact_adam

    weight = torch.zeros(4, 256, dtype=BF16)
    state = compact_adam.new_state(weight, compact_adam.StateFormat(moments, masters))
    entries = [state.get(entry) for entry in compact_adam.ENTRIES]
    numbers, keys = torch.zeros(9), torch.zeros(3, dtype=torch.long)
    adam_kernels.update(compact_adam.Slice(weight, weight.float(), entries, 0, numbers, keys))
    assert set(compiled) == {"_update_blocks" if moments == "int8" else "_update"}


@pytest.mark.parametrize("num_tokens", [4, 512, 4096])
@pytest.mark.parametrize("family", ["qwen3-30b", "gpt-oss-20b"])
def test_products_of_experts_compile(family: str, num_tokens: int, compiled: Compiled) -> None:
    """On tensor cores, sixteen bytes at a time, whatever the number of tokens."""
    from posttrain.policy.fused import expert_kernels

    is_qwen = family == "qwen3-30b"
    experts, hidden, inner, top_k = (128, 2048, 768, 8) if is_qwen else (32, 2880, 2880, 4)
    chosen, factors = torch.zeros(num_tokens, top_k, dtype=torch.long), torch.empty(num_tokens, top_k, dtype=BF16)
    pairs = expert_kernels.sort_pairs(chosen, experts)
    gate = expert_kernels.ExpertGate() if is_qwen else expert_kernels.ExpertGate(True, 1.702, 7.0, 1.0)
    for width, inputs in ((2 * inner, hidden), (hidden, inner)):
        weight = torch.empty(0, dtype=BF16)
        shape = (experts, width, inputs) if is_qwen else (experts, inputs, width)
        weight = weight.as_strided((0, *shape[1:]), (shape[1] * shape[2], shape[2], 1))
        is_first = width == 2 * inner
        expert_kernels.grouped_product(
            torch.empty(num_tokens if is_first else num_tokens * top_k, inputs, dtype=BF16),
            weight if is_qwen else weight.transpose(1, 2), pairs, top_k, factors=factors,
            gate=gate if is_first else None, bias=None if is_qwen else torch.empty(experts, width, dtype=BF16),
        )  # fmt: skip
        ptx = compiled["_grouped_product"].asm["ptx"]
        assert "wgmma" in ptx
        assert "cp.async.cg.shared.global" in ptx
    rows = torch.empty(num_tokens * top_k, hidden, dtype=BF16)
    expert_kernels.sum_pairs(rows, top_k, BF16)
    both = torch.empty(num_tokens * top_k, 2 * inner, dtype=BF16)
    inside = expert_kernels.gate_forward(both, pairs.order, factors, gate)
    expert_kernels.gate_backward(inside, both, pairs.order, factors, gate)
    kernels = {"_rank_pairs", "_place_pairs", "_grouped_product", "_sum_pairs", "_gate_forward", "_gate_backward"}
    assert set(compiled) == kernels
