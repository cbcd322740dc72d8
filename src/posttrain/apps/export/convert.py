"""Converts a checkpoint to a Hugging Face folder. `convert` is the entry point; the parts are in the other files.

The folder is written under a temporary name, compared with its source, and renamed: a folder with the target's name is
complete. Weights are processed one at a time, so memory does not grow with the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NoReturn

import torch
from torch import Tensor

from posttrain.apps.export.conversion_input import ConversionError, ConversionInput, Say, open_input
from posttrain.apps.export.merge_lora import Adapter, MergedSource, adapter_of_files, open_adapter
from posttrain.apps.export.model_card import lineage, model_card
from posttrain.apps.export.verification import Verification, compare, fits_into_memory, loaded_logits, streamed_logits
from posttrain.apps.export.weight_names import empty_model
from posttrain.apps.export.weight_sources import RenamedSource, SafetensorsSource, WeightSource
from posttrain.checkpointing.integrity import seal
from posttrain.errors import InputError, reason_of
from posttrain.files import durable
from posttrain.files.json_files import JsonMapping, read_json
from posttrain.files.redaction import redact
from posttrain.models.hub import processor_files, why_unavailable
from posttrain.models.tensor_files import TensorFacts, plan_shards, write_index, write_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LINEAGE = "conversion.json"
Advance = Callable[[int, int], None]  # bytes just written, bytes in all


@dataclass(frozen=True)
class ConversionSettings:
    merge_lora: bool = False  # False: an adapter stays an adapter
    dtype: str | None = None  # None: as saved
    max_shard_bytes: int = 5 * 10**9
    verify: bool = True
    force: bool = False  # replace a target that is not empty
    for_vllm: bool = False  # an adapter with one pair of matrices for each expert


@dataclass(frozen=True)
class Converted:
    folder: Path
    num_files: int
    num_bytes: int
    is_adapter: bool
    verification: Verification | None


def convert(
    reference: str,
    target: Path,
    settings: ConversionSettings | None = None,
    *,
    config: Path | None = None,
    base: str | None = None,
    shown_as: str | None = None,
    measured: JsonMapping | None = None,
    say: Say = print,
    advance: Advance | None = None,
) -> Converted:
    """Write the model that `reference` names to the new folder `target`. `shown_as` is its name in the model card,
    `measured` what the card shows beside the run's validation: see `lineage`."""
    settings = settings or ConversionSettings()
    check_target(target, settings.force)
    if settings.dtype not in (None, *DTYPES):
        raise ConversionError(f"dtype {settings.dtype!r} is not known; accepted: {', '.join(DTYPES)}")
    source = open_input(reference, config=config, base=base, say=say)
    as_adapter = source.has_adapter and not settings.merge_lora
    with durable.new_folder(target, partial(check_target, force=settings.force)) as folder:
        write = _write_adapter if as_adapter else _write_model
        num_files = write(folder, source, settings, advance or (lambda count, total: None))
        _write_tokenizer(folder, source)
        is_verified = settings.verify and not settings.for_vllm  # peft loads another layout
        verification = _verify(folder, source, settings, as_adapter, say) if is_verified else None
        named = shown_as or reference
        facts = lineage(source, named, merged=not as_adapter, verification=verification, measured=measured)
        (folder / LINEAGE).write_text(redact(json.dumps(facts, indent=2)) + "\n", encoding="utf-8")
        card = model_card(source, facts, name=shown_as or target.name)
        (folder / "README.md").write_text(redact(card), encoding="utf-8")
        folder.chmod(0o755)  # some libraries make theirs private
        for file in folder.iterdir():
            file.chmod(0o644)
        seal(folder)
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return Converted(target, num_files, num_bytes, as_adapter, verification)


def check_target(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file; accepted: a folder that does not exist yet, or is empty")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise InputError(f"{target} is not empty; name another folder, or replace it with --force")
    if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise InputError(
            f"{target} holds something else than a model, which --force does not replace; name another folder"
        )


# -- weights -----------------------------------------------------------------------------------------------------------


def _write_model(folder: Path, source: ConversionInput, settings: ConversionSettings, advance: Advance) -> int:
    adapter = _adapter_of_files(source) if source.has_adapter and source.shape.translated else source.adapter
    if adapter is not None and adapter.settings.get("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        raise ConversionError(
            f"{adapter.place} is an adapter of the task {adapter.settings['task_type']!r}; only those of language "
            "models can be merged. Without --merge-lora it is converted as an adapter"
        )
    weights = source.weights if adapter is None else MergedSource(source.weights, adapter)
    plan = {name: _converted(facts, settings.dtype) for name, facts in weights.facts.items()}
    shards = plan_shards(plan, settings.max_shard_bytes)
    total = sum(facts.num_bytes for facts in plan.values())
    for name, shard in shards.items():
        for count in write_safetensors(folder / name, shard, _finite(weights, shard)):
            advance(count, total)
    write_index(folder, shards)
    _write_configs(folder, source, plan)
    return len(shards)


def _converted(facts: TensorFacts, dtype: str | None) -> TensorFacts:
    return replace(facts, dtype=DTYPES[dtype]) if dtype and facts.dtype.is_floating_point else facts


def _finite(weights: WeightSource, plan: Mapping[str, TensorFacts]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are to be written; ConversionError for one that holds NaN or infinity."""
    for name, tensor in weights.read(list(plan)):
        written = tensor.to(plan[name].dtype)
        # In pieces: the mask of a whole tensor would take as much memory as the tensor.
        pieces = written.reshape(-1).split(2**20) if written.is_floating_point() else ()
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            _explain_non_finite(name, written, tensor, weights.where(name))
        yield name, written


def _explain_non_finite(name: str, written: Tensor, read: Tensor, where: str) -> NoReturn:
    bad = ~torch.isfinite(written)
    count = int(bad.sum())
    place = [int(axis[0]) for axis in bad.nonzero(as_tuple=True)]
    if bool(torch.isfinite(read).all()):
        raise ConversionError(
            f"{name}{place} of {where} is {float(read[tuple(place)]):g}, too large for {written.dtype}"
        )
    raise ConversionError(
        f"{name} of {where} holds {count} numbers that are not finite, the first at {place}: "
        f"{float(written[tuple(place)])}. The checkpoint is unusable; take an earlier one"
    )


def _adapter_of_files(source: ConversionInput) -> Adapter:
    """Of families whose files hold other tensors than the model: mixtures of experts, models with a vision tower."""
    settings = read_json(source.folder / "adapter_config.json")
    base = empty_model(source.shape.config, source.shape.model_class)
    return adapter_of_files(_adapter_tensors(source), settings, base)


def _adapter_tensors(source: ConversionInput) -> SafetensorsSource:
    """The adapter of such a family, under peft's own names."""
    if source.source is not None:
        raise ConversionError(
            f"{source.folder} holds LoRA weights of {source.shape.config.model_type} in shards; adapters of this "
            "family can be converted only from a peft folder (adapter_config.json and adapter_model.safetensors)"
        )
    return SafetensorsSource(source.folder, [source.folder / "adapter_model.safetensors"])


def _write_adapter(folder: Path, source: ConversionInput, settings: ConversionSettings, advance: Advance) -> int:
    parts: list[WeightSource]
    peft_settings: JsonMapping
    if source.shape.translated:
        parts, peft_settings = [_adapter_tensors(source)], read_json(source.folder / "adapter_config.json")
        if settings.for_vllm:
            factors = _adapter_of_files(source).factors
            parts = [RenamedSource(factors, {f"base_model.model.{name}": name for name in factors.facts})]
            rank = max(facts.shape[0] for name, facts in factors.facts.items() if ".lora_A." in name)
            plain = {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
            peft_settings = {**peft_settings, **plain}  # the scale is in the matrices
    else:
        assert source.adapter is not None
        peft_settings = source.adapter.settings
        parts = [
            RenamedSource(part, {f"base_model.model.{name}": name for name in part.facts})
            for part in (source.adapter.factors, source.adapter.whole)
        ]
    plans = [{name: _converted(facts, settings.dtype) for name, facts in part.facts.items()} for part in parts]
    plan = {name: facts for part in plans for name, facts in part.items()}
    tensors = chain.from_iterable(_finite(part, own) for part, own in zip(parts, plans, strict=True))
    total = sum(facts.num_bytes for facts in plan.values())
    for count in write_safetensors(folder / "adapter_model.safetensors", plan, tensors):
        advance(count, total)
    config = {**peft_settings, "base_model_name_or_path": source.base, "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 1


# -- what else is in the folder ----------------------------------------------------------------------------------------


def _write_configs(folder: Path, source: ConversionInput, plan: Mapping[str, TensorFacts]) -> None:
    from posttrain.policy.checkpoint.files import KeptGenerationConfig

    config = source.shape.config
    floating = [facts.dtype for facts in plan.values() if facts.dtype.is_floating_point]
    config.dtype = max(set(floating), key=floating.count) if floating else torch.float32
    config.architectures = [source.shape.model_class.__name__]
    config.save_pretrained(folder)
    if not source.shape.model_class.can_generate():
        return
    generation = None
    for place in (str(source.folder), source.base):
        if why_unavailable(place) is not None:
            continue
        file = Path(place) / "generation_config.json"
        try:
            generation = KeptGenerationConfig.from_pretrained(place)
            break
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if file.is_file():  # it may hold the token that ends an answer
                raise ConversionError(f"{file} cannot be read: {reason_of(error)}; fix or remove it") from error
    (generation or KeptGenerationConfig.from_model_config(config)).save_pretrained(folder)


def _write_tokenizer(folder: Path, source: ConversionInput) -> None:
    from transformers import AutoTokenizer

    if (reason := why_unavailable(source.tokenizer, holding="a tokenizer")) is not None:
        raise ConversionError(
            f"the tokenizer of {source.text}: {reason}. A base model that has moved is named with --base"
        )
    try:
        AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=False).save_pretrained(folder)
    except Exception as error:  # a file of the tokenizer that is not one may raise anything
        raise ConversionError(
            f"the tokenizer {source.tokenizer!r} cannot be read: {reason_of(error)}. Give the model that was trained "
            "with --base"
        ) from error
    config = source.shape.config
    if config.get_text_config() is not config:
        for file in processor_files(str(source.folder)) or processor_files(source.base):
            shutil.copy(file, folder)


# -- verification ------------------------------------------------------------------------------------------------------


def _verify(
    folder: Path, source: ConversionInput, settings: ConversionSettings, as_adapter: bool, say: Say
) -> Verification | None:
    shape = source.shape
    if shape.translated and (source.has_adapter or set(source.weights.facts) != set(shape.shapes)):
        return _verify_translated(folder, source, as_adapter, say)
    reference = streamed_logits(shape, source.weights, source.adapter)
    without = streamed_logits(shape, source.weights) if source.adapter is not None else None
    how: Literal["loaded", "streamed"] = "loaded" if fits_into_memory(shape) else "streamed"
    loadable = source.loadable_folder if as_adapter else folder
    written = SafetensorsSource(folder)
    if how == "loaded" and loadable is not None:
        found = loaded_logits(loadable, shape, folder if as_adapter else None)
    elif as_adapter:
        found = streamed_logits(shape, source.weights, open_adapter(folder))
    else:
        found = streamed_logits(shape, written)
    is_16_bit = any(facts.dtype in (torch.bfloat16, torch.float16) for facts in written.facts.values())
    rounded = is_16_bit and (settings.dtype is not None or (source.adapter is not None and not as_adapter))
    verification = compare(reference, found, how=how, rounded=rounded, without_adapter=without)
    if verification.drowns_adapter and not as_adapter:
        say(
            "warning: rounding the merged weights to 16 bits changed logits by up to "
            f"{verification.max_difference:.3g}, the adapter by {verification.adapter_effect:.3g}: much of the "
            "training is lost. --dtype float32 keeps it"
        )
    return verification


def _verify_translated(folder: Path, source: ConversionInput, as_adapter: bool, say: Say) -> Verification | None:
    """Files of this family hold other tensors than the model has, so it cannot be streamed: both are loaded whole."""
    original = source.loadable_folder
    if original is None or not fits_into_memory(source.shape):
        say("warning: not verified: the weights of this family can be compared only when loaded whole from a folder")
        return None
    if source.has_adapter:
        original = source.base_folder
    reference = loaded_logits(original, source.shape, source.folder if source.has_adapter else None)
    found = loaded_logits(original, source.shape, folder) if as_adapter else loaded_logits(folder, source.shape)
    without = loaded_logits(original, source.shape) if source.has_adapter else None
    rounded = any(facts.dtype != torch.float32 for facts in SafetensorsSource(folder).facts.values())
    return compare(reference, found, how="loaded", rounded=rounded, without_adapter=without)
