# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the output head: log-probabilities from logits in one pass, and the logits' gradient in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _logprobs(logits_ptr, target_ptr, normaliser_ptr, logprob_ptr, width, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * width
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < width:
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < width, other=float("-inf")).to(tl.float32) * factor
        higher = tl.maximum(best, x)
        # A column with only -inf so far stays empty: -inf minus -inf is NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(best - safe) + tl.exp(x - safe)
        best = higher
        start += BLOCK
    top = tl.max(best, 0)
    normaliser = top + tl.log(tl.sum(mass * tl.exp(best - top), 0))
    chosen = tl.load(base + tl.load(target_ptr + row)).to(tl.float32) * factor
    tl.store(normaliser_ptr + row, normaliser)
    tl.store(logprob_ptr + row, chosen - normaliser)


@triton.jit
def _gradient(
    logits_ptr, target_ptr, normaliser_ptr, grad_ptr, out_ptr, width, factor, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(logits_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32) * factor
    grad = tl.load(grad_ptr + row).to(tl.float32) * factor
    share = tl.exp(x - tl.load(normaliser_ptr + row))
    hit = (at == tl.load(target_ptr + row)).to(tl.float32)
    tl.store(out_ptr + row * width + at, (grad * (hit - share)).to(out_ptr.dtype.element_ty), mask=inside)


def logprobs(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """(log-sum-exp of each row of logits * factor, log-probability of the row's target), fp32."""
    rows, width = logits.shape
    normalisers, chosen = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _logprobs[(rows,)](
            logits, targets, normalisers, chosen, width, factor,
            BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return normalisers, chosen


def logit_gradient(
    logits: Tensor, targets: Tensor, normalisers: Tensor, grad: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    """d (sum of grad * logprob) / d logits, before the factor was applied, rounded once to `dtype`."""
    rows, width = logits.shape
    out = torch.empty(rows, width, dtype=dtype, device=logits.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _gradient[(rows, triton.cdiv(width, block))](
            logits, targets, normalisers, grad.contiguous(), out, width, factor, BLOCK=block, num_warps=8
        )
    return out
