"""From files to groups and pairs: the functions that training and the command line call.

Steps: read blocks, convert them to one schema, filter, group (on disk if needed), remove duplicates, make groups or
pairs of each unit, and return them in the order in which their prompts first appeared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.errors import DataError
from posttrain.data.traces.canonical import SCHEMA, canonical_table, trace_of
from posttrain.data.traces.files import BrokenFiles, ProgressCall, TraceFile, locate, read_blocks
from posttrain.data.traces.filters import passing, without_duplicates
from posttrain.data.traces.grouping import MEMORY_BYTES, UNITS_AT_ONCE, GroupedPart, GroupParts, Made, OrderedRuns
from posttrain.data.traces.layout import Layout, arrow_types, find_layout
from posttrain.data.traces.pairs import PairRow, pair_rows
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import PairRules, TraceColumns, TraceFilters, TraceGroup

COMPARED = list(SCHEMA.names[: SCHEMA.get_field_index("reward") + 1])  # the columns that pairs and statistics need


@dataclass(frozen=True)
class Reading:
    """How files are read: what is the same for groups, pairs and statistics."""

    path: str | Sequence[str]  # a file, a folder, a pattern or a URL; or several of them
    columns: TraceColumns = field(default_factory=TraceColumns)
    filters: TraceFilters = field(default_factory=TraceFilters)
    broken_files: BrokenFiles = "error"  # "skip" uses what can be read and names the rest in the report
    scratch: str | None = None  # folder for temporary files; None: the system's
    memory_bytes: int = MEMORY_BYTES  # tables beyond this go to disk
    on_progress: ProgressCall | None = None

    def __post_init__(self) -> None:
        if self.scratch is not None and not Path(self.scratch).is_dir():
            raise DataError(f"scratch: no folder {self.scratch!r}; temporary files need one that exists")

    @property
    def name(self) -> str:
        """The path, or the paths, for people."""
        return self.path if isinstance(self.path, str) else " ".join(self.path)

    def tables(self, report: ReadReport, files: list[TraceFile]) -> Iterator[pa.Table]:
        """The usable rows that pass the filters, in the order of the files."""
        layouts: dict[str, Layout] = {}

        def choose(file: str, has: Any, first_rows: Any) -> tuple[list[str], dict[str, pa.DataType]]:
            layout = find_layout(self.columns, has, file, list(self.filters.where))
            if self.filters.by_time and not layout.time:
                need = "`since` and `until` need a column with the time"
                raise DataError(f"{file}: {need}, and the file has none by a usual name")
            report.pair_files += file not in layouts and layout.shape == "pair"
            layouts[file] = layout
            return layout.names, arrow_types(layout, first_rows) if first_rows else {}

        blocks = read_blocks(files, choose, report, broken_files=self.broken_files, on_progress=self.on_progress)
        for file_index, block in blocks:
            table, places = canonical_table(block, layouts[block.file], file_index, report)
            table = passing(table, block, places, self.filters, report)
            report.kept += table.num_rows
            if table.num_rows:
                yield table
        if not report.rows:
            raise DataError(f"{self.name}: no rows")

    def grouped(
        self,
        report: ReadReport,
        parts: GroupParts,
        files: list[TraceFile],
        *,
        columns: Sequence[str] = SCHEMA.names,
        on_table: Callable[[pa.Table], None] = lambda table: None,
    ) -> Iterator[GroupedPart]:
        """Everything that was read, in parts that hold whole groups, duplicates left out."""
        names = [file.shown for file in files]
        for table in self.tables(report, files):
            on_table(table)
            parts.add(table.select(columns))
        for table in parts.parts():
            part = GroupedPart.of(table)
            report.ids_with_several_prompts += part.groups_with_several_units
            yield without_duplicates(part, self.filters, names, report)


def ordered(
    reading: Reading,
    report: ReadReport,
    make: Callable[[GroupedPart], Iterator[tuple[int, Made]]],
    files: list[TraceFile],
    *,
    columns: Sequence[str] = SCHEMA.names,
) -> Iterator[Made]:
    """What `make` yields for all parts, sorted by the number that it gives to each."""
    with tempfile.TemporaryDirectory(prefix="posttrain-traces-", dir=reading.scratch) as folder:
        parts = GroupParts(Path(folder), reading.memory_bytes)
        runs: OrderedRuns[Made] = OrderedRuns(Path(folder))
        for part in reading.grouped(report, parts, files, columns=columns):
            if parts.spilled:
                runs.add(make(part))
            else:
                yield from (made for _, made in make(part))
        yield from runs.merged()


def iter_trace_groups(
    path: str | Sequence[str],
    columns: TraceColumns | None = None,
    filters: TraceFilters | None = None,
    *,
    report: ReadReport | None = None,
    **options: Any,
) -> Iterator[TraceGroup]:
    """The traces at `path` (a file, a folder, a pattern, a URL), grouped, in the order in which prompts first appear.

    A group has one prompt and, where there are group ids, one id. `report` is filled while the groups are taken and
    complete after the last one; `options` are further fields of `Reading`.
    """
    reading = Reading(path, columns or TraceColumns(), filters or TraceFilters(), **options)
    files = locate(path)
    names = [file.shown for file in files]

    def groups(part: GroupedPart) -> Iterator[tuple[int, TraceGroup]]:
        for begin in range(0, len(part), UNITS_AT_ONCE):
            units = part.in_order[begin : begin + UNITS_AT_ONCE]
            sizes = part.starts[units + 1] - part.starts[units]
            places = [np.arange(start, start + size) for start, size in zip(part.starts[units], sizes, strict=True)]
            rows = part.take(SCHEMA.names, np.concatenate(places)).to_pylist()
            traces = iter([trace_of(row, names) for row in rows])
            for first_row, size in zip(part.first_rows[units].tolist(), sizes.tolist(), strict=True):
                own = list(islice(traces, size))
                yield first_row, TraceGroup(own[0].prompt, own, own[0].group_id)

    yield from ordered(reading, ReadReport() if report is None else report, groups, files)


def iter_pair_rows(
    path: str | Sequence[str],
    columns: TraceColumns | None = None,
    filters: TraceFilters | None = None,
    rules: PairRules | None = None,
    *,
    report: ReadReport | None = None,
    pair_report: PairReport | None = None,
    **options: Any,
) -> Iterator[PairRow]:
    """Preference pairs of the traces at `path`, with NeMo-Aligner's keys, in the order in which prompts first appear.

    `prompt` is a text or a list of messages, as the traces have it. `chosen_response` and `rejected_response` are the
    texts of the answers, or lists of messages where a trace goes on for several turns. `chosen_reward`,
    `rejected_reward`: numbers.
    """
    reading = Reading(path, columns or TraceColumns(), filters or TraceFilters(), **options)
    wanted, counts = rules or PairRules(), PairReport() if pair_report is None else pair_report
    read = ReadReport() if report is None else report
    yield from ordered(reading, read, lambda part: pair_rows(part, wanted, counts), locate(path), columns=COMPARED)
