"""Groups traces, and orders what is made of them, without holding the files in memory.

Tables are collected; once they pass a limit they are written to temporary files, cut by the hash of the group, so that
a group lies in one file whole. A file that is still too large is cut again by other bits of the hash. Then one file
after another is read and sorted. What comes out does not depend on where the cuts were: each group has its first row in
the input, and `OrderedRuns` puts them in that order.
"""

from __future__ import annotations

import heapq
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import IO, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.data.traces.canonical import SCHEMA
from posttrain.data.traces.chat_text import decoded
from posttrain.data.traces.values import Response

MEMORY_BYTES = 96 << 20  # tables held before they are cut, and the largest part that is sorted at once
BITS_PER_CUT = 6
DEEPEST_CUT = 64 // BITS_PER_CUT
BUFFER_BYTES = 128 << 10
MAX_OPEN_RUNS = 128
UNITS_AT_ONCE = 1024  # turned into Python objects together

Made = TypeVar("Made")


class GroupParts:
    """Collects tables and returns them in parts that hold complete groups."""

    def __init__(self, scratch: Path, memory_bytes: int = MEMORY_BYTES, *, name: str = "part", depth: int = 0) -> None:
        self._scratch, self._limit, self._name, self._depth = scratch, memory_bytes, name, depth
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._files: dict[int, _PartFile] = {}  # by some bits of the group's hash

    def add(self, table: pa.Table) -> None:
        self._held.append(table)
        self._held_bytes += table.nbytes
        if self._held_bytes >= self._limit:
            self._spill()

    @property
    def spilled(self) -> bool:
        """Whether there is more than memory should hold, and so more than one part."""
        return bool(self._files)

    def _spill(self) -> None:
        if not self._held:
            return
        table = pa.concat_tables(self._held)
        self._held, self._held_bytes = [], 0
        shift = np.uint64(64 - BITS_PER_CUT * (self._depth + 1))
        target = (table["group"].to_numpy() >> shift) & np.uint64((1 << BITS_PER_CUT) - 1)
        order = np.argsort(target, kind="stable")
        table = table.take(pa.array(order)).combine_chunks()
        numbers, starts = np.unique(target[order], return_index=True)
        for number, start, size in zip(numbers, starts, np.diff(starts, append=len(order)), strict=True):
            if number not in self._files:
                path = self._scratch / f"{self._name}-{number:02d}.arrow"
                self._files[number] = _PartFile(path, table.schema)
            self._files[number].write(table.slice(start, size))

    def parts(self) -> Iterator[pa.Table]:
        """The parts, each with whole groups. Each is freed when the next one is requested."""
        if not self._files:
            held, self._held = self._held, []
            yield pa.concat_tables(held) if held else SCHEMA.empty_table()
            return
        self._spill()
        for file in self._files.values():
            file.close()
        for _, file in sorted(self._files.items()):
            alone = len(self._files) == 1 and self._depth > 0  # one group, or as good as one: cutting changes nothing
            with pa.OSFile(str(file.path)) as stream, pa.ipc.open_stream(stream) as batches:
                if file.num_bytes <= self._limit or self._depth >= DEEPEST_CUT - 1 or alone:
                    yield batches.read_all()
                else:
                    finer = GroupParts(self._scratch, self._limit, name=file.path.stem, depth=self._depth + 1)
                    for batch in batches:
                        finer.add(pa.Table.from_batches([batch]))
                    yield from finer.parts()
            file.path.unlink()


class _PartFile:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.num_bytes = path, 0  # in memory
        self._stream = pa.OSFile(str(path), "wb")
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_stream(self._stream, schema, options=options)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)
        self.num_bytes += table.nbytes

    def close(self) -> None:
        self._writer.close()
        self._stream.close()


class OrderedRuns(Generic[Made]):
    """Values in the order of a number, more than memory holds: sorted runs on disk, merged while read."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._runs: list[Path] = []
        self._written = 0

    def add(self, run: Iterable[tuple[int, Made]]) -> None:
        """A run comes sorted, and goes to a file of its own."""
        path = self._scratch / f"run-{self._written:05d}"
        self._written += 1
        with path.open("wb", buffering=BUFFER_BYTES) as file:
            for numbered in run:
                pickle.dump(numbered, file, protocol=5)
        self._runs.append(path)

    def merged(self) -> Iterator[Made]:
        while len(self._runs) > MAX_OPEN_RUNS:
            together, self._runs = self._runs[:MAX_OPEN_RUNS], self._runs[MAX_OPEN_RUNS:]
            self.add(_merge(together))
        yield from map(itemgetter(1), _merge(self._runs))


def _merge(paths: list[Path]) -> Iterator[tuple[int, Made]]:
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb", buffering=BUFFER_BYTES)) for path in paths]
        yield from heapq.merge(*map(_stored, files), key=itemgetter(0))
    for path in paths:
        path.unlink()


def _stored(file: IO[bytes]) -> Iterator[tuple[int, Made]]:
    with suppress(EOFError):
        while True:
            yield pickle.load(file)


@dataclass(frozen=True)
class GroupedPart:
    """A part in the order of its units. Rows are addressed by their position in it; the table is not sorted.

    A *unit* is the traces with the same group and the same prompt. Within a unit rows keep the order of the input.
    """

    table: pa.Table
    order: NDArray[np.int64]  # place -> row of the table
    starts: NDArray[np.int64]  # the place where each unit begins; one more at the end

    @classmethod
    def of(cls, table: pa.Table) -> GroupedPart:
        row, group, prompt = (table[name].to_numpy() for name in ("row", "group", "prompt_hash"))
        order = np.lexsort((row, prompt, group))
        changes = np.zeros(max(len(order) - 1, 0), dtype=bool)
        for key in (prompt, group):
            changes |= key[order][1:] != key[order][:-1]
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(order)]] if len(order) else [[0]])
        # In one piece: taking rows out of a column in pieces would put it together each time.
        return cls(table.combine_chunks(), order, starts.astype(np.int64))

    def __len__(self) -> int:
        """The number of units."""
        return len(self.starts) - 1

    def take(self, names: list[str], places: NDArray[np.int64]) -> pa.Table:
        return self.table.select(names).take(pa.array(self.order[places]))

    def texts(self, name: str, places: NDArray[np.int64]) -> list[Response]:
        """The prompts or responses at these places: texts, or messages."""
        columns = self.take([name, f"{name}_is_chat"], places).columns
        return [decoded(text, chat) for text, chat in zip(*(column.to_pylist() for column in columns), strict=True)]

    def without(self, drop: NDArray[np.bool_]) -> GroupedPart:
        """Without some places. The first of a unit is never one of them, so that the order of units stays."""
        if not drop.any():
            return self
        assert not drop[self.starts[:-1]].any()
        kept = np.concatenate([[0], np.cumsum(~drop)])
        return GroupedPart(self.table, self.order[~drop], kept[self.starts])

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The number of each row in the input, by place."""
        return np.asarray(self.table["row"].to_numpy()[self.order])

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        return np.asarray(self.table["reward"].to_numpy()[self.order])

    @cached_property
    def response_codes(self) -> NDArray[np.int64]:
        """Equal numbers for equal responses."""
        column = self.table["response"].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        codes = column.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        return np.asarray(codes[self.order], dtype=np.int64)

    @cached_property
    def unit_of(self) -> NDArray[np.int64]:
        """The unit that each place belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @cached_property
    def group_starts(self) -> NDArray[np.int64]:
        """The place where each group begins, whatever its prompts; one more at the end."""
        group = self.table["group"].to_numpy()[self.order]
        if not len(group):
            return np.zeros(1, dtype=np.int64)
        return np.concatenate([[0], np.flatnonzero(group[1:] != group[:-1]) + 1, [len(group)]]).astype(np.int64)

    @property
    def groups_with_several_units(self) -> int:
        first_unit_of_group = np.searchsorted(self.starts, self.group_starts)
        return int((np.diff(first_unit_of_group) > 1).sum())

    @cached_property
    def first_rows(self) -> NDArray[np.int64]:
        return self.rows[self.starts[:-1]]

    @cached_property
    def in_order(self) -> NDArray[np.int64]:
        """The units by first appearance in the input."""
        return np.argsort(self.first_rows, kind="stable")
