"""Records in the order of a number, more of them than memory holds: sorted runs on disk, merged while they are read."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO

_HEAD = struct.Struct("<qI")
BUFFER_BYTES = 128 << 10
MAX_OPEN_RUNS = 128

Record = tuple[int, bytes]  # its place in the order, and what it holds


class OrderedRuns:
    """Each run comes sorted and goes to a file of its own in `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._runs: list[Path] = []
        self._written = 0

    def add(self, run: Iterable[Record]) -> None:
        self._runs.append(self._write(run))

    def merged(self) -> Iterator[bytes]:
        while len(self._runs) > MAX_OPEN_RUNS:
            together, self._runs = self._runs[:MAX_OPEN_RUNS], self._runs[MAX_OPEN_RUNS:]
            self._runs.append(self._write(_merge(together)))
        for _, payload in _merge(self._runs):
            yield payload

    def _write(self, run: Iterable[Record]) -> Path:
        path = self._scratch / f"run-{self._written:05d}"
        self._written += 1
        with path.open("wb", buffering=BUFFER_BYTES) as file:
            for place, payload in run:
                file.write(_HEAD.pack(place, len(payload)))
                file.write(payload)
        return path


def _merge(paths: list[Path]) -> Iterator[Record]:
    files = [path.open("rb", buffering=BUFFER_BYTES) for path in paths]
    try:
        yield from heapq.merge(*(_records(file) for file in files), key=itemgetter(0))
    finally:
        for file, path in zip(files, paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)


def _records(file: IO[bytes]) -> Iterator[Record]:
    while head := file.read(_HEAD.size):
        place, size = _HEAD.unpack(head)
        yield place, file.read(size)
