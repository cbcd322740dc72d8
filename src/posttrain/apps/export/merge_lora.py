"""Reads LoRA adapters from folders and checkpoints, and merges them into the weights of their base model.

    W' = W + scale * B A        scale = alpha / r, or alpha / sqrt(r) with rslora

Supported: plain LoRA on linear layers, peft's per-layer patterns, and modules that were trained in full. DoRA, adapters
of embeddings and trained biases are refused with a message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.apps.export.weight_names import is_lora, plain_name
from posttrain.apps.export.weight_sources import RenamedSource, SafetensorsSource, TensorSource, WeightSource
from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping, read_json
from posttrain.models.tensor_files import TensorFacts
from posttrain.policy.experts import adapters_by_file, target_of

_LORA_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")


@dataclass(frozen=True)
class Adapter:
    """`factors` holds `<module>.lora_A.weight` and `<module>.lora_B.weight`; `whole` weights that replace the
    model's."""

    place: Path
    factors: WeightSource
    whole: WeightSource
    settings: JsonMapping  # the keys of peft's adapter_config.json

    @property
    def modules(self) -> list[str]:
        return sorted({name.rpartition(".lora_")[0] for name in self.factors.facts})

    def rank(self, module: str) -> Any:
        """By the adapter's config."""
        return _of_pattern(self.settings.get("rank_pattern"), module, self.settings["r"])

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = _of_pattern(self.settings.get("alpha_pattern"), module, self.settings["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def read_factors(self, module: str) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] in float32."""
        names = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        a, b = (tensor.float() for _, tensor in self.factors.read(names))
        return a, b

    def delta(self, module: str) -> Tensor:
        """What the adapter adds to the module's weight, in float32."""
        a, b = self.read_factors(module)
        change = (b @ a) * self.scale(module)
        return change.T if self.settings.get("fan_in_fan_out") else change


def _of_pattern(patterns: JsonMapping | None, module: str, default: object) -> Any:
    """As peft does: a key is a regular expression for the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def open_adapter(folder: Path) -> Adapter:
    """A peft adapter folder."""
    file = folder / "adapter_model.safetensors"
    return adapter_in(SafetensorsSource(folder, [file]), read_json(folder / "adapter_config.json"), folder)


def adapter_in(source: WeightSource, settings: JsonMapping, place: Path) -> Adapter:
    """The adapter among the tensors of `source`, whatever prefix their names have."""
    _check_settings(settings, place)
    factors, whole = {}, {}
    for name in source.facts:
        plain = plain_name(name).replace("modules_to_save.default.", "").replace("modules_to_save.", "")
        plain = plain.removeprefix("base_model.model.")
        match = _LORA_NAME.fullmatch(plain)
        if match:
            factors[f"{match['module']}.lora_{match['which']}.weight"] = name
        elif is_lora(plain):
            raise InputError(f"{place}: {name} is not an adapter of a linear layer, so it cannot be merged")
        else:
            whole[plain] = name
    odd = [name for name in factors if name.replace(".lora_A.", ".lora_B.") not in factors]
    odd += [name for name in factors if name.replace(".lora_B.", ".lora_A.") not in factors]
    if odd or not factors:
        what = f"{odd[0]} has no counterpart" if odd else "there are no lora_A and lora_B weights in it"
        raise InputError(f"{place} is not a complete LoRA adapter: {what}")
    adapter = Adapter(place, RenamedSource(source, factors), RenamedSource(source, whole), settings)
    for module in adapter.modules:
        rank = adapter.factors.facts[f"{module}.lora_A.weight"].shape[0]
        if adapter.rank(module) != rank:  # the scale is by the rank, so the merged weights would be wrong
            raise InputError(
                f"{place}: the adapter of {module} has rank {rank}, and {adapter.rank(module)} by its config (r and "
                "rank_pattern, or lora_cfg.dim of a run). Is it the config of another adapter?"
            )
    return adapter


def adapter_of_files(source: WeightSource, settings: JsonMapping, base: nn.Module) -> Adapter:
    """The adapter in peft's layout of a family whose files hold other tensors than the model, for those of the files:
    one for each expert. Its scale is in B.
    """
    _check_settings(settings, source.place)
    saved = Adapter(source.place, source, source, settings)
    factors, whole = {}, {}
    for name, tensor in source.read(list(source.facts)):
        plain = name.removeprefix("base_model.model.").replace("modules_to_save.", "")
        if not is_lora(plain):
            whole[plain] = tensor
            continue
        target, stack = target_of(base, plain)
        module, experts = target.removesuffix(".weight"), 1 if stack is None else stack.num_experts
        axis = 0 if ".lora_A." in plain else 1
        if tensor.shape[axis] != saved.rank(module) * experts:
            of_experts = f" for each of {experts} experts" if stack is not None else ""
            raise InputError(
                f"{source.where(name)}: {name} has the shape {list(tensor.shape)}, and the model and the adapter's "
                f"config describe rank {saved.rank(module)}{of_experts}. Is it an adapter of another model?"
            )
        factors[plain] = tensor.float() * (saved.scale(module) if axis else 1.0)
    by_file = TensorSource(source.place, adapters_by_file(base, factors))
    plain_settings = {**settings, "r": 1, "lora_alpha": 1, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    return Adapter(source.place, by_file, TensorSource(source.place, whole), plain_settings)


def _check_settings(settings: JsonMapping, place: Path) -> None:
    refused = {
        "peft_type": settings.get("peft_type", "LORA") != "LORA",
        "use_dora": bool(settings.get("use_dora")),
        "bias": settings.get("bias", "none") not in ("none", None),
        "layer_replication": bool(settings.get("layer_replication")),
    }
    for key, wrong in refused.items():
        if wrong:
            raise InputError(f"{place}: the adapter has {key} {settings[key]!r}, and only plain LoRA can be converted")
    for key in ("r", "lora_alpha"):
        if not _is_positive(settings.get(key)):
            raise InputError(f"{place}: the adapter's {key} is {settings.get(key)!r}; a positive number is needed")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(key) or {}
        if not isinstance(patterns, Mapping) or not all(map(_is_positive, patterns.values())):
            raise InputError(f"{place}: the adapter's {key} is {patterns!r}; positive numbers by names are needed")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


class MergedSource:
    """The base model's weights with an adapter merged into them, each when it is read."""

    def __init__(self, base: WeightSource, adapter: Adapter) -> None:
        self.place = adapter.place
        self._base, self._adapter = base, adapter
        self._modules = set(adapter.modules)
        for module in sorted(self._modules):
            self._check_fit(module)
        if unknown := [name for name in adapter.whole.facts if name not in base.facts]:
            raise InputError(f"{adapter.place}: {unknown[0]} was trained in full, but {base.place} has no such weight")
        self.facts: Mapping[str, TensorFacts] = base.facts

    def _check_fit(self, module: str) -> None:
        name = f"{module}.weight"
        if name not in self._base.facts:
            raise InputError(
                f"{self._adapter.place} adapts {module}, which the base model {self._base.place} does not have; "
                "it belongs to another model"
            )
        a = self._adapter.factors.facts[f"{module}.lora_A.weight"].shape
        b = self._adapter.factors.facts[f"{module}.lora_B.weight"].shape
        makes = (a[1], b[0]) if self._adapter.settings.get("fan_in_fan_out") else (b[0], a[1])
        if a[0] != b[1] or makes != self._base.facts[name].shape:
            raise InputError(
                f"{self._adapter.place}: the adapter of {module} is for a weight of shape {list(makes)}, but that of "
                f"the base model {self._base.place} is {list(self._base.facts[name].shape)}"
            )

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Merged weights come in float32, so that the caller rounds once."""
        for name in names:
            if name in self._adapter.whole.facts:
                yield from self._adapter.whole.read([name])
                continue
            ((_, tensor),) = self._base.read([name])
            module = name.removesuffix(".weight")
            if module in self._modules:
                tensor = torch.add(tensor.float(), self._adapter.delta(module))
            yield name, tensor

    def where(self, name: str) -> str:
        return f"{self._base.where(name)} with {self._adapter.place}"
