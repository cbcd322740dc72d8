"""Refuses a model's config.json with values that no model has, before a library builds billions of layers from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.json_files import JsonMapping, read_json

# Positive whole numbers, and the most that is believed.
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
_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")


def why_unusable(folder: Path) -> str | None:
    """What is wrong with the config.json in `folder`; None if nothing is, or there is none."""
    file = folder / "config.json"
    if not file.exists():
        return None
    try:
        problem = problem_in(read_json(file))
    except InputError as error:
        return str(error)
    return None if problem is None else f"{file}: {problem}"


def problem_in(config: JsonMapping) -> str | None:
    """What is wrong with the settings of a model, in words for after their name; None if nothing is."""
    for key, largest in _SIZES.items():
        value = config.get(key)
        if value is not None and not (_is_count(value) and 1 <= value <= largest):
            return f"{key} is {value!r:.80}; a whole number from 1 to {largest} is needed"
    for key in ("dtype", "torch_dtype"):
        if (value := config.get(key)) is not None and value not in _DTYPES:
            return f"{key} is {value!r:.80}; one of {', '.join(_DTYPES)} is needed"
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
