# mypy: disable-error-code="no-untyped-def"
"""One update of Adam on a GPU as one kernel, for every format of its state: `compact_adam.update_slice` is the
reference.

Torch's own operators would read and write every tensor a dozen times. Each number is read once here, made fp32,
updated, rounded (stochastically where it is stored in fewer bits, with the noise of `low_precision`) and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.policy.optimizer.compact_adam import Slice

_BLOCK = 1024


# -- noise -------------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(word):
    """low_precision._mix; of unsigned words."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def _words(keys_ptr, which: tl.constexpr, index):
    """low_precision.random_words with the key at place `which`."""
    key = tl.load(keys_ptr + which)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    mixed = _mix(index.to(tl.uint32) + low + (index >> 32).to(tl.uint32) * 0x1B873593)
    return _mix(mixed ^ (high * 0x2C1B3C6D))


@triton.jit
def _by_chance(value, words):
    """low_precision.round_to_bf16, still as fp32."""
    bits = value.to(tl.int32, bitcast=True) + (words & 0xFFFF).to(tl.int32)
    return tl.where(value == value, (bits & -65536).to(tl.float32, bitcast=True), value)


@triton.jit
def _uniform(words):
    return (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2 to the power of -24


# -- the update --------------------------------------------------------------------------------------------------------


@triton.jit
def _adam(value, gradient, moment, square, numbers_ptr):
    gradient = gradient * tl.load(numbers_ptr) + tl.load(numbers_ptr + 2) * value
    moment = moment + tl.load(numbers_ptr + 3) * (gradient - moment)
    square = square * tl.load(numbers_ptr + 4) + tl.load(numbers_ptr + 5) * gradient * gradient
    divisor = tl.div_rn(tl.sqrt_rn(square), tl.load(numbers_ptr + 7) + tl.zeros_like(square)) + tl.load(numbers_ptr + 8)
    value = value * tl.load(numbers_ptr + 1) + tl.load(numbers_ptr + 6) * tl.div_rn(moment, divisor)
    return value, moment, square


@triton.jit
def _write_weight(
    weight_ptr, master_ptr, at, inside, value, keys_ptr, index, HAS_MASTER: tl.constexpr, BY_CHANCE: tl.constexpr
):
    if HAS_MASTER:
        tl.store(master_ptr + at, value, mask=inside)
    elif BY_CHANCE:
        value = _by_chance(value, _words(keys_ptr, 0, index))
    tl.store(weight_ptr + at, value.to(weight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _update(
    weight_ptr, gradient_ptr, master_ptr, first_ptr, second_ptr, numbers_ptr, keys_ptr, start, count,
    HAS_MASTER: tl.constexpr, WEIGHT_BY_CHANCE: tl.constexpr, MOMENTS_BY_CHANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, index = at < count, start + at
    value = tl.load((master_ptr if HAS_MASTER else weight_ptr) + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
    moment = tl.load(first_ptr + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value, moment, square = _adam(value, gradient, moment, square, numbers_ptr)
    _write_weight(weight_ptr, master_ptr, at, inside, value, keys_ptr, index, HAS_MASTER, WEIGHT_BY_CHANCE)
    if MOMENTS_BY_CHANCE:
        moment = _by_chance(moment, _words(keys_ptr, 1, index))
        square = _by_chance(square, _words(keys_ptr, 2, index))
    tl.store(first_ptr + at, moment.to(first_ptr.dtype.element_ty), mask=inside)
    tl.store(second_ptr + at, square.to(second_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _update_blocks(
    weight_ptr, gradient_ptr, master_ptr, first_ptr, second_ptr, first_scales_ptr, second_scales_ptr, numbers_ptr,
    keys_ptr,
    start, num_blocks, size, HAS_MASTER: tl.constexpr, WEIGHT_BY_CHANCE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Moments in 8 bits: `size` numbers share a scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * size + column[None, :]
    whole = row < num_blocks
    inside, index = whole[:, None] & (column < size)[None, :], start + at
    value = tl.load((master_ptr if HAS_MASTER else weight_ptr) + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.div_rn(
        tl.load(first_ptr + at, mask=inside, other=0).to(tl.float32), tl.full(at.shape, 127.0, tl.float32)
    )
    moment = share * tl.abs(share) * tl.load(first_scales_ptr + row, mask=whole, other=0.0)[:, None]
    share = (tl.load(second_ptr + at, mask=inside, other=0).to(tl.float32) + 1.0) * 0.00390625
    square = share * share
    square = square * square * tl.load(second_scales_ptr + row, mask=whole, other=0.0)[:, None]
    value, moment, square = _adam(value, gradient, moment, square, numbers_ptr)
    _write_weight(weight_ptr, master_ptr, at, inside, value, keys_ptr, index, HAS_MASTER, WEIGHT_BY_CHANCE)

    magnitude = tl.where(inside, tl.abs(moment), 0.0)
    scale = tl.max(magnitude, 1)
    share = tl.div_rn(magnitude, tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(magnitude))
    lower = tl.minimum(tl.maximum(tl.floor(tl.sqrt_rn(share) * 127.0), 0.0), 126.0)
    full = tl.full(at.shape, 127.0, tl.float32)
    below, above = tl.div_rn(lower, full), tl.div_rn(lower + 1.0, full)
    below, above = below * below, above * above
    up = _uniform(_words(keys_ptr, 1, index)) < tl.div_rn(share - below, above - below)
    code = lower + up.to(tl.float32)
    tl.store(first_ptr + at, tl.where(moment < 0.0, -code, code).to(tl.int8), mask=inside)
    tl.store(first_scales_ptr + row, scale, mask=whole)

    square = tl.where(inside, square, 0.0)
    scale = tl.max(square, 1)
    share = tl.div_rn(square, tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(square))
    lower = tl.minimum(tl.maximum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(share)) * 256.0 - 1.0), 0.0), 254.0)
    below, above = (lower + 1.0) * 0.00390625, (lower + 2.0) * 0.00390625
    below, above = below * below, above * above
    below, above = below * below, above * above
    up = _uniform(_words(keys_ptr, 2, index)) < tl.div_rn(share - below, above - below)
    tl.store(second_ptr + at, (lower + up.to(tl.float32)).to(tl.uint8), mask=inside)
    tl.store(second_scales_ptr + row, scale, mask=whole)


def update(part: Slice) -> None:
    """`compact_adam.update_slice`. Every tensor is contiguous."""
    weight, start, numbers, keys = part.weight, part.start, part.numbers, part.keys
    master, first, second, first_scales, second_scales = part.state
    assert first is not None
    kept = weight if master is None else master
    options = {"HAS_MASTER": master is not None, "WEIGHT_BY_CHANCE": weight.dtype == torch.bfloat16, "num_warps": 4}
    if first_scales is None:
        count = weight.numel()
        _update[(triton.cdiv(count, _BLOCK),)](
            weight, part.gradient, kept, first, second, numbers, keys, start, count,
            MOMENTS_BY_CHANCE=first.dtype == torch.bfloat16, BLOCK=_BLOCK, **options,
        )  # fmt: skip
        return
    num_blocks, size = weight.shape
    columns = triton.next_power_of_2(size)
    rows = max(1, _BLOCK // columns)
    _update_blocks[(triton.cdiv(num_blocks, rows),)](
        weight, part.gradient, kept, first, second, first_scales, second_scales, numbers, keys, start, num_blocks, size,
        ROWS=rows, COLUMNS=columns, **options,
    )  # fmt: skip
