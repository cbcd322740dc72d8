# mypy: disable-error-code="no-untyped-def"
"""The norm after a gated delta rule, norm(x) * weight * silu(gate) for each head, as one launch each way.

transformers computes it in a dozen operators over all tokens, most of them in fp32, and keeps what they leave: on a GPU
as much time as the recurrence itself. Computed in fp32 here and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from posttrain.policy.autograd import Context
from posttrain.policy.fused.kernel_trials import Comparison, Trial

_ROWS = 16
_TILES = 8  # of a program that adds up the weight's gradient


@triton.jit(do_not_specialize=["rows"])
def _forward(x_ptr, gate_ptr, weight_ptr, out_ptr, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (at < width)
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps))[:, None]
    out = x * weight * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, grad_x_ptr, grad_gate_ptr, partial_ptr, rows, width, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in range(TILES):
        row = ((tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (at < width)
        grad = tl.load(grad_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        factor = (1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps))[:, None]
        normed, share = x * factor, tl.sigmoid(gate)
        silu = gate * share
        grad_weight += grad * normed * silu
        grad_gate = grad * normed * weight * (share + silu * (1.0 - share))
        tl.store(grad_gate_ptr + row * width + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
        grad *= weight * silu
        grad_x = factor * (grad - normed * (tl.sum(grad * normed, 1) / width)[:, None])
        tl.store(grad_x_ptr + row * width + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    own = tl.arange(0, WIDTH)
    tl.store(partial_ptr + tl.program_id(0) * width + own, tl.sum(grad_weight, 0), mask=own < width)


class GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        out = torch.empty_like(x)
        (rows, width), ctx.eps = x.shape, eps
        ctx.save_for_backward(x, gate, weight)
        _forward[(triton.cdiv(rows, _ROWS),)](
            x, gate, weight, out, rows, width, eps, ROWS=_ROWS, WIDTH=triton.next_power_of_2(width), num_warps=4
        )
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        (rows, width), programs = x.shape, triton.cdiv(len(x), _ROWS * _TILES)
        grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _backward[(programs,)](
            grads[0].contiguous(), x, gate, weight, grad_x, grad_gate, partial, rows, width, ctx.eps,
            ROWS=_ROWS, WIDTH=triton.next_power_of_2(width), TILES=_TILES, num_warps=4,
        )  # fmt: skip
        return grad_x, grad_gate, partial.sum(0).to(weight.dtype), None


def _comparisons(
    device: torch.device, dtype: torch.dtype, *, gate_dtype: torch.dtype, weight_dtype: torch.dtype, width: int,
    eps: float, trains: bool,
) -> Iterator[Comparison]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    of_rows = (150, width)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float32).to(own)
        for shape, own in ((of_rows, dtype), (of_rows, gate_dtype), ((width,), weight_dtype))
    ]

    def kernels(*given: Tensor) -> tuple[Tensor]:
        return (GatedNorm.apply(*given, eps),)

    def reference(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * F.silu(gate),)

    yield Comparison(kernels, reference, inputs, int(trains))


TRIAL = Trial("norms of recurrent layers", _comparisons)
