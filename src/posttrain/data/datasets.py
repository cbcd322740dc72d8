"""Datasets in tokens: tasks to answer, pairs to compare, examples to imitate.

Tokens are kept as flat integer arrays, because a million prompts as Python integers would not fit in memory; an item is
put together when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Generic, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from posttrain.data.chat import ChatFormat
from posttrain.data.entries import Entry, read_entries
from posttrain.data.errors import DataError
from posttrain.data.named import (
    PREFERENCE_DATASETS,
    RESPONSE_DATASETS,
    PreferenceSpec,
    ResponseSpec,
    find_spec,
    unknown_dataset,
)
from posttrain.data.readers import ExampleReader, Item, Numbered, Outcome, PairReader, TaskReader
from posttrain.data.shuffling import keyed_order
from posttrain.types import Example, Pair, Task

ROWS_PER_CHUNK = 2048  # read, rendered and tokenised together


class TokenColumn:
    """One list of integers per row."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q")

    def append(self, row: Iterable[int]) -> None:
        self._values.extend(row)
        self._ends.append(len(self._values))

    def bytes_of(self, row: int) -> bytes:
        return self._part(row).tobytes()

    def __getitem__(self, row: int) -> tuple[int, ...]:
        return tuple(self._part(row))

    def _part(self, row: int) -> array[int]:
        return self._values[self._ends[row - 1] if row else 0 : self._ends[row]]


class Table(Generic[Item]):
    """The rows of all entries, in the order of the files. Several datasets may show parts of one table."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.columns: dict[str, TokenColumn] = {}

    def append(self, item: Item, tokens: Mapping[str, Iterable[int]]) -> None:
        for name, row in tokens.items():
            self.columns.setdefault(name, TokenColumn()).append(row)
        self.items.append(item)

    def item(self, row: int, draw: int) -> Item:
        fields: dict[str, Any] = {name: column[row] for name, column in self.columns.items()}
        if "mask" in fields:
            fields["mask"] = tuple(map(bool, fields["mask"]))
        return replace(self.items[row], draw=draw, **fields)

    def digest(self, row: int) -> bytes:
        """Of what the model and the judge see: the same content gives the same digest, whatever file it is in."""
        summary = hashlib.sha256()
        for name, column in sorted(self.columns.items()):
            part = column.bytes_of(row)
            summary.update(f"{name}:{len(part)};".encode() + part)
        answer = getattr(self.items[row], "reference", None)
        summary.update(json.dumps(answer, sort_keys=True, default=str).encode())
        return summary.digest()


@dataclass(frozen=True)
class HoldOut:
    """What an entry wants to be kept for validation: positions [start, stop) of the dataset are its rows."""

    start: int
    stop: int
    size: float
    seed: int


class RowDataset(Generic[Item]):
    """A sequence of items. `dropped` counts the rows that were left out, by reason."""

    def __init__(
        self,
        name: str,
        table: Table[Item],
        rows: Sequence[int] | NDArray[np.int64],
        dropped: Mapping[str, int] | None = None,
        hold_outs: Sequence[HoldOut] = (),
    ) -> None:
        self.name = name
        self.dropped = dict(dropped or {})
        self._table: Table[Item] = table
        self._rows = np.asarray(rows, dtype=np.int64)
        self._hold_outs = tuple(hold_outs)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a dataset of {len(self)}")
        return self._table.item(int(self._rows[index]), draw=index)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 of the content in its order. Two datasets with the same one give the same run."""
        summary = hashlib.sha256()
        for row in self._rows:
            summary.update(self._table.digest(int(row)))
        return summary.hexdigest()

    def split(self, validation_size: float, seed: int) -> tuple[Self, Self]:
        """Training rows and validation rows: a share of them below 1, otherwise a number. Equal rows stay together."""
        training, validation = self._divide(range(len(self)), validation_size, seed)
        return self._part(training, self.dropped), self._part(validation)

    def held_out(self) -> tuple[Self, Self | None]:
        """Training and validation rows as the entries' `split_validation_size` say; None when no entry keeps any back."""
        training: list[int] = []
        validation: list[int] = []
        for part in self._hold_outs:
            positions = range(part.start, part.stop)
            kept, held = self._divide(positions, part.size, part.seed) if part.size else (list(positions), [])
            training += kept
            validation += held
        return (self._part(training, self.dropped), self._part(validation)) if validation else (self, None)

    def _divide(self, positions: Sequence[int], size: float, seed: int) -> tuple[list[int], list[int]]:
        digests = [self._table.digest(int(self._rows[position])) for position in positions]
        distinct = list(dict.fromkeys(digests))
        count = int(size) if size >= 1 else max(1, round(size * len(distinct)))
        if not 0 < count < len(distinct):
            raise DataError(
                f"{self.name}: a validation part of {size:g} leaves nothing to train on or to validate with; "
                f"there are {len(distinct)} different rows"
            )
        chosen = {distinct[index] for index in keyed_order(len(distinct), seed, 0)[:count]}
        training = [position for position, digest in zip(positions, digests, strict=True) if digest not in chosen]
        # A repeated row is validated once.
        first = {digest: position for position, digest in reversed(list(zip(positions, digests, strict=True)))}
        return training, sorted(first[digest] for digest in chosen)

    def _part(self, positions: Sequence[int], dropped: Mapping[str, int] | None = None) -> Self:
        return type(self)(self.name, self._table, self._rows[list(positions)], dropped)


class TaskDataset(RowDataset[Task]):
    """Prompts with what is needed to judge an answer."""


class PairDataset(RowDataset[Pair]):
    """Preferences."""


class ExampleDataset(RowDataset[Example]):
    """Answers to imitate."""


class Reader(Protocol[Item]):
    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Item]]: ...


def load_task_dataset(
    entries: Any, defaults: Any, chat: ChatFormat, *, max_prompt_tokens: int | None, seed: int
) -> TaskDataset:
    """Tasks of one entry, or of several one after another. Prompts over `max_prompt_tokens` are dropped."""
    loading: _Loading[Task] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        known = _response_spec(entry)
        reader = TaskReader(entry, known or RESPONSE_DATASETS[0], chat, max_prompt_tokens)
        loading.add(entry, known, reader)
    return TaskDataset(*loading.finished())


def load_pair_dataset(
    entries: Any, defaults: Any, chat: ChatFormat, *, max_total_tokens: int, seed: int
) -> PairDataset:
    """Pairs whose prompt with the longer answer has at most `max_total_tokens`."""
    loading: _Loading[Pair] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        known = _preference_spec(entry)
        loading.add(entry, known, PairReader(entry, known or PREFERENCE_DATASETS[0], chat, max_total_tokens))
    return PairDataset(*loading.finished())


def load_example_dataset(
    entries: Any, defaults: Any, chat: ChatFormat, *, max_total_tokens: int, only_unmask_final: bool, seed: int
) -> ExampleDataset:
    """Examples of at most `max_total_tokens`; every assistant's turn is trained, or the last one only."""
    loading: _Loading[Example] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        known = _response_spec(entry)
        reader = ExampleReader(entry, known or RESPONSE_DATASETS[0], chat, max_total_tokens, only_unmask_final)
        loading.add(entry, known, reader)
    return ExampleDataset(*loading.finished())


class _Loading(Generic[Item]):
    """Gathers the rows of one entry after another."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._table: Table[Item] = Table()
        self._names: list[str] = []
        self._rows: list[int] = []
        self._dropped: Counter[str] = Counter()
        self._hold_outs: list[HoldOut] = []

    def add(self, entry: Entry, known: ResponseSpec | PreferenceSpec | None, reader: Reader[Item]) -> None:
        name = _label(entry, known)
        first, dropped = len(self._table.items), Counter[str]()
        rows = ((f"{name}:{index}", row) for index, row in enumerate(entry.rows(known)))
        while chunk := list(islice(rows, ROWS_PER_CHUNK)):
            for outcome in reader.read(chunk):
                if isinstance(outcome, str):
                    dropped[outcome] += 1
                else:
                    self._table.append(outcome.item, outcome.tokens)
        kept = range(first, len(self._table.items))
        if not kept:
            reasons = "; ".join(f"{reason}: {count}" for reason, count in dropped.items()) or "it has none"
            raise DataError(
                f"{name}: no row is left ({reasons}). Raise policy.max_total_sequence_length, or look at the data"
            )
        start = len(self._rows)
        self._rows += list(kept) * (entry.repeat or 1)
        seed = self._seed if entry.seed is None else entry.seed
        self._hold_outs.append(HoldOut(start, len(self._rows), entry.split_validation_size or 0.0, seed))
        self._names.append(name)
        self._dropped += dropped

    def finished(self) -> tuple[str, Table[Item], list[int], dict[str, int], list[HoldOut]]:
        return "+".join(self._names), self._table, self._rows, dict(self._dropped), self._hold_outs


def _response_spec(entry: Entry) -> ResponseSpec | None:
    return _known(entry, find_spec(entry.dataset_name or "", RESPONSE_DATASETS), RESPONSE_DATASETS)


def _preference_spec(entry: Entry) -> PreferenceSpec | None:
    return _known(entry, find_spec(entry.dataset_name or "", PREFERENCE_DATASETS), PREFERENCE_DATASETS)


def _known(entry: Entry, found: Any, specs: Any) -> Any:
    """The named dataset; None for a path or a hub name, whose rows are read by their keys."""
    name = entry.dataset_name
    if found or not name or "/" in name or (not entry.data_path and entry.local_path):
        return found
    raise unknown_dataset(name, specs)


def _label(entry: Entry, known: ResponseSpec | PreferenceSpec | None) -> str:
    """A short name for people: the one it was given, the dataset's, or that of its file."""
    if entry.name:
        return entry.name
    if known and known.hub:
        return known.name
    path = entry.local_path
    if path is None:
        return entry.dataset_name or ""
    return path.rstrip("/").rpartition("/")[2].split(".")[0] or path
