"""Tests on a few tokens that a replacement forward computes the same as the module's own.

Runs in evaluation mode, as dropout of adapters would differ between the two. Blocks of routed experts are replaced by
their input for the test: rounding may choose another expert, and the block is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention_interface import attention_context
from posttrain.policy.experts import stacked_experts
from posttrain.policy.packed import PackedAttention, Segment
from posttrain.policy.runtime import evaluation_mode

_TRIAL_TOKENS = 8


class Observed(PackedAttention):
    """One pass of a layer's own forward over a few tokens: which options it passes to attention, and its output."""

    @torch.no_grad()
    def __init__(self, layer: Any, rotary: nn.Module) -> None:
        norm = layer.input_layernorm.weight
        super().__init__([Segment(0, _TRIAL_TOKENS)], norm.device)
        self.norm_weight = norm
        self.states = trial_states(norm)
        positions = torch.arange(_TRIAL_TOKENS, device=norm.device)[None]
        self.angles: tuple[Tensor, Tensor] = rotary(self.states, positions)
        self.options: dict[str, Any] = {}
        self.layer = layer
        self.output = self._run(layer.forward)  # not the layer: hooks may come later, sharding's among them

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.options = options
        return super().attend(layer, query, key, value, **options)

    def _run(self, forward: Callable[..., Tensor]) -> Tensor:
        with (
            evaluation_mode(self.layer), attention_context(self), _autocast(self.norm_weight),
            _without_experts(self.layer.mlp),
        ):  # fmt: skip
            output = forward(self.states, position_embeddings=self.angles)
        return output[0] if isinstance(output, tuple) else output

    @property
    def num_rotated(self) -> int:
        """Numbers of a head."""
        return self.angles[0].shape[-1]

    @torch.no_grad()
    def agrees(self, forward: Callable[..., Tensor]) -> bool:
        """Whether `forward` gives the same output as the layer's own forward, which used our attention. Not with sinks:
        the options of a fused layer are constants, and sinks are trained.
        """
        return (
            bool(self.options)
            and "sinks" not in self.options
            and is_near(self._run(forward), self.output, self.norm_weight.dtype, spread=self.output - self.states)
        )


@contextmanager
def _without_experts(mlp: nn.Module) -> Iterator[None]:
    own = mlp.__dict__.get("forward")
    if not stacked_experts(mlp):
        yield
        return
    mlp.forward = lambda x: x
    try:
        yield
    finally:
        del mlp.__dict__["forward"]
        if own is not None:
            mlp.forward = own


def _reduced(weight: Tensor) -> torch.dtype | None:
    return weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else None


def trial_states(weight: Tensor) -> Tensor:
    """Between layers states are fp32, also where the weights are not."""
    states = torch.randn(1, _TRIAL_TOKENS, len(weight), generator=torch.Generator().manual_seed(0))
    return states.to(weight.device, torch.float32 if _reduced(weight) is not None else weight.dtype)


def is_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype, spread: Tensor | None = None) -> bool:
    """Equality up to the rounding of weights in `dtype`, relative to the maximum of `spread` or of `theirs`."""
    error = (ours - theirs).float().abs().max()
    tolerance = 3e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return bool(error <= tolerance * (theirs if spread is None else spread).float().abs().max())


@torch.no_grad()
def trial_pass(decoder: Any, weight: Tensor) -> Tensor:
    """Output for a few random states of a decoder whose last norm has `weight`."""
    states, positions = trial_states(weight), torch.arange(_TRIAL_TOKENS, device=weight.device)[None]
    with (
        evaluation_mode(decoder),
        _autocast(weight),
        attention_context(PackedAttention([Segment(0, _TRIAL_TOKENS)], weight.device)),
    ):
        output: Tensor = decoder(inputs_embeds=states, position_ids=positions, use_cache=False).last_hidden_state
    return output


def _autocast(weight: Tensor) -> torch.autocast:
    reduced = _reduced(weight)
    return torch.autocast(weight.device.type, reduced, enabled=reduced is not None, cache_enabled=False)
