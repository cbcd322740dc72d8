"""The local files that settings name: their content is a part of what the settings say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def files_named_in(values: Any) -> list[Path]:
    """Of settings such as `data.jsonl` and `rewards.py:score`. Folders are not looked into."""
    found: dict[Path, None] = {}
    for text in _texts(values):
        for candidate in (text, text.rpartition(":")[0]):
            # os.path: a prompt of 300 characters is no name that the system can look up, which pathlib takes as an error.
            if os.path.isfile(os.path.expanduser(candidate)):
                found[Path(candidate).expanduser()] = None
    return list(found)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
