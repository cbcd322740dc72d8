"""Layers that predict further tokens: `mtp.*` of Qwen3.5, a layer behind the last one of DeepSeek-V3.

`transformers` does not load them, so posttrain neither trains nor samples with them. Checkpoints and exports keep them
as they are in the files of the model: servers use them for drafts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.models.tensor_files import StoredPart, stored_parts, write_index, write_safetensors

_ATTRIBUTE = "_posttrain_drafts"  # of the model
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def is_draft(model_class: Any, config: Any, name: str) -> bool:
    """Whether a tensor in the files belongs to such a layer, by what `transformers` ignores."""
    layer, patterns = _LAYER.search(name), getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()
    is_behind = layer is not None and int(layer[1]) >= getattr(config.get_text_config(), "num_hidden_layers", 2**31)
    return ("mtp" in name or is_behind) and any(re.search(pattern, name) for pattern in patterns)


def keep_drafts(model: Any, name: str) -> None:
    """From here on `drafts_of` has those in the files of the model `name`; they are read when they are written."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    found: dict[str, StoredPart] = {}
    if getattr(model, "_keys_to_ignore_on_load_unexpected", None):
        for file in sorted(folder.glob("*.safetensors")):
            with suppress(InputError):  # of another type, and no file of this model
                parts = stored_parts(file)
                found |= {key: part for key, part in parts.items() if is_draft(type(model), model.config, key)}
    setattr(model, _ATTRIBUTE, found)
    if found and not (dist.is_initialized() and dist.get_rank() > 0):
        size = sum(part.facts.num_bytes for part in found.values()) / 2**20
        print(
            f"note: {model.config.model_type}: {len(found)} tensors of layers that predict further tokens "
            f"({next(iter(found))}, …; {size:,.0f} MiB) are not trained, and saved as they are",
            file=sys.stderr,
        )


def drafts_of(model: nn.Module) -> Mapping[str, StoredPart]:
    return getattr(model, _ATTRIBUTE, {})


def add_drafts(folder: Path, drafts: Mapping[str, StoredPart]) -> None:
    """Write them beside the weights that are in the folder, as its last file."""
    written = sorted(folder.glob("model*.safetensors"))
    places = [folder / f"model-{at:05d}-of-{len(written) + 1:05d}.safetensors" for at in range(1, len(written) + 2)]
    files = places[:-1]
    for file, place in zip(written, files, strict=True):
        durable.move(file, place)
    plan = {name: part.facts for name, part in drafts.items()}
    for _ in write_safetensors(places[-1], plan, ((name, part.read()) for name, part in drafts.items())):
        pass
    shards = {file.name: {name: part.facts for name, part in stored_parts(file).items()} for file in files}
    write_index(folder, {**shards, places[-1].name: plan})
