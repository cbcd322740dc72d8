"""What training in FP8 is tested against: products and gradients in float64, and all of it in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_references import (
    decoder_of,
    norm,
    random_batch,
    states_and_gradients,
    swiglu,
    use_torch_kernels,
)
from tiny_models import tiny_model
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(x: Tensor) -> Tensor:
    """Each row as e4m3 values times a factor, in float64."""
    values, factors = _quantise(x)
    return values.double() * factors.double()[:, None]


def rounded_weight(x: Tensor) -> Tensor:
    """As e4m3 values times one factor for all rows, in float64."""
    values, factors = _quantise_weight(x)
    return values.double() * factors.double()[:, None]


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    return _with_largest(x, x.float().abs().amax(-1))


def _quantise_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    return _with_largest(x, x.float().abs().amax().expand(len(x)))


def _with_largest(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    largest = largest.clamp_min(1e-12)
    return (x.float() * (LARGEST / largest)[:, None]).to(FP8), largest / LARGEST


class SlowProduct(torch.autograd.Function):
    """x @ weight.T of quantised numbers. The gradient of x is that of quantised rows of the outputs' gradient and of
    the weight with a factor for each of its columns; that of the weight has neither quantised.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (rounded(x) @ rounded_weight(weight).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        return (rounded(grad) @ rounded(weight.T).T).to(x.dtype), grad.T @ x


def slow_product(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = SlowProduct.apply(x, weight)
    return out


def use_torch_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and products of FP8 in torch, on any device, for weights of any precision; nothing is refused."""
    from posttrain.config import PolicyConfig
    from posttrain.policy import trainer
    from posttrain.policy.fused import fp8, fp8_kernels

    use_torch_kernels(monkeypatch)

    def quantise(x: Tensor, out: Any = None) -> Any:
        return _kept(fp8.ScaledRows(*_quantise(x)), out)

    def quantise_weight(x: Tensor, out: Any = None) -> Any:
        return _kept(fp8.ScaledRows(*_quantise_weight(x)), out)

    def norm_quantised(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Any:
        total = x if delta is None else x + delta
        y = norm(total.float(), weight.float())
        scale = (total.float().square().mean(-1) + eps).rsqrt()
        return total, quantise(y), None if dtype is None else y.to(dtype), scale

    def swiglu_quantised(gate_up: Tensor, dtype: torch.dtype | None) -> Any:
        y = swiglu(*gate_up.float().chunk(2, dim=1))
        return quantise(y), None if dtype is None else y.to(dtype)

    def multiply(x: Any, weight: Any, dtype: torch.dtype) -> Tensor:
        wide = [rows.values.float() * rows.factors[:, None] for rows in (x, weight)]
        return (wide[0] @ wide[1].T).to(dtype)

    for name, function in (
        ("quantise", quantise),
        ("quantise_weight", quantise_weight),
        ("quantise_columns", lambda x: quantise(x.T)),
        ("norm_quantised", norm_quantised),
        ("swiglu_quantised", swiglu_quantised),
    ):
        monkeypatch.setattr(fp8_kernels, name, function)
    monkeypatch.setattr(fp8, "multiply", multiply)
    monkeypatch.setattr(trainer, "fp8_obstacle", lambda *_, **__: None)
    problems = PolicyConfig.problems
    monkeypatch.setattr(
        PolicyConfig, "problems", lambda self, is_set: (text for text in problems(self, is_set) if "fp8" not in text)
    )


def _kept(made: Any, out: Any) -> Any:
    """What was made, in the memory of `out` if there is one."""
    if out is None:
        return made
    for target, source in zip(out, made, strict=True):
        target.copy_(source)
    return out


def even_model(family: str, device: str) -> Any:
    """Fused, in bf16. Its layers change the residual a little, as trained ones do: then errors are not amplified."""
    from posttrain.policy.fused.layers import fuse_layers

    model = tiny_model(
        family, dtype=torch.bfloat16, hidden_size=256, intermediate_size=528, num_attention_heads=8, head_dim=32
    )
    decoder: Any = decoder_of(model)
    with torch.no_grad():
        for parameter in decoder.layers.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.25)
    assert fuse_layers(decoder.to(device), may_join=True) == 2
    return model.to(device).train()


def assert_fp8_is_near(model: Any) -> None:
    changes = changed_by_fp8(model)
    assert max(changes.values()) < 0.25, changes
    assert 0.01 < sum(changes.values()) / len(changes) < 0.12, changes


def changed_by_fp8(model: Any) -> dict[str, float]:
    """What FP8 does to states, log-probabilities and gradients of a fused model: relative norm of the change."""
    from posttrain.policy.fused.fp8 import Fp8Weights, fp8_products

    batch = random_batch([70, 20], [60, 40, 50], [0, 1, 0])
    plain = states_and_gradients(model, batch)
    copies = Fp8Weights(decoder_of(model).layers, gradients=True)  # type: ignore[arg-type]
    copies.refresh()
    with fp8_products(copies):
        found = states_and_gradients(model, batch)
    assert found[1].keys() == plain[1].keys()
    want = {**plain[0], **plain[1]}
    return {
        name: float((value.double() - want[name].double()).norm() / want[name].double().norm())
        for name, value in {**found[0], **found[1]}.items()
    }
