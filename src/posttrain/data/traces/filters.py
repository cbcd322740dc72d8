"""Applies `TraceFilters` to one block. Duplicates are not found here: they need the whole group (duplicates.py)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.data.errors import DataError
from posttrain.data.traces import report as reasons
from posttrain.data.traces.files import Block
from posttrain.data.traces.layout import Layout
from posttrain.data.traces.report import ReadReport, other_value
from posttrain.data.traces.values import TraceFilters


def check_filters(filters: TraceFilters, layout: Layout, file: str) -> None:
    if filters.by_time and not layout.time:
        raise DataError(
            f"{file}: `since` and `until` need a column with the time, and the file has none by a usual name"
        )


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
        leave_out(~_has_value(block, column, wanted)[places], other_value(column))
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
    """Whether a value is one of those. Typed at a command line everything is text, so "1" is also 1 and "true" is True."""
    for one in accepted:
        if value == one and isinstance(value, bool) == isinstance(one, bool):
            return True
        if isinstance(one, str) and value is not None and not isinstance(value, str):
            if isinstance(value, bool):
                if one.lower() == str(value).lower():
                    return True
            elif isinstance(value, int | float):
                try:
                    if float(one) == value:
                        return True
                except ValueError:
                    continue
            elif one == str(value):
                return True
        if one is None and value is None:
            return True
    return False
