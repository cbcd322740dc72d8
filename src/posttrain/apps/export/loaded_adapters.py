"""LoRA adapters of families whose files hold other tensors than the model: mixtures of experts, models with a vision tower.

Such an adapter is for the model's own tensors (all experts of a layer are one), so it cannot be merged into the tensors of
the files one at a time. transformers and peft load the model whole; peft merges; transformers writes the files.
"""

from __future__ import annotations

from pathlib import Path

import torch

from posttrain.apps.export.conversion_input import ConversionError, ConversionInput
from posttrain.apps.export.verification import Verification, compare, fits_into_memory, loaded_logits
from posttrain.apps.export.weight_sources import SafetensorsSource
from posttrain.models.lora import add_adapter


def merge_loaded(folder: Path, source: ConversionInput, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Write the model with its adapter, merged in float32 and rounded once: to `dtype`, or to the base model's."""
    from transformers import AutoModelForCausalLM

    if not fits_into_memory(source.shape):
        raise ConversionError(
            f"{source.folder} is an adapter of {source.shape.config.model_type}, which is merged with the whole model in memory "
            "in float32, and there is not enough of it. Without --merge-lora it is converted as an adapter"
        )
    kept = {facts.dtype for facts in SafetensorsSource(source.base_folder).facts.values()}
    model = AutoModelForCausalLM.from_pretrained(source.base_folder, dtype=torch.float32, trust_remote_code=False)
    merged = add_adapter(model, source.folder).merge_and_unload()  # type: ignore[operator]
    merged.to(dtype or (kept.pop() if len(kept) == 1 else torch.float32))
    merged.save_pretrained(folder, max_shard_size=max_shard_bytes)


def adapter_tensors(source: ConversionInput) -> SafetensorsSource:
    """The adapter under peft's own names."""
    if source.source is not None:
        raise ConversionError(
            f"{source.folder} holds LoRA weights of {source.shape.config.model_type} in shards; adapters of this family can be "
            "converted only from a peft folder (adapter_config.json and adapter_model.safetensors)"
        )
    return SafetensorsSource(source.folder, [source.folder / "adapter_model.safetensors"])


def compare_loaded(folder: Path, source: ConversionInput, *, as_adapter: bool) -> Verification:
    """The converted folder beside base model and adapter, each loaded whole."""
    shape, base = source.shape, source.base_folder
    reference = loaded_logits(base, shape, source.folder)
    found = loaded_logits(base, shape, folder) if as_adapter else loaded_logits(folder, shape)
    rounded = any(facts.dtype != torch.float32 for facts in SafetensorsSource(folder).facts.values())
    return compare(reference, found, how="loaded", rounded=rounded, without_adapter=loaded_logits(base, shape))
