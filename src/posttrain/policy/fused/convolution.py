# mypy: disable-error-code="no-untyped-def"
"""The causal convolution of packed rows and its gradient, with the SiLU that follows it, as Triton kernels.

Which tokens a token reads is data (`taps`), and so is which tokens read it (`users`: the last tokens of a prompt have
some in every response). Gradients are added up in a fixed order: each program of the backward pass adds up those of the
weights over some tokens, torch over programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _CHANNELS = 16, 128  # of a tile
_TILES = 8  # of a program that adds up gradients of weights


@triton.jit
def _taps_sum(
    x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, row, at, mask, stride_x, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOWS: tl.constexpr,
):  # fmt: skip
    """Before the activation. `row` is [tokens, 1], `at` [1, channels]."""
    wide = row.to(tl.int64)
    inside = at < channels
    total = tl.load(x_ptr + wide * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    total *= tl.load(weight_ptr + at * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        token = _tap(x_ptr, window_ptr, taps_ptr + tap * rows, row, at, mask, stride_x, rows, channels, HAS_WINDOWS)
        total += token * tl.load(weight_ptr + at * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _tap(x_ptr, window_ptr, taps_ptr, row, at, mask, stride_x, rows, channels, HAS_WINDOWS: tl.constexpr):
    source = tl.load(taps_ptr + row, mask=row < rows, other=0)
    token = tl.load(x_ptr + source * stride_x + at, mask=mask & (source < rows), other=0.0).to(tl.float32)
    if HAS_WINDOWS:
        place = window_ptr + (source - rows) * channels + at
        token += tl.load(place, mask=mask & (source >= rows), other=0.0).to(tl.float32)
    return token


@triton.jit
def _forward(
    x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOWS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    at = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = (row < rows) & (at < channels)
    total = _taps_sum(
        x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, row, at, mask, stride_x, rows, channels,
        WIDTH, HAS_BIAS, HAS_WINDOWS,
    )  # fmt: skip
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(out_ptr + row.to(tl.int64) * channels + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient_of_sums(
    grad_ptr, x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, sums_ptr, partial_ptr,
    stride_grad, stride_x, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOWS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Gradient of what goes into the activation, and of weights and bias over the tokens of the program: [width + 1]
    numbers a channel, the last one is the bias."""
    at = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    number = tl.arange(0, TAPS)[:, None]
    added = tl.zeros([TAPS, CHANNELS], tl.float32)
    for tile in range(TILES):
        row = ((tl.program_id(0) * TILES + tile) * TOKENS + tl.arange(0, TOKENS))[:, None]
        mask = (row < rows) & (at < channels)
        grad = tl.load(grad_ptr + row.to(tl.int64) * stride_grad + at, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            total = _taps_sum(
                x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, row, at, mask, stride_x, rows, channels,
                WIDTH, HAS_BIAS, HAS_WINDOWS,
            )  # fmt: skip
            open_part = tl.sigmoid(total)
            grad *= open_part * (1.0 + total * (1.0 - open_part))
        tl.store(sums_ptr + row.to(tl.int64) * channels + at, grad.to(sums_ptr.dtype.element_ty), mask=mask)
        own = tl.load(x_ptr + row.to(tl.int64) * stride_x + at, mask=mask, other=0.0).to(tl.float32)
        added += tl.where(number == WIDTH - 1, tl.sum(grad * own, 0)[None, :], 0.0)
        added += tl.where(number == WIDTH, tl.sum(grad, 0)[None, :], 0.0)
        for tap in tl.static_range(WIDTH - 1):
            token = _tap(x_ptr, window_ptr, taps_ptr + tap * rows, row, at, mask, stride_x, rows, channels, HAS_WINDOWS)
            added += tl.where(number == tap, tl.sum(grad * token, 0)[None, :], 0.0)
    place = partial_ptr + (tl.program_id(0) * (WIDTH + 1) + number).to(tl.int64) * channels + at
    tl.store(place, added, mask=(number <= WIDTH) & (at < channels))


@triton.jit
def _gradient_of_input(
    sums_ptr, weight_ptr, first_ptr, user_ptr, tap_ptr, out_ptr, channels, WIDTH: tl.constexpr, CHANNELS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = at < channels
    total = tl.load(sums_ptr + row * channels + at, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(weight_ptr + at * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for number in range(tl.load(first_ptr + row), tl.load(first_ptr + row + 1)):
        user, tap = tl.load(user_ptr + number).to(tl.int64), tl.load(tap_ptr + number)
        grad = tl.load(sums_ptr + user * channels + at, mask=inside, other=0.0).to(tl.float32)
        total += grad * tl.load(weight_ptr + at * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * channels + at, total.to(out_ptr.dtype.element_ty), mask=inside)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, users: tuple[Tensor, Tensor, Tensor], taps: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
        windows: Tensor | None, silu: bool,
    ) -> Tensor:  # fmt: skip
        x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
        windows = None if windows is None else windows.to(x.dtype).contiguous()
        (rows, channels), width = x.shape, weight.shape[1]
        out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
        _forward[(triton.cdiv(rows, _TOKENS), triton.cdiv(channels, _CHANNELS))](
            x, x if windows is None else windows, taps, weight, x if bias is None else bias, out,
            x.stride(0), rows, channels, WIDTH=width, HAS_BIAS=bias is not None, HAS_WINDOWS=windows is not None,
            SILU=silu, TOKENS=_TOKENS, CHANNELS=_CHANNELS, num_warps=4,
        )  # fmt: skip
        ctx.users, ctx.silu = users, silu
        ctx.save_for_backward(taps, x, weight, bias, windows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        taps, x, weight, bias, windows = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(1) == 1 else grads[0].contiguous()
        (rows, channels), width = x.shape, weight.shape[1]
        programs, blocks = triton.cdiv(rows, _TOKENS * _TILES), triton.cdiv(channels, _CHANNELS)
        sums = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
        partial = torch.empty(programs, width + 1, channels, dtype=torch.float32, device=x.device)
        _gradient_of_sums[(programs, blocks)](
            grad, x, x if windows is None else windows, taps, weight, x if bias is None else bias, sums, partial,
            grad.stride(0), x.stride(0), rows, channels, WIDTH=width, HAS_BIAS=bias is not None,
            HAS_WINDOWS=windows is not None, SILU=ctx.silu, TOKENS=_TOKENS, CHANNELS=_CHANNELS, TILES=_TILES,
            TAPS=triton.next_power_of_2(width + 1), num_warps=4,
        )  # fmt: skip
        added = partial.sum(0)
        grad_x = torch.empty_like(sums)
        block = min(1024, triton.next_power_of_2(channels))
        _gradient_of_input[(rows, triton.cdiv(channels, block))](
            sums, weight, *ctx.users, grad_x, channels, WIDTH=width, CHANNELS=block, num_warps=4
        )
        grad_bias = None if bias is None else added[width].to(bias.dtype)
        return None, None, grad_x, added[:width].T.to(weight.dtype), grad_bias, None, None


def convolve(
    users: tuple[Tensor, Tensor, Tensor],  # first user of each token (and the number of all); users; by which tap
    taps: Tensor,  # [width - 1, tokens]: indices of tokens, behind them those of the windows
    x: Tensor,  # [tokens, channels]
    weight: Tensor,  # [channels, width]
    bias: Tensor | None,
    windows: Tensor | None,  # [pieces, width - 1, channels]: no gradient goes there
    *,
    silu: bool,
) -> Tensor:
    """In the type of `x`."""
    out: Tensor = _Convolve.apply(users, taps, x, weight, bias, windows, silu)
    return out
