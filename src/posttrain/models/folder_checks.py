"""Rejects unsafe model folders before a library reads them: named pipes, links out of the folder, and a config.json
with impossible values or names of remote code.

Code shipped with a model (`auto_map`, `custom_generate`) is not run: `trust_remote_code` is false everywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping, read_json

# Positive integers, and their plausible maximum.
_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**40,
    "sliding_window": 2**40,
}
_MAY_DIFFER_BY_LAYER = {"intermediate_size"}
_MAY_BE_ZERO = {"sliding_window"}  # where it is not used
# Transformers fetches attention called `owner/name` from the hub and runs it, and kernels for some names of experts.
_IMPLEMENTATIONS = re.compile(r"_?(?:attn|experts)_implementation(?:_internal)?")
_OF_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")


def refuse_pipes(folder: Path) -> None:
    """InputError if a file there is a named pipe: the libraries that read models would block forever."""
    for file in folder.iterdir():
        if file.is_fifo():
            raise InputError(f"{file}: a named pipe, not a file")


def refuse_links_outside(folder: Path) -> None:
    """InputError if a link below `folder` points outside of it. For folders that are copied: the target may be
    confidential.

    The hub's cache consists of links, to files elsewhere in the cache.
    """
    from huggingface_hub import constants

    own = folder.resolve()
    allowed = [own, Path(constants.HF_HUB_CACHE).resolve()]
    if own.parent.name == "snapshots":  # a copy of the hub's cache: models--owner--name/snapshots/revision
        allowed.append(own.parent.parent)
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in allowed):
                raise InputError(
                    f"{path}: a link to {path.resolve()}, outside of {folder}; put the file itself there if it is the "
                    "model's"
                )


def why_unusable(folder: Path) -> str | None:
    """What is wrong with the config.json in `folder`; None if nothing is, or there is none."""
    file = folder / "config.json"
    try:
        refuse_pipes(folder)
        if not file.exists():
            return None
        problem = problem_in(read_json(file))
    except InputError as error:
        return str(error)
    return None if problem is None else f"{file}: {problem}"


def problem_in(config: JsonMapping) -> str | None:
    """What is wrong with the settings of a model, in words for after their name; None if nothing is."""
    for key, largest in _SIZES.items():
        if (value := config.get(key)) is None:
            continue
        least = 0 if key in _MAY_BE_ZERO else 1
        values = value if key in _MAY_DIFFER_BY_LAYER and isinstance(value, list) else [value]
        if not all(_is_count(each) and least <= each <= largest for each in values):
            return f"{key} is {value!r:.80}; a whole number from {least} to {largest} is needed"
    for key in ("dtype", "torch_dtype"):
        if (value := config.get(key)) is not None and value not in _DTYPES:
            return f"{key} is {value!r:.80}; one of {', '.join(_DTYPES)} is needed"
    for key, value in config.items():
        if _IMPLEMENTATIONS.fullmatch(key) and (code := _fetched_code(key, value)) is not None:
            return f"{key} is {code!r:.80}, code that would be fetched from the hub and run; remove the key"
    layers = config.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, str) for layer in layers)):
        return f"layer_types is {layers!r:.80}; a list of names is needed"
    ends = config.get("eos_token_id")
    vocabulary = config.get("vocab_size")
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and not (_is_count(token) and token >= 0 and (vocabulary is None or token < vocabulary)):
            return f"eos_token_id is {ends!r:.80}; token ids below vocab_size = {vocabulary} are needed"
    inner = config.get("text_config")
    if inner is None or isinstance(inner, dict):
        return None if inner is None else problem_in(inner)
    return f"text_config is {inner!r:.80}; a map is needed"


def _fetched_code(key: str, value: object) -> object:
    if isinstance(value, dict):  # one for each part of the model
        return next((code for inner in value.values() if (code := _fetched_code(key, inner)) is not None), None)
    if value is None or (value in _OF_EXPERTS if "experts" in key else isinstance(value, str) and "/" not in value):
        return None
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
