"""What training in FP8 is tested against: its products and gradients in float64, and all of it in plain torch, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_references import norm, swiglu, use_torch_kernels
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(x: Tensor) -> Tensor:
    """Each row as e4m3 values times a factor, in float64."""
    values, factors = _quantise(x)
    return values.double() * factors.double()[:, None]


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.float().abs().amax(-1).clamp_min(1e-12)
    return (x.float() * (LARGEST / largest)[:, None]).to(FP8), largest / LARGEST


class SlowProduct(torch.autograd.Function):
    """x @ weight.T of quantised numbers. The gradient of x is that of quantised rows of the outputs' gradient and of the weight
    quantised along its other axis; that of the weight has neither quantised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (rounded(x) @ rounded(weight).T).to(x.dtype)

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
    from posttrain.config import checks
    from posttrain.policy import trainer
    from posttrain.policy.fused import fp8, fp8_kernels

    use_torch_kernels(monkeypatch)

    def quantise(x: Tensor, out: Any = None) -> Any:
        made = fp8_kernels.Fp8Rows(*_quantise(x))
        if out is None:
            return made
        for target, source in zip(out, made, strict=True):
            target.copy_(source)
        return out

    def norm_quantised(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Any:
        total = x if delta is None else x + delta
        y = norm(total.float(), weight.float())
        scale = (total.float().square().mean(-1) + eps).rsqrt()
        return total, quantise(y), None if dtype is None else y.to(dtype), scale

    def swiglu_quantised(gate_up: Tensor, dtype: torch.dtype | None) -> Any:
        y = swiglu(*gate_up.float().chunk(2, dim=1))
        return quantise(y), None if dtype is None else y.to(dtype)

    def multiply(x: Any, weight: Any, dtype: torch.dtype, counters: Tensor) -> Tensor:
        wide = [rows.values.float() * rows.factors[:, None] for rows in (x, weight)]
        return (wide[0] @ wide[1].T).to(dtype)

    for name, function in (
        ("quantise", quantise),
        ("norm_quantised", norm_quantised),
        ("swiglu_quantised", swiglu_quantised),
    ):
        monkeypatch.setattr(fp8_kernels, name, function)
    monkeypatch.setattr(fp8, "multiply", multiply)
    monkeypatch.setattr(trainer, "fp8_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(checks, "_fp8", lambda config: ())
