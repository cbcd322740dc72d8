# mypy: disable-error-code="no-untyped-def"
"""The causal convolution of packed rows and its gradient, with the SiLU that follows it, as Triton kernels.

Which tokens a token reads is data (`taps`), and so is which tokens of other pieces read it (`users`: the last tokens of
a prompt have some in every response). Gradients are added up in a fixed order: each program of the backward pass adds
up those of the weights over some tokens, torch over programs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.policy.autograd import Context
from posttrain.policy.fused.kernel_trials import Comparison, Trial
from posttrain.policy.recurrence import PackedRecurrence, RowPiece

_TOKENS, _CHANNELS = 16, 256  # of a tile
# Of a program that adds up gradients of weights: one warp, each thread has all tokens of its channels.
_TILE_TOKENS, _TILES = 4, 16


@triton.jit
def _weight(weight_ptr, tap, at, channels):
    return tl.load(weight_ptr + tap * channels + at, mask=at < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rows(ptr, row, at, stride, mask):
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + at[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(ptr, tile, row, at, stride, mask):
    place = ptr + row.to(tl.int64)[:, None] * stride + at[None, :]
    tl.store(place, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _taps_sum(
    x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, row, at, mask, stride_x, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOWS: tl.constexpr,
):  # fmt: skip
    """Before the activation."""
    total = _rows(x_ptr, row, at, stride_x, mask)
    total *= _weight(weight_ptr, WIDTH - 1, at, channels)
    if HAS_BIAS:
        total += _weight(bias_ptr, 0, at, channels)
    for tap in tl.static_range(WIDTH - 1):
        token = _tap(x_ptr, window_ptr, taps_ptr + tap * rows, row, at, mask, stride_x, rows, channels, HAS_WINDOWS)
        total += token * _weight(weight_ptr, tap, at, channels)
    return total


@triton.jit
def _tap(x_ptr, window_ptr, taps_ptr, row, at, mask, stride_x, rows, channels, HAS_WINDOWS: tl.constexpr):
    # A load of [tokens, 1] would be repeated for each channel of a thread.
    source = tl.load(taps_ptr + row, mask=row < rows, other=0)
    token = _rows(x_ptr, source, at, stride_x, mask & (source < rows)[:, None])
    if HAS_WINDOWS:
        token += _rows(window_ptr, source - rows, at, channels, mask & (source >= rows)[:, None])
    return token


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOWS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (row < rows)[:, None] & (at < channels)[None, :]
    total = _taps_sum(
        x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, row, at, mask, stride_x, rows, channels,
        WIDTH, HAS_BIAS, HAS_WINDOWS,
    )  # fmt: skip
    if SILU:
        total = total * tl.sigmoid(total)
    _store_rows(out_ptr, total, row, at, channels, mask)


@triton.jit(do_not_specialize=["rows"])
def _gradient_of_sums(
    grad_ptr, x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, sums_ptr, partial_ptr,
    stride_grad, stride_x, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOWS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Gradient of what goes into the activation, and of weights and bias over the tokens of the program: [width + 1]
    numbers a channel, the last one is the bias."""
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, TAPS)[:, None]
    added = tl.zeros([TAPS, CHANNELS], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        mask = (row < rows)[:, None] & (at < channels)[None, :]
        grad = _rows(grad_ptr, row, at, stride_grad, mask)
        if SILU:
            total = _taps_sum(
                x_ptr, window_ptr, taps_ptr, weight_ptr, bias_ptr, row, at, mask, stride_x, rows, channels,
                WIDTH, HAS_BIAS, HAS_WINDOWS,
            )  # fmt: skip
            open_part = tl.sigmoid(total)
            grad *= open_part * (1.0 + total * (1.0 - open_part))
        _store_rows(sums_ptr, grad, row, at, channels, mask)
        own = _rows(x_ptr, row, at, stride_x, mask)
        added += tl.where(number == WIDTH - 1, tl.sum(grad * own, 0)[None, :], 0.0)
        added += tl.where(number == WIDTH, tl.sum(grad, 0)[None, :], 0.0)
        for tap in tl.static_range(WIDTH - 1):
            token = _tap(x_ptr, window_ptr, taps_ptr + tap * rows, row, at, mask, stride_x, rows, channels, HAS_WINDOWS)
            added += tl.where(number == tap, tl.sum(grad * token, 0)[None, :], 0.0)
    place = partial_ptr + (tl.program_id(0) * (WIDTH + 1) + number).to(tl.int64) * channels + at[None, :]
    tl.store(place, added, mask=(number <= WIDTH) & (at < channels)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _gradient_of_input(
    sums_ptr, weight_ptr, taps_ptr, first_ptr, source_ptr, user_ptr, tap_ptr, out_ptr, rows, channels,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * TOKENS
    row = begin + tl.arange(0, TOKENS)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (row < rows)[:, None] & (at < channels)[None, :]
    total = _rows(sums_ptr, row, at, channels, mask)
    total *= _weight(weight_ptr, WIDTH - 1, at, channels)
    for tap in tl.static_range(WIDTH - 1):
        user = row + WIDTH - 1 - tap
        reads = tl.load(taps_ptr + tap * rows + user, mask=user < rows, other=-1) == row
        total += _rows(sums_ptr, user, at, channels, mask & reads[:, None]) * _weight(weight_ptr, tap, at, channels)
    for number in range(tl.load(first_ptr + begin), tl.load(first_ptr + tl.minimum(begin + TOKENS, rows))):
        found = row == tl.load(source_ptr + number)
        reader = tl.where(found, tl.load(user_ptr + number), 0)
        grad = _rows(sums_ptr, reader, at, channels, mask & found[:, None])
        total += grad * _weight(weight_ptr, tl.load(tap_ptr + number), at, channels)
    _store_rows(out_ptr, total, row, at, channels, mask)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, users: tuple[Tensor, ...], taps: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
        windows: Tensor | None, silu: bool,
    ) -> Tensor:  # fmt: skip
        x, weight = dense_rows(x), weight.T.contiguous()
        windows = None if windows is None else windows.to(x.dtype).contiguous()
        (rows, channels), width = x.shape, weight.shape[0]
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
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        taps, x, weight, bias, windows = ctx.saved_tensors
        grad = dense_rows(grads[0])
        (rows, channels), width = x.shape, weight.shape[0]
        programs, blocks = triton.cdiv(rows, _TILE_TOKENS * _TILES), triton.cdiv(channels, _CHANNELS)
        sums = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
        partial = torch.empty(programs, width + 1, channels, dtype=torch.float32, device=x.device)
        _gradient_of_sums[(programs, blocks)](
            grad, x, x if windows is None else windows, taps, weight, x if bias is None else bias, sums, partial,
            grad.stride(0), x.stride(0), rows, channels, WIDTH=width, HAS_BIAS=bias is not None,
            HAS_WINDOWS=windows is not None, SILU=ctx.silu, TOKENS=_TILE_TOKENS, CHANNELS=_CHANNELS, TILES=_TILES,
            TAPS=triton.next_power_of_2(width + 1), num_warps=1,
        )  # fmt: skip
        added = partial.sum(0)
        grad_x = torch.empty_like(sums)
        _gradient_of_input[(triton.cdiv(rows, _TOKENS), blocks)](
            sums, weight, taps, *ctx.users, grad_x, rows, channels, WIDTH=width, TOKENS=_TOKENS, CHANNELS=_CHANNELS,
            num_warps=4,
        )  # fmt: skip
        grad_bias = None if bias is None else added[width].to(bias.dtype)
        return None, None, grad_x, added[:width].T.to(weight.dtype), grad_bias, None, None


def convolve(
    users: tuple[Tensor, ...],  # `PackedRecurrence.users_of`
    taps: Tensor,  # [width - 1, tokens]: indices of tokens, behind them those of the windows
    x: Tensor,  # [tokens, channels]
    weight: Tensor,  # [channels, width]
    bias: Tensor | None,
    windows: Tensor | None,  # [pieces, width - 1, channels]: no gradient goes there
    *,
    silu: bool,
) -> Tensor:
    """In the type of `x`."""
    return _Convolve.apply(users, taps, x, weight, bias, windows, silu)


def dense_rows(x: Tensor) -> Tensor:
    """[rows, channels] whose rows may be parts of wider ones and begin at whole 16 bytes, as Triton's kernels are
    specialised for. Otherwise a copy."""
    if x.stride(1) == 1 and all(number % 16 == 0 for number in (x.shape[1], x.stride(0), x.data_ptr())):
        return x
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None, *, silu: bool) -> bool:
    """Whether the kernels for these arguments of `convolve` compute what torch does, on this GPU."""
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    channels, width = weight.shape
    return TRIAL.passes(
        x.device, x.dtype, weight_dtype=weight.dtype, bias_dtype=None if bias is None else bias.dtype, width=width,
        remainder=channels % 16, has_windows=windows is not None, silu=silu, trains=trains,
    )  # fmt: skip


def _comparisons(
    device: torch.device, dtype: torch.dtype, *, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None, width: int,
    remainder: int, has_windows: bool, silu: bool, trains: bool,
) -> Iterator[Comparison]:  # fmt: skip
    """Two tiles of channels, the second not full; a prompt, two answers to it and a sequence of one token."""
    pieces = [RowPiece(0, 70), RowPiece(70, 90, 0), RowPiece(90, 91), RowPiece(91, 100, 0)]
    packed, on_host = (PackedRecurrence(pieces, each) for each in (device, torch.device("cpu")))
    generator, channels = torch.Generator().manual_seed(0), _CHANNELS + 32 + remainder

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    x, weight, bias = random(100, channels), random(channels, width), random(channels)
    inputs = [x.to(dtype), weight.to(weight_dtype), None if bias_dtype is None else bias.to(bias_dtype)]
    windows = random(len(pieces), width - 1, channels).to(dtype) if has_windows else None
    own = None if windows is None else windows.to(device)

    def kernels(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (convolve(packed.users_of(width), packed.taps_of(width), x, weight, bias, own, silu=silu),)

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        wide = None if windows is None else windows.float()
        return (on_host.convolve_in_torch(x, weight, bias, wide, silu=silu),)

    yield Comparison(kernels, reference, inputs, int(trains))


TRIAL = Trial("convolutions of recurrent layers", _comparisons)
