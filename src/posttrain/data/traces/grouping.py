"""Groups traces without holding the files in memory.

Tables are collected; once they pass a limit they are written to temporary files, cut by the hash of the group, so that a group
lies in one file whole. A file that is still too large is cut again by other bits of the hash. Then one file after another is
read and sorted. What comes out does not depend on where the cuts were: each group has its first row in the input, and
ordered_runs.py puts them in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.data.traces.canonical import SCHEMA

MEMORY_BYTES = 96 << 20  # tables held before they are cut, and the largest part that is sorted at once
BITS_PER_CUT = 6
DEEPEST_CUT = 64 // BITS_PER_CUT


class GroupParts:
    """Collects tables and returns them in parts that hold complete groups."""

    def __init__(self, scratch: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self._scratch, self._limit = scratch, memory_bytes
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._cut: _Cut | None = None

    def add(self, table: pa.Table) -> None:
        self._held.append(table)
        self._held_bytes += table.nbytes
        if self._held_bytes >= self._limit:
            self._spill()

    def _spill(self) -> None:
        if not self._held:
            return
        if self._cut is None:
            self._cut = _Cut(self._scratch, "part", 0)
        self._cut.write(pa.concat_tables(self._held))
        self._held, self._held_bytes = [], 0

    @property
    def spilled(self) -> bool:
        """Whether there is more than memory should hold, and so more than one part."""
        return self._cut is not None

    def parts(self) -> Iterator[pa.Table]:
        """The parts, each with whole groups. Each is freed when the next one is requested."""
        if self._cut is None:
            held, self._held = self._held, []
            yield pa.concat_tables(held) if held else SCHEMA.empty_table()
            return
        self._spill()
        yield from self._read(self._cut)

    def _read(self, cut: _Cut) -> Iterator[pa.Table]:
        sizes = cut.close()
        for path, size in sizes.items():
            alone = len(sizes) == 1 and cut.depth > 0  # one group, or as good as one: cutting again changes nothing
            if size > self._limit and cut.depth < DEEPEST_CUT - 1 and not alone:
                finer = _Cut(self._scratch, path.stem, cut.depth + 1)
                with pa.OSFile(str(path)) as stream, pa.ipc.open_stream(stream) as batches:
                    for batch in batches:
                        finer.write(pa.Table.from_batches([batch]))
                path.unlink()
                yield from self._read(finer)
            else:
                with pa.OSFile(str(path)) as stream, pa.ipc.open_stream(stream) as batches:
                    table = batches.read_all()
                path.unlink()
                yield table


class _Cut:
    """Temporary files, one for each value that some bits of the group's hash can have."""

    def __init__(self, scratch: Path, name: str, depth: int) -> None:
        self.depth = depth
        self._paths = [scratch / f"{name}-{index:02d}.arrow" for index in range(1 << BITS_PER_CUT)]
        self._writers: dict[int, tuple[pa.OSFile, pa.ipc.RecordBatchStreamWriter]] = {}
        self._sizes: dict[int, int] = {}

    def write(self, table: pa.Table) -> None:
        shift = np.uint64(64 - BITS_PER_CUT * (self.depth + 1))
        target = (table["group"].to_numpy() >> shift) & np.uint64((1 << BITS_PER_CUT) - 1)
        order = np.argsort(target, kind="stable")
        table = table.take(pa.array(order)).combine_chunks()
        edges = np.searchsorted(target[order], np.arange((1 << BITS_PER_CUT) + 1))
        for index in range(1 << BITS_PER_CUT):
            start, stop = int(edges[index]), int(edges[index + 1])
            if start == stop:
                continue
            piece = table.slice(start, stop - start)
            if index not in self._writers:
                stream = pa.OSFile(str(self._paths[index]), "wb")
                options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
                self._writers[index] = (stream, pa.ipc.new_stream(stream, piece.schema, options=options))
            self._writers[index][1].write_table(piece)
            self._sizes[index] = self._sizes.get(index, 0) + piece.nbytes

    def close(self) -> dict[Path, int]:
        """The files that were written, with the bytes that their tables have in memory."""
        for stream, writer in self._writers.values():
            writer.close()
            stream.close()
        return {self._paths[index]: self._sizes[index] for index in sorted(self._writers)}


@dataclass(frozen=True)
class GroupedPart:
    """A part in the order of its units. Rows are addressed by their position in that order; the table itself is not
    sorted.

    A *unit* is the traces with the same group and the same prompt; with `split_prompts` off, all of a group. Within a unit
    rows keep the order of the input.
    """

    table: pa.Table
    order: NDArray[np.int64]  # place -> row of the table
    starts: NDArray[np.int64]  # the place where each unit begins; one more at the end

    @classmethod
    def of(cls, table: pa.Table, *, split_prompts: bool = True) -> GroupedPart:
        row, group, prompt = (table[name].to_numpy() for name in ("row", "group", "prompt_hash"))
        keys = (prompt, group) if split_prompts else (group,)
        order = np.lexsort((row, *keys))
        changes = np.zeros(max(len(order) - 1, 0), dtype=bool)
        for key in keys:
            changes |= key[order][1:] != key[order][:-1]
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(order)]] if len(order) else [[0]])
        # In one piece: taking rows out of a column in pieces would put it together each time.
        return cls(table.combine_chunks(), order, starts.astype(np.int64))

    def __len__(self) -> int:
        """The number of units."""
        return len(self.starts) - 1

    def take(self, names: list[str], places: NDArray[np.int64]) -> pa.Table:
        return self.table.select(names).take(pa.array(self.order[places]))

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
