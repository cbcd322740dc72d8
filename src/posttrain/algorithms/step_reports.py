"""Step reports: timings of stages, batch reports, and metrics that are ratios of counts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from posttrain.types import StepReport, TokenBatch


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
        """Add stages measured elsewhere."""
        for stage, seconds in spans.items():
            self.spans[stage] = self.spans.get(stage, 0.0) + seconds

    def finish(self, total: str = "total_step_time") -> dict[str, float]:
        """All stages, and the total time since construction."""
        return {**self.spans, total: time.perf_counter() - self._start}


def num_sequence_tokens(batch: TokenBatch) -> int:
    """Token count of full sequences: each response with its prompt, even if the prompt is shared."""
    return sum(len(batch.prompts[p]) + len(r) for p, r in zip(batch.prompt_of, batch.responses, strict=True))


def batch_report(
    batch: TokenBatch, metrics: Mapping[str, float], timings_s: Mapping[str, float], *, answers_per_sample: int = 1
) -> StepReport:
    """The report of a step, or of a validation, that trains on given answers. A pair is one sample with two answers."""
    num_samples = len(batch.responses) // answers_per_sample
    return StepReport(metrics, timings_s, num_tokens=num_sequence_tokens(batch), num_samples=num_samples)


def with_accuracy(measured: Mapping[str, float], num_rows: float) -> dict[str, float]:
    """Counts divided by the number of rows. A tie counts as half correct, as for a random guess.

    Integer counts are divided once: adding per-micro-batch fractions can give accuracies above 1.
    """
    metrics = dict(measured)
    right, ties = metrics.pop("num_ranked_right"), metrics.pop("num_ties")
    rows = max(num_rows, 1.0)
    return {**metrics, "accuracy": (right + ties / 2) / rows, "tie_rate": ties / rows}
