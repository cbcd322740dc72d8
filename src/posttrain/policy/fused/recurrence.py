"""The recurrence of packed rows and its gradient on a GPU. `recurrence_kernels.py` has the formulas."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from posttrain.policy.autograd import Context
from posttrain.policy.fused import recurrence_kernels as kernels
from posttrain.policy.recurrence import CHUNK_TOKENS, UNIT_EPS, Chunks, PackedRecurrence, RowPiece

_ROWS = 16  # of a program that works on rows by themselves
WARPS = 4  # of a program that works on a chunk
STAGES = 2
PASS_COLUMNS = 32  # of a state that is passed from chunk to chunk


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


def _folded(grad: Tensor, x: Tensor, shape: _Shape, scale: float, *, unit: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.fold_heads[(triton.cdiv(shape.rows, _ROWS), shape.key_heads)](
        grad, x, out, x.stride(0), shape.rows, shape.key_width, UNIT_EPS, scale, GROUP=shape.heads // shape.key_heads,
        UNIT=unit, ROWS=_ROWS, WIDTH=triton.next_power_of_2(shape.key_width), num_warps=4,
    )  # fmt: skip
    return out


class _Recur(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
        before: Tensor | None, unit: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shape = _Shape(v.shape[0], v.shape[1], k.shape[1], k.shape[2], v.shape[2], k.dtype)
        ctx.set_materialize_grads(False)
        ctx.chunks, ctx.shape, ctx.unit = chunks, shape, unit
        ctx.save_for_backward(q, k, v, g, beta, before)
        if unit:
            q, k = _unit(q, shape.key_width**-0.5), _unit(k, 1.0)
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
        chunks, shape, scale = ctx.chunks, ctx.shape, ctx.shape.key_width**-0.5
        common, corrects = shape.common, beta is not None
        q, k = (_unit(raw_q, scale), _unit(raw_k, 1.0)) if ctx.unit else (raw_q, raw_k)
        grad, grad_ends = (None if one is None else one.contiguous() for one in grads)
        grad = torch.zeros_like(v, memory_format=torch.contiguous_format) if grad is None else grad
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
        grad_q = _folded(grad_q, raw_q, shape, scale, unit=ctx.unit)
        grad_k = _folded(grad_k, raw_k, shape, 1.0, unit=ctx.unit)
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
    query, key, value = (
        x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (query, key, value)
    )
    assert query.dtype == key.dtype, f"queries are {query.dtype}, keys {key.dtype}"
    rate = None if beta is None else beta.contiguous()
    before = None if states is None else states.float().contiguous()
    out, ends = _Recur.apply(chunks, query, key, value, log_decay.float().contiguous(), rate, before, unit)
    return out, ends


@cache
def agrees_with_torch(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    widths: tuple[int, int],
    *,
    corrects: bool,
    unit: bool,
) -> bool:
    """Whether the kernels compute what torch does, gradients included, on a few tokens: it depends on the versions of
    Triton and of the GPU whether their products are compiled right. `dtypes` and `widths` are those of keys and values.
    """
    with ThreadPoolExecutor(1) as fresh:  # a thread without the hooks and modes of autograd that the caller has set
        if device.type == "cuda":
            fresh.submit(torch.cuda.set_device, device)
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)  # torch's side of the comparison has a sum that is not
        try:
            errors = fresh.submit(_errors, device, dtypes, widths, corrects, unit).result()
        except TritonError:  # a GPU with too little shared memory
            errors = [float("inf")]
        finally:
            torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
    agrees = max(errors) <= (5e-2 if dtypes[0].itemsize == 2 else 1e-3)
    if not agrees:
        warnings.warn(
            f"recurrent layers are computed by torch, more slowly: on this GPU the kernels for heads of {widths[0]} x "
            f"{widths[1]} in {str(dtypes[0]).removeprefix('torch.')} differ from torch by {max(errors):.1e}",
            stacklevel=2,
        )
    return agrees


def _errors(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], widths: tuple[int, int], corrects: bool, unit: bool
) -> list[float]:
    """The largest difference of each output and gradient, in parts of its largest number: of a prompt of several
    chunks and two answers to it.
    """
    packed = PackedRecurrence([RowPiece(0, 150), RowPiece(150, 230, 0), RowPiece(230, 250, 0)], device)
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(250, 1, widths[0], generator=random) * widths[0] ** -0.5 for _ in range(2))
    value, decay, rate = (torch.randn(250, 2, *rest, generator=random) for rest in ((widths[1],), (), ()))
    weight = torch.randn(value.shape, generator=random).to(device)
    given = [query.to(dtypes[0]), key.to(dtypes[0]), value.to(dtypes[1]), -torch.nn.functional.softplus(decay)]
    given += [rate.sigmoid().to(dtypes[0])] if corrects else []
    found = []
    for in_torch in (True, False):
        leaves = [x.to(device, torch.float32 if in_torch else x.dtype).requires_grad_() for x in given]
        q, k, v, g, beta = leaves if corrects else [*leaves, None]
        with torch.enable_grad():
            if in_torch:
                out, ends = packed.recur_in_torch(q, k, v, g, beta, unit=unit)
            else:
                out, ends = recur(packed.chunks, q, k, v, g, beta, None, unit=unit)
            grads = torch.autograd.grad((out.float() * weight).sum() + ends.sum(), leaves)
        found.append([x.detach().float() for x in (out, ends, *grads)])
    return [
        float((ours - theirs).abs().max() / theirs.abs().max()) if bool(ours.isfinite().all()) else float("inf")
        for theirs, ours in zip(*found, strict=True)
    ]
