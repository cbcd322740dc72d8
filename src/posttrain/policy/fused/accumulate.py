"""Adding a gradient in bf16 to a sum in fp32, at the speed of the memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def add_into(total: Tensor, addend: Tensor) -> None:
    """`total += addend`, where `total` is fp32."""
    if _plain_on_cuda(total) and _plain_on_cuda(addend) and total.dtype == torch.float32 != addend.dtype:
        from posttrain.policy.fused import kernels

        kernels.add_into(total, addend)
    else:
        total.add_(addend)


def _plain_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.is_contiguous() and not isinstance(tensor, DTensor)
