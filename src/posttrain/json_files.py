"""JSON objects: their type, and reading one from a file with an error that names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import InputError

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]  # the same, not to be changed


def read_json(path: Path, error: type[InputError] = InputError) -> JsonObject:
    """The object in a JSON file; `error` if the file cannot be read or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason.strerror})") from reason
    except ValueError as reason:
        raise error(f"{path}: not JSON ({reason})") from reason
    if not isinstance(content, dict):
        raise error(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content
