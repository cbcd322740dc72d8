"""From the projections of new tokens to the cache in one launch: head norm, rotation, keys and values into their slots.

Replaces, per layer, what `transformers` does in a dozen small kernels: `q_norm` and `k_norm` where the family has them,
the rotation of queries and keys (the rotate-half convention: of the first `cos.shape[1]` numbers of a head, the second
half, negated, goes before the first), and the scatter into the pages.

**Roundings.** With `exact_like_torch` every intermediate is rounded as torch rounds it between its operators: q * cos,
then rotate_half(q) * sin, then their sum, each to the type that the operands promote to (three roundings in bf16; the
norm adds two). The result of the rotation has the same bits. The norm's mean of squares is summed in another order,
which changes its last bit in float32 and, rarely, the last bit of what is rounded from it. Otherwise all intermediates
are float32, rounded once by the norm and once by the rotation: closer to the true value, and the same as the fused
layers of training (`policy/fused/kernels.py`). The engine uses this mode.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.engines.native.kernels.paged import Factors, factors_or_any, runs_here
from posttrain.engines.native.kernels.shapes import next_power_of_two

# Heads of one row per program.
_HEADS_PER_PROGRAM = 8
_TRITON_TYPE: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    x,
    inverse_rms,
    weight,
    HAS_OFFSET: tl.constexpr,
    IN_TYPE: tl.constexpr,
    NORM_TYPE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """x / rms * weight, with the roundings of Qwen's norm; with those of Gemma's, whose weight is an offset from 1."""
    x = x * inverse_rms
    if HAS_OFFSET:
        return _rounded(x * (1.0 + weight), IN_TYPE, EXACT)
    return _rounded(_rounded(x, IN_TYPE, EXACT) * weight, NORM_TYPE, EXACT)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    x_ptr, row, row_factor, head, num_heads, row_stride, head_stride,
    out_ptr, factor_ptr, out_row, out_row_stride, out_head_stride, may_write,
    cos_ptr, sin_ptr, cos_stride, sin_stride, norm_ptr, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr, EXACT: tl.constexpr, FP8: tl.constexpr,
    IN_TYPE: tl.constexpr, NORM_TYPE: tl.constexpr, ROPE_TYPE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, HALF_PADDED)
    there = (head < num_heads)[:, None] & (i < HALF)[None, :]
    at = row * row_stride + head[:, None] * head_stride + i[None, :]
    x1 = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32) * row_factor
    x2 = tl.load(x_ptr + at + HALF, mask=there, other=0.0).to(tl.float32) * row_factor
    at_out = out_row * out_row_stride + head[:, None] * out_head_stride + i[None, :]
    rest = i[None, :] + 0.0
    if REST_PADDED > 0:
        r = 2 * HALF + tl.arange(0, REST_PADDED)
        rest_there = (head < num_heads)[:, None] & (r < DIM)[None, :]
        at_rest = row * row_stride + head[:, None] * head_stride + r[None, :]
        rest = tl.load(x_ptr + at_rest, mask=rest_there, other=0.0).to(tl.float32) * row_factor
    if HAS_NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if REST_PADDED > 0:
            squares += tl.sum(rest * rest, 1)
        inverse_rms = tl.rsqrt(squares / DIM + eps)[:, None]
        w1 = tl.load(norm_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(norm_ptr + i + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        x1 = _scaled(x1, inverse_rms, w1, HAS_OFFSET, IN_TYPE, NORM_TYPE, EXACT).to(NORM_TYPE).to(tl.float32)
        x2 = _scaled(x2, inverse_rms, w2, HAS_OFFSET, IN_TYPE, NORM_TYPE, EXACT).to(NORM_TYPE).to(tl.float32)
        if REST_PADDED > 0:
            w = tl.load(norm_ptr + r, mask=r < DIM, other=0.0).to(tl.float32)[None, :]
            rest = _scaled(rest, inverse_rms, w, HAS_OFFSET, IN_TYPE, NORM_TYPE, EXACT).to(NORM_TYPE).to(tl.float32)
    cos1 = tl.load(cos_ptr + row * cos_stride + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + row * cos_stride + i + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + row * sin_stride + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + row * sin_stride + i + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    y1 = _rounded(x1 * cos1, ROPE_TYPE, EXACT) - _rounded(x2 * sin1, ROPE_TYPE, EXACT)
    y2 = _rounded(x2 * cos2, ROPE_TYPE, EXACT) + _rounded(x1 * sin2, ROPE_TYPE, EXACT)
    y1 = _rounded(y1, ROPE_TYPE, EXACT)
    y2 = _rounded(y2, ROPE_TYPE, EXACT)
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(y1), 1), tl.max(tl.abs(y2), 1))
        if REST_PADDED > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        largest = tl.maximum(largest, 1e-12)
        tl.store(factor_ptr + out_row * num_heads + head, largest / 448.0, mask=(head < num_heads) & may_write)
        y1 = y1 * (448.0 / largest)[:, None]
        y2 = y2 * (448.0 / largest)[:, None]
        if REST_PADDED > 0:
            rest = rest * (448.0 / largest)[:, None]
    # Output may alias input: all reads precede the first write.
    tl.debug_barrier()
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptr + at_out, y1.to(out_type), mask=there & may_write)
    tl.store(out_ptr + at_out + HALF, y2.to(out_type), mask=there & may_write)
    if REST_PADDED > 0:
        at_rest_out = out_row * out_row_stride + head[:, None] * out_head_stride + r[None, :]
        tl.store(out_ptr + at_rest_out, rest.to(out_type), mask=rest_there & may_write)


@triton.jit
def _write_kv_rope_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, out_ptr, key_cache_ptr, value_cache_ptr, key_factor_ptr, value_factor_ptr,
    cos_ptr, sin_ptr, slot_ptr, row_factor_ptr,
    query_norm_ptr, key_norm_ptr, eps,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    out_row_stride, out_head_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, QUERY_BLOCKS: tl.constexpr, KEY_BLOCKS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr, EXACT: tl.constexpr, FP8: tl.constexpr,
    HAS_ROW_FACTORS: tl.constexpr, IN_TYPE: tl.constexpr, NORM_TYPE: tl.constexpr, ROPE_TYPE: tl.constexpr,
):  # fmt: skip
    """A program handles some heads of one row: queries, keys or values, in this order."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    kept = slot >= 0
    row_factor = 1.0
    if HAS_ROW_FACTORS:
        row_factor = tl.load(row_factor_ptr + row)
    h = tl.arange(0, HEAD_BLOCK)
    if part < QUERY_BLOCKS:
        _rotate_heads(
            query_ptr, row, row_factor, part * HEAD_BLOCK + h, HEADS, query_row_stride, query_head_stride,
            out_ptr, key_factor_ptr, row, out_row_stride, out_head_stride, part >= 0,
            cos_ptr, sin_ptr, cos_stride, sin_stride, query_norm_ptr, eps,
            DIM, HALF, HALF_PADDED, REST_PADDED, HAS_NORM, HAS_OFFSET, EXACT, False, IN_TYPE, NORM_TYPE, ROPE_TYPE,
        )  # fmt: skip
    elif part < QUERY_BLOCKS + KEY_BLOCKS:
        _rotate_heads(
            key_ptr, row, row_factor, (part - QUERY_BLOCKS) * HEAD_BLOCK + h, KV_HEADS, key_row_stride, key_head_stride,
            key_cache_ptr, key_factor_ptr, slot, KV_HEADS * DIM, DIM, kept,
            cos_ptr, sin_ptr, cos_stride, sin_stride, key_norm_ptr, eps,
            DIM, HALF, HALF_PADDED, REST_PADDED, HAS_NORM, HAS_OFFSET, EXACT, FP8, IN_TYPE, NORM_TYPE, ROPE_TYPE,
        )  # fmt: skip
    else:
        head = (part - QUERY_BLOCKS - KEY_BLOCKS) * HEAD_BLOCK + h
        d = tl.arange(0, VALUE_PADDED)
        mask = (head < KV_HEADS)[:, None] & (d < VALUE_DIM)[None, :] & kept
        at = row * value_row_stride + head[:, None] * value_head_stride + d[None, :]
        value = tl.load(value_ptr + at, mask=mask, other=0.0).to(tl.float32) * row_factor
        if FP8:
            largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-12)
            tl.store(value_factor_ptr + slot * KV_HEADS + head, largest / 448.0, mask=(head < KV_HEADS) & kept)
            value = value * (448.0 / largest)[:, None]
        at_cache = (slot * KV_HEADS + head)[:, None] * VALUE_DIM + d[None, :]
        tl.store(value_cache_ptr + at_cache, value.to(value_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_rope(
    query: Tensor,  # [rows, heads, dim] or [rows, heads * dim]; may be a view of one product for all three
    key: Tensor,  # [rows, kv heads, dim], or flat
    value: Tensor,  # [rows, kv heads, value dim], or flat
    cos: Tensor,  # [rows, rotated dims], in the model's type or float32
    sin: Tensor,
    key_cache: Tensor,  # [pages, page size, kv heads, dim]
    value_cache: Tensor,  # [pages, page size, kv heads, value dim]
    slots: Tensor,  # [rows], int64: page * page size + place; negative: keys and values of this row are not written
    *,
    query_norm: Tensor | None = None,  # [dim]: RMS norm of each head before the rotation, both or none
    key_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: bool = False,  # the factor is 1 + weight, in float32: Gemma's norm
    exact_like_torch: bool = True,
    factors: Factors | None = None,  # scales of an FP8 cache, written with it
    row_factors: Tensor | None = None,  # [rows], float32: not applied yet to queries, keys and values
    out: Tensor | None = None,  # output of rotated queries; `query` itself: in place; None: a new tensor
) -> Tensor:
    """Returns rotated queries [rows, heads, dim], and writes keys and values to the cache."""
    kv_heads, dim, value_dim = key_cache.shape[2], key_cache.shape[3], value_cache.shape[3]
    query, key = _with_heads(query, dim), _with_heads(key, dim)
    value = _with_heads(value, value_dim)
    rows, heads, _ = query.shape
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device) if out is None else out
    result, out = out, _with_heads(out, dim)
    _check(query, key, value, cos, sin, key_cache, value_cache, slots)
    assert (query_norm is None) == (key_norm is None), "queries and keys are normed together or not at all"
    if rows == 0:
        return result.view(rows, heads, dim) if result.dim() == 2 else result
    rotated = cos.shape[1]
    query_blocks, key_blocks = -(-heads // _HEADS_PER_PROGRAM), -(-kv_heads // _HEADS_PER_PROGRAM)
    norm_type = query.dtype
    if query_norm is not None and not norm_offset:
        norm_type = torch.promote_types(query.dtype, query_norm.dtype)
    unused = cos
    _write_kv_rope_kernel[(rows, query_blocks + 2 * key_blocks)](
        query, key, value, out, key_cache, value_cache, *factors_or_any(key_cache, factors), cos, sin, slots,
        unused if row_factors is None else row_factors,
        unused if query_norm is None else query_norm, unused if key_norm is None else key_norm, norm_eps,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), cos.stride(0), sin.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim, HALF=rotated // 2,
        HALF_PADDED=next_power_of_two(rotated // 2),
        REST_PADDED=next_power_of_two(dim - rotated) if dim > rotated else 0,
        VALUE_PADDED=next_power_of_two(value_dim), HEAD_BLOCK=_HEADS_PER_PROGRAM, QUERY_BLOCKS=query_blocks,
        KEY_BLOCKS=key_blocks, HAS_NORM=query_norm is not None, HAS_OFFSET=norm_offset, EXACT=exact_like_torch,
        FP8=factors is not None, HAS_ROW_FACTORS=row_factors is not None,
        IN_TYPE=_TRITON_TYPE[query.dtype], NORM_TYPE=_TRITON_TYPE[norm_type],
        ROPE_TYPE=_TRITON_TYPE[torch.promote_types(norm_type, cos.dtype)],
        # A fused multiply-add would skip a rounding.
        num_warps=2, num_stages=1, enable_fp_fusion=not exact_like_torch,
    )  # fmt: skip
    return out


def _with_heads(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(1, (-1, dim)) if x.dim() == 2 else x


def _check(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    assert runs_here(query), "the kernel runs on a GPU, or in Triton's interpreter"
    rows, dim = len(query), key_cache.shape[3]
    assert query.dtype == key.dtype, f"queries are {query.dtype}, keys {key.dtype}"
    assert key.shape == (rows, key_cache.shape[2], dim), f"keys {tuple(key.shape)} for a cache {tuple(key_cache.shape)}"
    assert value.shape == (rows, key_cache.shape[2], value_cache.shape[3]), f"values {tuple(value.shape)}"
    assert cos.shape == sin.shape, "cos and sin belong together"
    assert cos.dtype == sin.dtype, "cos and sin belong together"
    assert cos.shape[0] == rows, f"{cos.shape[0]} angles for {rows} rows"
    assert cos.shape[1] <= dim, f"{cos.shape[1]} rotated of {dim} dims"
    assert cos.shape[1] % 2 == 0, "dims are rotated in pairs"
    assert slots.shape == (rows,), f"{tuple(slots.shape)} slots for {rows} rows"
    assert slots.dtype == torch.int64, "slots may exceed 2^31"
    assert slots.stride(0) == 1, "slots must be contiguous"
    assert all(x.stride(-1) == 1 for x in (query, key, value, cos, sin)), "the values of a head must be contiguous"
    assert key_cache.is_contiguous(), "pages are used in place"
    assert value_cache.is_contiguous(), "pages are used in place"
