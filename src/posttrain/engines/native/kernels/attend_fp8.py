"""The inner loop of the attention kernels over keys and values in FP8.

Two adjacent FP8 numbers are loaded as one 16-bit word and unpacked in the layout of the tensor cores. Single 8-bit
numbers would have to be moved to that layout one by one, which takes longer than reading bf16. So a head is split into
its even and odd dims, and each product into two. FP8 converts to fp16 exactly; the query is rounded to fp16. The scale
of a key scales its score. The scale of a value scales its weight, times 448, which keeps weights in the range of fp16;
the sum is divided by 448 at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _even_and_odd(pairs, IN_ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lower and the upper e4m3 of each 16 bits, as fp16."""
    if IN_ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(
            asm="""{
                .reg .b16 first, second;
                .reg .b32 one, other;
                mov.b32 {first, second}, $2;
                cvt.rn.f16x2.e4m3x2 one, first;
                cvt.rn.f16x2.e4m3x2 other, second;
                prmt.b32 $0, one, other, 0x5410;
                prmt.b32 $1, one, other, 0x7632;
            }""",
            constraints="=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        return even, odd
    # The sign stays in place; exponent and mantissa shift to their fp16 positions. The exponent biases differ by 8.
    even = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
    odd = (pairs & 0x8000) | ((pairs & 0x7F00) >> 1)
    return even.to(tl.float16, bitcast=True) * 256.0, odd.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def attend_fp8(  # type: ignore[no-untyped-def]
    query,  # [QUERIES, KEY_PADDED]
    key_ptr,  # pairs, as uint16
    value_ptr,
    key_factor_ptr,
    value_factor_ptr,
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
    IN_ASSEMBLY: tl.constexpr,
):
    """`_attend` of `attend.py`: attention over positions [low, high), and log2 of the sum of its weights."""
    KEY_PAIRS: tl.constexpr = KEY_PADDED // 2
    VALUE_PAIRS: tl.constexpr = VALUE_PADDED // 2
    even_query, odd_query = tl.split(tl.reshape(query.to(tl.float16), (QUERIES, KEY_PAIRS, 2)))
    dk = tl.arange(0, KEY_PAIRS)
    dv = tl.arange(0, VALUE_PAIRS)
    j = tl.arange(0, BLOCK)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    even_acc = tl.zeros([QUERIES, VALUE_PAIRS], tl.float32)
    odd_acc = tl.zeros([QUERIES, VALUE_PAIRS], tl.float32)
    page = tl.load(table_row + (low + j) // PAGE_SIZE, mask=low + j < high, other=0)
    for begin in range(low, high, BLOCK):
        position = begin + j
        visible = position < high
        slot = (page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + head
        key_mask = visible[:, None] & (dk < KEY_DIM // 2)[None, :]
        keys = tl.load(key_ptr + (slot * (KEY_DIM // 2))[:, None] + dk[None, :], mask=key_mask, other=0)
        even_keys, odd_keys = _even_and_odd(keys, IN_ASSEMBLY)
        scores = tl.dot(even_query, tl.trans(even_keys))
        scores = tl.dot(odd_query, tl.trans(odd_keys), scores)
        scores *= inner_scale * tl.load(key_factor_ptr + slot, mask=visible, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = outer_scale * (2.0 * tl.sigmoid(scores) - 1.0)
        seen = visible[None, :]
        if HAS_FIRST:
            seen = seen & (position[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - reference)
        weights = tl.exp2(scores - reference[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weights *= (448.0 * tl.load(value_factor_ptr + slot, mask=visible, other=0.0))[None, :]
        weights = weights.to(tl.float16)
        value_mask = visible[:, None] & (dv < VALUE_DIM // 2)[None, :]
        values = tl.load(value_ptr + (slot * (VALUE_DIM // 2))[:, None] + dv[None, :], mask=value_mask, other=0)
        even_values, odd_values = _even_and_odd(values, IN_ASSEMBLY)
        even_acc = tl.dot(weights, even_values, even_acc * shrink[:, None])
        odd_acc = tl.dot(weights, odd_values, odd_acc * shrink[:, None])
        best = new_best
        ahead = position + BLOCK
        page = tl.load(table_row + ahead // PAGE_SIZE, mask=ahead < high, other=0)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc = tl.interleave(even_acc, odd_acc) / (448.0 * total)[:, None]
    return acc, tl.where(nothing, float("-inf"), best + tl.log2(total))
