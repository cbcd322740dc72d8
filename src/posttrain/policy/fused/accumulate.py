"""Gradients of weights in lower precision, added up in fp32 over the micro-batches of an update; and joined weights.

The sum is an attribute of its parameter. A matrix product that makes a gradient can add to it on the way out
(`add_product`): then the gradient is never rounded, written and read again. All others arrive in the parameter's own
type, as autograd returns them (`move_to_sum`). Autograd does not see gradients added to a sum: hooks on the parameter's
gradient are not called, and `torch.autograd.grad` returns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain.policy.runtime import triton_kernels

# Rows of a sum that one product adds to. cuBLAS 13 takes 15.3 ms for the 128,256 of an output head at once on an H200,
# and 12.3 without adding; for 28,672 of them adding costs 6 %.
_ROWS = 2**15
# The attribute. Gradients of a parameter without it are accumulated by autograd alone.
_SUM = "gradient_sum"


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds all parameters, which are views of it; it has no gradient.

    Parameters with the same input are adjacent in memory, so that one matrix product computes all of them. This is
    checked at each use, not stored: parameters that an optimizer, a model copy or a checkpoint has moved are joined
    again.
    """
    if len(parameters) == 1:
        return parameters[0].detach()
    if not _lie_together(parameters):
        _join(parameters)
    first = parameters[0].detach()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _lie_together(parameters: Sequence[Tensor]) -> bool:
    place = parameters[0].data_ptr()
    memory = parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        # The same memory too: two allocations may happen to be adjacent.
        if parameter.data_ptr() != place or parameter.untyped_storage().data_ptr() != memory:
            return False
        if not parameter.is_contiguous():
            return False
        place += parameter.nbytes
    return True


@torch.no_grad()
def _join(parameters: Sequence[Tensor]) -> None:
    assert len({id(parameter) for parameter in parameters}) == len(parameters), "a tensor cannot lie in two places"
    # A captured copy would run at each replay. The warm-up before capturing has joined the weights.
    assert not (parameters[0].is_cuda and torch.cuda.is_current_stream_capturing())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([parameter.shape[0] for parameter in parameters]), strict=True):
        parameter.data = part


def begin_sum(parameter: Tensor) -> None:
    """Start accumulating its gradients; the previous sum is dropped."""
    setattr(parameter, _SUM, None)


def sum_of(parameter: Tensor) -> Tensor | None:
    """None before the first gradient."""
    return getattr(parameter, _SUM)


def move_to_sum(parameter: Tensor) -> None:
    """Add the gradient left by autograd to the sum."""
    if (gradient := parameter.grad) is None:
        return
    parameter.grad = None
    if (total := sum_of(parameter)) is None:
        setattr(parameter, _SUM, gradient.float())  # the same tensor where it is fp32 already
    else:
        add_into(total, gradient)


def add_product(parameters: Sequence[Tensor], left: Tensor, right: Tensor) -> bool:
    """Add left @ right, the gradient of parameters that lie one below the other, to their sums; False if autograd must
    handle it: the parameters have no sums, or are fp32, where nothing is gained.
    """
    if left.dtype == torch.float32 or not all(hasattr(parameter, _SUM) for parameter in parameters):
        return False
    totals = [sum_of(parameter) for parameter in parameters]
    there = [total for total in totals if total is not None]
    if not there:
        product = torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else torch.mm(left, right).float()
        for parameter, part in zip(parameters, product.split([len(p) for p in parameters]), strict=True):
            setattr(parameter, _SUM, part)
    elif len(there) == len(totals):
        _add_product(joined(there), left, right)
    else:
        return False  # one of them was used on its own before
    return True


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    for part, rows in zip(total.split(_ROWS), left.split(_ROWS), strict=True):
        if part.is_cuda:
            torch.addmm(part, rows, right, out_dtype=torch.float32, out=part)
        else:
            part.add_(torch.mm(rows, right))


def add_into(total: Tensor, addend: Tensor) -> None:
    """`total += addend`, where `total` is fp32, at the speed of the memory."""
    suits = _plain_on_cuda(total) and _plain_on_cuda(addend) and total.dtype == torch.float32 != addend.dtype
    if suits and (kernels := triton_kernels("policy.fused.kernels")) is not None:
        kernels.add_into(total, addend)
    else:
        total.add_(addend)


def _plain_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.is_contiguous() and not isinstance(tensor, DTensor)
