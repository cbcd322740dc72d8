"""Triton kernels that `fp8_products.py` measures: quantising rows to FP8, and products of few rows with both operands in FP8.

A quantised matrix is e4m3 values and one fp32 factor per row; value times factor is what was meant. A weight's row is an output
channel, that of activations a token, so both factors belong to the end of a product. Candidates to measure: posttrain does
not use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


# -- quantising ------------------------------------------------------------------------------------------------------


@triton.jit
def _quantised(values, inside_sum):
    """Rows of fp32 [ROWS, BLOCK] as e4m3, and the factor of each row."""
    largest = tl.maximum(tl.max(tl.abs(values), 1), inside_sum)
    factor = largest / 448.0
    scaled = values * (448.0 / largest)[:, None]
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv), factor


@triton.jit(do_not_specialize=["num_rows"])
def quantise_rows_kernel(
    x_ptr, q_ptr, factor_ptr, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (at < width)[None, :]
    place = row[:, None] * width + at[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    q, factor = _quantised(x, 1e-12)
    tl.store(q_ptr + place, q, mask=mask)
    tl.store(factor_ptr + row, factor, mask=row < num_rows)


@triton.jit
def norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, factor_ptr, width, eps, QUANTISE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sum = x + delta; y = its root-mean-square norm, in bf16 or quantised. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_ptr + row * width + at, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    y = x * scale * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if QUANTISE:
        largest = tl.maximum(tl.max(tl.abs(y), 0), 1e-12)
        y = tl.minimum(tl.maximum(y * (448.0 / largest), -448.0), 448.0)
        tl.store(factor_ptr + row, largest / 448.0)
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up_ptr, y_ptr, factor_ptr, width, QUANTISE: tl.constexpr, BLOCK: tl.constexpr):
    """y = silu(gate) * up of rows [gate, up]. Quantised: one program per row. Else: programs along the row too."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    if QUANTISE:
        largest = tl.maximum(tl.max(tl.abs(y), 0), 1e-12)
        y = tl.minimum(tl.maximum(y * (448.0 / largest), -448.0), 448.0)
        tl.store(factor_ptr + row, largest / 448.0)
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def quantise_rows(x: Tensor, q: Tensor, factor: Tensor, rows_per_program: int = 1, num_warps: int = 8) -> None:
    rows, width = x.shape
    quantise_rows_kernel[(triton.cdiv(rows, rows_per_program),)](
        x, q, factor, rows, width, ROWS=rows_per_program, BLOCK=triton.next_power_of_2(width), num_warps=num_warps
    )


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, total: Tensor, y: Tensor, factor: Tensor | None) -> None:
    rows, width = x.shape
    norm_kernel[(rows,)](
        x, delta, weight, total, y, x if factor is None else factor, width, 1e-5,
        QUANTISE=factor is not None, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip


def swiglu(gate_up: Tensor, y: Tensor, factor: Tensor | None) -> None:
    rows, width = y.shape
    block = 1024 if factor is None else triton.next_power_of_2(width)
    swiglu_kernel[(rows, triton.cdiv(width, block))](
        gate_up, y, y if factor is None else factor, width,
        QUANTISE=factor is not None, BLOCK=block, num_warps=4 if factor is None else 16,
    )  # fmt: skip


# -- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """What a program works on. `swapped`: weights are the first operand; 64 output channels fill the matrix units."""

    swapped: bool
    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    descriptor: bool = False  # the copy engine fetches weights; else the threads do
    precise: bool = False  # sums of `depth` products are added up in fp32; else in what the matrix units keep

    @property
    def name(self) -> str:
        order = "w·x" if self.swapped else "x·w"
        rest = " tma" * self.descriptor + " fp32" * self.precise
        return f"{order} {self.rows}x{self.columns}x{self.depth} w{self.num_warps} s{self.num_stages}{rest}"


@triton.jit(do_not_specialize=["num_rows", "splits"])
def product_kernel(
    x_ptr, w_ptr, x_factor_ptr, w_factor_ptr, y_ptr, pieces_ptr, counters_ptr, num_rows, n, k, splits,
    SWAPPED: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows, k] @ w[n, k]^T with the factors of both; k in `splits` parts, summed in order by the last program."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    # Tiles of rows that need the same weights are neighbours: all but the first find them in L2.
    rows = (tile % tiles_of_rows) * ROWS + tl.arange(0, ROWS)
    first_column = (tile // tiles_of_rows) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    blocks = k // DEPTH
    first = part * blocks // splits
    last = (part + 1) * blocks // splits
    x_mask = rows[:, None] < num_rows
    x_at = x_ptr + rows[:, None] * k + deep[None, :]
    if not DESCRIPTOR:
        w_at = w_ptr + columns[:, None].to(tl.int64) * k + deep[None, :]
    LIMIT: tl.constexpr = DEPTH if PRECISE else None  # None: the whole sum stays in the matrix units
    if SWAPPED:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(first, last):
        x = tl.load(x_at + block * DEPTH, mask=x_mask, other=0.0)
        if DESCRIPTOR:
            w = w_ptr.load([first_column, block * DEPTH])
        else:
            w = tl.load(w_at + block * DEPTH, eviction_policy="evict_first")
        if SWAPPED:
            total = tl.dot(w, tl.trans(x), total, max_num_imprecise_acc=LIMIT)
        else:
            total = tl.dot(x, tl.trans(w), total, max_num_imprecise_acc=LIMIT)
    if SWAPPED:
        total = tl.trans(total)
    place = rows[:, None].to(tl.int64) * n + columns[None, :]
    if splits == 1:
        _finish(total, x_factor_ptr, w_factor_ptr, y_ptr, rows, columns, place, num_rows, x_mask)
    else:
        size = num_rows.to(tl.int64) * n
        tl.store(pieces_ptr + part * size + place, total, mask=x_mask)
        tl.debug_barrier()
        done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if done == splits - 1:
            total = tl.load(pieces_ptr + place, mask=x_mask, other=0.0, cache_modifier=".cg")
            for other in range(1, splits):
                total += tl.load(pieces_ptr + other * size + place, mask=x_mask, other=0.0, cache_modifier=".cg")
            _finish(total, x_factor_ptr, w_factor_ptr, y_ptr, rows, columns, place, num_rows, x_mask)
            tl.store(counters_ptr + tile, 0)


@triton.jit
def _finish(total, x_factor_ptr, w_factor_ptr, y_ptr, rows, columns, place, num_rows, mask):
    x_factor = tl.load(x_factor_ptr + rows, mask=rows < num_rows, other=0.0)
    w_factor = tl.load(w_factor_ptr + columns)
    y = total * x_factor[:, None] * w_factor[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass
class Scratch:
    """Parts of sums, and counters that are zero between launches. One launch at a time may use it."""

    pieces: Tensor
    counters: Tensor

    @classmethod
    def on(cls, device: str, num_pieces: int, num_counters: int = 65536) -> Scratch:
        return cls(
            torch.empty(num_pieces, dtype=torch.float32, device=device),
            torch.zeros(num_counters, dtype=torch.int32, device=device),
        )


def fits(tile: Tile, n: int, k: int) -> bool:
    return n % tile.columns == 0 and k % tile.depth == 0


def product(
    x: Tensor, x_factor: Tensor, w: Tensor, w_factor: Tensor, y: Tensor, tile: Tile, splits: int, scratch: Scratch
) -> None:
    rows, k = x.shape
    n = w.shape[0]
    assert fits(tile, n, k)
    assert splits <= k // tile.depth
    tiles = triton.cdiv(rows, tile.rows) * (n // tile.columns)
    assert splits == 1 or (splits * rows * n <= scratch.pieces.numel() and tiles <= scratch.counters.numel())
    product_kernel[(tiles, splits)](
        x,
        as_read(w, tile),
        x_factor,
        w_factor,
        y,
        scratch.pieces,
        scratch.counters,
        rows,
        n,
        k,
        splits,
        **options(tile),
    )


def as_read(w: Tensor, tile: Tile) -> Tensor | TensorDescriptor:
    if not tile.descriptor:
        return w
    return TensorDescriptor(w, list(w.shape), list(w.stride()), [tile.columns, tile.depth])


def options(tile: Tile) -> dict[str, int | bool]:
    return {
        "SWAPPED": tile.swapped, "DESCRIPTOR": tile.descriptor, "PRECISE": tile.precise,
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


# -- compiling ahead -------------------------------------------------------------------------------------------------


class _HopperWithoutGpu:
    """A driver that names its target and can do nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_without_gpu() -> None:
    """From here on this process compiles for a Hopper GPU, and can launch nothing."""
    from triton.runtime import driver

    driver._active = _HopperWithoutGpu()


def compile_product(tile: Tile) -> Any:
    """Into Triton's cache, without a launch."""
    w = as_read(torch.empty(tile.columns, tile.depth, dtype=FP8), tile) if tile.descriptor else FP8
    f32 = torch.float32
    return product_kernel.warmup(
        FP8, w, f32, f32, torch.bfloat16, f32, torch.int32, 64, 4096, 4096, 2, grid=(1,), **options(tile)
    )


def compile_quantisation(width: int, rows_per_program: int, num_warps: int) -> Any:
    return quantise_rows_kernel.warmup(
        torch.bfloat16, FP8, torch.float32, 4096, width,
        ROWS=rows_per_program, BLOCK=triton.next_power_of_2(width), num_warps=num_warps, grid=(1,),
    )  # fmt: skip
