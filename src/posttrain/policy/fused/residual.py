"""The last sum of a layer, left to the norm that comes next: a launch less in every layer of a pass without gradients.

What is still to be added travels as an attribute of the layer's output, past code that is not ours. So it is left only where
nobody looks at that output on its way: no hooks, no recomputation, and a successor that is known to take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PENDING = "pending_delta"


def with_pending(states: Tensor, delta: Tensor) -> Tensor:
    """`states`, to which `delta` is still to be added."""
    setattr(states, _PENDING, delta)
    return states


def take_pending(states: Tensor) -> Tensor | None:
    """What is still to be added; whoever asks has to do it."""
    delta: Tensor | None = states.__dict__.pop(_PENDING, None)
    return delta


@dataclass
class Successor:
    """Of layer number `place`: the next layer, or the norm behind the last one, as they are at the moment."""

    decoder: Any
    place: int

    def takes_sum_of(self, layer: Any) -> bool:
        layers = self.decoder.layers
        follower = layers[self.place + 1] if self.place + 1 < len(layers) else self.decoder.norm
        recomputes = layer.training and getattr(layer, "gradient_checkpointing", False)
        return (
            not torch.is_grad_enabled()
            and not recomputes
            and not layer._forward_hooks
            and not follower._forward_pre_hooks
            and getattr(follower.forward, "takes_sums", False)
        )
