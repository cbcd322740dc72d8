"""Linear modules that take the same input, as one matrix product; some of them may have a low-rank adapter.

With adapters, one product multiplies the input with the base weights and another with all matrices A. Each B adds to
its own columns: scaling and sum happen inside the product, with one rounding. Plain torch, independent of models, of
peft (`adapters.py`) and of what comes before a product (`ops.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from posttrain.policy.autograd import Context
from posttrain.policy.fused.accumulate import add_product


@dataclass(frozen=True)
class LowRank:
    """Adapters of a product: scaling * (x @ a.T) @ b.T is added to the outputs of each span."""

    downs: tuple[Tensor, ...]  # the parameters A, which lie in `down`
    ups: tuple[Tensor, ...]  # the parameters B
    down: Tensor  # [sum of ranks, inputs]
    spans: tuple[tuple[int, int], ...]  # first output and number of outputs of each
    scalings: tuple[float, ...]

    @property
    def ranks(self) -> list[int]:
        return [down.shape[0] for down in self.downs]

    def columns(self, wide: Tensor) -> list[Tensor]:
        """The output columns of each adapter."""
        return [wide.narrow(1, start, length) for start, length in self.spans]


@dataclass(frozen=True)
class Product:
    """x @ weight.T + bias, and what adapters add. Parameter data may change between calls, so a `Product` is valid for
    one call.
    """

    weights: tuple[Tensor, ...]  # the parameters, which lie in `weight`
    biases: tuple[Tensor, ...]  # one for each weight, or none
    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]
    low_rank: LowRank | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All inputs that can have a gradient, in the order passed to autograd: weights, biases, As, Bs."""
        adapters = () if self.low_rank is None else (*self.low_rank.downs, *self.low_rank.ups)
        return (*self.weights, *self.biases, *adapters)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs, and the inputs as the adapters see them, which the backward pass needs."""
        out = torch.mm(x, self.weight.T) if self.bias is None else torch.addmm(self.bias, x, self.weight.T)
        return out, self.add_adapters(x, out)

    def add_adapters(self, x: Tensor, out: Tensor, divisors: Tensor | None = None) -> Tensor | None:
        """Add the adapters' output for `x` to `out`, each row divided by its divisor; returns the adapters' inputs."""
        if (adapters := self.low_rank) is None:
            return None
        low = torch.mm(x, adapters.down.T)
        if divisors is not None:
            low.div_(divisors[:, None])
        pieces = low.split(adapters.ranks, dim=1)
        for target, piece, up, scaling in zip(
            adapters.columns(out), pieces, adapters.ups, adapters.scalings, strict=True
        ):
            target.addmm_(piece, up.T, alpha=scaling)
        return low

    def needs_input(self, needed: Sequence[bool]) -> bool:
        """Whether gradients of parts are needed that are computed from x; `needed` goes with `parts`."""
        weights, _, downs, _ = self._by_kind(needed)
        return any(weights) or any(downs)

    def low_gradient(self, grad_out: Tensor) -> Tensor | None:
        if (adapters := self.low_rank) is None:
            return None
        grad_low = grad_out.new_empty(grad_out.shape[0], adapters.down.shape[0])
        targets = grad_low.split(adapters.ranks, dim=1)
        for target, grad, up, scaling in zip(
            targets, adapters.columns(grad_out), adapters.ups, adapters.scalings, strict=True
        ):
            _multiply(grad, up, scaling, out=target)
        return grad_low

    def input_gradient(self, grad_out: Tensor, grad_low: Tensor | None) -> Tensor:
        grad = self._base_gradient(grad_out)
        if self.low_rank is not None and grad_low is not None:
            grad.addmm_(grad_low, self.low_rank.down)
        return grad

    def _base_gradient(self, grad_out: Tensor) -> Tensor:
        """Gradient of the inputs, without the adapters' contribution."""
        return torch.mm(grad_out, self.weight)

    def part_gradients(
        self, grad_out: Tensor, grad_low: Tensor | None, low: Tensor | None, x: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """In the order of `parts`, None where it is not needed, or in a sum already; x only if `needs_input`."""
        weights, biases, downs, ups = self._by_kind(needed)
        rows = [weight.shape[0] for weight in self.weights]
        if all(weights) and add_product(self.weights, grad_out.T, _there(x)):
            weights = [False] * len(weights)
        grads = _split_needed(rows, weights, lambda: torch.mm(grad_out.T, _there(x)))
        grads += _split_needed(rows, biases, lambda: grad_out.sum(0))
        if (adapters := self.low_rank) is None:
            return grads
        grads += _split_needed(adapters.ranks, downs, lambda: torch.mm(_there(grad_low).T, _there(x)))
        pieces = _there(low).split(adapters.ranks, dim=1)
        for grad, piece, scaling, wanted in zip(
            adapters.columns(grad_out), pieces, adapters.scalings, ups, strict=True
        ):
            out = grad_out.new_empty(grad.shape[1], piece.shape[1]) if wanted else None
            grads.append(None if out is None else _multiply(grad.T, piece, scaling, out=out))
        return grads

    def _by_kind(self, needed: Sequence[bool]) -> list[list[bool]]:
        """`needed` of the weights, the biases, the As and the Bs."""
        num_adapted = 0 if self.low_rank is None else len(self.low_rank.downs)
        counts = [len(self.weights), len(self.biases), num_adapted, num_adapted]
        ends = [0, *accumulate(counts)]
        assert ends[-1] == len(needed)
        return [list(needed[start:end]) for start, end in pairwise(ends)]


class Multiply(torch.autograd.Function):
    """x @ weight.T + bias with adapters. To be called with `product.parts`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, product: Product, *parts: Tensor) -> Tensor:
        out, low = product.forward(x)
        ctx.save_for_backward(x, low)
        ctx.product = product
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        product: Product = ctx.product
        grad_out = grads[0].contiguous()
        needs_x, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        grad_low = product.low_gradient(grad_out) if needs_x or product.needs_input(needed) else None
        part_grads = product.part_gradients(grad_out, grad_low, low, x, needed)
        return product.input_gradient(grad_out, grad_low) if needs_x else None, None, *part_grads


def _multiply(left: Tensor, right: Tensor, factor: float, *, out: Tensor) -> Tensor:
    """left @ right * factor, rounded once; the previous content of `out` is ignored."""
    return out.addmm_(left, right, beta=0, alpha=factor)


def _split_needed(sizes: list[int], needed: list[bool], whole: Any) -> list[Tensor | None]:
    if not any(needed):
        return [None] * len(needed)
    return [part if wanted else None for part, wanted in zip(whole().split(sizes), needed, strict=True)]


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
