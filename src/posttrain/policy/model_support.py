"""Checks, with a forward pass over one token, that the packed forward pass computes a model correctly.

Refused are recurrent layers, attention windows that the attention function is not given, changes of the logits that
`head` does not support, and rotary embeddings that depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from posttrain.models.attention_interface import AttendOptions, attention_context
from posttrain.policy.head import Head, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Rotary embeddings whose angles depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class LayerShape:
    """What an attention layer stores of one token in the KV cache."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Then each head of a token has a factor for its key and one for its value."""
        return self.dtype == torch.float8_e4m3fn

    @property
    def bytes_per_token(self) -> int:
        factors = 2 * torch.float32.itemsize if self.is_fp8 else 0
        return self.num_heads * ((self.key_dim + self.value_dim) * self.dtype.itemsize + factors)


def observe_layers(base: Any, head: Head) -> dict[int, LayerShape]:
    """What each attention layer stores per token, found by a pass over one token. Rejects unsupported models."""
    config, observer = base.config.get_text_config(), _LayerObserver()
    seen: list[Tensor] = []
    hook = head.decoder.register_forward_hook(lambda _module, _args, out: seen.append(out.last_hidden_state))
    one = torch.zeros(1, 1, dtype=torch.long, device=base.get_input_embeddings().weight.device)
    try:
        with attention_context(observer):
            logits = base(input_ids=one, position_ids=one, use_cache=False).logits
    finally:
        hook.remove()
    expected = config.num_hidden_layers
    if len(observer.layers) != expected:
        raise UnsupportedModelError(
            f"{config.model_type}: {len(observer.layers)} of {expected} layers use the attention interface. "
            "Layers with a recurrent state or with attention of their own cannot be sampled here."
        )
    _check_windows(config, observer.windows)
    head.check_logits(seen[-1], logits)
    _check_attention_is_the_only_link(config, head, one.device)
    return observer.layers


def _check_windows(config: PretrainedConfig, windows: Mapping[int, int | None]) -> None:
    """Refuse models that give a window to `transformers`' mask but not to the attention function that we use."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    for layer, window in windows.items():
        kind = "sliding_attention" if kinds is None else kinds[layer]
        field = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
        limit = None if field is None else getattr(config, field, None)
        if window is None and limit is not None and limit < config.max_position_embeddings:
            raise UnsupportedModelError(
                f"{config.model_type}: config.{field} is {limit}, and layer {layer} does not pass it to its attention "
                "function. posttrain would let every token attend to all before it"
            )


@torch.no_grad()
def _check_attention_is_the_only_link(config: PretrainedConfig, head: Head, device: torch.device) -> None:
    """Refuse models whose layers pass something from token to token other than by attention. Where each token attends
    to itself alone, the tokens before it must not matter: in a packed row they may belong to another sequence.
    """
    rows = torch.tensor([[0, 1, 2, 3], [2, 1, 0, 3]], device=device)
    with attention_context(_LayerObserver()):
        # Rows of one shape, so that rounding does not differ either.
        first, second = (head.hidden(row[None], torch.zeros_like(row)[None])[-1].float() for row in rows)
    weight: Any = next(head.decoder.parameters())
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    if float((first - second).abs().max()) > tolerance * float(first.abs().max()):
        raise UnsupportedModelError(
            f"{config.model_type}: its layers carry something from token to token beside attention, a recurrent state "
            "or a convolution. posttrain puts several sequences into one row, where those would run into each other."
        )


def check_length(config: PretrainedConfig, longest: int) -> None:
    """Refuse lengths at which the model's positions would depend on which sequences run together."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_kind_of_layer = [part for part in settings.values() if isinstance(part, Mapping)]
    for rope in [settings] if "rope_type" in settings else by_kind_of_layer:
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE and longest > limit:
            raise UnsupportedModelError(
                f"rope_type {rope['rope_type']!r} changes all positions of a batch once one sequence is longer than "
                f"{limit} tokens; this call may reach {longest}. Lower max_total_tokens to {limit} or less."
            )


class _LayerObserver:
    """Attention of tokens that see themselves alone: the output of each is its value."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        self.windows[layer] = options["window"]
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
