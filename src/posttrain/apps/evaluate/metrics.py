"""The metrics of a finished evaluation, problem by problem, and how certain their means are.

Besides pass@k, cons@k and avg@k (`algorithms/pass_at_k.py`) an answer has a length, may be cut off, or unscored. The
interval of a mean is a percentile bootstrap over problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from posttrain.algorithms.pass_at_k import parse_metric, problem_value
from posttrain.apps.evaluate.results import Interval, ProblemResult

LENGTH, TRUNCATION, UNSCORED = "mean_length_tokens", "truncation_rate", "unscored_rate"
_WORDS_AT_ONCE = 1 << 22


def per_problem(problems: Sequence[ProblemResult], metric: str, pass_threshold: float = 1.0) -> list[float | None]:
    """The metric of each problem, in order. Accepts `mean_length_tokens`, `truncation_rate` and `unscored_rate` as
    well."""
    if metric == LENGTH:
        known = [[s.num_tokens for s in p.samples if s.finish_reason and s.num_tokens is not None] for p in problems]
        return [mean_of([float(length) for length in lengths]) for lengths in known]
    if metric == TRUNCATION:
        return [mean_of([float(s.truncated) for s in p.samples if s.finish_reason]) for p in problems]
    if metric == UNSCORED:
        return [mean_of([float(s.reward is None) for s in p.samples]) for p in problems]
    parsed = parse_metric(metric)
    return [
        problem_value(parsed, [s.reward for s in p.samples], [s.answer for s in p.samples], pass_threshold)
        for p in problems
    ]


def bootstrap_interval(
    values: Sequence[float | None], *, seed: int, confidence: float = 0.95, resamples: int = 10_000
) -> Interval | None:
    """Percentile interval of the mean, problems drawn with replacement. None without a measured problem.

    The same values, seed and sizes give the same interval anywhere: only numpy's raw Philox words are used.
    """
    measured = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(measured):
        return None
    means = []
    for drawn in random_words(seed, 1, resamples, len(measured)):
        # 53 bits, uniform in [0, 1): the bias is as small as that of a modulus, and 1 is never reached.
        places = ((drawn >> np.uint64(11)) * (2.0**-53) * len(measured)).astype(np.int64)
        means.append(measured[np.minimum(places, len(measured) - 1)].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), confidence)


def random_words(seed: int, stream: int, num_rows: int, num_columns: int) -> Iterator[NDArray[np.uint64]]:
    """A table of random 64-bit words, some rows at a time; another one for each seed and stream."""
    words = np.random.Philox(key=np.array([seed % 2**64, stream], dtype=np.uint64))
    at_once = max(1, _WORDS_AT_ONCE // num_columns)
    for start in range(0, num_rows, at_once):
        count = min(at_once, num_rows - start)
        yield words.random_raw(count * num_columns).reshape(count, -1)


def mean_of(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
