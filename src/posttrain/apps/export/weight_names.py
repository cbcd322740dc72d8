"""Maps saved tensors to the weights that a model needs according to its config.

Training frameworks save the same weights under longer names (`model.model.layers…`, `base_model.model.…`). Their
prefixes and infixes are removed. Shapes are compared, so that the config of another model is detected before anything
is written.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from posttrain.apps.export.weight_sources import WeightSource
from posttrain.errors import InputError
from posttrain.models.draft_layers import is_draft
from posttrain.models.loading import auto_class_of, explain_config_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\.")
_LORA = re.compile(r"\.lora_[AB]\b|\.lora_embedding_[AB]\b|\.lora_magnitude_vector\b")
_DERIVED = re.compile(
    r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias)$"
)  # older versions saved these; computed anew


class MismatchError(InputError):
    """Weights that are not those of the model that the config describes."""


@dataclass(frozen=True)
class WeightShapes:
    """The weights that a config describes."""

    config: PretrainedConfig
    model_class: type[PreTrainedModel]
    origin: str  # where the config came from, for messages
    shapes: Mapping[str, tuple[int, ...]]  # tied weights once
    tied: Mapping[str, str]  # name that shares its tensor -> the name in `shapes`
    translated: bool  # files may hold other names or tensors than the model (one per expert); transformers converts

    @classmethod
    def of(cls, config: PretrainedConfig, origin: str) -> WeightShapes:
        from transformers.conversion_mapping import get_model_conversion_mapping

        try:
            model_class = model_class_of(config)
            model = empty_model(config, model_class)
        except MismatchError as error:
            raise MismatchError(f"{config_file_of(origin)}: {error}") from error
        except Exception as error:  # a value that no model can be built with may raise anything
            raise MismatchError(f"{config_file_of(origin)}: {explain_config_error(error, config.to_dict())}") from error
        first: dict[int, str] = {}
        tied = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                tied[name] = first[id(parameter)]
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}
        is_translated = bool(get_model_conversion_mapping(model, add_legacy=False))
        return cls(config, model_class, origin, shapes, tied, is_translated)


def config_file_of(origin: str) -> str:
    """The config's place for messages. `origin` is the file itself, or the model that the file belongs to."""
    return origin if Path(origin).name == "config.json" else f"config.json of {origin}"


def model_class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that the config names: a language model, or a reward model."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, name, None)) is None:
            continue
        # Loading follows model_type, so verifying with a class of another family would be meaningless.
        made_for = getattr(found, "config_class", None)
        if not isinstance(made_for, type) or not isinstance(config, made_for):
            raise MismatchError(
                f"architectures names {name}, not a model of model_type {config.model_type!r}; one of the two is wrong"
            )
        return found
    try:
        return auto_class_of(config)._model_mapping[type(config)]
    except KeyError:
        raise MismatchError(
            f"model_type {config.model_type!r} with architectures {config.architectures} is unknown to transformers "
            f"{transformers.__version__} as a language model"
        ) from None


def empty_model(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> nn.Module:
    """The modules without memory for their parameters; what is computed from the config (rotary tables) is there."""
    with _parameters_on_meta():
        model: nn.Module = model_class(config)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]
    return model.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register: Callable[..., None] = nn.Module.register_parameter
    this_thread = threading.get_ident()  # another may be building a model that is to have its parameters

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta" and threading.get_ident() == this_thread:
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def plain_name(name: str) -> str:
    """A saved name without the parts that wrappers add."""
    return _WRAPPERS.sub("", name)


def is_lora(name: str) -> bool:
    return _LORA.search(name) is not None


def prefix_of(names: Iterable[str], wanted: Container[str]) -> str:
    """The prefix that most of `names` have before one of the `wanted` names; empty if none fits."""
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            if ".".join(parts[first:]) in wanted:
                found["".join(f"{part}." for part in parts[:first])] += 1
                break
    return found.most_common(1)[0][0] if found else ""


def match_names(shape: WeightShapes, source: WeightSource, *, keeps_drafts: bool = False) -> dict[str, str]:
    """name in the converted model -> name in the source. MismatchError if the two do not fit. `keeps_drafts`: with the
    layers that predict further tokens, which the model does not have."""
    saved = {plain_name(name): name for name in source.facts if not is_lora(name)}
    prefix = prefix_of(saved, shape.shapes)
    saved = {name.removeprefix(prefix): old for name, old in saved.items()}
    saved = {name: old for name, old in saved.items() if not _DERIVED.search(name)}
    missing = [name for name in shape.shapes if name not in saved]
    for name in list(missing):  # of two names that share a tensor, either may have been saved
        partner = next((other for other, first in shape.tied.items() if first == name and other in saved), None)
        if partner is not None:
            saved[name] = saved[partner]
            missing.remove(name)
    drafts = {name: old for name, old in saved.items() if is_draft(shape.model_class, shape.config, name)}
    unexpected = [name for name in saved if name not in {*shape.shapes, *shape.tied, *drafts}]
    if (missing or unexpected) and shape.translated:
        return {name: old for name, old in saved.items() if name not in shape.tied}
    _check(shape, source, saved, missing, unexpected)
    return {**{name: saved[name] for name in shape.shapes}, **(drafts if keeps_drafts else {})}


def _check(
    shape: WeightShapes, source: WeightSource, saved: Mapping[str, str], missing: list[str], unexpected: list[str]
) -> None:
    for name, expected in shape.shapes.items():
        if name in saved and source.facts[saved[name]].shape != expected:
            raise MismatchError(
                f"{name} has shape {list(source.facts[saved[name]].shape)} in {source.where(saved[name])}, but "
                f"{list(expected)} by {shape.origin}. Is it the config of another model, or is a shard missing?"
            )
    if missing:
        raise MismatchError(
            f"{source.place} has no weights for {len(missing)} of the {len(shape.shapes)} parameters that "
            f"{shape.origin} describes, among them {missing[0]}. Is a shard missing, or is it the config of another "
            "model?"
        )
    if unexpected:
        raise MismatchError(
            f"{source.place} holds {len(unexpected)} weights that {shape.origin} does not describe, among them "
            f"{unexpected[0]} in {source.where(saved[unexpected[0]])}. Is it the config of another model?"
        )
