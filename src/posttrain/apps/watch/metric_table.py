"""`metrics.jsonl` as columns in memory. Only new lines are read, and the file is read again when a resume has cut it.

10,000 steps with 60 metrics take about 5 MB here; as dictionaries they would take 60.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterator

import numpy as np

from posttrain.apps.watch.places import Place, Stamp, Unreadable
from posttrain.files.json_files import JsonObject, parse_json
from posttrain.reporting.chart_specs import points_of
from posttrain.reporting.run_files import METRICS_FILE

ANCHOR_BYTES = 256  # before the place up to which the file was read; if they differ, it was rewritten
ABSENT = math.nan  # the row does not have the key
NOT_FINITE = math.inf  # the row has null
TAIL_BYTES = 64 * 1024
PIECE_BYTES = 8 * 2**20  # that are read at once
MAX_LINE_BYTES = 2**20
MAX_FILE_BYTES = 512 * 2**20
MAX_METRICS = 4096
MAX_VALUES = 32 * 2**20  # of all metrics and steps
MAX_NAME_CHARACTERS = 500


class MetricTable:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.RLock()
        self._stamp: Stamp | None = None
        self.problem = ""  # why the file cannot be shown
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
            self.problem = ""
            try:
                if stamp is None:
                    self._clear()
                else:
                    self._read_new(stamp.size)
            except Unreadable as error:
                self._clear()
                self.problem = str(error)
            self._stamp = stamp
        return self

    def _read_new(self, size: int) -> None:
        if size > MAX_FILE_BYTES:
            raise Unreadable(f"{METRICS_FILE}: more than {MAX_FILE_BYTES >> 20} MiB")
        if size < self._offset:
            self._clear()
        is_more = True
        while is_more:
            start = self._offset - len(self._anchor)
            content = self._place.read(METRICS_FILE, start, min(start + PIECE_BYTES, size))
            if not content.startswith(self._anchor):
                self._clear()
                continue
            whole = content.rfind(b"\n") + 1  # a run that is being written may end in half a line
            for line in content[len(self._anchor) : whole].splitlines():
                row = row_of(line)
                if row is not None:
                    self._append(row)
            if len(content) - whole > MAX_LINE_BYTES:
                raise Unreadable(f"{METRICS_FILE}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
            is_more = start + whole > self._offset and start + len(content) < size
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
                if len(self._columns) == MAX_METRICS or len(key) > MAX_NAME_CHARACTERS:
                    raise Unreadable(
                        f"{METRICS_FILE}: more than {MAX_METRICS:,} metrics, or the name of one has more than "
                        f"{MAX_NAME_CHARACTERS} characters"
                    )
                self._columns[key] = array("d", [ABSENT]) * len(self._steps)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
            self._columns[key][index] = value if is_number else NOT_FINITE
        if len(self._steps) * len(self._columns) > MAX_VALUES:
            raise Unreadable(f"{METRICS_FILE}: more than {MAX_VALUES:,} values")

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

    def rows(self) -> Iterator[JsonObject]:
        """One per step, in order; None where a value was not finite."""
        with self._lock:
            steps, columns = np.array(self._steps), {key: np.array(column) for key, column in self._columns.items()}
        for index in np.argsort(steps, kind="stable").tolist():
            values = {key: float(column[index]) for key, column in columns.items()}
            logged = {key: value if math.isfinite(value) else None for key, value in values.items() if value == value}
            yield {"step": int(steps[index]), **logged}

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
        row = parse_json(line) if len(line) <= MAX_LINE_BYTES else None
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and abs(row["step"]) < 2**53
    return row if is_row else None


def tail_rows(place: Place, name: str, num_bytes: int = TAIL_BYTES) -> list[JsonObject]:
    """The objects at the end of a file of lines. Those with a step only."""
    stamp = place.stamp(name)
    if stamp is None:
        return []
    start = max(0, stamp.size - num_bytes)
    lines = place.read(name, start, stamp.size).split(b"\n")
    return [row for line in (lines[1:] if start else lines) if (row := row_of(line)) is not None]
