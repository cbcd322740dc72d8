# mypy: disable-error-code="no-untyped-def"
"""Triton kernels around FP8 products: norm, SwiGLU and plain rows quantised as they are written.

A quantised row is e4m3 values and one fp32 factor; value times factor is the number. The largest number of a row
becomes 448, the largest of e4m3. A row of activations is a token with a factor of its own. All rows of a weight have
the same factor: e4m3 is a floating-point format, whose numbers keep their relative precision down to 2^-14 of the
largest one. NaN stays NaN: a conversion that saturates would hide diverged weights.

Norm and SwiGLU also accept rows in bf16 whose factors have not been applied yet (`ScaledRows`), and apply them as they
read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.policy.fused.fp8 import ScaledRows

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_TURNED_ROWS, _TURNED_COLUMNS = 512, 32  # part of a weight that a program transposes at a time


# -- quantising --------------------------------------------------------------------------------------------------------


@triton.jit
def _factor_of(largest):
    """(what rows are multiplied with, their factor) for rows whose largest number is `largest`."""
    largest = tl.maximum(largest, 1e-12)
    return 448.0 / largest, largest / 448.0


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rows(
    x_ptr, q_ptr, factor_ptr, place_ptr, largest_ptr, num_rows, heads, token_stride, head_stride, width,
    HAS_PLACES: tl.constexpr, HAS_LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row is one head of a token; it goes to the token's place, or stays in order. With HAS_LARGEST all rows have the
    factor of that number."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    token, head = row // heads, row % heads
    at = tl.arange(0, BLOCK)
    mask = there[:, None] & (at < width)[None, :]
    source = token * token_stride + head * head_stride
    x = tl.load(x_ptr + source[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    if HAS_LARGEST:
        largest = tl.zeros_like(largest) + tl.load(largest_ptr)
    scale, factor = _factor_of(largest)
    target = row
    if HAS_PLACES:
        target = tl.load(place_ptr + token, mask=there, other=0) * heads + head
    tl.store(q_ptr + target[:, None] * width + at[None, :], (x * scale[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(factor_ptr + target, factor, mask=there)


@triton.jit
def _quantise_columns(x_ptr, q_ptr, factor_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of x [rows, columns], which become rows of q [columns, rows]: read once for the largest number, and
    again.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & there[None, :]
        x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale, factor = _factor_of(tl.max(largest, 0))
    tl.store(factor_ptr + column, factor, mask=there)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & there[None, :]
        x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.trans((x * scale[None, :]).to(tl.float8e4nv))
        tl.store(q_ptr + column[:, None] * rows + row[None, :], q, mask=tl.trans(mask))


@triton.jit
def _norm_quantised(
    x_ptr, delta_ptr, delta_factor_ptr, weight_ptr, sum_ptr, y_ptr, scale_ptr, q_ptr, factor_ptr, width, eps,
    HAS_DELTA: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTORS:
            delta *= tl.load(delta_factor_ptr + row)
        x += delta
        tl.store(sum_ptr + row * width + at, x.to(sum_ptr.dtype.element_ty), mask=inside)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    norm_scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(scale_ptr + row, norm_scale)
    y = x * norm_scale * weight
    if HAS_Y:
        tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    scale, factor = _factor_of(tl.max(tl.abs(y), 0))
    tl.store(q_ptr + row * width + at, (y * scale).to(tl.float8e4nv), mask=inside)
    tl.store(factor_ptr + row, factor)


@triton.jit
def _swiglu_quantised(
    gate_up_ptr, in_factor_ptr, y_ptr, q_ptr, factor_ptr, width,
    HAS_FACTORS: tl.constexpr, HAS_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        in_factor = tl.load(in_factor_ptr + row)
        gate *= in_factor
        up *= in_factor
    y = gate * tl.sigmoid(gate) * up
    if HAS_Y:
        tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    scale, factor = _factor_of(tl.max(tl.abs(y), 0))
    tl.store(q_ptr + row * width + at, (y * scale).to(tl.float8e4nv), mask=inside)
    tl.store(factor_ptr + row, factor)


@triton.jit
def _apply_factors(x_ptr, factor_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr + row)
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def new_rows(rows: int, width: int, device: torch.device) -> ScaledRows:
    values = torch.empty(rows, width, dtype=FP8, device=device)
    return ScaledRows(values, torch.empty(rows, dtype=torch.float32, device=device))


def quantise(x: Tensor, out: ScaledRows | None = None) -> ScaledRows:
    """Each row of `x` [rows, width] with a factor of its own."""
    rows, width = x.shape
    out = new_rows(rows, width, x.device) if out is None else out
    _launch_quantise(x[:, None], out.values, out.factors)
    return out


def quantise_weight(weight: Tensor, out: ScaledRows | None = None) -> ScaledRows:
    """All rows of `weight` [outputs, inputs] with the same factor."""
    outputs, inputs = weight.shape
    out = new_rows(outputs, inputs, weight.device) if out is None else out
    largest = torch.linalg.vector_norm(weight, float("inf"), dtype=torch.float32)
    _launch_quantise(weight[:, None], out.values, out.factors, largest=largest)
    return out


def quantise_columns(x: Tensor) -> ScaledRows:
    """Each column of `x` [rows, columns] with a factor of its own, as rows: `quantise(x.T)`, without the transposed
    copy.
    """
    rows, columns = x.shape
    assert x.is_contiguous()
    out = new_rows(columns, rows, x.device)
    if columns:
        _quantise_columns[(triton.cdiv(columns, _TURNED_COLUMNS),)](
            x, *out, rows, columns, ROWS=_TURNED_ROWS, COLUMNS=_TURNED_COLUMNS, num_warps=8
        )
    return out


def quantise_into(x: Tensor, values: Tensor, factors: Tensor, slots: Tensor) -> None:
    """Heads of tokens [tokens, heads, dim] into `slots` of pages [pages, page size, heads, dim] and of
    their factors.
    """
    _launch_quantise(x, values, factors, places=slots)


def _launch_quantise(
    x: Tensor, values: Tensor, factors: Tensor, *, places: Tensor | None = None, largest: Tensor | None = None
) -> None:
    tokens, heads, width = x.shape
    assert x.stride(2) == 1, "the numbers of a row must be contiguous"
    assert values.is_contiguous(), "rows are written as blocks"
    assert factors.is_contiguous(), "one factor for each row"
    num_rows, block = tokens * heads, triton.next_power_of_2(width)
    if num_rows == 0:
        return
    per_program = max(1, 2048 // block)
    _quantise_rows[(triton.cdiv(num_rows, per_program),)](
        x, values, factors, x if places is None else places, x if largest is None else largest,
        num_rows, heads, x.stride(0), x.stride(1), width,
        HAS_PLACES=places is not None, HAS_LARGEST=largest is not None, ROWS=per_program, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip


def norm_quantised(
    x: Tensor, delta: Tensor | ScaledRows | None, weight: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, ScaledRows, Tensor | None, Tensor]:
    """(x + delta, its norm times `weight` quantised, the same in `dtype` if one is given, the norm's factor of each
    row); x itself where there is no delta.
    """
    rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    y = None if dtype is None else torch.empty(rows, width, dtype=dtype, device=x.device)
    out, scale = new_rows(rows, width, x.device), x.new_empty(rows, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(width)
        deltas, factors = delta if isinstance(delta, ScaledRows) else (delta, None)
        assert deltas is None or deltas.is_contiguous()
        _norm_quantised[(rows,)](
            x, x if deltas is None else deltas, x if factors is None else factors, weight, total,
            x if y is None else y, scale, *out, width, eps,
            HAS_DELTA=delta is not None, HAS_FACTORS=factors is not None, HAS_Y=y is not None, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return total, out, y, scale


def swiglu_quantised(gate_up: Tensor | ScaledRows, dtype: torch.dtype | None) -> tuple[ScaledRows, Tensor | None]:
    """silu(gate) * up quantised, and in `dtype` if one is given; gate and up side by side in `gate_up`."""
    values, factors = gate_up if isinstance(gate_up, ScaledRows) else (gate_up, None)
    assert values.is_contiguous()
    rows, width = values.shape[0], values.shape[1] // 2
    y = None if dtype is None else torch.empty(rows, width, dtype=dtype, device=values.device)
    out = new_rows(rows, width, values.device)
    if rows:
        block = triton.next_power_of_2(width)
        _swiglu_quantised[(rows,)](
            values, values if factors is None else factors, values if y is None else y, *out, width,
            HAS_FACTORS=factors is not None, HAS_Y=y is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, y


def apply_factors(rows: ScaledRows) -> Tensor:
    """The numbers themselves, in the dtype of the values."""
    values, factors = rows
    assert values.is_contiguous()
    out = torch.empty_like(values)
    if values.numel():
        block = min(2048, triton.next_power_of_2(values.shape[1]))
        grid = (values.shape[0], triton.cdiv(values.shape[1], block))
        _apply_factors[grid](values, factors, out, values.shape[1], BLOCK=block, num_warps=4)
    return out


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16
