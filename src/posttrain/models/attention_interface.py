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
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict, Unpack

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


class Latent(NamedTuple):
    """What a layer of latent attention makes its keys and values of (DeepSeek-V2, arXiv 2405.04434)."""

    vector: Tensor  # [tokens, rank]
    up: nn.Module  # makes of it the keys without their positions, and the values, of all heads


class LatentContext(AttentionContext, Protocol):
    """A context that gets the latent vectors of some layers."""

    expands: bool  # else values, and the numbers of keys that do not depend on positions, are not computed

    def keeps_latent(self, layer: int) -> bool: ...

    def attend_latent(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, latent: Latent, **options: Unpack[AttendOptions]
    ) -> Tensor: ...


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


def route_latent_layers(model: nn.Module) -> None:
    """Let the active context see what the up-projections of `model` get."""
    for module in model.modules():
        up = getattr(module, "kv_b_proj", None)
        layer: Any = getattr(module, "layer_idx", None)
        base: Any = getattr(up, "base_layer", up)  # inside of an adapter
        is_matrix = isinstance(layer, int) and isinstance(base, nn.Linear) and base.bias is None
        if is_matrix and not isinstance(base.forward, _UpProjection):
            base.forward = _UpProjection(base, layer)


class _UpProjection:
    """The forward of a linear layer. It notes its input if the context wants it, and makes no outputs if not needed."""

    def __init__(self, module: nn.Linear, layer: int) -> None:
        self.module, self.layer, self.own_forward = module, layer, module.forward
        self.vector: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if (context := _keeps_latent(self.layer)) is None:
            return self.own_forward(x)
        self.vector = x.flatten(0, -2)
        if context.expands:
            return self.own_forward(x)
        weight = self.module.weight
        return weight.new_zeros(1).expand(*x.shape[:-1], len(weight))  # a view without memory


def _keeps_latent(layer: int) -> LatentContext | None:
    context: Any = _active
    return context if hasattr(context, "keeps_latent") and context.keeps_latent(layer) else None


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
    up = getattr(module, "kv_b_proj", None)
    noted = getattr(getattr(up, "base_layer", up), "forward", None)
    if isinstance(noted, _UpProjection) and noted.vector is not None and (keeping := _keeps_latent(layer)) is not None:
        assert up is not None
        vector, noted.vector = noted.vector, None  # it may be called again
        out = keeping.attend_latent(layer, q, k, v, Latent(vector, up), **how)
    else:
        out = context.attend(layer, q, k, v, **how)
    # Contiguous: some families take a view of it.
    return out.reshape(batch, length, heads, out.shape[-1]).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
