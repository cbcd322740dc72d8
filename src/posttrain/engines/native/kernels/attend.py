"""The attention kernels, in Triton: over pages of one sequence, over pages that several share, and the reduction of
pieces.

All softmax arithmetic is in base 2 and in float32: `scale` carries log2(e), and pieces store their sums as log2(sum of
2^score). A piece is the part [low, high) of a sequence that one program reads; every kernel computes the same pieces
from the lengths (`_piece`), so programs without work exit immediately and no unwritten piece is read.

The number of pieces depends on the batch size. It is an argument, not a constant: a kernel takes most of a second to
compile, and a call whose answers end one after another meets a dozen batch sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.engines.native.kernels.attend_fp8 import attend_fp8


@triton.jit
def _piece(begin, end, index, splits, BLOCK: tl.constexpr, MIN_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions [low, high) of piece `index` of [begin, end), and how many pieces are not empty."""
    span = tl.maximum(end - begin, 0)
    size = (span + splits * BLOCK - 1) // (splits * BLOCK) * BLOCK
    size = tl.maximum(size, MIN_TOKENS)
    low = begin + index * size
    return low, tl.minimum(low + size, end), (span + size - 1) // size


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    query, keys, inner_scale, outer_scale, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):
    """log2(e) times the scaled, capped scores; [queries, positions]."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * inner_scale
    if HAS_SOFTCAP:
        # tanh(x) = 2 * sigmoid(2x) - 1, the 2 of 2x being part of the inner scale.
        scores = outer_scale * (2.0 * tl.sigmoid(scores) - 1.0)
    return scores


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]
    scores, values, best, total, acc, EXACT_WEIGHTS: tl.constexpr, PRECISION: tl.constexpr
):
    """One more block in the online softmax. A query without visible positions so far has -inf as its maximum."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    reference = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.exp2(best - reference)
    weights = tl.exp2(scores - reference[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    rounded = weights.to(values.dtype)
    acc = tl.dot(rounded, values, acc, input_precision=PRECISION)
    if EXACT_WEIGHTS:
        lost = (weights - rounded.to(tl.float32)).to(values.dtype)
        acc = tl.dot(lost, values, acc, input_precision=PRECISION)
    return new_best, total, acc


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,  # [QUERIES, KEY_PADDED]
    key_ptr,
    value_ptr,
    table_row,
    low,
    high,
    first,  # [QUERIES]: start of each query's window, at or after low; read if HAS_FIRST
    head,
    inner_scale,
    outer_scale,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXACT_WEIGHTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention over positions [low, high) of the sequence in `table_row`, and log2 of the sum of its weights."""
    dk = tl.arange(0, KEY_PADDED)
    dv = tl.arange(0, VALUE_PADDED)
    j = tl.arange(0, BLOCK)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    # Page numbers are read one block ahead. Reading them on use would occupy pipeline stages needed for keys and
    # values.
    page = tl.load(table_row + (low + j) // PAGE_SIZE, mask=low + j < high, other=0)
    for begin in range(low, high, BLOCK):
        position = begin + j
        visible = position < high
        slot = (page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + head
        key_mask = visible[:, None] & (dk < KEY_DIM)[None, :]
        keys = tl.load(key_ptr + (slot * KEY_DIM)[:, None] + dk[None, :], mask=key_mask, other=0.0)
        scores = _scores(query, keys, inner_scale, outer_scale, HAS_SOFTCAP, PRECISION)
        seen = visible[None, :]
        if HAS_FIRST:
            seen = seen & (position[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        value_mask = visible[:, None] & (dv < VALUE_DIM)[None, :]
        values = tl.load(value_ptr + (slot * VALUE_DIM)[:, None] + dv[None, :], mask=value_mask, other=0.0)
        best, total, acc = _accumulate(scores, values, best, total, acc, EXACT_WEIGHTS, PRECISION)
        ahead = position + BLOCK
        page = tl.load(table_row + ahead // PAGE_SIZE, mask=ahead < high, other=0)
    # Rows without visible positions get zeros, not 0/0.
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    return acc / total[:, None], tl.where(nothing, float("-inf"), best + tl.log2(total))


@triton.jit
def _with_pieces(  # type: ignore[no-untyped-def]
    acc, acc_sum, piece_ptr, piece_sum_ptr, first_slot, num_pieces, dv, present, VALUE_DIM: tl.constexpr
):
    """`acc`, whose weights add up to 2^acc_sum, combined with the `num_pieces` pieces from `first_slot` on; and log2 of
    the sum of all weights."""
    best = acc_sum
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    mask = present[:, None] & (dv < VALUE_DIM)[None, :]
    for index in range(num_pieces):
        slot = first_slot + index
        piece_sum = tl.load(piece_sum_ptr + slot, mask=present, other=float("-inf"))
        piece = tl.load(piece_ptr + slot[:, None] * VALUE_DIM + dv[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, piece_sum)
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        own_weight = tl.exp2(best - reference)
        weight = tl.exp2(piece_sum - reference)
        acc = acc * own_weight[:, None] + piece * weight[:, None]
        total = total * own_weight + weight
        best = new_best
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], best + tl.log2(total)


@triton.jit
def _sink_share(sink_ptr, heads, mask, log2_sum):  # type: ignore[no-untyped-def]
    """What a head's sink, a key whose value is 0, leaves of the output whose weights add up to 2^log2_sum."""
    sink = tl.load(sink_ptr + heads, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
    return 1.0 / (1.0 + tl.exp2(sink - log2_sum))


@triton.jit(do_not_specialize=["splits", "slots", "prefix_splits"])
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [rows, heads, KEY_DIM], strides below, the last one 1
    key_ptr,  # [pages, PAGE_SIZE, KV_HEADS, KEY_DIM]
    value_ptr,  # [pages, PAGE_SIZE, KV_HEADS, VALUE_DIM]
    key_factor_ptr,  # [pages, PAGE_SIZE, KV_HEADS], float32; read if FP8
    value_factor_ptr,
    out_ptr,  # [rows, heads, VALUE_DIM]; unused if IS_SPLIT
    piece_ptr,  # [rows, heads, slots, VALUE_DIM], float32
    piece_sum_ptr,  # [rows, heads, slots], float32: log2 of the sum of a piece
    table_ptr,  # [rows, most pages], int32
    length_ptr,  # [rows], int32
    start_ptr,  # [rows], int32: positions before it are in a shared tile; read if HAS_START
    sink_ptr,  # [heads]: a logit of each head in the denominator; read if HAS_SINKS
    inner_scale,
    outer_scale,
    window,
    query_row_stride,
    query_head_stride,
    table_stride,
    splits,
    slots,
    prefix_splits,  # the first slots hold pieces of a shared prefix, written earlier; read if HAS_START
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    GROUP_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # splits > 1
    HAS_START: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,  # keys and values are pairs in 16 bits: `attend_fp8.py`
    IN_ASSEMBLY: tl.constexpr,
    EXACT_WEIGHTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """With one piece, writes the final output including the shared prefix; otherwise writes the pieces."""
    # Key heads of one sequence run concurrently: they read adjacent bytes of the same pages.
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(length_ptr + row)
    start = 0
    if HAS_START:
        start = tl.load(start_ptr + row)
    first = start
    if HAS_WINDOW:
        first = tl.maximum(first, length - window)
    low, high, _ = _piece(first, length, split, splits, BLOCK, MIN_TOKENS)
    if IS_SPLIT:  # noqa: SIM102  (one is compile-time, the other run-time)
        if low >= high:
            return

    g = tl.arange(0, GROUP_PADDED)
    dk = tl.arange(0, KEY_PADDED)
    dv = tl.arange(0, VALUE_PADDED)
    heads = head * GROUP + g
    at_query = row * query_row_stride + heads[:, None] * query_head_stride + dk[None, :]
    query = tl.load(query_ptr + at_query, mask=(g < GROUP)[:, None] & (dk < KEY_DIM)[None, :], other=0.0)
    if FP8:
        acc, piece_sum = attend_fp8(
            query, key_ptr, value_ptr, key_factor_ptr, value_factor_ptr, table_ptr + row * table_stride, low, high, g,
            head, inner_scale, outer_scale,
            GROUP_PADDED, KV_HEADS, KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, PAGE_SIZE, BLOCK,
            False, HAS_SOFTCAP, IN_ASSEMBLY,
        )  # fmt: skip
    else:
        acc, piece_sum = _attend(
            query, key_ptr, value_ptr, table_ptr + row * table_stride, low, high, g, head, inner_scale, outer_scale,
            GROUP_PADDED, KV_HEADS, KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, PAGE_SIZE, BLOCK,
            False, HAS_SOFTCAP, EXACT_WEIGHTS, PRECISION,
        )  # fmt: skip
    at_head = row * (KV_HEADS * GROUP) + heads
    out_mask = (g < GROUP)[:, None] & (dv < VALUE_DIM)[None, :]
    if IS_SPLIT:
        at_slot = at_head * slots + (prefix_splits + split)
        tl.store(piece_ptr + at_slot[:, None] * VALUE_DIM + dv[None, :], acc, mask=out_mask)
        tl.store(piece_sum_ptr + at_slot, piece_sum, mask=g < GROUP)
    else:
        if HAS_START:
            _, _, num_shared = _piece(0, start, 0, prefix_splits, PREFIX_BLOCK, MIN_TOKENS)
            acc, piece_sum = _with_pieces(
                acc, piece_sum, piece_ptr, piece_sum_ptr, at_head * slots, num_shared, dv, g < GROUP, VALUE_DIM
            )
        if HAS_SINKS:
            acc *= _sink_share(sink_ptr, heads, g < GROUP, piece_sum)[:, None]
        at_out = at_head[:, None] * VALUE_DIM + dv[None, :]
        tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["splits", "slots"])
def shared_prefix_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    value_ptr,
    key_factor_ptr,
    value_factor_ptr,
    piece_ptr,  # [rows, heads, slots, VALUE_DIM], float32
    piece_sum_ptr,  # [rows, heads, slots], float32
    table_ptr,  # [rows, most pages], int32
    length_ptr,  # [rows], int32
    tile_rows_ptr,  # [tiles, SAMPLES], int32: rows that share a prefix, -1 behind the last
    tile_length_ptr,  # [tiles], int32: positions that they share, 0 for an unused tile
    inner_scale,
    outer_scale,
    window,
    query_row_stride,
    query_head_stride,
    table_stride,
    splits,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SAMPLES: tl.constexpr,
    QUERIES_PADDED: tl.constexpr,  # at least SAMPLES * GROUP
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,  # keys and values are pairs in 16 bits: `attend_fp8.py`
    IN_ASSEMBLY: tl.constexpr,
    EXACT_WEIGHTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    low, high, _ = _piece(0, tl.load(tile_length_ptr + tile), split, splits, BLOCK, MIN_TOKENS)
    if low >= high:
        return

    m = tl.arange(0, QUERIES_PADDED)
    dk = tl.arange(0, KEY_PADDED)
    dv = tl.arange(0, VALUE_PADDED)
    row = tl.load(tile_rows_ptr + tile * SAMPLES + m // GROUP, mask=m // GROUP < SAMPLES, other=-1)
    present = row >= 0
    row = tl.maximum(row, 0).to(tl.int64)
    heads = head * GROUP + m % GROUP
    at_query = row[:, None] * query_row_stride + heads[:, None] * query_head_stride + dk[None, :]
    query = tl.load(query_ptr + at_query, mask=present[:, None] & (dk < KEY_DIM)[None, :], other=0.0)
    # The pages of the first row: all rows of the tile share them.
    table_row = table_ptr + tl.load(tile_rows_ptr + tile * SAMPLES).to(tl.int64) * table_stride

    from_block = low
    first = tl.zeros([QUERIES_PADDED], tl.int32)
    if HAS_WINDOW:
        length = tl.load(length_ptr + row, mask=present, other=0)
        # Missing rows have no visible positions.
        first = tl.where(present, tl.maximum(length - window, 0), 2147483647)
        from_block = tl.maximum(low, tl.min(first, 0))

    if FP8:
        acc, piece_sum = attend_fp8(
            query, key_ptr, value_ptr, key_factor_ptr, value_factor_ptr, table_row, from_block, high, first, head,
            inner_scale, outer_scale,
            QUERIES_PADDED, KV_HEADS, KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, PAGE_SIZE, BLOCK,
            HAS_WINDOW, HAS_SOFTCAP, IN_ASSEMBLY,
        )  # fmt: skip
    else:
        acc, piece_sum = _attend(
            query, key_ptr, value_ptr, table_row, from_block, high, first, head, inner_scale, outer_scale,
            QUERIES_PADDED, KV_HEADS, KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, PAGE_SIZE, BLOCK,
            HAS_WINDOW, HAS_SOFTCAP, EXACT_WEIGHTS, PRECISION,
        )  # fmt: skip
    at_slot = (row * (KV_HEADS * GROUP) + heads) * slots + split
    out_mask = present[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(piece_ptr + at_slot[:, None] * VALUE_DIM + dv[None, :], acc, mask=out_mask)
    tl.store(piece_sum_ptr + at_slot, piece_sum, mask=present)


@triton.jit(do_not_specialize=["splits", "slots", "prefix_splits"])
def combine_pieces_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [rows, heads, VALUE_DIM]
    piece_ptr,  # [rows, heads, slots, VALUE_DIM], float32
    piece_sum_ptr,  # [rows, heads, slots], float32
    length_ptr,
    start_ptr,
    sink_ptr,
    window,
    splits,
    slots,
    prefix_splits,  # the first slots are those of the shared prefix
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + row)
    slot = tl.arange(0, SLOTS_PADDED)
    dv = tl.arange(0, VALUE_PADDED)
    start = 0
    written = slot < 0
    if HAS_START:
        start = tl.load(start_ptr + row)
        _, _, num_shared = _piece(0, start, 0, prefix_splits, PREFIX_BLOCK, MIN_TOKENS)
        written = slot < num_shared
    first = start
    if HAS_WINDOW:
        first = tl.maximum(first, length - window)
    _, _, num_own = _piece(first, length, 0, splits, BLOCK, MIN_TOKENS)
    written = written | ((slot >= prefix_splits) & (slot < prefix_splits + num_own))

    at_slot = (row * tl.num_programs(0) + head) * slots + slot
    sums = tl.load(piece_sum_ptr + at_slot, mask=written, other=float("-inf"))
    best = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(best == float("-inf"), 0.0, best))
    mask = written[:, None] & (dv < VALUE_DIM)[None, :]
    pieces = tl.load(piece_ptr + at_slot[:, None] * VALUE_DIM + dv[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(pieces * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if HAS_SINKS:
        out *= _sink_share(sink_ptr, head, head >= 0, best + tl.log2(total))
    at_out = (row * tl.num_programs(0) + head) * VALUE_DIM + dv
    tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=dv < VALUE_DIM)
