"""Sampling in FP8 on a GPU: products and attention against float64, and an engine that trains meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_references import CASES, assert_equal_to_rounding, in_fp8, random_cache, slow_attention
from peft import LoraConfig, get_peft_model
from test_native_engine_cuda import KEY, SAMPLING, make_tasks, trainer_logprobs
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.errors import InputError
from posttrain.types import Completion

BF16 = torch.bfloat16
# Without drafts: when they are tried depends on measured times, and rounding on how many rows a step has.
SETTINGS = NativeSettings(
    page_size=4, max_batch_size=7, max_prefill_tokens=16, precision="fp8", num_speculative_tokens=0
)
WIDE = {"hidden_size": 256, "intermediate_size": 528, "num_attention_heads": 8, "head_dim": 32}


def meant(rows: tuple[Tensor, Tensor]) -> Tensor:
    return rows[0].double() * rows[1].double()[:, None]


@pytest.mark.parametrize("rows", [1, 8, 16, 33, 64, 65, 130, 520])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (1024, 14336), (960, 576), (16, 48)])
def test_products_equal_those_of_the_quantised_numbers(rows: int, outputs: int, inputs: int) -> None:
    from posttrain.policy.fused.fp8 import Fp8Product, whole
    from posttrain.policy.fused.fp8_kernels import quantise, quantise_weight

    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda", dtype=BF16) * torch.rand(rows, 1, device="cuda").to(BF16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=BF16) * 0.02
    copy = quantise_weight(weight)
    product = Fp8Product((weight,), (), weight, None, copy=copy, transposed=None, one=torch.ones((), device="cuda"))
    expected = meant(quantise(x)) @ meant(copy).T
    with torch.no_grad():
        found = {"applied": product.forward(x)[0], "deferred": whole(product.deferred(x))}
    for name, out in found.items():
        error = (out.double() - expected).norm() / expected.norm()
        assert error < 6e-3, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("name", ["4 query heads per key head", "one key head per query head", "odd group, odd dim",
                                  "soft cap in a window", "widest head", "pages of 64 tokens",
                                  "sinks in a window"])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 4, None])
def test_attention_over_a_cache_in_fp8_equals_reference(name: str, splits: int | None) -> None:
    from posttrain.engines.native import kernels

    case = replace(CASES[name], lengths=(1, 17, 64, 130, 700), device="cuda")
    cache, wide = in_fp8(random_cache(case, BF16, "cuda"))
    out = torch.full_like(cache.query, float("nan"))
    kernels.paged_attention(*cache.tensors, **case.options, factors=cache.factors, splits=splits, out=out)
    assert_equal_to_rounding(out, slow_attention(wide, **case.options))


def wide_model(family: str, seed: int = 0) -> nn.Module:
    return tiny_model(family, dtype=BF16, seed=seed, **WIDE).cuda()


def gap(model: nn.Module, completions: list[list[Completion]]) -> float:
    ours = torch.tensor([logprob for group in completions for c in group for logprob in c.logprobs])
    return float((ours - trainer_logprobs(model, completions, SAMPLING.temperature)).abs().exp().mean())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2-sliding", "qwen3"])
def test_samples_are_near_the_trainers(family: str) -> None:
    model = wide_model(family)
    exact = NativeEngine(model, byte_tokenizer(), SETTINGS.model_copy(update={"precision": "auto"}))
    exact_gap = gap(model, exact.generate(make_tasks(), 8, SAMPLING, KEY))
    engine = NativeEngine(model, byte_tokenizer(), SETTINGS)
    assert exact_gap < gap(model, engine.generate(make_tasks(), 8, SAMPLING, KEY)) < 1.4
    assert engine._workspace is not None
    assert engine._workspace.graphs is not None, "steps are captured"


def test_an_update_reaches_the_copies_inside_captured_steps() -> None:
    model = wide_model("llama")
    engine = NativeEngine(model, byte_tokenizer(), SETTINGS)
    before = engine.generate(make_tasks(), 3, SAMPLING, KEY)
    assert engine.generate(make_tasks(), 3, SAMPLING, KEY) == before
    with torch.no_grad():
        for parameter in model.get_decoder().layers.parameters():
            parameter.mul_(1.1)
    after = engine.generate(make_tasks(), 3, SAMPLING, KEY)
    assert after == NativeEngine(model, byte_tokenizer(), SETTINGS).generate(make_tasks(), 3, SAMPLING, KEY)
    assert after != before
    engine.release()
    assert engine.generate(make_tasks(), 3, SAMPLING, KEY) == after


def test_adapters_are_not_quantised() -> None:
    torch.manual_seed(0)
    model = get_peft_model(wide_model("llama"), LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    model.to(BF16)
    engine = NativeEngine(model, byte_tokenizer(), SETTINGS)
    assert gap(model, engine.generate(make_tasks(), 8, SAMPLING, KEY)) < 1.4
    with model.disable_adapter():
        assert gap(model, engine.generate(make_tasks(), 8, SAMPLING, KEY)) < 1.4


def test_preemption_keeps_completions_near_the_trainers() -> None:
    model = wide_model("llama")
    page_bytes = 4 * 2 * 2 * (2 * 32 + 8)
    engine = NativeEngine(
        model, byte_tokenizer(), SETTINGS.model_copy(update={"kv_cache_gib": 16 * page_bytes / 2**30})
    )
    few = engine.generate(make_tasks(), 3, SAMPLING, KEY)
    assert engine.num_preemptions > 0
    assert gap(model, few) < 1.4


@pytest.mark.parametrize(
    ("model", "reason"),
    [(lambda: tiny_model("llama").cuda(), "float32"), (lambda: tiny_model("gemma2", dtype=BF16).cuda(), "gemma2")],
)
def test_models_that_cannot_be_quantised_are_refused(model: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        NativeEngine(model(), byte_tokenizer(), SETTINGS)  # type: ignore[operator]
