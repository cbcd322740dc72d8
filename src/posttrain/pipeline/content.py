"""What things hold, as hashes: files, folders, models, traces. What the hashes are for is not known here.

A file's hash is remembered with its size, time and inode, so that looking at a large, unchanged file again costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.checkpointing import durable
from posttrain.errors import InputError


def digest(value: Any) -> str:
    """One SHA-256 for plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class FileHashes:
    """SHA-256 of files, remembered in `memory`. Losing the memory costs time only."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, list[Any]] = _read_memory(memory)
        self._changed = False

    def of(self, file: Path) -> str:
        try:
            status = file.stat()
            mark = [status.st_size, status.st_mtime_ns, status.st_ino]
            name = str(file.absolute())
            known = self._known.get(name)
            if known is not None and known[:3] == mark:
                return str(known[3])
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror})") from error
        self._known[name] = [*mark, found]
        self._changed = True
        return found

    def save(self) -> None:
        if self._changed and self._memory.parent.is_dir():
            durable.write_text(self._memory, json.dumps(self._known))
            self._changed = False


def _read_memory(memory: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def traces_content(path: str | Sequence[str], hashes: FileHashes) -> list[str]:
    """The content of each file of traces, in the order in which they are read. Names do not count.

    Files behind a URL are not read for this: their store says what changes when they do (an ETag, or size and time).
    """
    from posttrain.data.traces.files import locate

    contents = []
    for file in locate(path):
        protocol = file.filesystem.protocol
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        if "file" in names or "local" in names:
            contents.append(hashes.of(Path(file.location)))
        else:
            contents.append(f"{file.shown}:{file.size}:{file.filesystem.checksum(file.location)}")
    return contents


def model_identity(reference: str) -> str:
    """Of a local model, its files; a name on the hub stands for itself."""
    from posttrain.evaluation.identity import folder_fingerprint
    from posttrain.export.model_reference import resolve_model

    found = resolve_model(reference)
    if found.files is None:
        return found.model
    folders = dict.fromkeys([found.files, Path(found.model), Path(found.tokenizer)])
    return folder_fingerprint(*(folder for folder in folders if folder.is_dir()))
