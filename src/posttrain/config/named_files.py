"""The files that a config names, to detect whether their content has changed since a result was saved."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Only these are looked up as folders or patterns: any word may happen to be the name of a folder (`split: train`).
DATA_OR_MODEL = (".data_path", ".dataset_name", ".model_name", ".tokenizer.name")
_FUNCTION = (".function", ".agent")
_WRITTEN = (".cache_path", ".usage_file")  # by the run itself: other content does not make it another run
_OF_A_CHECKPOINT = ("policy/weights", "policy/tokenizer")  # what reading a model from it reads


@dataclass(frozen=True)
class Named:
    """One setting that names files."""

    key: str  # dotted
    text: str  # as it is written: data.jsonl, rewards.py:score, a folder, package.module:score
    files: tuple[Path, ...]
    names: tuple[str, ...]  # of the files below what is named; a single file has none
    part: str = ""  # what of the file is meant: a function


def files_named_in(values: object) -> list[Path]:
    """Files such as `data.jsonl` and `rewards.py:score`, those below folders of data and models, and modules."""
    return list(dict.fromkeys(file for named in settings_with_files(values) for file in named.files))


def settings_with_files(values: object) -> Iterator[Named]:
    for key, text in _texts(values, ""):
        if not key.endswith(_WRITTEN) and (found := _named(key, text)) is not None:
            yield found


def _named(key: str, text: str) -> Named | None:
    setting = key.removeprefix(".")
    for file in (text, text.rpartition(":")[0]):
        # os.path: a prompt of 300 characters is no name that the system can look up, which pathlib takes as an error.
        if os.path.isfile(os.path.expanduser(file)):
            return Named(setting, text, (Path(file).expanduser(),), ("",), text[len(file) + 1 :])
    if key.endswith(DATA_OR_MODEL) and (below := list(_below(os.path.expanduser(text)))):
        return Named(setting, text, *zip(*below, strict=True))  # type: ignore[arg-type]
    if key.endswith(_FUNCTION) and (module := _module(text)) is not None:
        return Named(
            setting, text, (module,), ("",), text.rpartition(":")[2] if ":" in text else text.rpartition(".")[2]
        )
    return None


def _below(text: str) -> Iterator[tuple[Path, str]]:
    """Each file, and its name below the folder, or the folder of a pattern."""
    if os.path.isdir(text):
        root = text
        parts = [part for name in _OF_A_CHECKPOINT if os.path.isdir(part := os.path.join(text, name))] or [text]
        patterns = [os.path.join(glob.escape(part), "**", "*") for part in parts]
    else:
        root = os.path.dirname(text)
        patterns = [text] if any(character in text for character in "*?") else []
    for pattern in patterns:  # hidden files are not data
        for path in sorted(glob.glob(pattern, recursive=True)):
            if os.path.isfile(path):
                yield Path(path), os.path.relpath(path, root or ".")


def _module(text: str) -> Path | None:
    """The file of `package.module:name` or `package.module.name`, looked for as an import would be."""
    module = text.rpartition(":")[0] or text.rpartition(".")[0]
    inner = module.replace(".", os.sep)
    for folder in (os.getcwd(), *sys.path):
        for place in (os.path.join(folder, f"{inner}.py"), os.path.join(folder, inner, "__init__.py")):
            if inner and os.path.isfile(place):
                return Path(place)
    return None


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key with a dot before it, text)"""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
