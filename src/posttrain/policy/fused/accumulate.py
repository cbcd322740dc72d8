"""Adding a gradient in bf16 to a sum in fp32, at the speed of the memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def add_into(total: Tensor, addend: Tensor) -> None:
    """`total += addend`, where `total` is fp32."""
    suits = _plain_on_cuda(total) and _plain_on_cuda(addend) and total.dtype == torch.float32 != addend.dtype
    if suits and (kernel := _kernel()) is not None:
        kernel(total, addend)
    else:
        total.add_(addend)


@cache
def _kernel() -> Callable[[Tensor, Tensor], None] | None:
    """None where Triton is missing."""
    try:
        from posttrain.policy.fused import kernels
    except ImportError:
        return None
    return kernels.add_into


def _plain_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.is_contiguous() and not isinstance(tensor, DTensor)
