"""Routed experts on a GPU: kernels against a slow reference in fp32 and bf16, gradients, adapters, and the engine with
CUDA graphs against the trainer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_references import ROUTINGS, Routing, check_order, expert_inputs, slow_experts
from fused_references import assert_near, decoder_of, noise, states_and_gradients, trainer_logprobs
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor

from posttrain.config.policy import LoraConfig
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.lora import add_lora
from posttrain.policy.experts import compute_adapters_by_rows, stacked_experts
from posttrain.policy.fused.layers import fuse_layers
from posttrain.types import NoiseKey, Sampling, Task

pytest.importorskip("triton")
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, BF16: 2e-2}
FAMILIES = ["qwen3-moe", "gpt-oss"]
LARGER = {"hidden_size": 64, "intermediate_size": 64}  # products of rows of 16 bytes and more


def model_of(family: str) -> Any:
    sizes = {"num_experts": 8, "moe_intermediate_size": 48} if family == "qwen3-moe" else {"num_local_experts": 8}
    return tiny_model(family, dtype=BF16, **LARGER, **sizes).cuda()


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_pairs_are_sorted(routing: Routing) -> None:
    from posttrain.policy.fused import expert_kernels as kernels

    for tile in kernels.TILES.values():
        pairs = kernels.sort_pairs(routing.chosen().cuda(), routing.experts, tile)
        check_order(pairs, routing.chosen(), routing.experts)
    chosen = noise(20_000, 128).topk(8).indices
    check_order(kernels.sort_pairs(chosen.cuda(), 128), chosen, 128)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("clamped", [False, True], ids=["halves", "alternating"])
@pytest.mark.parametrize("name", ["none of some", "many experts"])
def test_products(name: str, clamped: bool, dtype: torch.dtype) -> None:
    """As Qwen3 and as gpt-oss keep their weights; every tile gives the same bits."""
    from posttrain.policy.fused import expert_kernels as kernels

    routing, is_half = ROUTINGS[name], dtype == BF16
    gate = kernels.ExpertGate(True, 1.702, 0.7, 1.0) if clamped else kernels.ExpertGate()
    sizes = (128, 64) if is_half else (40, 36)
    given = {name: t.cuda().to(dtype) for name, t in expert_inputs(routing, *sizes, has_bias=clamped).items()}
    chosen = routing.chosen().cuda()
    expected = slow_experts(**{n: t.double() for n, t in given.items()}, chosen=chosen, gate=gate)
    results = []
    for tile in kernels.TILES.values() if is_half else [kernels.ExpertTile(16, 64, 16, 4, 2, 2)]:
        x, pairs = given["x"], kernels.sort_pairs(chosen, routing.experts, tile)
        for part, how in (("gate_up", gate), ("down", None)):
            weight = given[part].transpose(1, 2).contiguous().transpose(1, 2) if clamped else given[part]
            x = kernels.grouped_product(
                x, weight, pairs, routing.top_k, factors=given["weights"], gate=how,
                bias=given.get("gate_up_bias") if part == "gate_up" else None,
            )  # fmt: skip
        bias = kernels.WeighedBias(given["down_bias"], chosen, given["weights"]) if clamped else None
        results.append(kernels.sum_pairs(x, routing.top_k, dtype, bias=bias))
    for result in results:
        assert_near("out", result, expected, TOLERANCE[dtype])
        assert torch.equal(result, results[0])


def test_a_row_does_not_depend_on_the_others() -> None:
    module = next(iter(stacked_experts(fused("qwen3-moe")).values()))
    hidden, chosen = noise(300, 64).cuda().to(BF16), noise(300, 8).topk(2).indices.cuda()
    weights = noise(300, 2).softmax(1).cuda().to(BF16)
    with torch.no_grad():
        whole = module(hidden, chosen, weights)
        for count in (1, 7, 40, 150):
            assert torch.equal(module(hidden[:count], chosen[:count], weights[:count]), whole[:count])


def fused(family: str, *, is_adapted: bool = False) -> Any:
    from posttrain.policy.fused.experts import FusedExperts

    model = model_of(family)
    if is_adapted:
        model = with_adapters(model)
    fuse_layers(decoder_of(model), may_join=True)
    assert all(isinstance(module.forward, FusedExperts) for module in stacked_experts(model).values())
    return model


def with_adapters(model: Any) -> Any:
    model = add_lora(model, LoraConfig(enabled=True, dim=8), seed=0)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            parameter.data.copy_(noise(*parameter.shape, seed=place) * 0.1)
    compute_adapters_by_rows(model)
    return model


CASES = pytest.mark.parametrize(
    ("family", "is_adapted"), [("qwen3-moe", False), ("gpt-oss", False), ("qwen3-moe", True)]
)


@CASES
def test_gradients_are_as_near_to_float64_as_those_of_the_present_path(family: str, is_adapted: bool) -> None:
    module: Any = next(iter(stacked_experts(fused(family, is_adapted=is_adapted)).values()))
    random = torch.Generator().manual_seed(1)
    chosen = torch.rand(200, 8, generator=random).topk(2).indices.cuda()
    given = [torch.randn(200, 64, generator=random), torch.rand(200, 2, generator=random)]
    given, upstream = [t.cuda().to(BF16) for t in given], torch.randn(200, 64, generator=random).cuda()

    def results(forward: Any, inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = forward(leaves[0], chosen, leaves[1])
        grads = torch.autograd.grad(out, [*leaves, *parameters], upstream.to(out.dtype))
        return [out.detach().double(), *(grad.double() for grad in grads)]

    def exact(x: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        names = [("gate_up", "gate_up_proj"), ("down", "down_proj")]
        parts = {part: wide[name].transpose(1, 2) if module.is_transposed else wide[name] for part, name in names}
        parts |= {f"{part}_bias": wide[f"{name}_bias"] for part, name in names if module.has_bias}
        return slow_experts(x, weights, **parts, chosen=chosen, gate=module.forward.gate)

    if is_adapted:
        wrappers = module.forward.adapters.values()
        trained = [p for wrapper in wrappers for p in wrapper.parameters(recurse=True) if p.requires_grad]
        trained = list({id(p): p for p in trained}.values())
    else:
        trained = list(module.parameters())
    ours, again = (results(module, given, trained) for _ in range(2))
    present = wanted = results(module.forward.own_forward, given, trained)
    if not is_adapted:
        wide = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
        wanted = results(exact, [t.double() for t in given], list(wide.values()))
    for number, (found, same, theirs, want) in enumerate(zip(ours, again, present, wanted, strict=True)):
        assert torch.equal(found, same), "the same bits each time"
        error, theirs_error = (float((t - want).norm() / want.norm()) for t in (found, theirs))
        assert error < max(1.3 * theirs_error, 0.015), (number, error, theirs_error)


@CASES
def test_graphs_sample_what_the_trainer_says(family: str, is_adapted: bool) -> None:
    model = fused(family, is_adapted=is_adapted)
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=random).tolist() for length in (6, 20, 8, 1)]
    tasks = [Task(number, f"t:{number}", "", tuple(prompt)) for number, prompt in enumerate(prompts)]
    settings, sampling = NativeSettings(page_size=4, max_batch_size=64, max_prefill_tokens=16), Sampling(20)
    engine = NativeEngine(model, byte_tokenizer(), settings)
    completions = engine.generate(tasks, 16, sampling, NoiseKey(2, 3))
    assert engine._use_graphs, "no capture failed"
    ours = torch.tensor([logprob for group in completions for c in group for logprob in c.logprobs])
    prompt_of = [number for number, group in enumerate(completions) for _ in group]
    responses = [c.token_ids for group in completions for c in group]
    difference = (ours - trainer_logprobs(model, prompts, responses, prompt_of)).abs()
    assert difference.exp().mean() <= 1.03, difference.sort().values[-20:]


def test_a_model_with_and_without_the_kernels() -> None:
    (values, grads), (want_values, want_grads) = map(states_and_gradients, (fused("qwen3-moe"), model_of("qwen3-moe")))
    assert grads.keys() == want_grads.keys()
    assert (values["logprobs"] - want_values["logprobs"]).abs().mean() < 0.05
