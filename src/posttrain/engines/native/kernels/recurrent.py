# mypy: disable-error-code="no-untyped-def"
"""One more token of every sequence in the recurrent layers: a convolution and a recurrence, each in one launch that
advances the states in their slots.

The recurrence is bound by the bytes of its states, which are read and written once: a program holds some columns of
one head's state in registers. Queries and keys come as the layer made them; their norms, the repetition of key heads
and all casts happen in the kernel. Rows of the last slot, for padding, start from zeros and leave nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from posttrain.policy.fused.convolution import dense_rows
from posttrain.policy.fused.kernel_trials import Comparison, Trial
from posttrain.policy.fused.recurrence import dense_heads
from posttrain.policy.recurrence import UNIT_EPS, in_exact_types
from posttrain.policy.recurrence import convolution_step as convolution_in_torch
from posttrain.policy.recurrence import recurrence_step as recurrence_in_torch

_CHANNELS = 512  # of a program of the convolution
# Value columns and warps of a program of the recurrence.
STEP_BLOCK, STEP_WARPS = 32, 4


@triton.jit(do_not_specialize=["scratch"])
def _convolve(
    x_ptr, pool_ptr, slot_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, scratch, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    slot = tl.load(slot_ptr + row).to(tl.int64)
    held = inside & (slot < scratch)
    window = pool_ptr + slot * (WIDTH - 1) * channels + at
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        token = tl.load(window + tap * channels, mask=held, other=0.0)
        total += token.to(tl.float32) * tl.load(weight_ptr + at * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(window + (tap - 1) * channels, token, mask=held)
    x = tl.load(x_ptr + row * stride_x + at, mask=inside, other=0.0)
    total += x.to(tl.float32) * tl.load(weight_ptr + at * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    if WIDTH > 1:
        tl.store(window + (WIDTH - 2) * channels, x.to(pool_ptr.dtype.element_ty), mask=held)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(out_ptr + row * channels + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_decay", "stride_beta", "scratch"])
def _step(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, pool_ptr, slot_ptr, out_ptr,
    stride_query, stride_key, stride_value, stride_decay, stride_beta, scratch, key_width, value_width, eps, scale,
    GROUP: tl.constexpr, CORRECTS: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, KEYS)
    column = block * VALUES + tl.arange(0, VALUES)
    in_key, in_value = at < key_width, column < value_width
    slot = tl.load(slot_ptr + row).to(tl.int64)
    place = pool_ptr + (slot * tl.num_programs(1) + head) * key_width * value_width
    place += at[:, None] * value_width + column[None, :]
    held = in_key[:, None] & in_value[None, :] & (slot < scratch)
    state = tl.load(place, mask=held, other=0.0)
    own = head // GROUP * key_width + at
    query = tl.load(query_ptr + row * stride_query + own, mask=in_key, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + row * stride_key + own, mask=in_key, other=0.0).to(tl.float32)
    if UNIT:
        query *= scale / tl.sqrt(tl.sum(query * query, 0) + eps)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + eps)
    value = tl.load(value_ptr + row * stride_value + head * value_width + column, mask=in_value, other=0.0)
    value = value.to(tl.float32)
    state *= tl.exp(tl.load(decay_ptr + row * stride_decay + head).to(tl.float32))
    if CORRECTS:
        beta = tl.load(beta_ptr + row * stride_beta + head).to(tl.float32)
        value = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * value[None, :]
    tl.store(place, state, mask=held)
    out = tl.sum(state * query[:, None], 0)
    target = (row * tl.num_programs(1) + head) * value_width + column
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=in_value)


def convolution_step(
    pool: Tensor,  # [slots, width - 1, channels], advanced in place; the last slot is for padding
    slots: Tensor,
    x: Tensor,  # [rows, channels]
    weight: Tensor,  # [channels, width]
    bias: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    (rows, channels), width = x.shape, weight.shape[1]
    x, weight = dense_rows(x), weight.contiguous()
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    if rows:
        _convolve[(rows, triton.cdiv(channels, block))](
            x, pool, slots, weight, x if bias is None else bias, out, x.stride(0), len(pool) - 1, channels,
            WIDTH=width, HAS_BIAS=bias is not None, SILU=silu, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def recurrence_step(
    pool: Tensor,  # [slots, heads, key width, value width], fp32, advanced in place; the last slot is for padding
    slots: Tensor,
    query: Tensor,  # [rows, key heads, key width]
    key: Tensor,
    value: Tensor,  # [rows, heads, value width]
    log_decay: Tensor,  # [rows, heads]
    beta: Tensor | None,
    *,
    unit: bool,
    block: int = STEP_BLOCK,
    warps: int = STEP_WARPS,
) -> Tensor:
    """In the type of `value`."""
    rows, heads, value_width = value.shape
    query, key, value = (dense_heads(x) for x in (query, key, value))
    rate = log_decay if beta is None else beta
    assert log_decay.stride(1) == 1 == rate.stride(1), "numbers of a row are contiguous"
    out = torch.empty(rows, heads, value_width, dtype=value.dtype, device=value.device)
    block = min(block, triton.next_power_of_2(value_width))
    if rows:
        _step[(triton.cdiv(value_width, block), heads, rows)](
            query, key, value, log_decay, rate, pool, slots, out,
            query.stride(0), key.stride(0), value.stride(0), log_decay.stride(0), rate.stride(0), len(pool) - 1,
            key.shape[2], value_width, UNIT_EPS, key.shape[2] ** -0.5,
            GROUP=heads // key.shape[1], CORRECTS=beta is not None, UNIT=unit,
            KEYS=triton.next_power_of_2(key.shape[2]), VALUES=block, num_warps=warps,
        )  # fmt: skip
    return out


def convolution_fits(pool: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> bool:
    """Whether the kernel for these arguments of `convolution_step` computes what torch does, on this GPU."""
    channels, width = weight.shape
    return CONVOLUTION_TRIAL.passes(
        x.device, x.dtype, pool_dtype=pool.dtype, weight_dtype=weight.dtype,
        bias_dtype=None if bias is None else bias.dtype, width=width, silu=silu,
        channels=channels if channels < 2 * _CHANNELS else _CHANNELS + channels % _CHANNELS,
    )  # fmt: skip


def recurrence_fits(
    pool: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, *, unit: bool
) -> bool:
    """Whether the kernel for these arguments of `recurrence_step` computes what torch does, on this GPU."""
    return RECURRENCE_TRIAL.passes(
        value.device, key.dtype, other_dtypes=(query.dtype, value.dtype, log_decay.dtype),
        rate_dtype=None if beta is None else beta.dtype, key_heads=key.shape[1], sizes=tuple(pool.shape[1:]), unit=unit,
    )  # fmt: skip


_SLOTS = (2, 0, 1, 3)  # of the rows of a trial; the last one is for padding


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]


def _convolution_comparisons(
    device: torch.device, dtype: torch.dtype, *, pool_dtype: torch.dtype, weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None, width: int, silu: bool, channels: int,
) -> Iterator[Comparison]:  # fmt: skip
    rows, slots = len(_SLOTS), torch.tensor(_SLOTS, device=device)
    pool, x, weight, bias = _random((rows, width - 1, channels), (rows, channels), (channels, width), (channels,))
    inputs = [pool.to(pool_dtype), x.to(dtype), weight.to(weight_dtype)]

    def kernels(pool: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return convolution_step(pool, slots, x, weight, bias, silu=silu)[:-1], pool[slots[:-1]]

    def reference(pool: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        out, after = convolution_in_torch(pool[list(_SLOTS[:-1])], x[:-1], weight, bias)
        return F.silu(out) if silu else out, after

    yield Comparison(kernels, reference, [*inputs, None if bias_dtype is None else bias.to(bias_dtype)])


def _recurrence_comparisons(
    device: torch.device, dtype: torch.dtype, *, other_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    rate_dtype: torch.dtype | None, key_heads: int, sizes: tuple[int, int, int], unit: bool,
) -> Iterator[Comparison]:  # fmt: skip
    rows, slots, (heads, key_width, value_width) = len(_SLOTS), torch.tensor(_SLOTS, device=device), sizes
    of_keys = (rows, key_heads, key_width)
    pool, query, key, value, decay, rate = _random(
        (rows, *sizes), of_keys, of_keys, (rows, heads, value_width), (rows, heads), (rows, heads)
    )
    query, key, beta = query * key_width**-0.5, key * key_width**-0.5, rate.sigmoid()
    others = zip((query, value, -F.softplus(decay)), other_dtypes, strict=True)
    query, value, decay = (x.to(dtype) for x, dtype in others)
    inputs = [pool, query, key.to(dtype), value, decay, None if rate_dtype is None else beta.to(rate_dtype)]

    def kernels(pool: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence_step(pool, slots, *given, unit=unit)[:-1], pool[slots[:-1]]

    def reference(pool: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        own = in_exact_types(*(None if x is None else x[:-1] for x in given), unit=unit)
        return recurrence_in_torch(pool[list(_SLOTS[:-1])], *own)

    yield Comparison(kernels, reference, inputs)


CONVOLUTION_TRIAL = Trial("convolutions of decode steps", _convolution_comparisons)
RECURRENCE_TRIAL = Trial("recurrent layers of decode steps", _recurrence_comparisons)
