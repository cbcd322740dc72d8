"""Confidence bounds of a mean over problems, and the number of problems that a decision needs. No metrics, no files.

The unit is the problem: samples of one problem are not independent, so each problem contributes one number. Bounds are
one-sided, at the requested confidence:

- one evaluation, every value 0 or 1: Clopper-Pearson, which is exact;
- other values: Student's t with two pseudo-observations at each end of their range, as Agresti and Coull add for
  proportions;
- differences of two evaluations on the same problems: Student's t on the differences, with one pseudo-observation at each
  end, as Bonett and Price add for paired proportions; on different problems: Welch's t, with one at each end of either
  evaluation, as Agresti and Caffo add.

Pseudo-observations keep the bounds valid where all values are equal: without them, thirty unchanged answers would show
with certainty that nothing changes. The bounds are the wider of those with and without them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from posttrain.apps.ship.gate.distributions import beta_cdf, beta_quantile, normal_quantile, t_quantile

Range = tuple[float, float]
RATE: Range = (0.0, 1.0)
Method = Literal["exact binomial", "t", "paired t", "unpaired t"]
MAX_ASKED = 10_000_000  # larger numbers of problems are not reported


@dataclass(frozen=True)
class MeanEstimate:
    """A mean with one-sided bounds. It is below `low` with probability 1 - confidence at most, and so above `high`."""

    mean: float
    low: float
    high: float
    deviation: float  # of one problem
    num_problems: int
    confidence: float
    method: Method
    imagined: float = 0.0  # variance of the mean from pseudo-observations, times num_problems squared: constant in n
    systematic: float = 0.0  # error in both bounds that more problems do not reduce


def with_systematic_error(estimate: MeanEstimate, error: float) -> MeanEstimate:
    return replace(estimate, low=estimate.low - error, high=estimate.high + error, systematic=error)


def estimate_mean(values: Sequence[float], confidence: float, value_range: Range) -> MeanEstimate:
    """Of one evaluation."""
    assert len(values) > 0
    if value_range == RATE and set(values) <= {0.0, 1.0}:
        return _exact(values, confidence)
    found = _student(values, (*value_range, *value_range), confidence, "t")
    # Other ranges are those of the observed values, and the mean may lie beyond them.
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0)) if value_range == RATE else found


def estimate_paired(differences: Sequence[float], confidence: float, value_range: Range) -> MeanEstimate:
    """Of the differences of two evaluations of the same problems. `value_range` is that of the differences."""
    assert len(differences) > 0
    return _student(differences, value_range, confidence, "paired t")


def estimate_unpaired(
    left: Sequence[float], right: Sequence[float], confidence: float, left_range: Range, right_range: Range
) -> MeanEstimate:
    """Of mean(left) - mean(right), for evaluations of different problems."""
    assert len(left) > 0
    assert len(right) > 0
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    soft_a, soft_b = np.concatenate([a, left_range]), np.concatenate([b, right_range])
    return _estimate(
        float(a.mean() - b.mean()),
        [_welch_bounds(soft_a, soft_b, confidence), _welch_bounds(a, b, confidence)],
        _variance(a) / len(a) + _variance(b) / len(b),
        _variance(soft_a) / len(soft_a) + _variance(soft_b) / len(soft_b),
        min(len(a), len(b)),
        confidence,
        "unpaired t",
    )


def _welch_bounds(a: NDArray[np.float64], b: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    if len(a) < 2 or len(b) < 2:
        return -math.inf, math.inf
    spread_a, spread_b = _variance(a) / len(a), _variance(b) / len(b)
    below = spread_a**2 / (len(a) - 1) + spread_b**2 / (len(b) - 1)  # Welch and Satterthwaite
    degrees = (spread_a + spread_b) ** 2 / below if below > 0 else float(len(a) + len(b) - 2)
    third = _third_moment(a) / len(a) ** 2 - _third_moment(b) / len(b) ** 2
    return _bounds(float(a.mean() - b.mean()), spread_a + spread_b, third, degrees, confidence)


def needed_problems(estimate: MeanEstimate, threshold: float, power: float) -> int | None:
    """The number of problems that separates the mean from `threshold` with probability `power`, if the estimate is right.

    None: more than `MAX_ASKED`, or no number does, because the systematic error is too large.
    """
    distance = abs(estimate.mean - threshold) - estimate.systematic
    if distance <= 0:
        return None
    needed: float | None
    if estimate.method == "exact binomial" and not estimate.systematic:
        needed = _needed_for_rate(estimate.mean, threshold, estimate.confidence, power)
    else:
        # The n for which quantiles * sqrt(deviation^2 / n + imagined / n^2) is the distance.
        quantiles = _quantiles(estimate, power)
        by_spread = (quantiles * estimate.deviation / distance) ** 2
        needed = by_spread / 2 + math.sqrt(by_spread**2 / 4 + (quantiles / distance) ** 2 * estimate.imagined)
    if needed is None or needed > MAX_ASKED:
        return None
    # The present number was not enough, so the bounds are wider than this approximation.
    return max(math.ceil(needed), estimate.num_problems + 1)


def detectable_distance(estimate: MeanEstimate, num_problems: int, power: float) -> float:
    """The smallest distance from a threshold that `num_problems` detect."""
    variance = estimate.deviation**2 / num_problems + estimate.imagined / num_problems**2
    return estimate.systematic + _quantiles(estimate, power) * math.sqrt(variance)


def _quantiles(estimate: MeanEstimate, power: float) -> float:
    return normal_quantile(estimate.confidence) + max(normal_quantile(power), 0.0)


def _needed_for_rate(rate: float, threshold: float, confidence: float, power: float) -> int | None:
    """The smallest number of problems for which Clopper and Pearson's bound decides, with probability `power`.

    A rate below the threshold is shown by a small number of hits, and the largest such number is searched: the more hits
    are allowed, the more problems the bound needs, and the more likely it is that no more hits occur.
    """
    if rate > threshold:
        rate, threshold = 1 - rate, 1 - threshold

    def problems_for(hits: int) -> int:
        """The smallest number of problems whose upper bound with `hits` is not above the threshold."""
        counts = range(hits + 1, MAX_ASKED + 1)
        return counts.start + bisect_left(counts, confidence, key=lambda n: beta_cdf(threshold, hits + 1, n - hits))

    def is_likely(hits: int) -> bool:
        return beta_cdf(rate, hits + 1, problems_for(hits) - hits) <= 1 - power

    enough = 1
    while not is_likely(enough - 1):
        enough *= 2
        if enough > threshold * MAX_ASKED:
            return None
    return problems_for(bisect_left(range(enough), True, lo=enough // 2, hi=enough - 1, key=is_likely))


def _exact(values: Sequence[float], confidence: float) -> MeanEstimate:
    """Clopper and Pearson's bounds of a proportion."""
    total, hits = len(values), round(sum(values))
    error = 1 - confidence
    low = beta_quantile(error, hits, total - hits + 1) if hits else 0.0
    high = beta_quantile(confidence, hits + 1, total - hits) if hits < total else 1.0
    rate = hits / total
    imagined = 2 * rate**2 + 2 * (1 - rate) ** 2  # two pseudo-observations at each end
    return MeanEstimate(rate, low, high, math.sqrt(rate * (1 - rate)), total, confidence, "exact binomial", imagined)


def _student(values: Sequence[float], ends: Sequence[float], confidence: float, method: Method) -> MeanEstimate:
    plain = np.asarray(values, dtype=np.float64)
    softened = np.concatenate([plain, ends])
    return _estimate(
        float(plain.mean()),
        [_t_bounds(softened, confidence), _t_bounds(plain, confidence)],
        _variance(plain) / len(plain),
        _variance(softened) / len(softened),
        len(plain),
        confidence,
        method,
    )


def _estimate(
    mean: float,
    bounds: Sequence[tuple[float, float]],
    variance: float,
    softened_variance: float,
    num_problems: int,
    confidence: float,
    method: Method,
) -> MeanEstimate:
    """From the bounds and the variances of a mean, with pseudo-observations and without.

    Pseudo-observations pull the mean towards the middle of the range. A bound must not hold because of that, so the wider
    bounds are used.
    """
    return MeanEstimate(
        mean=mean,
        low=min(low for low, _ in bounds),
        high=max(high for _, high in bounds),
        deviation=math.sqrt(variance * num_problems),
        num_problems=num_problems,
        confidence=confidence,
        method=method,
        imagined=max(softened_variance - variance, 0.0) * num_problems**2,
    )


def _t_bounds(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    if len(values) < 2:
        return -math.inf, math.inf
    count = len(values)
    spread, third = _variance(values) / count, _third_moment(values) / count**2
    return _bounds(float(values.mean()), spread, third, count - 1, confidence)


def _bounds(centre: float, variance: float, third: float, degrees: float, confidence: float) -> tuple[float, float]:
    """Student's bounds of a mean with this variance, moved outwards for its third moment (Johnson 1978).

    With skewed values, such as lengths, the plain bound on the side of the long tail is exceeded too often. The bound on
    the other side is conservative and stays.
    """
    if variance <= 0:
        return centre, centre
    quantile = t_quantile(round(confidence, 12), max(math.floor(degrees), 1))
    reach = quantile * math.sqrt(variance)
    shift = third / (6 * variance) * (1 + 2 * quantile**2)
    return centre - reach + min(shift, 0.0), centre + reach + max(shift, 0.0)


def _third_moment(values: NDArray[np.float64]) -> float:
    return float(((values - values.mean()) ** 3).mean())


def _variance(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0
