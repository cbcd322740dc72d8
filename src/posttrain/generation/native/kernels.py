"""Attention of one new token per sequence over its pages, as one Triton kernel. Imported on CUDA machines only.

One program per sequence and key head: the query heads that share it are the rows of a small matrix product, so each page
is read once. Softmax is computed online, in float32. Grouped heads, sliding windows, soft caps and head dimensions up to 256
(padded to a power of two) are handled; `supports` says no to the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_HEAD_DIM = 256


@triton.jit
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [rows, kv heads * GROUP, HEAD_DIM]
    key_ptr,  # [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM]
    value_ptr,
    out_ptr,  # as query
    table_ptr,  # [rows, most pages], int32
    length_ptr,  # [rows], int32
    scale,
    window,
    softcap,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(length_ptr + row)
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED)
    j = tl.arange(0, BLOCK)

    at_query = (row.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    query_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + at_query, mask=query_mask, other=0.0)

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    best = tl.full([GROUP_PADDED], -1e30, tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    # Every block holds at least one visible position, so `best` is a real score after the first of them.
    for begin in range(first // BLOCK * BLOCK, length, BLOCK):
        position = begin + j
        visible = (position < length) & (position >= first)
        page = tl.load(table_ptr + row.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=visible, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = ((slot * KV_HEADS + head) * HEAD_DIM)[:, None] + d[None, :]
        mask = visible[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(key_ptr + at, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            # tanh(x) = 2 * sigmoid(2x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(visible[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        values = tl.load(value_ptr + at, mask=mask, other=0.0)
        # Weights keep their digits: rounded to bf16 they would be the largest part of what separates the sampler's
        # log-probabilities from the trainer's.
        acc = acc * shrink[:, None] + tl.dot(weights, values.to(tl.float32), input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    acc = acc / total[:, None]
    tl.store(out_ptr + at_query, acc.to(out_ptr.dtype.element_ty), mask=query_mask)


def supports(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    return (
        query.shape[-1] <= _MAX_HEAD_DIM
        and keys.shape == values.shape
        and query.dtype == keys.dtype
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


def paged_attention(
    query: Tensor,  # [rows, heads, dim]
    keys: Tensor,  # [pages, page size, kv heads, dim]
    values: Tensor,
    table: Tensor,  # [rows, most pages], int32
    lengths: Tensor,  # [rows], int32: tokens of each row, the new one included
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    rows, heads, dim = query.shape
    _, page_size, kv_heads, _ = keys.shape
    query = query.contiguous()
    assert keys.is_contiguous(), "pages are used in place"
    assert values.is_contiguous(), "pages are used in place"
    assert table.stride(1) == 1, "pages of a row lie side by side"
    out = torch.empty_like(query)
    group = heads // kv_heads
    # Tiles of keys and values are staged in shared memory; wide ones have to be shorter to fit.
    wide = dim * query.element_size() > 256
    _paged_attention_kernel[(rows, kv_heads)](
        query, keys, values, out, table, lengths,
        scale, 0 if window is None else window, 1.0 if softcap is None else softcap, table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=dim, DIM_PADDED=max(16, triton.next_power_of_2(dim)), PAGE_SIZE=page_size, BLOCK=32 if wide else 64,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=2 if wide else 3,
    )  # fmt: skip
    return out
