"""Tests on a few tokens that a replacement forward computes the same as the module's own.

Runs in evaluation mode, as dropout of adapters would differ between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention_interface import attention_context
from posttrain.policy.packed import PackedAttention, Segment
from posttrain.policy.runtime import evaluation_mode

_TRIAL_TOKENS = 8


class Observed(PackedAttention):
    """One pass of a layer's own forward over a few tokens: which options it passes to attention, and its output.

    An MLP that is called as a module stands aside: among experts, a rounding may change which are chosen. Of a `mixer`
    that is called as a module: which options it gets, by name, out of the layer's own.
    """

    @torch.no_grad()
    def __init__(self, layer: Any, rotary: nn.Module, mixer: str | None, calls_mlp: bool) -> None:
        norm = layer.input_layernorm.weight
        self.mixer, self.calls_mlp = mixer, calls_mlp
        self.mixer_options: set[str] = set()
        super().__init__([Segment(0, _TRIAL_TOKENS)], norm.device)
        self.norm_weight = norm
        self.states = trial_states(norm)
        positions = torch.arange(_TRIAL_TOKENS, device=norm.device)[None]
        try:
            self.angles: tuple[Tensor, Tensor] = rotary(self.states, positions)
        except IndexError:  # it expects places in time, height and width
            if mixer is None:
                raise
            self.angles = rotary(self.states, positions.expand(3, 1, -1))
        self.given: dict[str, Any] = {"position_embeddings": self.angles}
        if mixer is not None:
            self.given |= {"attention_mask": None, "position_ids": positions, "use_cache": False}
        self.options: dict[str, Any] = {}
        self.layer = layer
        hooked = nn.Identity() if mixer is None else getattr(layer, mixer)
        with hooked.register_forward_pre_hook(self._note_options, with_kwargs=True):
            self.output = self._run(layer.forward)  # not the layer: hooks may come later, sharding's among them

    def _note_options(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        others = {name: value for name, value in options.items() if name != "hidden_states"}
        if arguments or any(value is not self.given.get(name) for name, value in others.items()):
            raise ValueError("the layer gives its mixer more than its own arguments")
        self.mixer_options = set(options)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.options = options
        return super().attend(layer, query, key, value, **options)

    def _run(self, forward: Callable[..., Tensor]) -> Tensor:
        def echo(_: nn.Module, inputs: tuple[Any, ...], output: object) -> Any:
            return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]

        hook = self.layer.mlp.register_forward_hook(echo) if self.calls_mlp else nullcontext()
        with evaluation_mode(self.layer), attention_context(self), _autocast(self.norm_weight), hook:
            output = forward(self.states, **self.given)
        return output[0] if isinstance(output, tuple) else output

    @property
    def num_rotated(self) -> int:
        """Numbers of a head."""
        return self.angles[0].shape[-1]

    @torch.no_grad()
    def agrees(self, forward: Callable[..., Tensor]) -> bool:
        """Whether `forward` gives the same output as the layer's own forward, which used our attention."""
        is_observed = bool(self.mixer_options if self.mixer is not None else self.options)
        return is_observed and is_near(
            self._run(forward), self.output, self.norm_weight.dtype, spread=self.output - self.states
        )


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
