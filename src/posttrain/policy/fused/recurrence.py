"""The recurrence of packed rows and its gradient on a GPU. `recurrence_kernels.py` has the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from posttrain.policy.autograd import Context
from posttrain.policy.fused import recurrence_kernels as kernels
from posttrain.policy.fused.kernel_trials import Comparison, Trial
from posttrain.policy.recurrence import CHUNK_TOKENS, UNIT_EPS, Chunks, PackedRecurrence, RowPiece

_ROWS = 16  # of a program that works on rows by themselves
WARPS = 4  # of a program that works on a chunk
STAGES = 2
PASS_COLUMNS = 32  # of a state that is passed from chunk to chunk
# A prompt of several chunks and two answers to it.
TRIAL_PIECES = (RowPiece(0, 150), RowPiece(150, 230, 0), RowPiece(230, 250, 0))
WIDTH_STEP = 16  # heads are padded to multiples of it: Triton then loads 16 bytes at a time, and never 2


@dataclass
class _Shape:
    """Sizes of a layer, and of the tiles that fit them."""

    rows: int
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.keys, self.values = (max(16, triton.next_power_of_2(n)) for n in (self.key_width, self.value_width))
        self.key_block, self.value_block = min(64, self.keys), min(64, self.values)
        self.num_key_blocks, self.num_value_blocks = self.keys // self.key_block, self.values // self.value_block
        self.pass_block = min(PASS_COLUMNS, self.values)
        self.num_pass_blocks = self.values // self.pass_block
        self.widths = (self.key_width, self.value_width)
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        self.common = {
            "GROUP": self.heads // self.key_heads, "TOKENS": CHUNK_TOKENS, "PRECISION": precision,
            "num_warps": WARPS, "num_stages": STAGES,
        }  # fmt: skip
        self.key_tiles = {"KEYS": self.keys, "BK": self.key_block}
        self.value_tiles = {"VALUES": self.values, "BV": self.value_block}


def _unit(x: Tensor, scale: float) -> Tensor:
    rows, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.unit_rows[(triton.cdiv(rows, _ROWS), heads)](
        x, out, x.stride(0), rows, width, UNIT_EPS, scale, ROWS=_ROWS, WIDTH=triton.next_power_of_2(width), num_warps=4
    )
    return out


def _folded(grad: Tensor, x: Tensor, shape: _Shape, scale: float | None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.fold_heads[(triton.cdiv(shape.rows, _ROWS), shape.key_heads)](
        grad, x, out, x.stride(0), shape.rows, shape.key_width, UNIT_EPS, scale or 1.0,
        GROUP=shape.heads // shape.key_heads, UNIT=scale is not None, ROWS=_ROWS,
        WIDTH=triton.next_power_of_2(shape.key_width), num_warps=4,
    )  # fmt: skip
    return out


class _Recur(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
        before: Tensor | None, scale: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`scale`: of queries that are made unit vectors, as keys are; None: neither is."""
        shape = _Shape(v.shape[0], v.shape[1], k.shape[1], k.shape[2], v.shape[2], k.dtype)
        ctx.set_materialize_grads(False)
        ctx.chunks, ctx.shape, ctx.scale = chunks, shape, scale
        ctx.save_for_backward(q, k, v, g, beta, before)
        if scale is not None:
            q, k = _unit(q, scale), _unit(k, 1.0)
        x, states, ends, *_ = _states(chunks, shape, k, v, g, beta, before)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        kernels.outputs[(shape.num_value_blocks, chunks.num_chunks, shape.heads)](
            chunks.table, q, k, x, g, states, out, q.stride(0), k.stride(0), x.stride(0), *shape.widths,
            **shape.common, **shape.key_tiles, BV=shape.value_block,
        )  # fmt: skip
        return out, ends

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raw_q, raw_k, v, g, beta, before = ctx.saved_tensors
        chunks, shape, scale = ctx.chunks, ctx.shape, ctx.scale
        common, corrects = shape.common, beta is not None
        q, k = (raw_q, raw_k) if scale is None else (_unit(raw_q, scale), _unit(raw_k, 1.0))
        grad, grad_ends = (None if one is None else one.contiguous() for one in grads)
        grad = torch.zeros_like(v, memory_format=torch.contiguous_format) if grad is None else dense_heads(grad)
        x, states, _, t, w = _states(chunks, shape, k, v, g, beta, before)
        strides = (q.stride(0), k.stride(0))
        of_chunks = (chunks.num_chunks, shape.heads)

        grad_x = torch.empty(v.shape, dtype=shape.dtype, device=v.device)
        kernels.added_gradients[of_chunks](
            chunks.table, q, k, g, grad, grad_x, *strides, *shape.widths,
            **common, **shape.key_tiles, **shape.value_tiles,
        )  # fmt: skip
        grad_states = torch.empty_like(states)
        sizes = (chunks.num_pieces, shape.heads, *shape.widths)
        grad_before = torch.empty(sizes, dtype=torch.float32, device=v.device)
        for wave in reversed(chunks.waves):
            kernels.pass_gradients[(shape.num_pass_blocks, shape.heads, len(wave))](
                wave, chunks.facts, chunks.followers, q, k, w, g, grad, grad_before if grad_ends is None else grad_ends,
                grad_states, grad_before, grad_x, *strides, *shape.widths, **common, KEYS=shape.keys,
                BV=shape.pass_block, CORRECTS=corrects, HAS_GRAD_ENDS=grad_ends is not None,
            )  # fmt: skip
        by_head = (shape.rows, shape.heads, shape.key_width)
        grad_q, grad_k = (torch.empty(by_head, dtype=torch.float32, device=v.device) for _ in range(2))
        grad_w = torch.empty(by_head, dtype=shape.dtype, device=v.device) if corrects else grad_q
        blocks = shape.num_key_blocks
        parts = 2 * blocks + corrects
        grad_total = torch.empty(parts, *g.shape, dtype=torch.float32, device=v.device)
        of_columns = (*strides, x.stride(0), shape.rows, *shape.widths)
        tiles = {**common, "BK": shape.key_block, **shape.value_tiles}
        kernels.query_gradients[(blocks, *of_chunks)](
            chunks.table, q, k, x, g, states, grad, grad_x, grad_q, grad_w, grad_total, *of_columns, **tiles,
            CORRECTS=corrects,
        )  # fmt: skip
        kernels.key_gradients[(blocks, *of_chunks)](
            chunks.table, q, k, x, g, states, grad, grad_states, grad_k, grad_total[blocks:], *of_columns, **tiles
        )
        grad_v, grad_beta = grad_x.to(v.dtype), None
        if corrects:
            grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            grad_beta = torch.empty(beta.shape, dtype=torch.float32, device=v.device)
            grad_a = torch.empty_like(t)
            kernels.system_gradients[of_chunks](
                chunks.table, k, v, g, beta, t, grad_x, grad_w, grad_a, grad_v, grad_beta,
                k.stride(0), v.stride(0), *shape.widths, **common, **shape.key_tiles, **shape.value_tiles,
            )  # fmt: skip
            kernels.system_key_gradients[of_chunks](
                chunks.table, k, g, beta, t, grad_w, grad_a, grad_k, grad_beta, grad_total[-1], k.stride(0),
                shape.key_width, **common, **shape.key_tiles,
            )  # fmt: skip
            grad_beta = grad_beta.to(beta.dtype)
        grad_g = torch.empty(g.shape, dtype=torch.float32, device=v.device)
        kernels.decay_gradients[of_chunks](
            chunks.table, grad_total, grad_g, shape.rows, PARTS=parts, TOKENS=CHUNK_TOKENS
        )
        grad_q = _folded(grad_q, raw_q, shape, scale)
        grad_k = _folded(grad_k, raw_k, shape, None if scale is None else 1.0)
        of_before = None
        if before is not None and ctx.needs_input_grad[6]:
            of_before = torch.where(chunks.facts[:, 3].view(-1, 1, 1, 1) < 0, grad_before, 0.0)
        return None, grad_q, grad_k, grad_v, grad_g, grad_beta, of_before, None


def _states(
    chunks: Chunks, shape: _Shape, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X of all tokens, the states before all chunks and after all pieces, T and W. Without `beta` there is none of
    the last two, and X is `v`."""
    x, t, w = v, v, v
    if beta is not None:
        t = v.new_empty(chunks.num_chunks, shape.heads, CHUNK_TOKENS, CHUNK_TOKENS, dtype=shape.dtype)
        x = v.new_empty(v.shape, dtype=shape.dtype)
        w = v.new_empty(shape.rows, shape.heads, shape.key_width, dtype=shape.dtype)
        kernels.corrections[(chunks.num_chunks, shape.heads)](
            chunks.table, k, v, g, beta, t, x, w, k.stride(0), v.stride(0), *shape.widths,
            **shape.common, **shape.key_tiles, **shape.value_tiles,
        )  # fmt: skip
    states = v.new_empty(chunks.num_chunks, shape.heads, *shape.widths, dtype=shape.dtype)
    sizes = (chunks.num_pieces, shape.heads, *shape.widths)
    ends = torch.empty(sizes, dtype=torch.float32, device=v.device)
    for wave in chunks.waves:
        kernels.pass_states[(shape.num_pass_blocks, shape.heads, len(wave))](
            wave, chunks.facts, k, x, w, g, ends if before is None else before, states, x, ends,
            k.stride(0), x.stride(0), *shape.widths, **shape.common, KEYS=shape.keys, BV=shape.pass_block,
            CORRECTS=beta is not None, HAS_BEFORE=before is not None,
        )  # fmt: skip
    return x, states, ends, t, w


def recur(
    chunks: Chunks,
    query: Tensor,  # [tokens, key heads, key width]
    key: Tensor,
    value: Tensor,  # [tokens, heads, value width]
    log_decay: Tensor,  # [tokens, heads]
    beta: Tensor | None,
    states: Tensor | None,  # before each piece that follows none: [pieces, heads, key width, value width]
    *,
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """The output of every token, in the type of `value`, and the state after each piece, in fp32."""
    assert query.dtype == key.dtype, f"queries are {query.dtype}, keys {key.dtype}"
    widths, scale = (key.shape[2], value.shape[2]), key.shape[2] ** -0.5 if unit else None
    more_keys, more_values = (-width % WIDTH_STEP for width in widths)
    before = None if states is None else states.float().contiguous()
    if more_keys or more_values:
        query, key, value = F.pad(query, (0, more_keys)), F.pad(key, (0, more_keys)), F.pad(value, (0, more_values))
        before = None if before is None else F.pad(before, (0, more_values, 0, more_keys))
    query, key, value = (dense_heads(x) for x in (query, key, value))
    rate = None if beta is None else beta.contiguous()
    out, ends = _Recur.apply(chunks, query, key, value, log_decay.float().contiguous(), rate, before, scale)
    return (out[..., : widths[1]], ends[..., : widths[0], : widths[1]]) if more_keys or more_values else (out, ends)


def dense_heads(x: Tensor) -> Tensor:
    """[rows, heads, width] whose rows may be parts of wider ones and begin at whole 16 bytes, as Triton's kernels are
    specialised for. Otherwise a copy."""
    numbers = x.shape[1] * x.shape[2]
    is_dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if is_dense and all(number % 16 == 0 for number in (numbers, x.stride(0), x.data_ptr())):
        return x
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def fits(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, states: Tensor | None, *,
    unit: bool,
) -> bool:  # fmt: skip
    """Whether the kernels for these arguments of `recur` compute what torch does, on this GPU."""
    trains = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, log_decay, beta, states)
    )
    return TRIAL.passes(
        value.device, key.dtype, value_dtype=value.dtype, rate_dtype=None if beta is None else beta.dtype,
        widths=(key.shape[2], value.shape[2]), group=value.shape[1] // key.shape[1], unit=unit,
        has_before=states is not None, trains=trains,
    )  # fmt: skip


def _comparisons(
    device: torch.device, dtype: torch.dtype, *, value_dtype: torch.dtype, rate_dtype: torch.dtype | None,
    widths: tuple[int, int], group: int, unit: bool, has_before: bool, trains: bool,
) -> Iterator[Comparison]:  # fmt: skip
    """In training with gradients of the outputs, and with those of the last states too: the kernels differ."""
    packed, on_host = (PackedRecurrence(TRIAL_PIECES, each) for each in (device, torch.device("cpu")))
    generator, tokens = torch.Generator().manual_seed(0), TRIAL_PIECES[-1].end

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    query, key = (random(tokens, 1, widths[0]) * widths[0] ** -0.5 for _ in range(2))
    value, decay, rate = random(tokens, group, widths[1]), random(tokens, group), random(tokens, group).sigmoid()
    inputs = [query.to(dtype), key.to(dtype), value.to(value_dtype), -F.softplus(decay)]
    inputs += [None if rate_dtype is None else rate.to(rate_dtype)]
    inputs += [random(len(TRIAL_PIECES), group, *widths) if has_before else None]
    for num_graded in (1, 2) if trains else (0,):
        yield Comparison(
            partial(recur, packed.chunks, unit=unit), partial(on_host.recur_in_torch, unit=unit), inputs, num_graded
        )


TRIAL = Trial("recurrent layers", _comparisons)
