"""Which rows `TraceFilters` leave out: by their values, block by block; and equal responses, within a unit.

Responses to different prompts are never compared. Nearly equal: the Jaccard similarity of their sets of five-word
shingles (lower case, white space ignored) reaches a limit. Which responses to compare is found with MinHash (Broder
1997): 64 minima of each set in 16 bands of 4; two responses are compared when a band agrees, and then by their sets, so
a near duplicate is never a guess. At a similarity of 0.7 one pair in 80 is overlooked by the bands, at 0.9 none in a
million. Memory is that of one group.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.data.traces import report as reasons
from posttrain.data.traces.canonical import place_of
from posttrain.data.traces.files import Block
from posttrain.data.traces.grouping import GroupedPart
from posttrain.data.traces.report import ReadReport
from posttrain.data.traces.values import TraceFilters, text_of

WORDS_PER_SHINGLE = 5
NUM_MINIMA, NUM_BANDS = 64, 16
_RANDOM = np.random.default_rng(20261115)
_FACTORS = _RANDOM.integers(1, 2**63, NUM_MINIMA, dtype=np.uint64) | np.uint64(1)
_OFFSETS = _RANDOM.integers(0, 2**63, NUM_MINIMA, dtype=np.uint64)


def passing(
    table: pa.Table, block: Block, places: NDArray[np.int64], filters: TraceFilters, report: ReadReport
) -> pa.Table:
    """The rows of `table` that pass; `places` are their positions in the block."""
    keep = np.ones(table.num_rows, dtype=bool)

    def leave_out(which: NDArray[np.bool_], reason: str) -> None:
        fresh = np.flatnonzero(which & keep)
        if len(fresh):
            shown = (block.place(int(places[index])) for index in fresh[: reasons.EXAMPLES_PER_REASON])
            report.filter(reason, len(fresh), shown)
            keep[fresh] = False

    if filters.min_reward_threshold is not None:
        leave_out(table["reward"].to_numpy() < filters.min_reward_threshold, reasons.BELOW_THRESHOLD)
    if filters.by_time:
        times = table["time"].combine_chunks()
        leave_out(times.is_null().to_numpy(zero_copy_only=False), reasons.NO_TIME)
        moments = times.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        if filters.since_moment:
            leave_out(moments < _microseconds(filters.since_moment), reasons.OUT_OF_TIME)
        if filters.until_moment:
            leave_out(moments >= _microseconds(filters.until_moment), reasons.OUT_OF_TIME)
    for column, wanted in filters.where.items():
        leave_out(~_has_value(block, column, wanted)[places], f"{column} has another value")
    return table if keep.all() else table.filter(pa.array(keep))


def _microseconds(moment: datetime) -> int:
    return int(pa.scalar(moment, pa.timestamp("us", tz="UTC")).cast(pa.int64()).as_py())


def _has_value(block: Block, column: str, wanted: object) -> NDArray[np.bool_]:
    accepted = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    array = block.array(column)
    if array is not None and not pa.types.is_nested(array.type):
        encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode(null_encoding="encode")
        matches = np.array([_matches(value, accepted) for value in encoded.dictionary.to_pylist()], dtype=bool)
        # Signed, whatever the writer chose: -1 stands for null.
        codes = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        return np.append(matches, _matches(None, accepted))[codes]
    return np.array([_matches(value, accepted) for value in block.values(column)], dtype=bool)


def _matches(value: object, accepted: Sequence[object]) -> bool:
    return any(_is(value, one) for one in accepted)


def _is(value: object, wanted: object) -> bool:
    """Typed at a command line everything is text, so "1" is also 1 and "true" is True."""
    if value is None or isinstance(value, str) or not isinstance(wanted, str):
        return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() == wanted.lower() if isinstance(value, bool) else str(value) == wanted
    try:
        return float(wanted) == value
    except ValueError:
        return False


# -- duplicates --------------------------------------------------------------------------------------------------------


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
                responses = part.texts("response", np.arange(start, stop))
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


def shingles(text: str) -> NDArray[np.uint64]:
    """The hashes of the five-word shingles of a text, each once; of a shorter text, the hash of all its words."""
    words = text.lower().split()
    hashes = np.array([zlib.crc32(word.encode()) for word in words] or [0], dtype=np.uint64)
    width = min(WORDS_PER_SHINGLE, len(hashes))
    count = len(hashes) - width + 1
    mixed = np.full(count, len(hashes) if width < WORDS_PER_SHINGLE else 0, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(width):
            mixed = (mixed * np.uint64(0x9E3779B97F4A7C15)) ^ hashes[offset : offset + count]
            mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(31)
    return np.unique(mixed)


def minima(shingle_hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The MinHash signature of a set."""
    with np.errstate(over="ignore"):
        permuted = shingle_hashes[None, :] * _FACTORS[:, None] + _OFFSETS[:, None]
    return np.asarray((permuted >> np.uint64(16)).min(axis=1))


def jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def near_duplicates(texts: Sequence[str], similarity: float) -> list[int | None]:
    """For each text the index of the earlier one that it nearly equals, or None for a text that stays."""
    sets: dict[int, NDArray[np.uint64]] = {}  # of the texts that stay
    bands: dict[tuple[int, bytes], list[int]] = {}
    result: list[int | None] = []
    for index, text in enumerate(texts):
        own = shingles(text)
        signature = minima(own).reshape(NUM_BANDS, -1)
        keys = [(band, part.tobytes()) for band, part in enumerate(signature)]
        candidates = sorted({candidate for key in keys for candidate in bands.get(key, ())})
        match = next((candidate for candidate in candidates if jaccard(own, sets[candidate]) >= similarity), None)
        result.append(match)
        if match is None:
            sets[index] = own
            for key in keys:
                bands.setdefault(key, []).append(index)
    return result
