# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of routed experts: sorting of (token, expert) pairs, products of sorted rows, SwiGLU, sums of pairs.

Pairs are numbered token by token. Sorted by expert (stable), the rows of an expert are cut into tiles; a program of the
grouped product computes some columns of one tile. Which tiles there are is decided on the device: the grid is the
largest that the shapes allow, and programs without a tile end at once. So nothing synchronises with the host, and a
CUDA graph can capture all of it.

The weights are the left operand of the product (out^T = W x^T). The tensor cores then take tiles of few tokens without
padding them to 64 rows, and the numbers of a row are added up in the same order whatever the size of the tile: a row's
outputs do not depend on how many other rows there are.

Training computes the products with other kernels (`experts.py`) and keeps what the gradient needs in the type of the
weights. Sampling rounds at the same places: a product, what an adapter adds to it, and its sum with a bias, before the
activation; the activation times the router's weight; each pair's output, before a token's are added up in fp32.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_SORTED_AT_ONCE = 2**14  # numbers of the table (pairs x experts) in the registers of a program that sorts
_MOST_SORTERS = 128
_SUM_BLOCK = 1024


@dataclass(frozen=True)
class ExpertTile:
    """`rows` of an expert times `width` columns, `depth` inputs per iteration. `group` tiles of rows take the same
    columns one after another: those of one expert then find the weights in L2.
    """

    rows: int
    width: int
    depth: int
    num_warps: int
    num_stages: int
    group: int


# By rows; on an H200 the fastest of `bench/experts.py --tiles` for 32 rows an expert (Qwen3-30B-A3B) and for 64
# (gpt-oss-20b). Few rows: bound by the bytes of the weights. Many rows: bound by the tensor cores.
TILES = {
    16: ExpertTile(16, 128, 64, 4, 5, 8),
    32: ExpertTile(32, 256, 64, 8, 3, 8),
    64: ExpertTile(64, 128, 64, 4, 4, 8),
    128: ExpertTile(128, 128, 64, 8, 4, 8),
}
_FEW_WARPS, _SMALLEST = 4, 16


def tile_of(num_pairs: int, num_experts: int) -> ExpertTile:
    """The smallest tile that has the rows of an expert if pairs are spread evenly. An expert with more takes further
    tiles, which find its weights in L2."""
    return next((tile for rows, tile in TILES.items() if num_pairs <= rows * num_experts), TILES[128])


@dataclass(frozen=True)
class ExpertGate:
    """How gate and up projection make the input of the down projection: gate * sigmoid(alpha * gate) * (up + offset),
    both clamped at `limit`, gate from above. The columns of gate and up alternate, or are two halves.
    """

    alternates: bool = False
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0


class SortedPairs(NamedTuple):
    order: Tensor  # [pairs] which pair comes at each place
    place: Tensor  # [pairs] where each pair comes
    ends: Tensor  # [experts] behind the last place of each
    tiles: Tensor  # [3, tiles] expert (-1: unused), first place, behind the expert's last place
    tile: ExpertTile


class ExpertAdapter(NamedTuple):
    """An adapter of a grouped product; its rank is a multiple of 16 bytes."""

    down: Tensor  # [experts, inputs, rank], strides as they are
    up: Tensor  # [experts, rank, outputs]
    scaling: float


def is_interpreted(device: torch.device) -> bool:
    """By Triton's interpreter, which is how kernels are tested without a GPU."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


# -- sorting -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs", "blocks"])
def _rank_pairs(expert_ptr, rank_ptr, count_ptr, num_pairs, blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Of each pair, how many pairs of its expert come before it in the stretch of this program."""
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    seen = tl.zeros([EXPERTS], tl.int32)
    for block in range(blocks):
        pair = (program * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_own = (chosen[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.sum(is_own * (tl.cumsum(is_own, 0) + seen[None, :]), 1) - 1
        tl.store(rank_ptr + pair, rank, mask=pair < num_pairs)
        seen += tl.sum(is_own, 0)
    tl.store(count_ptr + program * EXPERTS + expert, seen)


@triton.jit(do_not_specialize=["num_pairs", "num_programs", "blocks", "num_experts", "num_tiles"])
def _place_pairs(
    expert_ptr, rank_ptr, count_ptr, order_ptr, end_ptr, tile_ptr, num_pairs, num_programs, blocks, num_experts,
    num_tiles, ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Ranks become places; each program also writes its share of the tiles."""
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    earlier = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_programs, 16):
        row = first + tl.arange(0, 16)
        there = (row < num_programs)[:, None]
        counts = tl.load(count_ptr + row[:, None] * EXPERTS + expert[None, :], mask=there, other=0)
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(row[:, None] < program, counts, 0), 0)
    ends = tl.cumsum(total, 0)
    if program == 0:
        tl.store(end_ptr + expert, ends, mask=expert < num_experts)
    for block in range(blocks):
        pair = (program * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        there = pair < num_pairs
        chosen = tl.load(expert_ptr + pair, mask=there, other=-1).to(tl.int32)
        is_own = (chosen[:, None] == expert[None, :]).to(tl.int32)
        place = tl.load(rank_ptr + pair, mask=there, other=0)
        place += tl.sum(is_own * (ends - total + earlier)[None, :], 1)
        tl.store(rank_ptr + pair, place, mask=there)
        tl.store(order_ptr + place, pair, mask=there)
    tiles = (total + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    tile = program * TILES + tl.arange(0, TILES)
    owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_owner = (owner[:, None] == expert[None, :]).to(tl.int32)
    first_of_all = ends - total - (tile_ends - tiles) * ROWS
    tl.store(tile_ptr + tile, tl.where(owner < EXPERTS, owner, -1), mask=tile < num_tiles)
    first_place = tl.sum(is_owner * first_of_all[None, :], 1) + tile * ROWS
    tl.store(tile_ptr + num_tiles + tile, first_place, mask=tile < num_tiles)
    tl.store(tile_ptr + 2 * num_tiles + tile, tl.sum(is_owner * ends[None, :], 1), mask=tile < num_tiles)


def sort_pairs(experts: Tensor, num_experts: int, tile: ExpertTile | None = None) -> SortedPairs:
    """`experts` [tokens, experts of a token], each in [0, num_experts)."""
    experts, num_pairs = experts.contiguous(), experts.numel()
    tile = tile_of(num_pairs, num_experts) if tile is None else tile
    padded = triton.next_power_of_2(num_experts)
    block = max(_SORTED_AT_ONCE // padded, 1)
    blocks = triton.cdiv(num_pairs, block * _MOST_SORTERS)
    programs = triton.cdiv(num_pairs, block * blocks)
    num_tiles = min((num_pairs + num_experts * (tile.rows - 1)) // tile.rows, num_pairs)
    place, order, ends, counts, tiles = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((num_pairs,), (num_pairs,), (num_experts,), (programs, padded), (3, num_tiles))
    )
    _rank_pairs[(programs,)](experts, place, counts, num_pairs, blocks, BLOCK=block, EXPERTS=padded, num_warps=8)
    _place_pairs[(programs,)](
        experts, place, counts, order, ends, tiles, num_pairs, programs, blocks, num_experts, num_tiles,
        ROWS=tile.rows, TILES=triton.next_power_of_2(triton.cdiv(num_tiles, programs)), BLOCK=block, EXPERTS=padded,
        num_warps=8,
    )  # fmt: skip
    return SortedPairs(order, place, ends, tiles, tile)


# -- products ----------------------------------------------------------------------------------------------------------


@triton.jit
def _activated(gate, up, alpha, limit, offset, HAS_LIMIT: tl.constexpr):
    """Gate and up after the clamps, sigmoid, and what they make."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    sigmoid = tl.sigmoid(alpha * gate)
    return gate, up, sigmoid, gate * sigmoid * (up + offset)


@triton.jit(do_not_specialize=["num_tiles", "top_k"])
def _grouped_product(
    x_ptr, weight_ptr, bias_ptr, factor_ptr, low_ptr, up_ptr, out_ptr, order_ptr, tile_ptr,
    num_tiles, width, inputs, top_k, stride_expert, stride_output, stride_input, scaling, alpha, limit, offset,
    GATED: tl.constexpr, ALTERNATES: tl.constexpr, HAS_LIMIT: tl.constexpr, GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, WIDTH_FITS: tl.constexpr,
    DEPTH_FITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    per_group = GROUP * tl.cdiv(width, WIDTH)
    first_tile = program // per_group * GROUP
    group = tl.minimum(num_tiles - first_tile, GROUP)
    tile = first_tile + program % per_group % group
    block = program % per_group // group
    expert = tl.load(tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_ptr + num_tiles + tile) + tl.arange(0, ROWS)
    there = place < tl.load(tile_ptr + 2 * num_tiles + tile)
    place = tl.where(there, place, 0).to(tl.int64)  # rows without a pair compute some other row, and are not stored
    pair = tl.load(order_ptr + place).to(tl.int64)
    source = pair // top_k if GATHERS else place

    column = block * WIDTH + tl.arange(0, WIDTH)
    output = column  # of the weight; gate and up become neighbours
    if GATED and not ALTERNATES:
        output = column % 2 * (width // 2) + column // 2
    if not WIDTH_FITS:
        output = tl.where(column < width, output, 0)
    at = tl.arange(0, DEPTH)
    weights = weight_ptr + expert * stride_expert + output[:, None] * stride_output + at[None, :] * stride_input
    rows = x_ptr + source[None, :] * inputs + at[:, None]
    total = tl.zeros([WIDTH, ROWS], tl.float32)
    for first in range(0, inputs, DEPTH):
        if DEPTH_FITS:
            weight = tl.load(weights)
            x = tl.load(rows)
        else:
            weight = tl.load(weights, mask=(first + at < inputs)[None, :], other=0.0)
            x = tl.load(rows, mask=(first + at < inputs)[:, None], other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
        weights += DEPTH * stride_input
        rows += DEPTH

    kind = out_ptr.dtype.element_ty
    if RANK > 0:
        rank = tl.arange(0, RANK)
        low = tl.load(low_ptr + place[None, :] * RANK + rank[:, None])
        up_weight = tl.load(up_ptr + (expert * RANK + rank[None, :]) * width + output[:, None])
        added = tl.dot(up_weight, low, input_precision="ieee").to(kind).to(tl.float32)
        total = total.to(kind).to(tl.float32) + (scaling * added).to(kind).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * width + output).to(tl.float32)
        total = total.to(kind).to(tl.float32) + bias[:, None]
    if GATED:
        total = total.to(kind).to(tl.float32)
    out = tl.trans(total)
    if GATED:
        gate, up = tl.split(tl.reshape(out, [ROWS, WIDTH // 2, 2]))
        gate, up, _, out = _activated(gate, up, alpha, limit, offset, HAS_LIMIT)
        out *= tl.load(factor_ptr + pair).to(tl.float32)[:, None]
        column = block * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        width = width // 2
    target = (pair if SCATTERS else place)[:, None] * width + column[None, :]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < width)[None, :])


def grouped_product(
    x: Tensor,
    weight: Tensor,
    pairs: SortedPairs,
    top_k: int,
    *,
    factors: Tensor,
    gate: ExpertGate | None = None,
    bias: Tensor | None = None,
    low_rank: ExpertAdapter | None = None,
) -> Tensor:
    """x @ weight [experts, outputs, inputs].T of each row's expert.

    With a gate: x has a row for each token, the result a row for each place, times the pair's router weight in
    `factors`. Without: x has a row for each place, the result a row for each pair.
    """
    low = x
    if low_rank is not None:  # the adapter's rows, in the order of places
        low = _product(x, low_rank.down.transpose(1, 2), pairs, top_k, factors, gathers=gate is not None)
    return _product(
        x, weight, pairs, top_k, factors, gate=gate, bias=bias, low_rank=low_rank, low=low,
        gathers=gate is not None, scatters=gate is None,
    )  # fmt: skip


def _product(
    x: Tensor, weight: Tensor, pairs: SortedPairs, top_k: int, factors: Tensor, *, gate: ExpertGate | None = None,
    bias: Tensor | None = None, low_rank: ExpertAdapter | None = None, low: Tensor | None = None, gathers: bool,
    scatters: bool = False,
) -> Tensor:  # fmt: skip
    _, width, inputs = weight.shape
    num_pairs, tile, num_tiles = len(pairs.order), pairs.tile, pairs.tiles.shape[1]
    assert x.is_contiguous()
    assert factors.is_contiguous()
    assert bias is None or bias.is_contiguous()
    out = torch.empty(num_pairs, width if gate is None else width // 2, dtype=x.dtype, device=x.device)
    columns = next((size for size in (tile.width, 128, 64) if width % size == 0), tile.width)
    columns = min(columns, max(triton.next_power_of_2(width), _SMALLEST))
    how = ExpertGate() if gate is None else gate
    _grouped_product[(num_tiles * triton.cdiv(width, columns),)](
        x, weight, x if bias is None else bias, factors, x if low is None else low,
        x if low_rank is None else low_rank.up, out, pairs.order, pairs.tiles, num_tiles, width, inputs, top_k,
        *weight.stride(), 1.0 if low_rank is None else low_rank.scaling, how.alpha, how.limit, how.offset,
        GATED=gate is not None, ALTERNATES=how.alternates, HAS_LIMIT=how.limit != float("inf"), GATHERS=gathers,
        SCATTERS=scatters, HAS_BIAS=bias is not None,
        RANK=0 if low_rank is None else low_rank.up.shape[1], WIDTH_FITS=width % columns == 0,
        DEPTH_FITS=inputs % tile.depth == 0, ROWS=tile.rows, WIDTH=columns, DEPTH=tile.depth, GROUP=tile.group,
        num_warps=tile.num_warps if columns == tile.width else _FEW_WARPS, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


# -- rows and pairs ----------------------------------------------------------------------------------------------------


class WeighedBias(NamedTuple):
    """What `sum_pairs` adds to each pair: the bias of its expert times its factor."""

    bias: Tensor  # [experts, width]
    experts: Tensor  # [tokens, experts of a token]
    factors: Tensor  # the same


@triton.jit
def _sum_pairs(
    x_ptr, place_ptr, bias_ptr, expert_ptr, factor_ptr, out_ptr, width,
    IS_SORTED: tl.constexpr, HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        row = pair
        if IS_SORTED:
            row = tl.load(place_ptr + pair).to(tl.int64)
        total += tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert, factor = tl.load(expert_ptr + pair).to(tl.int64), tl.load(factor_ptr + pair).to(tl.float32)
            total += factor * tl.load(bias_ptr + expert * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=at < width)


def sum_pairs(
    x: Tensor, top_k: int, dtype: torch.dtype, place: Tensor | None = None, bias: WeighedBias | None = None
) -> Tensor:
    """Sums of the rows of each token's pairs; `x` is in the order of pairs, or sorted with the pairs at `place`."""
    assert x.is_contiguous()
    assert bias is None or all(each.is_contiguous() for each in bias)
    rows, width = len(x) // top_k, x.shape[1]
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    if rows:
        block = min(_SUM_BLOCK, triton.next_power_of_2(width))
        _sum_pairs[(rows, triton.cdiv(width, block))](
            x, x if place is None else place, *((x, x, x) if bias is None else bias), out, width,
            IS_SORTED=place is not None, HAS_BIAS=bias is not None, TOP_K=top_k, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _gate_forward(
    x_ptr, order_ptr, factor_ptr, out_ptr, width, alpha, limit, offset,
    ALTERNATES: tl.constexpr, HAS_LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + tl.load(order_ptr + row)).to(tl.float32)
    at = tl.arange(0, BLOCK)
    places = x_ptr + row * 2 * width + (at * 2 if ALTERNATES else at)
    gate = tl.load(places, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(places + (1 if ALTERNATES else width), mask=at < width, other=0.0).to(tl.float32)
    _, _, _, out = _activated(gate, up, alpha, limit, offset, HAS_LIMIT)
    tl.store(out_ptr + row * width + at, (out * factor).to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _gate_backward(
    grad_ptr, x_ptr, order_ptr, factor_ptr, grad_x_ptr, grad_factor_ptr, width, alpha, limit, offset,
    ALTERNATES: tl.constexpr, HAS_LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + row)
    factor = tl.load(factor_ptr + pair).to(tl.float32)
    at = tl.arange(0, BLOCK)
    place = row * 2 * width + (at * 2 if ALTERNATES else at)
    to_up = 1 if ALTERNATES else width
    gate = tl.load(x_ptr + place, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + to_up, mask=at < width, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    clamped, clamped_up, sigmoid, out = _activated(gate, up, alpha, limit, offset, HAS_LIMIT)
    tl.store(grad_factor_ptr + pair, tl.sum(grad * out, 0))
    grad *= factor
    silu = clamped * sigmoid
    grad_gate = grad * (clamped_up + offset) * (sigmoid + alpha * silu * (1.0 - sigmoid))
    grad_up = grad * silu
    if HAS_LIMIT:
        grad_gate = tl.where(gate > limit, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(up) > limit, 0.0, grad_up)
    tl.store(grad_x_ptr + place, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=at < width)
    tl.store(grad_x_ptr + place + to_up, grad_up.to(grad_x_ptr.dtype.element_ty), mask=at < width)


def gate_forward(x: Tensor, order: Tensor, factors: Tensor, gate: ExpertGate) -> Tensor:
    """Of sorted rows of gate and up; `factors` are in the order of pairs."""
    rows, width = len(x), x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _gate_forward[(rows,)](
        x, order, factors, out, width, gate.alpha, gate.limit, gate.offset, ALTERNATES=gate.alternates,
        HAS_LIMIT=gate.limit != float("inf"), BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


def gate_backward(grad: Tensor, x: Tensor, order: Tensor, factors: Tensor, gate: ExpertGate) -> tuple[Tensor, Tensor]:
    """Gradients of the sorted rows, and of the factors in the order of pairs (fp32)."""
    rows, width = len(x), x.shape[1] // 2
    grad_x, grad_factors = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _gate_backward[(rows,)](
        grad, x, order, factors, grad_x, grad_factors, width, gate.alpha, gate.limit, gate.offset,
        ALTERNATES=gate.alternates, HAS_LIMIT=gate.limit != float("inf"), BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip
    return grad_x, grad_factors
