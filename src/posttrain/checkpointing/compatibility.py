"""Checks that a checkpoint fits this run's model, by the description in `policy/model.json`.

It holds what decides whether weights fit and token ids mean the same: architecture, sizes, LoRA, vocabulary. Settings
that a resumed run may change (precision, attention implementation, dropout, model source) are not included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.errors import CheckpointError
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonObject


@cache
def _names() -> Mapping[str, Any]:
    import yaml  # `posttrain --help` imports this package

    return yaml.safe_load(Path(__file__).with_name("compatibility.yaml").read_text("utf-8"))


def describe_model(
    model_config: Mapping[str, object],
    lora: Mapping[str, object] | None,
    vocabulary: Mapping[str, int] | None = None,
) -> JsonObject:
    """The description of a model: JSON values only.

    `model_config` is `config.to_dict()` of a `transformers` model, `lora` the adapter's settings (None, or `enabled:
    false`, for full tuning), `vocabulary` the tokenizer's `get_vocab()`.
    """
    # Multimodal models keep the decoder's sizes in a separate section.
    text = model_config.get("text_config")
    decoder = {
        **model_config,
        **(text if isinstance(text, Mapping) else {}),
        "model_type": model_config.get("model_type"),
    }
    return {
        **{
            section: {name: _plain(decoder[name]) for name in _names()[section] if decoder.get(name) is not None}
            for section in ("architecture", "sizes")
        },
        "lora": _describe_lora(lora),
        "vocabulary_sha256": None if vocabulary is None else hash_vocabulary(vocabulary),
    }


def hash_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 of the tokens in the order of their ids. The chat template is not part of it: a run may change that."""
    in_order = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    return sha256_of(json.dumps(in_order))


def check_same_model(saved: Mapping[str, object], current: Mapping[str, object]) -> None:
    """Raise CheckpointError with every difference if a checkpoint's description is not that of this run's model."""
    for section in ("architecture", "sizes"):
        found = saved.get(section) if isinstance(saved, Mapping) else None
        if not isinstance(found, Mapping) or not found or not set(found) <= set(_names()[section]):
            raise CheckpointError(
                f"model.json of the checkpoint does not describe a model: {section} is {_shown(found):.80}. Put the "
                "file back"
            )
    differences = list(_differences(saved, current, ""))
    if differences:
        lines = "\n".join(f"  {difference}" for difference in differences)
        raise CheckpointError(
            f"the checkpoint is of another model than this run's:\n{lines}\n"
            "Use the model and the LoRA settings it was saved with, or another checkpointing.checkpoint_dir."
        )


def _describe_lora(lora: Mapping[str, object] | None) -> dict[str, object] | None:
    if lora is None or lora.get("enabled") is False:
        return None
    described = {}
    for ours, theirs in _names()["lora"].items():
        value = next((lora[name] for name in theirs if lora.get(name) is not None), None)
        # A missing setting means empty or off.
        if value is not None and value is not False and value != [] and value != "":
            # The order of module names is irrelevant.
            described[ours] = sorted(value) if isinstance(value, list | tuple | set) else _plain(value)
    return described


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _differences(saved: object, current: object, name: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key in [*saved, *(key for key in current if key not in saved)]:
            yield from _differences(saved.get(key), current.get(key), f"{name}.{key}" if name else str(key))
    # A value that is missing on one side: for LoRA that means none, and is a difference; elsewhere (a field that
    # another version of `transformers` did not write) there is nothing to compare.
    elif saved != current and (name.startswith("lora") or (saved is not None and current is not None)):
        yield f"{name}: saved {_shown(saved)} != this run's {_shown(current)}"


def _shown(value: object) -> str:
    return "none" if value is None else json.dumps(value)
