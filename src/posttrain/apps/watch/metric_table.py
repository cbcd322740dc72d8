"""`metrics.jsonl` as columns in memory. Only new lines are read, and the file is read again when a resume has cut it.

10,000 steps with 60 metrics take about 5 MB here; as dictionaries they would take 60.
"""

from __future__ import annotations

import json
import math
import threading
from array import array

import numpy as np

from posttrain.apps.watch.places import Place, Stamp
from posttrain.files.json_files import JsonObject
from posttrain.reporting.chart_specs import points_of
from posttrain.reporting.run_files import METRICS_FILE

ANCHOR_BYTES = 256  # before the place up to which the file was read; if they differ, it was rewritten
ABSENT = math.nan  # the row does not have the key
NOT_FINITE = math.inf  # the row has null
TAIL_BYTES = 64 * 1024


class MetricTable:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.RLock()
        self._stamp: Stamp | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._anchor = b""
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._place_of_step: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return 8 * len(self._steps) * (len(self._columns) + 1) + 100 * len(self._place_of_step)

    def refresh(self) -> MetricTable:
        with self._lock:
            stamp = self._place.stamp(METRICS_FILE)
            if stamp == self._stamp:
                return self
            if stamp is None:
                self._clear()
            else:
                self._read_new(stamp.size)
            self._stamp = stamp
        return self

    def _read_new(self, size: int) -> None:
        start = self._offset - len(self._anchor)
        content = self._place.read(METRICS_FILE, start) if size >= self._offset else b""
        if not content.startswith(self._anchor) or size < self._offset:
            self._clear()
            start, content = 0, self._place.read(METRICS_FILE)
        whole = content.rfind(b"\n") + 1  # a run that is being written may end in half a line
        new = content[len(self._anchor) : whole]
        for line in new.splitlines():
            row = row_of(line)
            if row is not None:
                self._append(row)
        if whole:
            self._offset = start + whole
            self._anchor = content[max(0, whole - ANCHOR_BYTES) : whole]

    def _append(self, row: JsonObject) -> None:
        step = row["step"]
        index = self._place_of_step.setdefault(step, len(self._steps))
        if index == len(self._steps):
            self._steps.append(step)
            for column in self._columns.values():
                column.append(ABSENT)
        for key, value in row.items():
            if key == "step":
                continue
            if key not in self._columns:
                self._columns[key] = array("d", [ABSENT]) * len(self._steps)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
            self._columns[key][index] = value if is_number else NOT_FINITE

    # ------------------------------------------------------------------ reading

    @property
    def keys(self) -> list[str]:
        with self._lock:
            return list(self._columns)

    @property
    def last_step(self) -> int:
        with self._lock:
            return max(self._steps[-2:], default=0)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values where the key was logged; infinite where it was not finite."""
        with self._lock:
            column = self._columns.get(key)
            if column is None:
                return np.empty(0, dtype=np.int64), np.empty(0)
            steps, values = np.array(self._steps), np.array(column)
        logged = ~np.isnan(values)
        steps, values = steps[logged], values[logged]
        if len(steps) > 1 and (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values

    def last(self, key: str, count: int = 1) -> float | None:
        """The median of the last `count` finite values."""
        values = self.series(key)[1]
        finite = values[np.isfinite(values)][-count:]
        return float(np.median(finite)) if len(finite) else None

    def curve(
        self, key: str, num_points: int, first: int | None = None, last: int | None = None
    ) -> dict[str, list[float | None]]:
        """Buckets of neighbouring steps: the last step of each, mean, lowest and highest value; None is a gap."""
        steps, values = self.series(key)
        if first is not None or last is not None:
            inside = (steps >= (first if first is not None else -1)) & (steps <= (last if last is not None else 2**62))
            steps, values = steps[inside], values[inside]
        return points_of(steps, values, max(num_points, 1))


def row_of(line: bytes) -> JsonObject | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and abs(row["step"]) < 2**53
    return row if is_row else None


def tail_rows(place: Place, name: str, num_bytes: int = TAIL_BYTES) -> list[JsonObject]:
    """The objects at the end of a file of lines. Those with a step only."""
    stamp = place.stamp(name)
    if stamp is None:
        return []
    start = max(0, stamp.size - num_bytes)
    lines = place.read(name, start).split(b"\n")
    return [row for line in (lines[1:] if start else lines) if (row := row_of(line)) is not None]
