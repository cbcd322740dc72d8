"""The rollouts of a run: every group of every step, read one step at a time.

A step's file is unpacked on request. The newest unpacked ones are kept, up to a number of bytes. Searching a whole
run is done in slices of a fraction of a second, each with a cursor for the next, so that no request takes long and
nothing has to be indexed or written.
"""

from __future__ import annotations

import io
import json
import math
import re
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.apps.watch.places import Place, Stamp
from posttrain.apps.watch.rollout_filters import Filters, summary
from posttrain.files.json_files import JsonObject
from posttrain.reporting.run_files import ROLLOUTS_FOLDER
from posttrain.reporting.token_files import TokenFile, read_tokens

Kind = Literal["train", "validation"]
PREFIXES: dict[str, Kind] = {"step": "train", "validation_step": "validation"}
FILE_PREFIX: dict[Kind, str] = {kind: prefix for prefix, kind in PREFIXES.items()}
_NAME = re.compile(r"(step|validation_step)_(\d{1,12})\.(jsonl\.gz|tokens\.npz)")
MAX_STEP_BYTES = 512 * 2**20  # of one unpacked step: a file that unpacks without end must not fill the memory
CACHE_BYTES = 96 * 2**20
SLICE_S = 0.04
MAX_HITS = 40


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


class StepLines:
    """The groups of a step, each a line of JSON that is parsed when it is needed."""

    def __init__(self, content: bytes) -> None:
        self.lines = [line for line in content.split(b"\n") if line]
        self.num_bytes = len(content) + 100 * len(self.lines)

    def group(self, index: int) -> JsonObject | None:
        try:
            row = json.loads(self.lines[index])
        except (IndexError, ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) else None

    def groups(self) -> Iterator[tuple[int, JsonObject]]:
        for index in range(len(self.lines)):
            if (row := self.group(index)) is not None:
                yield index, row


class StepCache:
    """Unpacked steps of all runs, the least recently used ones dropped beyond `max_bytes`."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str, Stamp], StepLines] = OrderedDict()
        self._lock = threading.Lock()

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
        lines = StepLines(unpacked(place.read(name)))
        if keep and lines.num_bytes <= self._max_bytes:
            with self._lock:
                self._kept[key] = lines
                while self.num_bytes > self._max_bytes:
                    self._kept.popitem(last=False)
        return lines


def unpacked(content: bytes) -> bytes:
    """Of a gzip file; what can be read of one that is torn, and not more than a limit."""
    unpack = zlib.decompressobj(wbits=31)
    try:
        return unpack.decompress(content, MAX_STEP_BYTES)
    except zlib.error:
        return b""


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

    def listing(self, kind: Kind, step: int, filters: Filters) -> tuple[list[JsonObject], int]:
        """The requested groups of a step, and their total number."""
        lines = self.lines(kind, step)
        if lines is None:
            return [], 0
        found = []
        for index, group in lines.groups():
            if (matching := filters.matching(group)) is not None:
                found.append(summary(group, index, matching, filters.text))
        return found, len(lines.lines)

    def search(self, kind: Kind, filters: Filters, cursor: Cursor | None, *, slice_s: float = SLICE_S) -> Found:
        """From the newest step to the oldest, until there are enough hits or the time is over. One step at least."""
        steps = [step for step in reversed(self.steps(kind)) if cursor is None or step <= cursor.step]
        started, hits = self._clock(), list[JsonObject]()
        for place, step in enumerate(steps):
            first = cursor.index if cursor is not None and step == cursor.step else 0
            lines = self.lines(kind, step, keep=False)
            for index in range(first, len(lines.lines) if lines is not None else 0):
                assert lines is not None
                if not filters.may_match(lines.lines[index]):
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
    stamp = place.stamp(name)
    if stamp is None or stamp.size > MAX_STEP_BYTES:
        return None
    found = read_tokens(io.BytesIO(place.read(name)))
    return None if found is None else _columns(found, draw, sample)


def _columns(file: TokenFile, draw: int, sample: int) -> JsonObject | None:
    part = file.answer(draw, sample)
    if part is None:
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
