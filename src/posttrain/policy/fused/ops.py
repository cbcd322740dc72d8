"""The kernels of a decoder layer under autograd, together with the matrix products next to them.

They are fused because then the backward pass can recompute cheap values instead of storing them: a norm from the
residual that is kept anyway, the product inside SwiGLU from its two factors. This saves a third of a layer's stored
activations.

Weights that are multiplied with the same input lie side by side in memory (`accumulate.joined`): one product instead of
two or three. The gradients of the parameters are parts of one tensor. What adapters add is in `products.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.policy.autograd import Context
from posttrain.policy.fused import kernels
from posttrain.policy.fused.fp8 import Fp8Product
from posttrain.policy.fused.products import Product


class AddNorm(torch.autograd.Function):
    """(x + delta, norm(x + delta) * weight); without delta (x, norm(x) * weight). `adds_one`: times 1 + weight."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype,
        adds_one: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, y, scale = kernels.norm_forward(x, delta, weight, eps, dtype, adds_one=adds_one)
        ctx.save_for_backward(total, weight, scale)
        ctx.adds_one = adds_one
        ctx.delta_dtype = None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)  # an unused sum has no gradient: no zeros to write and read
        return total if delta is not None else x.view_as(x), y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        grad_total, grad_y = grads
        return *_norm_gradients(ctx, grad_y, grad_total, total, weight, scale), None, None, None


class Add(torch.autograd.Function):
    """x + delta; the gradient goes to each in its own type."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, delta: Tensor) -> Tensor:
        ctx.delta_dtype = delta.dtype
        return kernels.add(x, delta)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].to(ctx.delta_dtype)


class NormedLinear(torch.autograd.Function):
    """(x + delta, the product with norm(x + delta) * norm_weight), `adds_one` as in `AddNorm`. To be called with
    `product.parts`; the norm is not kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, delta: Tensor | None, norm_weight: Tensor, eps: float, adds_one: bool,
        product: Product, *parts: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if isinstance(product, Fp8Product):
            assert not adds_one, "`fp8_obstacle` refuses such models"
            total, scale, out, low = product.of_norm(x, delta, norm_weight, eps)
        else:
            total, y, scale = kernels.norm_forward(x, delta, norm_weight, eps, product.weight.dtype, adds_one=adds_one)
            out, low = product.forward(y)
        ctx.save_for_backward(total, norm_weight, scale, low)
        ctx.product, ctx.adds_one = product, adds_one
        ctx.delta_dtype = None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return total if delta is not None else x.view_as(x), out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, norm_weight, scale, low = ctx.saved_tensors
        product: Product = ctx.product
        grad_total, grad_out = grads
        needs_norm, needed = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[6:]
        grad_y: Tensor | None = None
        part_grads: list[Tensor | None] = [None] * len(needed)
        if grad_out is not None:
            grad_out = grad_out.contiguous()
            needs_y = product.needs_input(needed)
            grad_low = product.low_gradient(grad_out) if needs_norm or needs_y else None
            dtype = product.weight.dtype
            y = kernels.norm_again(total, norm_weight, scale, dtype, adds_one=ctx.adds_one) if needs_y else None
            part_grads = product.part_gradients(grad_out, grad_low, low, y, needed)
            grad_y = product.input_gradient(grad_out, grad_low) if needs_norm else None
        norm_grads = _norm_gradients(ctx, grad_y, grad_total, total, norm_weight, scale)
        return *norm_grads, None, None, None, *part_grads


class SwigluLinear(torch.autograd.Function):
    """The product with silu(gate) * up, for gate and up side by side in `gate_up`. To be called with `product.parts`;
    what goes into the product is not kept."""

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor, product: Product, *parts: Tensor) -> Tensor:
        if isinstance(product, Fp8Product):
            out, low = product.of_swiglu(gate_up)
        else:
            out, low = product.forward(kernels.swiglu_forward(*gate_up.chunk(2, dim=1)))
        ctx.save_for_backward(gate_up, low)
        ctx.product = product
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, low = ctx.saved_tensors
        product: Product = ctx.product
        grad_out = grads[0].contiguous()
        needs_gate_up, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        needs_y = product.needs_input(needed)
        grad_low = product.low_gradient(grad_out) if needs_gate_up or needs_y else None
        grad_gate_up, y = None, None
        if needs_gate_up:
            grad_gate_up = torch.empty_like(gate_up)
            y = kernels.swiglu_backward(
                product.input_gradient(grad_out, grad_low), *gate_up.chunk(2, dim=1), *grad_gate_up.chunk(2, dim=1),
                again=needs_y,
            )  # fmt: skip
        elif needs_y:
            y = kernels.swiglu_forward(*gate_up.chunk(2, dim=1))
        return grad_gate_up, None, *product.part_gradients(grad_out, grad_low, low, y, needed)


class Swiglu(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels.swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        kernels.swiglu_backward(grads[0].contiguous(), gate, up, grad_gate, grad_up, again=False)
        return grad_gate, grad_up


class Rotate(torch.autograd.Function):
    """Turns the first `num_heads` heads of each row of `x`, in place."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.num_heads = num_heads
        return kernels.rotate(x, cos, sin, num_heads, out=x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grads[0].contiguous()
        # The gradient of queries, keys and values has no other user, so it may be overwritten.
        alone = ctx.num_heads * cos.shape[1] < grad.shape[1]
        out = grad if alone else torch.empty_like(grad)
        return kernels.rotate(grad, cos, sin, ctx.num_heads, out=out, backward=True), None, None, None


def _norm_gradients(
    ctx: Context, grad_y: Tensor | None, grad_total: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, delta and the norm's weight, the first three inputs; the gradients came by the norm and by the residual."""
    if not any(ctx.needs_input_grad[:3]):
        return None, None, None
    if grad_y is None:
        assert grad_total is not None, "autograd requests gradients only where there are some"
        return grad_total, None if ctx.delta_dtype is None else grad_total.to(ctx.delta_dtype), None
    return kernels.norm_backward(
        grad_y.contiguous(), None if grad_total is None else grad_total.contiguous(), total, weight, scale,
        ctx.delta_dtype, needs_weight=ctx.needs_input_grad[2], adds_one=ctx.adds_one,
    )  # fmt: skip
