"""Products of experts by rows, and adapters of experts, against what `transformers` and peft compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float64 import TOLERANCE
from tiny_models import tiny_model
from torch import Tensor, nn

from posttrain.config.policy import LoraConfig
from posttrain.models.lora import add_lora
from posttrain.policy.experts import (
    AdaptedExperts,
    SortedRows,
    compute_adapters_by_rows,
    expert_outputs,
    stacked_experts,
    weighted_sum,
)

pytestmark = pytest.mark.usefixtures("in_float64")
FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3", "glm4-moe", "qwen3-next", "granite-hybrid")


def routed(module: Any, num_tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts of each token and their weights; no token goes to the second expert."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_tokens, 32, generator=random)
    chosen = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(num_tokens)])
    return hidden, chosen + (chosen > 0), torch.rand(num_tokens, 2, generator=random)


@pytest.mark.parametrize("family", FAMILIES)
def test_products_by_rows_are_those_of_transformers(family: str) -> None:
    module = next(iter(stacked_experts(tiny_model(family).double()).values()))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden, chosen, weights = routed(module)
    expected = module(hidden, chosen, weights)
    pairs = SortedRows.of(chosen.flatten(), module.num_experts)
    outputs = expert_outputs(module, hidden[pairs.order // 2], pairs.num_rows)
    found = weighted_sum(pairs.back(outputs), weights, hidden.dtype)
    assert float((found - expected).abs().max()) < TOLERANCE * float(expected.abs().max())


def adapted(family: str, *, by_rows: bool) -> nn.Module:
    model = add_lora(tiny_model(family).double(), LoraConfig(enabled=True, dim=3), seed=0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    if by_rows:
        compute_adapters_by_rows(model)
        compute_adapters_by_rows(model)  # trainer and engine both do
    return model


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_adapters_by_rows_are_those_of_peft(family: str) -> None:
    found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
    for by_rows in (False, True):
        model = adapted(family, by_rows=by_rows)
        block: Any = model.get_base_model().model.layers[0].mlp
        hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(3))
        out = block(hidden)
        (out * torch.linspace(0, 1, out.numel()).view_as(out)).sum().backward()
        with model.disable_adapter():
            base = block(hidden)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((out, base, gradients))
    (theirs, their_base, their_gradients), (ours, our_base, our_gradients) = found
    assert float((ours - theirs).abs().max()) < TOLERANCE
    assert float((our_base - their_base).abs().max()) < TOLERANCE < float((ours - our_base).abs().max())
    assert our_gradients.keys() == their_gradients.keys()
    assert any("experts.base_layer.lora_B" in name for name in our_gradients)
    for name, gradient in their_gradients.items():
        assert float((our_gradients[name] - gradient).abs().max()) < TOLERANCE, name


def test_a_pass_with_adapters_leaves_the_weights_of_experts_alone() -> None:
    """peft adds them to the weights of all experts, through a parametrisation, in every pass."""
    model = adapted("qwen3-moe", by_rows=True)
    block: Any = model.get_base_model().model.layers[0].mlp
    module = next(iter(stacked_experts(block).values()))
    assert isinstance(module.forward, AdaptedExperts)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(hasattr(module, "parametrizations")))
    block(torch.randn(1, 4, 32))
    assert seen == [False]
    assert "weight" not in block.gate.base_layer.__dict__
