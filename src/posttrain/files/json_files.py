"""JSON: the type of an object, and reading text and files strictly, with an error that names the place.

A text that is nested without end, has a number of thousands of digits or sets a key twice is refused like one that is
not JSON. `NaN` and `Infinity`, which Python writes, are read as the floats; who expects text or a count refuses them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import InputError

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]  # the same, not to be changed

MAX_DEPTH = 100
_PIECE_BYTES = 2**20
MAX_FILE_BYTES = 256 * 2**20  # of a file that describes a model, a run or a registry; data is read row by row


def parse_json(text: str | bytes, parse_int: Callable[[str], int | float] | None = None) -> Any:
    """The value of a JSON text; ValueError with the reason if it is not one."""
    try:
        value = json.loads(text, object_pairs_hook=without_repeats, parse_int=parse_int)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        reason = "a number has too many digits" if "integer string conversion" in str(error) else str(error)
        raise ValueError(reason) from None
    brackets = (text.count("{") + text.count("[")) if isinstance(text, str) else (text.count(b"{") + text.count(b"["))
    if brackets > MAX_DEPTH and is_deeper_than(MAX_DEPTH, value):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return value


def is_deeper_than(limit: int, value: Any) -> bool:
    """Whether lists and objects in `value` are nested more than `limit` deep."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def without_repeats(pairs: list[tuple[str, Any]]) -> JsonObject:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key in value if counts[key] > 1)
        raise ValueError(f"the key {twice!r} is set twice")
    return value


def read_json(path: Path, error: type[InputError] = InputError) -> JsonObject:
    """The object in a JSON file; `error` if the file cannot be read or holds something else."""
    try:
        content = parse_json(read_at_most(path, MAX_FILE_BYTES))
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason.strerror})") from reason
    except ValueError as reason:
        raise error(f"{path}: not JSON ({reason})") from reason
    if not isinstance(content, dict):
        raise error(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content


def read_at_most(path: Path, max_bytes: int) -> bytes:
    """The content of a file, also of one without an end such as /dev/zero; ValueError if it is longer."""
    refuse_pipe(path)
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(min(_PIECE_BYTES, max_bytes + 1 - len(content))):  # read(n) reserves n bytes at once
            content += piece
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes / 2**20:g} MiB")
    return bytes(content)


def refuse_pipe(path: str | Path) -> None:
    """OSError for a named pipe: to open one waits for a writer that may never come. Those of the shell, `<(…)`, are
    fine."""
    if stat.S_ISFIFO(os.stat(path).st_mode) and not str(path).startswith(("/dev/", "/proc/")):
        raise OSError(errno.EINVAL, "a named pipe, not a file", str(path))
