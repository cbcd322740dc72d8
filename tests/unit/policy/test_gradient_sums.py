"""Sums of gradients in fp32: by the product, by autograd, by both, and what an optimizer makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.config.policy import OptimizerConfig
from posttrain.policy.fused.accumulate import add_product, begin_sum, joined, move_to_sum, sum_of
from posttrain.policy.fused.products import Multiply, Product
from posttrain.policy.head import project
from posttrain.policy.logprobs import _LinearLogprobs
from posttrain.policy.optimizer import make_optimizer

BF16 = torch.bfloat16
OPTIMIZERS = [{}, {"state_dtype": "bfloat16", "master_weights": "none"}]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(*rows: int, width: int = 6, dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    return [nn.Parameter(random(count, width, seed=count, dtype=dtype)) for count in rows]


def multiply(weights: list[nn.Parameter], x: Tensor) -> Tensor:
    product = Product(tuple(weights), (), joined(weights), None)
    out: Tensor = Multiply.apply(x, product, *product.parts)
    return out


def train(weights: list[nn.Parameter], seed: int) -> Tensor:
    """One backward pass; returns the gradient of the weights below each other, in float64."""
    x, upstream = random(9, weights[0].shape[1], seed=seed), random(9, sum(len(w) for w in weights), seed=seed + 1)
    multiply(weights, x).backward(upstream)
    return upstream.double().T @ x.double()


def total_of(weights: list[nn.Parameter]) -> Tensor:
    sums = [sum_of(weight) for weight in weights]
    assert all(total is not None and total.dtype == torch.float32 for total in sums)
    return torch.cat([total for total in sums if total is not None])


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("rows_at_a_time", [3, 2**15])
def test_a_product_adds_the_gradients_of_all_its_weights_to_their_sums(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.policy.fused.accumulate._ROWS", rows_at_a_time)
    weights = parameters(5, 3)
    for weight in weights:
        begin_sum(weight)
    expected = sum(train(weights, seed) for seed in (1, 3, 5))
    assert isinstance(expected, Tensor)
    assert all(weight.grad is None for weight in weights), "they did not go by autograd as well"
    assert_near(total_of(weights), expected)
    first, second = (sum_of(weight) for weight in weights)
    assert first is not None
    assert second is not None
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(), "one product serves both"


def test_without_sums_gradients_go_by_autograd() -> None:
    weights = parameters(5, 3)
    expected = train(weights, 1)
    assert_near(torch.cat([weight.grad for weight in weights if weight.grad is not None]), expected)
    in_fp32 = parameters(5, 3, dtype=torch.float32)
    for weight in in_fp32:
        begin_sum(weight)
    product = Product(tuple(in_fp32), (), joined(in_fp32), None)
    Multiply.apply(random(2, 6, dtype=torch.float32), product, *product.parts).sum().backward()
    assert all(weight.grad is not None and sum_of(weight) is None for weight in in_fp32)


@pytest.mark.parametrize("alone_first", [True, False])
def test_a_weight_that_is_also_used_on_its_own(alone_first: bool) -> None:
    """Its gradient then comes by autograd, before or after those of the product."""
    weights = parameters(5, 3)
    for weight in weights:
        begin_sum(weight)
    expected = torch.zeros(8, 6, dtype=torch.float64)

    def alone() -> None:
        weights[1].sum().backward()
        move_to_sum(weights[1])
        expected[5:] += 1

    if alone_first:
        alone()
    for seed in (1, 3):
        expected += train(weights, seed)
        for weight in weights:
            move_to_sum(weight)
    if not alone_first:
        alone()
    assert_near(total_of(weights), expected)


def test_a_frozen_weight_in_the_product_has_no_sum() -> None:
    weights = parameters(5, 3)
    weights[0].requires_grad_(False)
    begin_sum(weights[1])
    expected = train(weights, 1)
    move_to_sum(weights[1])
    assert weights[0].grad is None
    assert_near(total_of(weights[1:]), expected[5:])


@pytest.mark.parametrize("chunk", [3, 100], ids=["several chunks", "one"])
def test_the_output_head_adds_to_the_sum_that_the_embedding_shares(chunk: int) -> None:
    weight = nn.Parameter(random(13, 6))
    begin_sum(weight)
    ids, targets = torch.tensor([1, 4, 4, 12, 0]), torch.tensor([4, 4, 12, 0, 7])
    exact = weight.detach().double().requires_grad_()
    for _ in range(2):
        _LinearLogprobs.apply(weight[ids], weight, targets, 1.0, chunk, None).sum().backward()
        move_to_sum(weight)
        (exact[ids] @ exact.T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    assert exact.grad is not None
    assert_near(total_of([weight]), exact.grad)


@pytest.mark.parametrize("options", OPTIMIZERS, ids=["masters", "compact"])
def test_an_update_is_the_one_without_sums(options: dict[str, Any]) -> None:
    """On a CPU a product is rounded before it is added, as autograd's gradients are: equal bit by bit."""

    def run(by_product: bool) -> list[Tensor]:
        model = nn.Module()
        weights = parameters(5, 3)
        model.a, model.b = weights
        optimizer = make_optimizer(model, OptimizerConfig(kwargs={"lr": 0.1}, **options), None, 0)
        for step in range(3):
            for seed in (10 * step, 10 * step + 2):
                if by_product:
                    train(weights, seed)
                    assert all(weight.grad is None for weight in weights)
                else:
                    x, upstream = random(9, 6, seed=seed), random(9, 8, seed=seed + 1)
                    nn.functional.linear(x, torch.cat(weights)).backward(upstream)
                optimizer.collect_gradients()
            norm, taken = optimizer.step(1.0)
            assert taken
            assert norm > 1
            assert all(sum_of(weight) is None for weight in weights), "the next update starts from nothing"
        return [weight.detach().clone() for weight in weights]

    for ours, theirs in zip(run(by_product=True), run(by_product=False), strict=True):
        assert torch.equal(ours, theirs)


def test_a_copy_of_a_model_shares_no_sums() -> None:
    import copy

    model = tiny_model("llama", dtype=BF16)
    make_optimizer(model, OptimizerConfig(kwargs={"lr": 0.1}), None, 0)
    frozen = copy.deepcopy(model)
    weight = frozen.get_output_embeddings().weight
    assert not add_product([weight], random(len(weight), 2), random(2, weight.shape[1]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_logits_under_autograd_have_the_gradients_of_a_product_in_the_weights_type(device: str) -> None:
    """On "meta" with the product of GPUs, whose result is fp32: `aten::mm.dtype`, which has no derivative."""
    hidden, weight = random(5, 6).to(device).requires_grad_(), random(9, 6, seed=1).to(device).requires_grad_()
    logits = project(hidden, weight)
    assert logits.dtype == torch.float32
    upstream = random(5, 9, seed=2, dtype=torch.float32).to(device)
    logits.backward(upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == BF16
    if device == "cpu":
        assert torch.equal(hidden.grad, upstream.to(BF16) @ weight.detach())
        assert torch.equal(weight.grad, upstream.to(BF16).T @ hidden.detach())


def test_chunks_of_logits_that_are_computed_again_add_to_the_sum_of_the_output_head() -> None:
    [weight], hidden, upstream = parameters(9), random(8, 6), random(8, 9, seed=2, dtype=torch.float32)
    begin_sum(weight)
    for part, grad in zip(hidden.split(4), upstream.split(4), strict=True):
        checkpoint(project, part.requires_grad_(), weight, use_reentrant=False).backward(grad)
    assert weight.grad is None
    assert_near(total_of([weight]), upstream.double().T @ hidden.double())
