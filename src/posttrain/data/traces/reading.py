"""From files to groups and pairs: the functions that training and the command line call.

Steps of `_ordered_records`: read blocks, convert them to one schema, filter, group (on disk if needed), remove
duplicates, convert each unit to records, and return records in the order in which their prompts first appeared.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.data.errors import DataError
from posttrain.data.traces import report as reasons
from posttrain.data.traces.canonical import SCHEMA, canonical_table, place_of, trace_of
from posttrain.data.traces.chat_text import decoded
from posttrain.data.traces.duplicates import near_duplicates
from posttrain.data.traces.files import BrokenFiles, ProgressCall, TraceFile, locate, read_blocks
from posttrain.data.traces.filters import check_filters, passing
from posttrain.data.traces.grouping import MEMORY_BYTES, GroupedPart, GroupParts
from posttrain.data.traces.layout import Layout, arrow_types, find_layout
from posttrain.data.traces.ordered_runs import OrderedRuns, Record
from posttrain.data.traces.pairs import choose_pairs, clear_best_worst
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import PairRules, TraceColumns, TraceFilters, TraceGroup, text_of
from posttrain.files.json_files import JsonObject

PairRow = JsonObject
UNITS_AT_ONCE = 1024  # turned into Python objects together
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
            check_filters(self.filters, layout, file)
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
        split_prompts: bool = True,
        columns: Sequence[str] = SCHEMA.names,
        on_table: Callable[[pa.Table], None] = lambda table: None,
    ) -> Iterator[GroupedPart]:
        """Everything that was read, in parts that hold whole groups, duplicates left out."""
        names = [file.shown for file in files]
        for table in self.tables(report, files):
            on_table(table)
            parts.add(table.select(columns))
        for table in parts.parts():
            part = GroupedPart.of(table, split_prompts=split_prompts)
            report.ids_with_several_prompts += part.groups_with_several_units
            yield without_duplicates(part, self.filters, names, report)


def iter_trace_groups(
    path: str | Sequence[str],
    columns: TraceColumns | None = None,
    filters: TraceFilters | None = None,
    *,
    split_prompts: bool = True,
    report: ReadReport | None = None,
    broken_files: BrokenFiles = "error",
    scratch: str | None = None,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: ProgressCall | None = None,
) -> Iterator[TraceGroup]:
    """The traces at `path` (a file, a folder, a pattern, a URL), grouped, in the order in which prompts first appear.

    A group has one prompt and, where there are group ids, one id. With `split_prompts` off a group is an id, whatever the
    prompts are: then each trace's own `prompt` counts. `report` is filled while the groups are taken and complete after the
    last one.
    """
    reading = _reading(path, columns, filters, broken_files, scratch, memory_bytes, on_progress)
    files = locate(path)
    names = [file.shown for file in files]

    def records(part: GroupedPart) -> Iterator[Record]:
        for begin in range(0, len(part), UNITS_AT_ONCE):
            units = part.in_order[begin : begin + UNITS_AT_ONCE]
            sizes = part.starts[units + 1] - part.starts[units]
            places = np.concatenate(
                [np.arange(start, start + n) for start, n in zip(part.starts[units], sizes, strict=True)]
            )
            traces = iter([trace_of(row, names) for row in part.take(SCHEMA.names, places).to_pylist()])
            for first_row, size in zip(part.first_rows[units].tolist(), sizes.tolist(), strict=True):
                own = list(islice(traces, size))
                yield first_row, pickle.dumps(TraceGroup(own[0].prompt, own, own[0].group_id), protocol=5)

    found = report if report is not None else ReadReport()
    for payload in ordered_records(reading, found, records, files, split_prompts=split_prompts):
        yield pickle.loads(payload)


def iter_pair_rows(
    path: str | Sequence[str],
    columns: TraceColumns | None = None,
    filters: TraceFilters | None = None,
    rules: PairRules | None = None,
    *,
    report: ReadReport | None = None,
    pair_report: PairReport | None = None,
    broken_files: BrokenFiles = "error",
    scratch: str | None = None,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: ProgressCall | None = None,
) -> Iterator[PairRow]:
    """Preference pairs made from the traces at `path`, with NeMo-Aligner's keys, in the order in which prompts first appear.

    `prompt` is a text or a list of messages, as the traces have it. `chosen_response` and `rejected_response` are the texts of
    the answers, or lists of messages where a trace goes on for several turns. `chosen_reward`, `rejected_reward`: numbers.
    """
    reading = _reading(path, columns, filters, broken_files, scratch, memory_bytes, on_progress)
    counts = pair_report if pair_report is not None else PairReport()
    found = report if report is not None else ReadReport()
    pair_rules = rules or PairRules()

    def records(part: GroupedPart) -> Iterator[Record]:
        for place, row in pair_rows(part, pair_rules, counts):
            yield place, pickle.dumps(row, protocol=5)

    for payload in ordered_records(reading, found, records, locate(path), columns=COMPARED):
        yield pickle.loads(payload)


def _reading(
    path: str | Sequence[str],
    columns: TraceColumns | None,
    filters: TraceFilters | None,
    broken_files: BrokenFiles,
    scratch: str | None,
    memory_bytes: int,
    on_progress: ProgressCall | None,
) -> Reading:
    return Reading(
        path, columns or TraceColumns(), filters or TraceFilters(), broken_files, scratch, memory_bytes, on_progress
    )


def ordered_records(
    reading: Reading,
    report: ReadReport,
    records: Callable[[GroupedPart], Iterator[Record]],
    files: list[TraceFile],
    *,
    split_prompts: bool = True,
    columns: Sequence[str] = SCHEMA.names,
) -> Iterator[bytes]:
    """The output of `records` for all parts, sorted by record number."""
    with tempfile.TemporaryDirectory(prefix="posttrain-traces-", dir=reading.scratch) as folder:
        parts = GroupParts(Path(folder), reading.memory_bytes)
        runs = OrderedRuns(Path(folder))
        for part in reading.grouped(report, parts, files, split_prompts=split_prompts, columns=columns):
            if parts.spilled:
                runs.add(records(part))
            else:
                yield from (payload for _, payload in records(part))
        yield from runs.merged()


def pair_rows(part: GroupedPart, rules: PairRules, counts: PairReport) -> Iterator[tuple[int, PairRow]]:
    """The pairs of a part, prompts by first appearance, each with the first row of its prompt."""
    units, chosen, rejected = paired_rows(part, rules, counts)
    for begin in range(0, len(units), UNITS_AT_ONCE):  # only the texts that are needed leave Arrow
        window = slice(begin, begin + UNITS_AT_ONCE)
        first_rows = part.first_rows[units[window]].tolist()
        prompts = _texts(part, "prompt", part.starts[units[window]])
        answers = _texts(part, "response", chosen[window]), _texts(part, "response", rejected[window])
        rewards = part.rewards[chosen[window]].tolist(), part.rewards[rejected[window]].tolist()
        for row, prompt, good, bad, high, low in zip(first_rows, prompts, *answers, *rewards, strict=True):
            yield (
                row,
                {
                    "prompt": prompt,
                    "chosen_response": good,
                    "rejected_response": bad,
                    "chosen_reward": high,
                    "rejected_reward": low,
                },
            )


def _texts(part: GroupedPart, name: str, places: NDArray[np.int64]) -> list[Any]:
    picked = part.take([name, f"{name}_is_chat"], places)
    return [decoded(text, chat) for text, chat in zip(*(column.to_pylist() for column in picked.columns), strict=True)]


def paired_rows(
    part: GroupedPart, rules: PairRules, counts: PairReport
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The unit, the preferred row and the rejected row of every pair of a part, in the order of the pairs."""
    rewards, identities, starts = part.rewards.tolist(), part.response_codes.tolist(), part.starts.tolist()
    best, worst, clear = clear_best_worst(part.rewards, part.response_codes, part.starts, rules)
    found: list[tuple[int, int, int]] = []
    for unit in part.in_order.tolist():
        if clear[unit]:
            counts.prompts_with_pairs += 1
            found.append((unit, best[unit], worst[unit]))
            continue
        start, stop = starts[unit], starts[unit + 1]
        choice = choose_pairs(rewards[start:stop], identities[start:stop], rules)
        counts.over_the_cap += choice.over_the_cap
        if choice.pairs:
            counts.prompts_with_pairs += 1
        else:
            counts.none[choice.why_none] += 1
        found += [(unit, start + good, start + bad) for good, bad in choice.pairs]
    units, chosen, rejected = np.array(found, dtype=np.int64).reshape(-1, 3).T
    counts.prompts += len(part)
    counts.pairs += len(found)
    counts.margin_sum += float((part.rewards[chosen] - part.rewards[rejected]).sum())
    return units, chosen, rejected


def without_duplicates(part: GroupedPart, filters: TraceFilters, files: list[str], report: ReadReport) -> GroupedPart:
    """Of equal responses in a unit the first stays; of nearly equal ones too, if that is asked for."""
    if filters.duplicates == "keep" or not len(part):
        return part
    original = repeated_responses(part)
    drop = original != np.arange(len(original))
    report.conflicting_duplicates += int((drop & (part.rewards != part.rewards[original])).sum())
    part = _leave_out(part, drop, reasons.EXACT_DUPLICATE, files, report)
    if filters.duplicates == "near":
        drop = np.zeros(len(part.rows), dtype=bool)
        for start, stop in zip(part.starts[:-1].tolist(), part.starts[1:].tolist(), strict=True):
            if stop - start > 1:
                responses = _texts(part, "response", np.arange(start, stop))
                matches = near_duplicates(
                    [text_of(turns, only_role="assistant") for turns in responses], filters.near_similarity
                )
                drop[start:stop] = [match is not None for match in matches]
        part = _leave_out(part, drop, reasons.NEAR_DUPLICATE, files, report)
    return part


def repeated_responses(part: GroupedPart) -> NDArray[np.int64]:
    """For each row the first row of its unit with the same response."""
    identity = part.unit_of * (int(part.response_codes.max(initial=0)) + 1) + part.response_codes
    _, first, inverse = np.unique(identity, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])


def _leave_out(part: GroupedPart, drop: Any, reason: str, files: list[str], report: ReadReport) -> GroupedPart:
    if drop.any():
        rows = part.rows[drop]
        report.filter(reason, len(rows), (place_of(int(row), files) for row in rows[: reasons.EXAMPLES_PER_REASON]))
        report.kept -= len(rows)
    return part.without(drop)
