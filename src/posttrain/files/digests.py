"""Digests: SHA-256 of texts, values and files, BLAKE2b where a few bytes are enough. `FileHashes` keeps those of files,
so that hashing a large, unchanged one again costs nothing.

A file is identified by its path, size, time and inode. One that was written a moment ago is not cached: it might change
once more within the same tick of the clock.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path, PurePath
from uuid import UUID

from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.json_files import parse_json
from posttrain.files.locks import locked

CACHE_VARIABLE = "POSTTRAIN_CACHE"
_MAX_THREADS = 8  # hashing lets other threads run, so large models are read as fast as the disk or the cores allow
_SETTLED_S = 2.0
_LARGE_BYTES = 1 << 20
_LONG_BYTES = 8 << 30

running_sha256 = hashlib.sha256  # of content that comes in pieces, and where bytes are wanted


def sha256_of(content: str | bytes | bytearray | memoryview) -> str:
    """What `sha256sum` prints for a file of this content; a text counts as UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def blake2_of(content: str | bytes, num_bytes: int) -> bytes:
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=num_bytes).digest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: object) -> str:
    """One SHA-256 for plain values, whatever the order of their keys. Of others, such as images, the bytes count."""
    return sha256_of(json.dumps(value, sort_keys=True, default=_plain))


def _plain(value: object) -> str:
    """Never the text of an object, which may contain its address."""
    if isinstance(value, bytes | bytearray | memoryview):
        return sha256_of(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal | UUID | PurePath):
        return str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    content = getattr(value, "tobytes", None)  # images and arrays
    return f"{kind} {sha256_of(content())}" if callable(content) else kind


class FileHashes:
    """`memory` is a file; losing it costs time only. Files below `min_bytes` are hashed faster than looked up."""

    def __init__(self, memory: Path, *, min_bytes: int = 0) -> None:
        self._memory = memory
        self._min_bytes = min_bytes
        self._known: dict[str, list[int | str]] = _read_memory(memory)
        self._new: dict[str, list[int | str]] = {}

    def of(self, file: Path) -> str:
        try:
            status = file.stat()
            if found := self._remembered(file, status):
                return found
            found = sha256_of_file(file)
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror})") from error
        if status.st_size >= self._min_bytes and time.time() - status.st_mtime > _SETTLED_S:
            self._known[_name(file)] = self._new[_name(file)] = [*_mark(status), found]
        return found

    def of_all(self, files: Sequence[Path]) -> list[str]:
        """Several at once, in their order."""
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            return list(pool.map(self.of, files))

    def of_named(self, files: Sequence[Path]) -> dict[str, str]:
        """The same, by path."""
        return {str(file): found for file, found in zip(files, self.of_all(files), strict=True)}

    def unknown_bytes(self, files: Sequence[Path]) -> int:
        """How much has to be read for these."""
        statuses = [(file, file.stat()) for file in files]
        return sum(status.st_size for file, status in statuses if not self._remembered(file, status))

    def save(self) -> None:
        if not self._new or not self._memory.parent.is_dir():
            return
        with locked(self._memory.with_suffix(".lock")):
            # Others may have written since: their entries are kept, those of removed files are not.
            merged = {**_read_memory(self._memory), **self._new}
            kept = {name: row for name, row in merged.items() if os.path.exists(name)}
            durable.write_text(self._memory, json.dumps(kept))
        self._new = {}

    def _remembered(self, file: Path, status: os.stat_result) -> str | None:
        known = self._known.get(_name(file))
        return str(known[3]) if known is not None and known[:3] == _mark(status) else None


def hash_files(files: Sequence[Path], say: Callable[[str], None] | None = None) -> list[str]:
    """With the cache that all of the user's commands share. `say` gets a message if it takes long."""
    try:
        memory = cache_folder() / "file_hashes.json"
    except RuntimeError:  # a user without a home
        memory = Path(os.devnull) / "file_hashes.json"
    hashes = FileHashes(memory, min_bytes=_LARGE_BYTES)
    if say is not None and (unknown := hashes.unknown_bytes(files)) > _LONG_BYTES:
        say(f"hashing {unknown / 2**30:.0f} GiB of files; the hashes are kept for the next time")
    found = hashes.of_all(files)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        hashes.save()
    except OSError:
        pass  # a home that cannot be written: the files are read again the next time
    return found


def cache_folder() -> Path:
    """For what can be computed or fetched again: POSTTRAIN_CACHE, or ~/.cache/posttrain."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "posttrain")


def _name(file: Path) -> str:
    return str(file.absolute())


def _mark(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read_memory(memory: Path) -> dict[str, list[int | str]]:
    try:
        known = parse_json(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
