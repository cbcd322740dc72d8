"""Files that a command writes because the user asked for them."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpointing import durable
from posttrain.errors import InputError


def write_for_user(path: Path, text: str) -> None:
    """Whole or not at all; InputError where it cannot be."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        durable.write_text(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
