"""The attention function that every model is loaded with. The caller chooses what it computes.

Every model is loaded with `attn_implementation=ATTENTION`. Its attention layers then call `_attend`, which passes the
projected and rotated queries, keys and values to the active `AttentionContext`: `PackedAttention` while training (no
padding, prompts shared by their responses), the engine's paged cache while sampling. Modules and weights are the same
in both.

For this implementation `transformers` builds no mask. The context alone decides which tokens attend to which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NotRequired, Protocol, TypedDict, Unpack

from torch import Tensor, nn
from transformers import AttentionInterface

from posttrain.errors import InputError

ATTENTION = "posttrain"
Place = tuple[int, int]  # (layer, which of its recurrent operations): where the state of a sequence is kept
# Queries and keys [tokens, key heads, key width], values [tokens, heads, value width], `log_decay` [tokens, heads], and
# `beta` of the same shape; without it the value is added as it is.
RecurrenceInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
# Arguments that some families pass beside queries, keys and values. Ignoring them would compute another model.
_NOT_COMPUTED = {
    "position_bias": "a bias by position",
    "indices": "a choice of tokens to look at",
    "block_indices": "a choice of tokens to look at",
}


class AttendOptions(TypedDict):
    """How a layer scores its keys."""

    scale: float
    window: int | None  # a token sees itself and the window-1 tokens before it; None: all of them
    softcap: float | None
    sinks: NotRequired[Tensor]  # a learnt logit of each head, in the denominator of the softmax


class AttentionContext(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        """Queries and the result are [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]."""

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        """Causal convolution of each channel over its sequence, then perhaps the SiLU; `x` and the result are
        [tokens, channels], `weight` is [channels, width]."""

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        """The recurrence of `recurrence_interface.py`; the result is [tokens, heads, value width]. With `unit` queries
        and keys are first divided by their norms, and queries by the root of their width. Computed in fp32 or wider;
        the result has the type of the values or that one."""


# A plain global, not a context variable: autograd recomputes checkpointed layers on threads of its own, which would not
# inherit one. A process runs one forward or backward pass at a time.
_active: AttentionContext | None = None


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Use `context` for every attention layer that runs inside. Backward passes with recomputation must run inside
    too."""
    global _active
    previous, _active = _active, context
    try:
        yield
    finally:
        _active = previous


def is_idle() -> bool:
    """No context is active: a model that was not loaded here is running."""
    return _active is None


def active_context() -> AttentionContext:
    assert _active is not None, "a model with posttrain's attention ran outside attention_context()"
    return _active


def named_layer(module: nn.Module) -> str:
    """For messages: the family, the number of the layer, and the class of its module."""
    name = type(module).__name__
    # Some mixers keep no config: their class is in transformers.models.<family>.
    config, family = getattr(module, "config", None), type(module).__module__.split(".")[-2:-1]
    number = getattr(module, "layer_idx", None)
    model_type = getattr(config, "model_type", None) or "".join(family) or name
    return f"{model_type}: {'' if number is None else f'layer {number}, '}{name},"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    for option, what in _NOT_COMPUTED.items():
        if options.get(option) is not None:
            raise InputError(
                f"{named_layer(module)} has {what}, which posttrain does not compute; it cannot be used here"
            )
    if attention_mask is not None:  # transformers builds none for this implementation, see above
        raise InputError(f"{named_layer(module)} builds its own attention mask, which is not supported")
    context = active_context()
    batch, heads, length, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    # Rotation leaves queries and keys in fp32 where the residual stream is; values have the precision of the weights.
    rows = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    q, k, v = (x.reshape(batch * length, x.shape[2], x.shape[3]) for x in rows)
    layer: int = module.layer_idx  # type: ignore[assignment]
    # Some configs write a window of 0 where there is none.
    how: AttendOptions = {"scale": scale, "window": sliding_window or None, "softcap": softcap}
    if s_aux is not None:
        how["sinks"] = s_aux
    out = context.attend(layer, q, k, v, **how)
    # Contiguous: some families take a view of it.
    return out.reshape(batch, length, heads, out.shape[-1]).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
