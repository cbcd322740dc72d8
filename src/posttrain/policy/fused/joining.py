"""Parameters that meet the same input, one below the other in memory: then one matrix product serves them all.

Whether some are joined is read off the parameters themselves, each time, and stored nowhere else. So an optimizer
that writes into them, a copy of the model or a checkpoint loaded into it need no special case; parameters that are
no longer adjacent (copied, moved, given other data) are joined again at their next use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds all of them, of which they are views; without a gradient of its own."""
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
