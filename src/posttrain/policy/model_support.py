"""Checks, with a forward pass over one token, that the packed forward pass computes a model correctly.

Refused are layers that link tokens by something else than attention or a known recurrence, attention windows that the
attention function is not given, changes of the logits that `head` does not support, and rotary embeddings that depend
on the rest of the batch. Families that no test covers are also proved: see `engines/native/proof.py`. Dropout and
jitter of a model's config are turned off here.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.errors import InputError, StopRequested, reason_of
from posttrain.files.json_files import JsonMapping
from posttrain.models.attention_interface import (
    AttendOptions,
    Latent,
    Place,
    RecurrenceInputs,
    attention_context,
    named_layer,
)
from posttrain.models.loading import TESTED_FAMILIES
from posttrain.models.tensor_files import TensorFacts
from posttrain.policy.head import Head, UnsupportedModelError
from posttrain.policy.latent import expanded, is_plain, plain_width, stored
from posttrain.policy.parallel.fsdp import is_first_rank
from posttrain.policy.recurrence import in_exact_types, recurrence_step

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Rotary embeddings whose angles depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Fields of a config, and attributes of modules, that make a pass of training random; not those of other heads.
_NOISE = re.compile(r"(?!classifier|summary).*(drop|jitter)")
_NOISE_OF_ATTENTION = re.compile(r"att(entio)?n.*drop")


@dataclass(frozen=True)
class LayerShape:
    """What an attention layer stores of one token in the KV cache."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    # Of latent vectors: the heads that are made of one. Its values are the first numbers of its keys.
    expanded: LayerShape | None = None

    @property
    def numbers(self) -> int:
        return self.num_heads * (self.key_dim + (self.value_dim if self.expanded is None else 0))

    @property
    def is_fp8(self) -> bool:
        """Then each head of a token has a factor for its key and one for its value."""
        return self.dtype == torch.float8_e4m3fn

    @property
    def bytes_per_token(self) -> int:
        factors = 2 * torch.float32.itemsize if self.is_fp8 else 0
        return self.numbers * self.dtype.itemsize + self.num_heads * factors


@dataclass(frozen=True)
class SequenceShapes:
    """What the layers of a model store: keys and values of each token, states of each sequence (the last tokens of a
    convolution, or a matrix for each head)."""

    layers: dict[int, LayerShape]
    states: dict[Place, TensorFacts]

    @property
    def state_bytes(self) -> int:
        """Of one sequence, whatever its length."""
        return sum(state.num_bytes for state in self.states.values())


def observe_layers(base: Any, head: Head) -> SequenceShapes:
    """What the layers store, found by a pass over one token. Rejects unsupported models."""
    config, observer = base.config.get_text_config(), LayerObserver()
    seen: list[Tensor] = []
    hook = head.decoder.register_forward_hook(lambda _module, _args, out: seen.append(out.last_hidden_state))
    one = torch.zeros(1, 1, dtype=torch.long, device=base.get_input_embeddings().weight.device)
    try:
        with attention_context(observer):
            logits = base(input_ids=one, position_ids=one, use_cache=False).logits
    finally:
        hook.remove()
    _check_windows(config, observer.windows)
    head.check_logits(seen[-1], logits)
    with attention_context(observer), torch.no_grad():
        ours, theirs = head.hidden(one, one).float(), seen[-1][0].float()
    if float((ours - theirs).abs().max()) > 0.1 * float(theirs.abs().max()):
        raise UnsupportedModelError(
            f"{config.model_type}: its hidden states of embeddings are not those of the tokens: it changes embeddings "
            "in a way that posttrain does not implement"
        )
    _check_no_other_link(config, head, one.device)
    return SequenceShapes(observer.layers, observer.states)


def _check_windows(config: PretrainedConfig, windows: Mapping[int, int | None]) -> None:
    """Refuse models that give a window to `transformers`' mask but not to the attention function that we use."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    for layer, window in windows.items():
        kind = "sliding_attention" if kinds is None else kinds[layer]
        field = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
        limit = None if field is None else getattr(config, field, None)
        if window is None and limit and limit < config.max_position_embeddings:
            raise UnsupportedModelError(
                f"{config.model_type}: config.{field} is {limit}, and layer {layer} does not pass it to its attention "
                "function. posttrain would let every token attend to all before it"
            )


@torch.no_grad()
def _check_no_other_link(config: PretrainedConfig, head: Head, device: torch.device) -> None:
    """Refuse models whose layers pass something from token to token in another way than by the active context. Where
    each token attends to itself alone, the tokens before it must not matter: in a packed row they may belong to another
    sequence. Layers that use no context are fine, a block with an MLP alone for example.
    """
    rows = torch.tensor([[0, 1, 2, 3], [2, 1, 0, 3]], device=device)
    states: list[dict[str, Tensor]] = []  # of the last token, after each layer and at the end

    def keep(name: str, output: object) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor):
            states[-1][name] = output.flatten(0, -2)[-1].float()

    with attention_context(LayerObserver()), ExitStack() as hooks:
        for at, layer in enumerate(head.layers):
            name = f"layer {at}, {type(layer).__name__},"
            hook = layer.register_forward_hook(lambda _layer, _args, output, name=name: keep(name, output))
            hooks.callback(hook.remove)
        for row in rows:  # of one shape, so that rounding does not differ either
            states.append({})
            keep("what comes after its layers", head.hidden(row[None], torch.zeros_like(row)[None]))
    weight: Any = next(head.decoder.parameters())
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    first, second = states
    differ = [
        name for name, state in first.items()
        if float((state - second[name]).abs().max()) > tolerance * float(state.abs().max())
    ]  # fmt: skip
    if differ and list(first)[-1] in differ:
        raise UnsupportedModelError(
            f"{config.model_type}: {differ[0]} carries values from token to token in another way than attention, a "
            "short convolution, a gated delta rule or Mamba-2. posttrain puts several sequences into one row, where "
            "those values would run into each other."
        )


def turn_off_noise(model: Any, overrides: JsonMapping) -> None:
    """Set dropout of hidden states, dropped layers and the router's jitter to 0, unless `overrides` ask for any: with
    them the trainer's probabilities are not the sampler's. Says once what of the config is not applied.

    Call it before adapters are added, whose dropout is a setting of the run.
    """
    asked = _noise_in(overrides)
    for name, value in asked.items():
        if _NOISE_OF_ATTENTION.match(name):
            raise InputError(
                f"policy.hf_config_overrides has {name} = {value:g}, and posttrain's attention drops nothing in "
                f"training; say so with policy.hf_config_overrides.{name}=0.0"
            )
    noise = _noise_in(model.config.get_text_config().to_dict())
    ignored = {name: value for name, value in noise.items() if not asked or _NOISE_OF_ATTENTION.match(name)}
    if ignored and is_first_rank():
        others = next((name for name in ignored if not _NOISE_OF_ATTENTION.match(name)), None)
        remedy = f"; policy.hf_config_overrides.{others}={ignored[others]:g} turns it on" if others else ""
        listed = ", ".join(f"{name} {value:g}" for name, value in ignored.items())
        print(f"note: trained without the noise of the model's config: {listed}{remedy}", file=sys.stderr)
    if asked:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and _NOISE.match(name):
                setattr(module, name, 0.0)


def is_noise_asked_for(overrides: JsonMapping) -> bool:
    return bool(_noise_in(overrides))


def _noise_in(config: JsonMapping) -> dict[str, float]:
    numbers = {name: value for name, value in config.items() if isinstance(value, int | float) and value is not True}
    return {name: value for name, value in numbers.items() if value > 0 and _NOISE.match(name)}


@contextmanager
def refusing_errors(config: PretrainedConfig) -> Iterator[None]:
    """An error of a forward pass refuses the model, unless tests cover its family: then the error is ours."""
    try:
        yield
    except (InputError, StopRequested, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if config.model_type in TESTED_FAMILIES:
            raise
        frames = list(traceback.walk_tb(error.__traceback__))
        last, line = frames[-1]
        ran = [frame.f_locals.get("self") for frame, _ in frames]
        inside = [
            named_layer(module) for module in ran if isinstance(module, nn.Module) and hasattr(module, "layer_idx")
        ]
        what = inside[-1].rstrip(",") if inside else f"{config.model_type}: its forward pass"
        raise UnsupportedModelError(
            f"{what} does not run with posttrain's attention, for which transformers builds no mask: "
            f"{type(error).__name__}: {reason_of(error)} ({Path(last.f_code.co_filename).name}:{line})"
        ) from error


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


class LayerObserver:
    """Attention of tokens that see themselves alone: the output of each is its value."""

    expands = True

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.states: dict[Place, TensorFacts] = {}

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        self.states[place] = TensorFacts((weight.shape[1] - 1, x.shape[1]), x.dtype)
        out = x * weight[:, -1] if bias is None else x * weight[:, -1] + bias
        return F.silu(out) if silu else out

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        query, key, value, log_decay, beta = in_exact_types(*inputs, unit=unit)
        self.states[place] = shape = TensorFacts((value.shape[1], key.shape[2], value.shape[2]), value.dtype)
        zero = value.new_zeros(len(value), *shape.shape)
        return recurrence_step(zero, query, key, value, log_decay, beta)[0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        self.windows[layer] = options["window"]
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def keeps_latent(self, layer: int) -> bool:
        return True

    def attend_latent(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, latent: Latent, **options: Unpack[AttendOptions]
    ) -> Tensor:
        out = self.attend(layer, query, key, value, **options)
        is_usual = query.shape[1] == key.shape[1] and not options.keys() - {"scale", "window", "softcap"}
        is_usual = is_usual and options["window"] is options["softcap"] is None
        if not (is_usual and is_plain(latent.up) and 0 < plain_width(latent.up, key, value) < key.shape[2]):
            return out
        heads, rows = self.layers[layer], stored(latent, key, value)
        made = expanded(latent.up, rows, heads.num_heads, heads.value_dim)
        # Some families change the keys after the up-projection.
        if rows.is_meta or all(map(_are_near, made, (key, value))):
            self.layers[layer] = LayerShape(1, rows.shape[2], latent.vector.shape[1], key.dtype, heads)
        return out


def _are_near(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    allowed = 4 * torch.finfo(theirs.dtype).eps * theirs.abs().max()
    return bool((ours - theirs).abs().max() <= allowed)
