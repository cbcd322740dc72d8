"""The fused layers on a GPU: operations against float64, models and adapters against the layers' own forward, in fp32
tightly and in bf16 to its rounding, and inside CUDA graphs.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_references import (
    EPS,
    FUSED_LAYERS,
    angles,
    assert_like_float64,
    assert_near,
    assert_same_model,
    decoder_of,
    family_model,
    mean_error,
    noise,
    norm,
    num_fused,
    rotated,
    states_and_gradients,
    swiglu,
    trainer_logprobs,
)
from tiny_models import byte_tokenizer
from torch import Tensor

from posttrain.models.attention_interface import attention_context
from posttrain.policy.fused.accumulate import joined
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.fused.products import Product
from posttrain.policy.packed import PackedAttention, Segment

pytest.importorskip("triton")
DEVICE = "cuda"
BF16 = torch.bfloat16
# Largest error of a tensor, in parts of its largest number.
TOLERANCE = {torch.float32: 1e-5, BF16: 1.5e-2}
# Heads of 32 numbers: torch's attention in bf16 takes multiples of eight.
SHAPE = {"hidden_size": 72, "intermediate_size": 104, "head_dim": 32}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def device_noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return noise(*shape, seed=seed).to(DEVICE, dtype)


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(600, 72), (7, 4096), (1, 3000), (3, 16384), (0, 64)])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    """The residual stays fp32, as in a model."""
    from posttrain.policy.fused.ops import Add, AddNorm

    inputs = {
        "x": device_noise(rows, width),
        "delta": device_noise(rows, width, dtype=dtype, seed=1),
        "weight": device_noise(width, dtype=dtype, seed=2),
    }
    assert_like_float64(
        lambda x, delta, weight: AddNorm.apply(x, delta, weight, EPS, dtype),
        lambda x, delta, weight: (x + delta, norm(x + delta, weight)),
        inputs,
        TOLERANCE[dtype],
    )
    del inputs["weight"]
    assert_like_float64(lambda x, delta: Add.apply(x, delta), lambda x, delta: x + delta, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("count", [1, 4097, 3_000_000])
def test_gradients_in_bf16_are_added_up_exactly(count: int) -> None:
    from posttrain.policy.fused.accumulate import add_into

    total, addend = device_noise(count), device_noise(count, dtype=BF16, seed=1)
    expected = total + addend.float()
    add_into(total, addend)
    assert torch.equal(total, expected)


def test_a_product_adds_to_sums_in_fp32_without_rounding() -> None:
    """Nearer to float64 than gradients that are rounded to bf16 on their way; and the same numbers each time."""
    from posttrain.policy.fused.accumulate import begin_sum, sum_of
    from posttrain.policy.fused.products import Multiply

    def summed() -> tuple[Tensor, Tensor, Tensor]:
        weights = [torch.nn.Parameter(device_noise(n, 256, dtype=BF16, seed=n)) for n in (384, 128)]
        for weight in weights:
            begin_sum(weight)
        expected = torch.zeros(512, 256, dtype=torch.float64, device=DEVICE)
        rounded = torch.zeros(512, 256, device=DEVICE)
        for seed in range(4):
            x = device_noise(700, 256, dtype=BF16, seed=seed)
            upstream = device_noise(700, 512, dtype=BF16, seed=seed + 50)
            product = Product(tuple(weights), (), joined(weights), None)
            Multiply.apply(x, product, *product.parts).backward(upstream)
            expected += upstream.double().T @ x.double()
            rounded += upstream.T @ x
        assert all(weight.grad is None for weight in weights)
        sums = [sum_of(weight) for weight in weights]
        return torch.cat([part for part in sums if part is not None]), expected, rounded

    total, expected, rounded = summed()
    assert total.dtype == torch.float32
    error, rounding = ((t.double() - expected).abs().max() / expected.abs().max() for t in (total, rounded))
    assert error < 1e-5
    assert error < rounding / 10
    assert torch.equal(total, summed()[0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("frozen", [[], ["w1"], ["w0", "w1"]], ids=["all", "one frozen", "both frozen"])
@pytest.mark.parametrize(("rows", "width", "sizes"), [(300, 200, (130, 70)), (1, 512, (64, 64))])
def test_norm_and_product(rows: int, width: int, sizes: tuple[int, int], frozen: list[str], dtype: torch.dtype) -> None:
    from posttrain.policy.fused.ops import NormedLinear

    def ours(x: Tensor, delta: Tensor, weight: Tensor, w0: Tensor, w1: Tensor) -> Any:
        product = Product((w0, w1), (), joined([w0, w1]), None)
        return NormedLinear.apply(x, delta, weight, EPS, False, product, *product.parts)

    inputs = {"x": device_noise(rows, width), "delta": device_noise(rows, width, dtype=dtype, seed=1)}
    inputs["weight"] = device_noise(width, dtype=dtype)
    inputs |= {f"w{i}": (device_noise(n, width, seed=i) / width**0.5).to(dtype) for i, n in enumerate(sizes)}
    assert_like_float64(
        ours,
        lambda x, delta, weight, w0, w1: (x + delta, norm(x + delta, weight) @ torch.cat([w0, w1]).T),
        inputs,
        TOLERANCE[dtype],
        frozen=frozen,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "inner", "width"), [(300, 1500, 64), (1, 14336, 32), (0, 64, 8)])
def test_swiglu_and_product(rows: int, inner: int, width: int, dtype: torch.dtype) -> None:
    from posttrain.policy.fused.ops import Swiglu, SwigluLinear

    def ours(gate_up: Tensor, weight: Tensor) -> Tensor:
        product = Product((weight,), (), weight.detach(), None)
        return SwigluLinear.apply(gate_up, product, *product.parts)

    gate_up = device_noise(rows, 2 * inner, dtype=dtype)
    weight = (device_noise(width, inner) / inner**0.5).to(dtype)
    assert_like_float64(
        ours,
        lambda gate_up, weight: swiglu(*gate_up.chunk(2, dim=1)) @ weight.T,
        {"gate_up": gate_up, "weight": weight},
        TOLERANCE[dtype],
    )
    assert_like_float64(
        lambda gate_up: Swiglu.apply(*gate_up.chunk(2, dim=1)),
        lambda gate_up: swiglu(*gate_up.chunk(2, dim=1)),
        {"gate_up": gate_up},
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "heads", "others", "dim"), [(300, 40, 8, 128), (1, 12, 3, 80), (33, 4, 0, 256)])
def test_rotation(rows: int, heads: int, others: int, dim: int, dtype: torch.dtype) -> None:
    from posttrain.policy.fused.ops import Rotate

    cos, sin = (part.to(DEVICE) for part in angles(rows, dim))
    parts = [heads * dim, others * dim]
    assert_like_float64(
        lambda x: Rotate.apply(x * 1, cos, sin, heads).split(parts, dim=1),
        lambda x: rotated(x, cos, sin, heads).split(parts, dim=1),
        {"x": device_noise(rows, sum(parts), dtype=dtype)},
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize(("rows", "width"), [(40, 128_256), (3, 4097), (1, 1)])
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_logprobs(rows: int, width: int, factor: float) -> None:
    from posttrain.policy.fused import softmax

    logits = device_noise(rows, width) * 4
    targets = torch.randint(width, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights = device_noise(rows, seed=2)
    wide = logits.double().requires_grad_()
    expected = (wide * factor).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    expected.backward(weights.double())
    normalisers, chosen = softmax.logprobs(logits, targets, factor)
    torch.testing.assert_close(chosen.double(), expected, atol=2e-5, rtol=0.0)
    assert wide.grad is not None
    for dtype, tolerance in ((torch.float32, 2e-5), (BF16, 5e-3)):
        grad = softmax.logit_gradient(logits, targets, normalisers, weights, factor, dtype)
        assert_near("gradient", grad, wide.grad, tolerance)


# -- attention over parts of one product -------------------------------------------------------------------------------

SEGMENTS = {
    "alone": [Segment(0, 40), Segment(40, 41), Segment(41, 100)],
    "shared prefix": [Segment(0, 40), Segment(40, 70, 0, 40), Segment(70, 71, 0, 40), Segment(71, 100)],
}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_queries_keys_and_values_may_be_views_of_one_product(
    segments: list[Segment], window: int | None, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = 8, 2, 64
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    product = device_noise(100, sum(sizes), dtype=dtype)
    attention = PackedAttention(segments, torch.device(DEVICE))
    results = []
    for contiguous in (False, True):
        whole = product.clone().requires_grad_()
        parts = [part.unflatten(1, (-1, dim)) for part in whole.split(sizes, dim=1)]
        assert not parts[1].is_contiguous()
        q, k, v = (part.contiguous() if contiguous else part for part in parts)
        out = attention.attend(0, q, k, v, scale=dim**-0.5, window=window, softcap=None)
        out.flatten(1).backward(device_noise(100, heads * dim, dtype=dtype, seed=1))
        assert whole.grad is not None
        results.append((out.detach(), whole.grad))
    for name, ours, expected in zip(("output", "gradient"), *results, strict=True):
        # Gradients of a shared prefix are added up in bf16, in an order left to chance.
        assert_near(name, ours, expected, 1e-5 if dtype == torch.float32 else 1e-2)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_join", [True, False], ids=["joined", "not joined"])
@pytest.mark.parametrize("family", FUSED_LAYERS)
def test_model_in_fp32(family: str, may_join: bool) -> None:
    model = family_model(family, device=DEVICE, **SHAPE)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=may_join) == num_fused(model) == FUSED_LAYERS[family]
    assert_same_model(model, own, 5e-5)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "activation checkpointing"])
@pytest.mark.parametrize("family", FUSED_LAYERS)
def test_model_in_bf16(family: str, checkpointing: bool) -> None:
    model = family_model(family, BF16, DEVICE, **SHAPE)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == FUSED_LAYERS[family]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    exact = copy.deepcopy(own).float()
    assert mean_error(model, exact) < 1.25 * mean_error(own, exact)


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(family: str, dtype: torch.dtype) -> Any:
    """With adapters that are far from zero, as after some training."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=12, target_modules=TARGETS)
    model: Any = get_peft_model(family_model(family, dtype, DEVICE, **SHAPE), config, autocast_adapter_dtype=False)
    change_adapters(model, 0)
    return model.train()


@torch.no_grad()
def change_adapters(model: Any, seed: int) -> None:
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.copy_(noise(*parameter.shape, seed=seed + place) * 0.15)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_adapters_in_fp32(family: str) -> None:
    model = adapted(family, torch.float32)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    assert_same_model(model, own, 5e-5)
    with model.disable_adapter(), own.disable_adapter(), torch.no_grad():
        ours, theirs = (states_and_gradients(each, backward=False)[0]["hidden"] for each in (model, own))
    assert_near("disabled", ours, theirs, 5e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_in_bf16(family: str) -> None:
    model = adapted(family, BF16)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    exact = copy.deepcopy(own).float()
    assert mean_error(model, exact) < 1.25 * mean_error(own, exact)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_captured_pass_follows_adapters_and_weights_that_change_in_place(dtype: torch.dtype) -> None:
    model = adapted("llama", dtype).eval()
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    layer: Any = decoder_of(model).layers[0]  # type: ignore[index, union-attr]
    states = device_noise(1, 12, SHAPE["hidden_size"])
    positions = tuple(part.to(DEVICE)[None] for part in angles(12, SHAPE["head_dim"]))
    attention = PackedAttention([Segment(0, 12)], torch.device(DEVICE))

    def run() -> Tensor:
        reduced = dtype if dtype == BF16 else None
        with torch.autocast(DEVICE, reduced, enabled=reduced is not None, cache_enabled=False):
            out: Tensor = layer(states, position_embeddings=positions)
        return out

    with torch.no_grad(), attention_context(attention):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            before = run().clone()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = run()
        change_adapters(model, 700)
        layer.self_attn.k_proj.base_layer.weight.mul_(0.5)
        layer.mlp.up_proj.base_layer.weight.mul_(1.5)
        graph.replay()
        expected = run()
    assert_near("replayed", recorded, expected, TOLERANCE[dtype])
    assert (expected - before).abs().max() > 0.05


def test_engine_samples_with_adapters_from_cuda_graphs() -> None:
    from posttrain.engines.native import NativeEngine, NativeSettings
    from posttrain.types import NoiseKey, Sampling, Task

    model = adapted("llama", torch.float32)
    own = copy.deepcopy(model)
    engine = NativeEngine(model, byte_tokenizer(), NativeSettings(kv_cache_gib=0.05))
    tasks = [Task(draw, f"t:{draw}", "", tuple(range(3, 9 + draw))) for draw in range(3)]

    def check() -> list[tuple[int, ...]]:
        """Every log-probability is that of the trainer, with fused layers and with their own forward."""
        groups = engine.generate(tasks, 4, Sampling(12, ignore_eos=True), NoiseKey(0, 0))
        answers = [completion for group in groups for completion in group]
        prompt_of = [place for place, group in enumerate(groups) for _ in group]
        tokens = [answer.token_ids for answer in answers]
        sampled = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
        for each in (model, own):
            scored = trainer_logprobs(each, [task.prompt_ids for task in tasks], tokens, prompt_of)
            torch.testing.assert_close(scored, sampled, atol=5e-4, rtol=0.0)
        return tokens

    first = check()
    assert engine._workspace is not None
    assert engine._workspace.graphs is not None, "steps were recorded"
    for each in (model, own):
        change_adapters(each, 900)
    assert check() != first
    with model.disable_adapter(), own.disable_adapter():
        assert check() != first
    assert engine._workspace.graphs is not None
