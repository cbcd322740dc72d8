"""The local files that settings name: their content is a part of what the settings say."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Only these are looked up as folders or patterns: any word may happen to be the name of a folder (`split: train`).
_DATA_OR_MODEL = (".data_path", ".dataset_name", ".model_name", ".tokenizer.name")
_FUNCTION = ".function"
_WRITTEN = (".cache_path", ".usage_file")  # by the run itself: other content does not make it another run
_OF_A_CHECKPOINT = ("policy/weights", "policy/tokenizer")  # what reading a model from it reads


def files_named_in(values: Any) -> list[Path]:
    """Files such as `data.jsonl` and `rewards.py:score`, those below folders of data and models, and modules of functions."""
    found: dict[Path, None] = {}
    for key, text in _texts(values, ""):
        if not key.endswith(_WRITTEN):
            found.update(dict.fromkeys(_files(key, text)))
    return list(found)


def _files(key: str, text: str) -> Iterator[Path]:
    for candidate in (text, text.rpartition(":")[0]):
        # os.path: a prompt of 300 characters is no name that the system can look up, which pathlib takes as an error.
        if os.path.isfile(os.path.expanduser(candidate)):
            yield Path(candidate).expanduser()
    if key.endswith(_DATA_OR_MODEL):
        yield from _below(os.path.expanduser(text))
    elif key.endswith(_FUNCTION):
        yield from _module(text)


def _below(text: str) -> Iterator[Path]:
    if os.path.isdir(text):
        parts = [part for name in _OF_A_CHECKPOINT if os.path.isdir(part := os.path.join(text, name))] or [text]
        patterns = [os.path.join(glob.escape(part), "**", "*") for part in parts]
    else:
        patterns = [text] if any(character in text for character in "*?") else []
    for pattern in patterns:  # hidden files are nobody's data
        yield from (Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path))


def _module(text: str) -> Iterator[Path]:
    """The file of `package.module:name` or `package.module.name`, looked for as an import would; nothing is imported."""
    module = text.rpartition(":")[0] or text.rpartition(".")[0]
    inner = module.replace(".", os.sep)
    for folder in (os.getcwd(), *sys.path):
        for place in (os.path.join(folder, f"{inner}.py"), os.path.join(folder, inner, "__init__.py")):
            if inner and os.path.isfile(place):
                yield Path(place)
                return


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key with a dot before it, text)"""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
