# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of FP8 products: norm, SwiGLU and plain rows quantised as they are written, and products of few rows.

A quantised row is e4m3 values and one fp32 factor; value times factor is the number. The largest number of a row becomes 448, the
largest of e4m3. A weight's row is an output, a row of activations a token, so both factors are applied once, to the finished sum.
NaN stays NaN: a conversion that saturates would hide diverged weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_TURNED_ROWS, _TURNED_COLUMNS = 512, 32  # part of a weight that a program transposes at a time


class Fp8Rows(NamedTuple):
    values: Tensor  # [rows, width], e4m3
    factors: Tensor  # [rows], fp32


# -- quantising --------------------------------------------------------------------------------------------------------


@triton.jit
def _factor_of(largest):
    """(what rows are multiplied with, their factor) for rows whose largest number is `largest`."""
    largest = tl.maximum(largest, 1e-12)
    return 448.0 / largest, largest / 448.0


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rows(
    x_ptr, q_ptr, factor_ptr, place_ptr, num_rows, heads, token_stride, head_stride, width,
    HAS_PLACES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row is one head of a token; it goes to the token's place, or stays in order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    token, head = row // heads, row % heads
    at = tl.arange(0, BLOCK)
    mask = there[:, None] & (at < width)[None, :]
    source = token * token_stride + head * head_stride
    x = tl.load(x_ptr + source[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    scale, factor = _factor_of(tl.max(tl.abs(x), 1))
    target = row
    if HAS_PLACES:
        target = tl.load(place_ptr + token, mask=there, other=0) * heads + head
    tl.store(q_ptr + target[:, None] * width + at[None, :], (x * scale[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(factor_ptr + target, factor, mask=there)


@triton.jit
def _quantise_columns(x_ptr, q_ptr, factor_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of x [rows, columns], which become rows of q [columns, rows]: read once for the largest number, and again."""
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
    x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, scale_ptr, q_ptr, factor_ptr, width, eps,
    HAS_DELTA: tl.constexpr, HAS_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
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
    gate_up_ptr, y_ptr, q_ptr, factor_ptr, width, HAS_Y: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if HAS_Y:
        tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    scale, factor = _factor_of(tl.max(tl.abs(y), 0))
    tl.store(q_ptr + row * width + at, (y * scale).to(tl.float8e4nv), mask=inside)
    tl.store(factor_ptr + row, factor)


def new_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    values = torch.empty(rows, width, dtype=FP8, device=device)
    return Fp8Rows(values, torch.empty(rows, dtype=torch.float32, device=device))


def quantise(x: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """Each row of `x` [rows, width] with a factor of its own."""
    rows, width = x.shape
    out = new_rows(rows, width, x.device) if out is None else out
    _launch_quantise(x[:, None], out.values, out.factors, None)
    return out


def quantise_columns(x: Tensor) -> Fp8Rows:
    """Each column of `x` [rows, columns] with a factor of its own, as rows: `quantise(x.T)`, without the transposed copy."""
    rows, columns = x.shape
    assert x.is_contiguous()
    out = new_rows(columns, rows, x.device)
    if columns:
        _quantise_columns[(triton.cdiv(columns, _TURNED_COLUMNS),)](
            x, *out, rows, columns, ROWS=_TURNED_ROWS, COLUMNS=_TURNED_COLUMNS, num_warps=8
        )
    return out


def quantise_into(x: Tensor, values: Tensor, factors: Tensor, slots: Tensor) -> None:
    """Heads of tokens [tokens, heads, dim] into `slots` of pages [pages, page size, heads, dim] and of their factors."""
    _launch_quantise(x, values, factors, slots)


def _launch_quantise(x: Tensor, values: Tensor, factors: Tensor, places: Tensor | None) -> None:
    tokens, heads, width = x.shape
    assert x.stride(2) == 1, "the numbers of a row must be contiguous"
    assert values.is_contiguous(), "rows are written as blocks"
    assert factors.is_contiguous(), "one factor for each row"
    num_rows, block = tokens * heads, triton.next_power_of_2(width)
    if num_rows == 0:
        return
    per_program = max(1, 2048 // block)
    _quantise_rows[(triton.cdiv(num_rows, per_program),)](
        x, values, factors, x if places is None else places, num_rows, heads, x.stride(0), x.stride(1), width,
        HAS_PLACES=places is not None, ROWS=per_program, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def norm_quantised(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Fp8Rows, Tensor | None, Tensor]:
    """(x + delta, its norm times `weight` quantised, the same in `dtype` if one is given, the norm's factor of each row); x
    itself where there is no delta."""
    rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    y = None if dtype is None else torch.empty(rows, width, dtype=dtype, device=x.device)
    out, scale = new_rows(rows, width, x.device), x.new_empty(rows, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(width)
        _norm_quantised[(rows,)](
            x, x if delta is None else delta, weight, total, x if y is None else y, scale, *out, width, eps,
            HAS_DELTA=delta is not None, HAS_Y=y is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return total, out, y, scale


def swiglu_quantised(gate_up: Tensor, dtype: torch.dtype | None) -> tuple[Fp8Rows, Tensor | None]:
    """silu(gate) * up quantised, and in `dtype` if one is given; gate and up side by side in `gate_up`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    y = None if dtype is None else torch.empty(rows, width, dtype=dtype, device=gate_up.device)
    out = new_rows(rows, width, gate_up.device)
    if rows:
        block = triton.next_power_of_2(width)
        _swiglu_quantised[(rows,)](
            gate_up, gate_up if y is None else y, *out, width,
            HAS_Y=y is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, y


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


# -- products of few rows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductTile:
    """What one program computes: `columns` outputs of `rows` rows, `depth` inputs at a time. Weights are the first operand:
    their 64 or more outputs fill the tensor cores, which a few rows would not."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _few_rows_product(
    x_ptr, w_ptr, x_factor_ptr, w_factor_ptr, y_ptr, pieces_ptr, counters_ptr, num_rows, n, k, splits,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows, k] @ w[n, k]^T times the factors; k in `splits` parts, which the last program adds in their order."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    # Row tiles that need the same weights are adjacent: all but the first read them from L2.
    rows = (tile % tiles_of_rows) * ROWS + tl.arange(0, ROWS)
    columns = (tile // tiles_of_rows) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    blocks = tl.cdiv(k, DEPTH)
    first = part * blocks // splits
    last = (part + 1) * blocks // splits
    row_there = rows < num_rows
    column_there = columns < n
    x_at = x_ptr + rows[:, None] * k + deep[None, :]
    w_at = w_ptr + columns[:, None].to(tl.int64) * k + deep[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for block in range(first, last):
        if EVEN:
            x = tl.load(x_at + block * DEPTH, mask=row_there[:, None], other=0.0)
            w = tl.load(w_at + block * DEPTH, eviction_policy="evict_first")
        else:
            inside = (deep < k - block * DEPTH)[None, :]
            x = tl.load(x_at + block * DEPTH, mask=row_there[:, None] & inside, other=0.0)
            w = tl.load(w_at + block * DEPTH, mask=column_there[:, None] & inside, other=0.0)
        total = tl.dot(w, tl.trans(x), total)
    total = tl.trans(total)
    mask = row_there[:, None] & column_there[None, :]
    place = rows[:, None].to(tl.int64) * n + columns[None, :]
    if splits == 1:
        _scale_and_store(total, x_factor_ptr, w_factor_ptr, y_ptr, rows, columns, place, row_there, column_there, mask)
    else:
        size = num_rows.to(tl.int64) * n
        tl.store(pieces_ptr + part * size + place, total, mask=mask)
        tl.debug_barrier()
        done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if done == splits - 1:
            total = tl.load(pieces_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            for other in range(1, splits):
                total += tl.load(pieces_ptr + other * size + place, mask=mask, other=0.0, cache_modifier=".cg")
            _scale_and_store(
                total, x_factor_ptr, w_factor_ptr, y_ptr, rows, columns, place, row_there, column_there, mask
            )
            tl.store(counters_ptr + tile, 0)


@triton.jit
def _scale_and_store(
    total, x_factor_ptr, w_factor_ptr, y_ptr, rows, columns, place, row_there, column_there, mask
):  # fmt: skip
    x_factor = tl.load(x_factor_ptr + rows, mask=row_there, other=0.0)
    w_factor = tl.load(w_factor_ptr + columns, mask=column_there, other=0.0)
    y = total * x_factor[:, None] * w_factor[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def few_rows_product(
    x: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype, counters: Tensor, tile: ProductTile, splits: int
) -> Tensor:
    """x @ weight.T in `dtype`. `counters` are zero, and zero again afterwards: one launch at a time may use them."""
    rows, k = x.values.shape
    n = weight.values.shape[0]
    out = torch.empty(rows, n, dtype=dtype, device=x.values.device)
    if rows == 0:
        return out
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns)
    assert splits == 1 or tiles <= len(counters)
    pieces = x.factors if splits == 1 else torch.empty(splits * rows * n, dtype=torch.float32, device=out.device)
    _few_rows_product[(tiles, splits)](
        x.values, weight.values, x.factors, weight.factors, out, pieces, counters, rows, n, k, splits,
        EVEN=n % tile.columns == 0 and k % tile.depth == 0, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
