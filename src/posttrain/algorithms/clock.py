"""Measures the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class StageClock:
    def __init__(self) -> None:
        self.spans: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans[stage] = self.spans.get(stage, 0.0) + time.perf_counter() - start

    def add(self, spans: Mapping[str, float]) -> None:
        """Stages that were measured elsewhere."""
        for stage, seconds in spans.items():
            self.spans[stage] = self.spans.get(stage, 0.0) + seconds

    def finish(self, total: str = "total_step_time") -> dict[str, float]:
        """All stages, and the time since the clock was made."""
        return {**self.spans, total: time.perf_counter() - self._start}
