"""The rollouts of a run: every group of every step, read one step at a time.

A step's file is unpacked on request. The newest unpacked ones are kept, up to a number of bytes. Searching a whole
run is done in slices of a fraction of a second, each with a cursor for the next, so that no request takes long and
nothing has to be indexed or written.
"""

from __future__ import annotations

import io
import math
import re
import threading
import time
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.apps.watch.places import Place, Stamp, Unreadable, read_whole
from posttrain.apps.watch.rollout_filters import Filters, summary
from posttrain.files.json_files import JsonObject, parse_json
from posttrain.reporting.run_data import is_group
from posttrain.reporting.run_files import ROLLOUTS_FOLDER
from posttrain.reporting.token_files import TokenFile, read_tokens

Kind = Literal["train", "validation"]
PREFIXES: dict[str, Kind] = {"step": "train", "validation_step": "validation"}
FILE_PREFIX: dict[Kind, str] = {kind: prefix for prefix, kind in PREFIXES.items()}
_NAME = re.compile(r"(step|validation_step)_(\d{1,12})\.(jsonl\.gz|tokens\.npz)")
MAX_STEP_BYTES = 512 * 2**20  # of one unpacked step: a file that unpacks without end must not fill the memory
MAX_GROUPS = 65_536  # of one step
MAX_GROUP_BYTES = 32 * 2**20
MAX_GROUP_VALUES = 2**21  # numbers, texts, lists and objects of a group, and marks of JSON in its texts
MAX_ANSWER_TOKENS = 2**20  # that the tokens of one answer are shown for
LISTING_S = 10.0  # for reading the groups of one step
_LINES_PER_LOOK = 64  # at the clock
_UNPACKED_AT_ONCE = 4 * 2**20
CACHE_BYTES = 96 * 2**20
SLICE_S = 0.04
MAX_HITS = 40
PAGE_GROUPS = 50
SORTS = {
    "reward": ("mean", True),
    "reward_up": ("mean", False),
    "spread": ("spread", True),
    "length": ("mean_length", True),
    "length_up": ("mean_length", False),
}


@dataclass(frozen=True)
class Cursor:
    """Where a search continues: the group `index` of `step`, then older steps."""

    step: int
    index: int


@dataclass(frozen=True)
class Found:
    hits: list[JsonObject]
    cursor: Cursor | None  # None: the search is over
    num_steps_left: int


@dataclass(frozen=True)
class Listing:
    groups: list[JsonObject]
    num_matching: int
    num_groups: int
    num_unreadable: int  # lines that are not a group
    is_cut: bool  # the step has more than is read


class StepLines:
    """The groups of a step, each a line of JSON that is parsed when it is needed. Lines beyond the limit are left out.

    Holds the text and where its lines end, not the lines: a file of short ones would take many times its size.
    """

    def __init__(self, content: bytes | bytearray, *, is_cut: bool = False) -> None:
        self._content = content
        self._spans: list[tuple[int, int]] = []
        start = 0
        while start < len(content) and len(self._spans) < MAX_GROUPS:
            end = content.find(b"\n", start)
            end = end if end >= 0 else len(content)
            self._spans.append((start, end))
            start = end + 1
        self.is_cut = is_cut or start < len(content)
        self.num_bytes = len(content) + 150 * len(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def count_within(self, num_bytes: int) -> int:
        """How many lines begin in the first bytes."""
        return bisect_left(self._spans, (num_bytes, 0))

    def line(self, index: int) -> bytes:
        start, end = self._spans[index]
        return bytes(self._content[start:end])

    def group(self, index: int) -> JsonObject | None:
        """None if there is none, or the line is not one."""
        if index >= len(self._spans) or self._spans[index][1] - self._spans[index][0] > MAX_GROUP_BYTES:
            return None
        line = self.line(index)
        if sum(line.count(mark) for mark in b",:[{") > MAX_GROUP_VALUES:
            return None
        try:
            row = parse_json(line)
        except ValueError:
            return None
        return row if is_group(row) else None


class StepCache:
    """Unpacked steps of all runs, the least recently used ones dropped beyond `max_bytes`."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str, Stamp], StepLines] = OrderedDict()
        self._lock = threading.Lock()
        self._unpacking = threading.Lock()  # one at a time: each may take MAX_STEP_BYTES

    @property
    def num_bytes(self) -> int:
        return sum(lines.num_bytes for lines in self._kept.values())

    def get(self, place: Place, name: str, *, keep: bool = True) -> StepLines | None:
        stamp = place.stamp(name)
        if stamp is None:
            return None
        key = (place.url, name, stamp)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with self._unpacking:
            content = unpacked(read_whole(place, name, MAX_STEP_BYTES))
            lines = StepLines(content, is_cut=len(content) >= MAX_STEP_BYTES)
        if keep and lines.num_bytes <= self._max_bytes:
            with self._lock:
                self._kept[key] = lines
                while self.num_bytes > self._max_bytes:
                    self._kept.popitem(last=False)
        return lines


def unpacked(content: bytes) -> bytearray:
    """Of a gzip file; what can be read of one that is torn, and not more than a limit."""
    unpack, found = zlib.decompressobj(wbits=31), bytearray()
    try:
        while not unpack.eof and len(found) < MAX_STEP_BYTES:
            piece = unpack.decompress(content, min(_UNPACKED_AT_ONCE, MAX_STEP_BYTES - len(found)))
            if not piece:
                break
            found += piece
            content = unpack.unconsumed_tail
    except zlib.error:
        pass
    return found


class RolloutStore:
    def __init__(self, place: Place, cache: StepCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._cache = cache
        self._clock = clock
        self._listed: tuple[object, dict[str, list[int]]] | None = None
        self._lock = threading.Lock()

    def steps(self, kind: Kind, *, with_tokens: bool = False) -> list[int]:
        """The steps that have a file, in order."""
        with self._lock:
            stamp = self._place.folder_stamp(ROLLOUTS_FOLDER)
            if self._listed is None or self._listed[0] != stamp or stamp is None:
                found: dict[str, list[int]] = {}
                for name in self._place.names(ROLLOUTS_FOLDER):
                    if match := _NAME.fullmatch(name):
                        found.setdefault(PREFIXES[match[1]] + match[3], []).append(int(match[2]))
                self._listed = (stamp, {key: sorted(steps) for key, steps in found.items()})
            return self._listed[1].get(kind + ("tokens.npz" if with_tokens else "jsonl.gz"), [])

    def lines(self, kind: Kind, step: int, *, keep: bool = True) -> StepLines | None:
        return self._cache.get(self._place, f"{ROLLOUTS_FOLDER}/{FILE_PREFIX[kind]}_{step}.jsonl.gz", keep=keep)

    def group(self, kind: Kind, step: int, index: int) -> JsonObject | None:
        lines = self.lines(kind, step)
        return lines.group(index) if lines is not None else None

    def first_groups(self, kind: Kind, step: int) -> list[JsonObject]:
        """As many as are looked through for answers that show a problem; none if the file cannot be read."""
        try:
            lines = self.lines(kind, step)
        except Unreadable:
            return []
        found = (lines.group(index) for index in range(lines.count_within(MAX_GROUP_BYTES))) if lines else ()
        return [group for group in found if group is not None]

    def listing(self, kind: Kind, step: int, filters: Filters, sort: str = "order", offset: int = 0) -> Listing:
        """A page of the groups of a step that are asked for."""
        lines = self.lines(kind, step)
        if lines is None:
            return Listing([], 0, 0, 0, False)
        column, descending = SORTS.get(sort, ("index", False))
        started, is_cut, num_unreadable = self._clock(), lines.is_cut, 0
        found: list[tuple[float | None, int]] = []  # not the summaries: of many groups they take much memory
        for index in range(len(lines)):
            if index % _LINES_PER_LOOK == _LINES_PER_LOOK - 1 and self._clock() - started > LISTING_S:
                is_cut = True
                break
            group = lines.group(index)
            if group is None:
                num_unreadable += 1
            elif filters.matching(group) is not None:
                found.append((summary(group, index, [])[column] if sort in SORTS else index, index))
        known = [(value, index) for value, index in found if value is not None]
        known.sort(key=lambda one: one[0], reverse=descending)
        ordered = [*known, *(one for one in found if one[0] is None)]
        rows = []
        for _, index in ordered[offset : offset + PAGE_GROUPS]:
            group = lines.group(index)
            assert group is not None
            rows.append(summary(group, index, filters.matching(group) or [], filters.text))
        return Listing(rows, len(found), len(lines), num_unreadable, is_cut)

    def search(self, kind: Kind, filters: Filters, cursor: Cursor | None, *, slice_s: float = SLICE_S) -> Found:
        """From the newest step to the oldest, until there are enough hits or the time is over. One step at least,
        unless it is a very long one."""
        steps = [step for step in reversed(self.steps(kind)) if cursor is None or step <= cursor.step]
        started, hits = self._clock(), list[JsonObject]()
        for place, step in enumerate(steps):
            first = cursor.index if cursor is not None and step == cursor.step else 0
            try:
                lines = self.lines(kind, step, keep=False)
            except Unreadable:  # of one step; the page of that step says why
                lines = None
            for index in range(first, len(lines) if lines is not None else 0):
                assert lines is not None
                if (index - first) % _LINES_PER_LOOK == _LINES_PER_LOOK - 1 and self._clock() - started > LISTING_S:
                    return Found(hits, Cursor(step, index), len(steps) - place)
                if not filters.may_match(lines.line(index)):
                    continue
                group = lines.group(index)
                if group is None or (matching := filters.matching(group)) is None:
                    continue
                if len(hits) == MAX_HITS:
                    return Found(hits, Cursor(step, index), len(steps) - place)
                hits.append({"step": step, "kind": kind, **summary(group, index, matching, filters.text)})
            if self._clock() - started > slice_s and place + 1 < len(steps):
                return Found(hits, Cursor(steps[place + 1], 0), len(steps) - place - 1)
        return Found(hits, None, 0)


def token_table(place: Place, step: int, draw: int, sample: int) -> JsonObject | None:
    """The tokens of one answer with the numbers behind them; None if the file or the answer is missing."""
    name = f"{ROLLOUTS_FOLDER}/step_{step}.tokens.npz"
    found = read_tokens(io.BytesIO(read_whole(place, name, MAX_STEP_BYTES)))
    return None if found is None else _columns(found, draw, sample)


def _columns(file: TokenFile, draw: int, sample: int) -> JsonObject | None:
    part = file.answer(draw, sample)
    if part is None or part.stop - part.start > MAX_ANSWER_TOKENS:
        return None
    sampler, trainer = file.sampler_logprobs[part], file.trainer_logprobs[part]
    columns = {
        "logprob": sampler,
        "difference": sampler - trainer,
        "advantage": file.advantages[part],
    }
    if file.reference_logprobs is not None:
        gap = file.reference_logprobs[part] - trainer
        columns["kl"] = np.expm1(np.clip(gap, -20, 20)) - gap  # k3, per token
    return {
        "pieces": file.pieces(part),
        "ids": file.token_ids[part].tolist(),
        "trained": file.trained[part].tolist(),
        **{
            name: [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
            for name, values in columns.items()
        },
    }
