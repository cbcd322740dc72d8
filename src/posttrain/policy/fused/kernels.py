# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of a decoder layer's elementwise work: root-mean-square norm, rotation of queries and keys, SwiGLU.

Each has one forward and one backward pass, computes in fp32 and rounds once, when it stores. Independent of autograd
(`ops.py`) and of models (`layers.py`). Rows are tokens; every tensor is contiguous along its last dimension.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORM_BACKWARD_PROGRAMS = 264  # two per multiprocessor of an H200: each adds up the weight's gradient over many rows
_SWIGLU_BLOCK = 1024
_ADD_BLOCK = 4096


def runs_on(device: torch.device) -> bool:
    """On GPUs, and on a CPU under Triton's interpreter, which is how kernels are tested without a GPU."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


# -- norm ------------------------------------------------------------------------------------------------------------


@triton.jit
def _norm_forward(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, scale_ptr, width, eps, HAS_DELTA: tl.constexpr,
    ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + row * width + at, x.to(sum_ptr.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    tl.store(y_ptr + row * width + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_apply(x_ptr, weight_ptr, scale_ptr, y_ptr, width, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    y = x * tl.load(scale_ptr + row) * weight
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    grad_y_ptr, grad_sum_ptr, x_ptr, weight_ptr, scale_ptr, grad_x_ptr, grad_delta_ptr, grad_weight_ptr,
    num_rows, width, HAS_GRAD_SUM: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WEIGHT_GRAD: tl.constexpr,
    ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    grad_weight = tl.zeros([BLOCK], tl.float32)
    row = program
    while row < num_rows:
        place = row * width + at
        grad_y = tl.load(grad_y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
        if HAS_WEIGHT_GRAD:
            grad_weight += grad_y * normed
        weighted = grad_y * weight
        grad = scale * (weighted - normed * (tl.sum(weighted * normed, 0) / width))
        if HAS_GRAD_SUM:
            grad += tl.load(grad_sum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + place, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_DELTA:
            tl.store(grad_delta_ptr + place, grad.to(grad_delta_ptr.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    if HAS_WEIGHT_GRAD:
        tl.store(grad_weight_ptr + program * width + at, grad_weight, mask=inside)


def norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, *, adds_one: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its norm times `weight` in `dtype`, the factor of each row); x itself where there is no delta.

    `adds_one`, in all three functions: times 1 + `weight`.
    """
    rows, width = x.shape
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    total = x if delta is None else torch.empty_like(x)
    y, scale = torch.empty(rows, width, dtype=dtype, device=x.device), x.new_empty(rows, dtype=torch.float32)
    if rows:
        _norm_forward[(rows,)](
            x, x if delta is None else delta, weight, total, y, scale, width, eps,
            HAS_DELTA=delta is not None, ADDS_ONE=adds_one, BLOCK=triton.next_power_of_2(width),
            num_warps=_warps(width),
        )  # fmt: skip
    return total, y, scale


def norm_again(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, adds_one: bool = False) -> Tensor:
    """The norm that `norm_forward` returned, bit for bit, from what it kept."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=dtype, device=x.device)
    if rows:
        _norm_apply[(rows,)](
            x, weight, scale, y, width, ADDS_ONE=adds_one, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width)
        )
    return y


def norm_backward(
    grad_y: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor,
    delta_dtype: torch.dtype | None, *, needs_weight: bool, adds_one: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, of delta (in `delta_dtype`, if there was one) and of the weight. `grad_sum` came by
    the residual.
    """
    rows, width = x.shape
    grad_x = torch.empty_like(x)
    grad_delta = None if delta_dtype is None else torch.empty_like(x, dtype=delta_dtype)
    programs = max(min(_NORM_BACKWARD_PROGRAMS, rows), 1)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device) if needs_weight else None
    _norm_backward[(programs,)](
        grad_y, grad_sum if grad_sum is not None else grad_y, x, weight, scale, grad_x,
        grad_delta if grad_delta is not None else grad_x, partial if partial is not None else scale, rows, width,
        HAS_GRAD_SUM=grad_sum is not None, HAS_DELTA=grad_delta is not None, HAS_WEIGHT_GRAD=needs_weight,
        ADDS_ONE=adds_one, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return grad_x, grad_delta, None if partial is None else partial.sum(0).to(weight.dtype)


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


@triton.jit
def _add(x_ptr, delta_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def add(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta in the type of x. torch's own kernel for two types takes more than twice as long."""
    out = torch.empty_like(x)
    if x.numel():
        _add[(triton.cdiv(x.numel(), 2048),)](x, delta, out, x.numel(), BLOCK=2048, num_warps=4)
    return out


def add_into(total: Tensor, addend: Tensor) -> None:
    """`total += addend`, contiguous, fp32 and anything: torch reads mixed types one number at a time."""
    if count := total.numel():
        _add[(triton.cdiv(count, _ADD_BLOCK),)](total, addend, total, count, BLOCK=_ADD_BLOCK, num_warps=8)


# -- rotation --------------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, stride_angles, stride_in, stride_out, half, sign,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of some rows: two halves that turn into each other (the "rotate half" convention of `transformers`)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, HALF)[None, :]
    inside = (row < num_rows) & (at < half)
    cos = tl.load(cos_ptr + row * stride_angles + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * stride_angles + at, mask=inside, other=0.0).to(tl.float32) * sign
    place = row * stride_in + head * 2 * half + at
    first = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
    target = row * stride_out + head * 2 * half + at
    tl.store(out_ptr + target, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + target + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, num_heads: int, *, out: Tensor, backward: bool = False) -> Tensor:
    """Turn the first `num_heads` heads of each row of `x` into `out`, which may be `x`.

    `cos` and `sin` are [rows, head dim], the second half repeating the first, as `transformers` makes them.
    """
    rows, half = len(x), cos.shape[1] // 2
    if rows:
        tile = 8
        _rotate[(triton.cdiv(rows, tile), num_heads)](
            x, cos, sin, out, rows, cos.stride(0), x.stride(0), out.stride(0), half, -1.0 if backward else 1.0,
            ROWS=tile, HALF=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
    return out


# -- SwiGLU ----------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_ptr + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, out_ptr, stride_gate, stride_up, stride_grad_gate,
    stride_grad_up, width, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_ptr + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    gated = tl.sigmoid(gate)
    silu = gate * gated
    grad_gate = grad * up * (gated + silu * (1.0 - gated))
    tl.store(grad_gate_ptr + row * stride_grad_gate + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + row * stride_grad_up + at, (grad * silu).to(grad_up_ptr.dtype.element_ty), mask=inside)
    if HAS_OUT:
        tl.store(out_ptr + row * width + at, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    if rows:
        _swiglu_forward[(rows, triton.cdiv(width, _SWIGLU_BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=_SWIGLU_BLOCK, num_warps=4
        )
    return out


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, *, again: bool
) -> Tensor | None:
    """Fills the two gradients. `again`: also returns the product of the forward pass, so that it need not be stored."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device) if again else None
    if rows:
        _swiglu_backward[(rows, triton.cdiv(width, _SWIGLU_BLOCK))](
            grad, gate, up, grad_gate, grad_up, grad if out is None else out, gate.stride(0), up.stride(0),
            grad_gate.stride(0), grad_up.stride(0), width, HAS_OUT=again, BLOCK=_SWIGLU_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
