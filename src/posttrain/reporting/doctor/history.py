"""The metrics of a run up to a step, as rules read them: series by key, and the settings of the run.

Rules look at the start of a series, at its end, and at running extremes. The work per step does not grow with the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from posttrain.files.json_files import JsonMapping

START = 5  # values whose median is the start of a series


class RunHistory:
    def __init__(
        self,
        kind: str,
        settings: Mapping[str, object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.settings = settings or {}  # by their dotted keys; of a run of another system, those that are known
        self._names = names  # what another system calls a setting; None: the names are ours
        self.step = 0
        self.num_steps = 0  # training steps seen
        self._values: dict[str, list[float]] = {}
        self._steps: dict[str, list[int]] = {}
        self._starts: dict[str, float] = {}
        self._nulls: dict[str, int] = {}  # the latest step at which a key was there without a number

    def append(self, row: JsonMapping) -> None:
        """A row of metrics.jsonl. A step may come in two rows, one of them its validation."""
        self.step = max(self.step, int(row["step"]))
        if any(key.startswith("train/") for key in row):
            self.num_steps += 1
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100:
                self._values.setdefault(key, []).append(float(value))
                self._steps.setdefault(key, []).append(int(row["step"]))
            elif value is None:
                self._nulls[key] = int(row["step"])

    # ------------------------------------------------------------------ series

    def values(self, key: str) -> Sequence[float]:
        return self._values.get(key, ())

    def steps(self, key: str) -> Sequence[int]:
        return self._steps.get(key, ())

    def now(self, key: str) -> float | None:
        """The value of the latest step; None if that step has none."""
        steps = self._steps.get(key)
        return self._values[key][-1] if steps and steps[-1] == self.step else None

    def is_null(self, key: str) -> bool:
        """Whether the latest step has the key without a finite number."""
        return self._nulls.get(key) == self.step

    def tail(self, key: str, count: int) -> Sequence[float]:
        """The last `count` values; empty if there are fewer, or if the latest step has none."""
        values = self._values.get(key, [])
        return values[-count:] if len(values) >= count > 0 and self._steps[key][-1] == self.step else ()

    def start(self, key: str) -> float | None:
        """The median of the first values; None as long as there are only those."""
        values = self._values.get(key, [])
        if len(values) <= START:
            return None
        if key not in self._starts:
            self._starts[key] = statistics.median(values[:START])
        return self._starts[key]

    def recent(self, key: str, count: int = START) -> float | None:
        """The median of the last `count` values."""
        tail = self.tail(key, count)
        return statistics.median(tail) if tail else None

    def all_above(self, key: str, threshold: float, count: int) -> bool:
        tail = self.tail(key, count)
        return bool(tail) and min(tail) > threshold

    def all_below(self, key: str, threshold: float, count: int) -> bool:
        tail = self.tail(key, count)
        return bool(tail) and max(tail) < threshold

    # ------------------------------------------------------------------ settings

    def setting(self, key: str) -> object:
        return self.settings.get(key)

    def number_setting(self, key: str) -> float | None:
        value = self.settings.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def fix(self, key: str, value: str) -> str:
        """`key=value`, with the key of the system that made the run; empty if it has no such setting."""
        if self._names is None:
            return f"{key}={value}"
        return f"{self._names[key]}={value}" if key in self._names else ""

    # ------------------------------------------------------------------ what several rules ask

    @property
    def validation_is_rising(self) -> bool:
        """Whether the latest validation is near the best one and better than the first."""
        values = self.values("validation/accuracy")
        if len(values) < 2:
            return False
        gained = values[-1] - values[0]
        return gained > 0 and max(values) - values[-1] <= 0.25 * gained

    @property
    def kl(self) -> str:
        """The key of the KL to the starting policy: that of the loss, or the estimate where it has no price."""
        return "train/kl_penalty" if "train/kl_penalty" in self._values else "train/kl_to_start"
