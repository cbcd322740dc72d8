"""Tokenised datasets and their loading: tasks, preference pairs, labelled answers, supervised examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Generic

from posttrain.data.chat import ChatFormat, WholeChatFormat
from posttrain.data.entries import Entries, Entry, Section, read_entries
from posttrain.data.errors import DataError
from posttrain.data.named_datasets import (
    PREFERENCE_DATASETS,
    RESPONSE_DATASETS,
    NamedDataset,
    preference_spec,
    response_spec,
)
from posttrain.data.packed_file import PackedFile
from posttrain.data.preference_shapes import read_judgements
from posttrain.data.readers import (
    ExampleReader,
    Item,
    JudgedReader,
    Numbered,
    Outcome,
    PairReader,
    TaskReader,
    preference_keys,
)
from posttrain.data.row_dataset import HoldOut, RowDataset, Table
from posttrain.data.sources import Row
from posttrain.data.trace_datasets import RecordedReader, TraceRows
from posttrain.types import Example, Judged, Pair, Task

ROWS_PER_CHUNK = 2048  # read, rendered and tokenised together


TaskDataset = RowDataset[Task]  # prompts with the data needed to score an answer
PairDataset = RowDataset[Pair]  # preferences
JudgedDataset = RowDataset[Judged]  # answers that are labelled good or bad
ExampleDataset = RowDataset[Example]  # answers for supervised training


def load_task_dataset(
    entries: Entries,
    defaults: Section | None,
    chat: ChatFormat,
    *,
    max_prompt_tokens: int | None,
    seed: int,
    max_total_tokens: int = 1 << 30,
    needs_signal: bool = True,
) -> TaskDataset:
    """Tasks of one entry, or of several one after another. Prompts over `max_prompt_tokens` are dropped.

    Of recorded groups, answers over `max_total_tokens` are, and with `needs_signal` groups whose rewards are all equal.
    """
    loading: _Loading[Task] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        if entry.holds_recorded_groups:
            traces = TraceRows(entry)
            answers = RecordedReader(entry, chat, max_total_tokens, needs_signal=needs_signal)
            loading.add(entry, None, answers.read, traces.groups(), traces.left_out)
        else:
            known = response_spec(entry, needs_reference=True)
            reader = TaskReader(entry, known or RESPONSE_DATASETS[0], chat, max_prompt_tokens)
            loading.add(entry, known, reader.read)
    return loading.finished()


def load_pair_dataset(
    entries: Entries, defaults: Section | None, chat: ChatFormat, *, max_total_tokens: int, seed: int
) -> PairDataset:
    """Pairs whose prompt with the longer answer has at most `max_total_tokens`."""
    loading: _Loading[Pair] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        known = preference_spec(entry)
        spec = known or PREFERENCE_DATASETS[0]
        if spec.kind == "packed":
            if isinstance(chat, WholeChatFormat):
                raise DataError(
                    f"{entry.file}: packs hold answers up to the end of the turn, and a reward model reads whole "
                    "conversations; use the rows that they were made of"
                )
            loading.add_packed(entry, known, PackedFile.open(entry.file, chat), max_total_tokens)
        elif spec.kind == "traces":
            traces = TraceRows(entry)
            # The text of a trace is a user's message.
            plain = entry.model_copy(update={"prompt_is_templated": bool(entry.prompt_is_templated)})
            reader = PairReader(plain, spec, chat, max_total_tokens)
            loading.add(entry, known, reader.read, traces.pairs(), traces.left_out)
        else:
            loading.add(entry, known, PairReader(entry, spec, chat, max_total_tokens).read)
    return loading.finished()


def load_judged_dataset(
    entries: Entries, defaults: Section | None, chat: ChatFormat, *, max_total_tokens: int, seed: int
) -> JudgedDataset:
    """Desirable and undesirable answers: labelled ones, both answers of each pair, or traces by their rewards."""
    loading: _Loading[Judged] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        known = preference_spec(entry)
        spec = known or PREFERENCE_DATASETS[0]
        if spec.kind == "packed":
            raise DataError(f"{entry.file}: packs hold pairs; use the rows that they were made of")
        if spec.kind == "traces":
            traces = TraceRows(entry)
            reader = JudgedReader(entry, chat, max_total_tokens, traces.judge)
            loading.add(entry, known, reader.read, traces.traces(), traces.left_out)
        else:
            judge = partial(read_judgements, keys=preference_keys(entry, spec))
            loading.add(entry, known, JudgedReader(entry, chat, max_total_tokens, judge).read)
    return loading.finished()


def load_example_dataset(
    entries: Entries,
    defaults: Section | None,
    chat: ChatFormat,
    *,
    max_total_tokens: int,
    only_unmask_final: bool,
    seed: int,
) -> ExampleDataset:
    """Examples of at most `max_total_tokens`; every assistant's turn is trained, or the last one only."""
    loading: _Loading[Example] = _Loading(seed)
    for entry in read_entries(entries, defaults):
        known = response_spec(entry, needs_reference=False)
        reader = ExampleReader(entry, known or RESPONSE_DATASETS[0], chat, max_total_tokens, only_unmask_final)
        rows = known.assemble(entry.rows(known)) if known and known.assemble else None
        loading.add(entry, known, reader.read, rows)
    return loading.finished()


class _Loading(Generic[Item]):
    """Gathers the rows of one entry after another."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._table: Table[Item] = Table()
        self._names: list[str] = []
        self._rows: list[int] = []
        self._dropped: Counter[str] = Counter()
        self._noted: Counter[str] = Counter()
        self._hold_outs: list[HoldOut] = []

    def add(
        self,
        entry: Entry,
        known: NamedDataset | None,
        read: Callable[[Sequence[Numbered]], Iterable[Outcome[Item]]],
        rows: Iterable[Row] | None = None,
        left_out: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """`rows` are the entry's own unless given; `left_out`, once they are read, says what did not become one."""
        name = _label(entry, known)
        numbered = ((f"{name}:{index}", row) for index, row in enumerate(entry.rows(known) if rows is None else rows))
        chunks = iter(lambda: list(islice(numbered, ROWS_PER_CHUNK)), [])
        self._gather(entry, name, (outcome for chunk in chunks for outcome in read(chunk)), left_out)

    def add_packed(
        self: _Loading[Pair], entry: Entry, known: NamedDataset | None, file: PackedFile, max_total_tokens: int
    ) -> None:
        name = _label(entry, known)
        # Packs of several files get distinct numbers.
        first = 1 + max((pair.pack for pair in self._table.items), default=-1)
        self._gather(entry, name, file.outcomes(name, max_total_tokens, first))
        self._table.pack_size = max(self._table.pack_size, file.header.statistics.pack_size)

    def _gather(
        self,
        entry: Entry,
        name: str,
        outcomes: Iterable[Outcome[Item]],
        left_out: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        first, dropped = len(self._table.items), Counter[str]()
        for outcome in outcomes:
            if isinstance(outcome, str):
                dropped[outcome] += 1
            else:
                self._table.append(outcome.item, outcome.tokens)
                self._noted.update(outcome.notes)
        dropped.update(left_out() if left_out else {})
        kept = range(first, len(self._table.items))
        if not kept:
            reasons = "; ".join(f"{reason}: {count}" for reason, count in dropped.items()) or "it has none"
            too_long = any("longer than" in reason for reason in dropped)
            remedy = "Raise policy.max_total_sequence_length, or look" if too_long else "Look"
            raise DataError(f"{name}: no row is left ({reasons}). {remedy} at the data")
        start = len(self._rows)
        self._rows += list(kept) * (entry.repeat or 1)
        seed = self._seed if entry.seed is None else entry.seed
        self._hold_outs.append(HoldOut(start, len(self._rows), entry.split_validation_size or 0.0, seed))
        self._names.append(name)
        self._dropped += dropped

    def finished(self) -> RowDataset[Item]:
        name = "+".join(self._names)
        return RowDataset(name, self._table, self._rows, self._dropped, self._hold_outs, self._noted)


def _label(entry: Entry, known: NamedDataset | None) -> str:
    """A short display name: the configured one, the dataset's, or that of its file."""
    if entry.name:
        return entry.name
    if known and known.hub:
        return known.name
    path = entry.local_path
    if path is None:
        return entry.dataset_name or ""
    return path.rstrip("/").rpartition("/")[2].split(".")[0] or path
