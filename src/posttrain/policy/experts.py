"""Stacked experts of `transformers` models: where they are, and their products over rows in the order of experts.

Used where the forward pass of `transformers` does not do: experts over ranks (`parallel/experts.py`), and experts with
LoRA adapters, whose products are computed beside those of the weights. peft would add them to the weights of all
experts in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.policy.parallel.fsdp import local_part

_STACKED = ("gate_up_proj", "up_proj", "down_proj")


def stacked_experts(model: nn.Module) -> dict[str, Any]:
    """Modules that hold all routed experts of a layer in tensors whose first axis is the expert, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and "down_proj" in module._parameters
    }


@dataclass(frozen=True)
class SortedRows:
    """Pairs of a token and an expert, in the order of experts."""

    order: Tensor  # which pair comes at each place; pairs are numbered token by token
    num_rows: Tensor  # [experts]

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> SortedRows:
        return cls(experts.argsort(stable=True), count_rows(experts, num_experts))

    def back(self, rows: Tensor) -> Tensor:
        """Rows in the order of pairs."""
        return rows.index_select(0, _inverse(self.order))


def count_rows(experts: Tensor, num_experts: int) -> Tensor:
    """Without `bincount`, which has no deterministic version on a GPU."""
    return torch.zeros(num_experts, dtype=torch.long, device=experts.device).index_add_(
        0, experts, torch.ones_like(experts)
    )


def expert_outputs(module: Any, rows: Tensor, num_rows: Tensor, gradient_factor: float = 1.0) -> Tensor:
    """The outputs of a module's experts, before the router's weights.

    `rows` are inputs in the order of experts, `num_rows` how many each has. Gradients of the module's parameters are
    multiplied by `gradient_factor`.
    """
    ends = num_rows.cumsum(0, dtype=torch.int32)
    expert_of = torch.repeat_interleave(num_rows, output_size=len(rows)) if module.has_bias else None

    def parameter(name: str) -> Tensor:
        own = local_part(module._parameters[name])
        return own if gradient_factor == 1.0 else _ScaledGradient.apply(own, gradient_factor)

    def product(name: str, x: Tensor) -> Tensor:
        weight = parameter(name)
        out = grouped_product(x, weight if module.is_transposed else weight.transpose(-2, -1), ends)
        return out if expert_of is None else out + parameter(f"{name}_bias")[expert_of]

    if module.has_gate:
        inner = module._apply_gate(product("gate_up_proj", rows))
    else:
        inner = module.act_fn(product("up_proj", rows))
    out = product("down_proj", inner)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def weighted_sum(outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each token's experts: outputs [tokens x experts of a token, hidden size] in the order of pairs."""
    return (outputs * weights.reshape(-1, 1)).unflatten(0, weights.shape).sum(1).to(dtype)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [rows, inputs] @ weight [experts, inputs, outputs] of each row's expert; an expert's rows end at `ends`."""
    x = x.to(weight.dtype)
    is_aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if len(x) and is_aligned and weight.dtype != torch.float64:
        return F.grouped_mm(x, weight, offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())  # each weight gets a gradient, of zeros where it has no rows
    return torch.cat([part @ own for part, own in zip(parts, weight.unbind(), strict=True)])


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None
