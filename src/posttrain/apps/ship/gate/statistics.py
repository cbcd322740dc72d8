"""Confidence bounds of a mean over problems, and the number of problems that a decision needs. No metrics, no files.

The unit is the problem: samples of one problem are not independent, so each problem contributes one number. Bounds are
one-sided, at the requested confidence:

- one evaluation, every value 0 or 1: Clopper-Pearson, which is exact;
- other values: Student's t with two pseudo-observations at each end of their range, as Agresti and Coull add for
  proportions;
- differences of two evaluations on the same problems: Student's t on the differences, with one pseudo-observation at
  each end, as Bonett and Price add for paired proportions; on different problems: Welch's t, with one at each end of
  either evaluation, as Agresti and Caffo add.

Pseudo-observations keep the bounds valid where all values are equal: without them, thirty unchanged answers would show
with certainty that nothing changes. The bounds are the wider of those with and without them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from posttrain.errors import InputError

Range = tuple[float, float]
RATE: Range = (0.0, 1.0)
Method = Literal["exact binomial", "t", "paired t", "unpaired t"]
MAX_ASKED = 10_000_000  # larger numbers of problems are not reported
SignedValues = tuple[float, NDArray[np.float64]]  # 1 or -1, and values: a mean is a sum of signed means


def special_functions() -> Any:
    """`scipy.special`; an InputError that names the extra where it is not installed."""
    try:
        import scipy.special
    except ImportError as error:
        raise InputError("the gate needs scipy: pip install 'posttrain[gate]'") from error
    return scipy.special


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
    found = _student([(1.0, values, (*value_range, *value_range))], confidence, "t")
    # Other ranges are those of the observed values, and the mean may lie beyond them.
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0)) if value_range == RATE else found


def estimate_paired(differences: Sequence[float], confidence: float, value_range: Range) -> MeanEstimate:
    """Of the differences of two evaluations of the same problems. `value_range` is that of the differences."""
    return _student([(1.0, differences, value_range)], confidence, "paired t")


def estimate_unpaired(
    left: Sequence[float], right: Sequence[float], confidence: float, left_range: Range, right_range: Range
) -> MeanEstimate:
    """Of mean(left) - mean(right), for evaluations of different problems."""
    return _student([(1.0, left, left_range), (-1.0, right, right_range)], confidence, "unpaired t")


def needed_problems(estimate: MeanEstimate, threshold: float, power: float) -> int | None:
    """The number of problems that separates the mean from `threshold` with probability `power`, by this estimate.

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
    ndtri = special_functions().ndtri
    return float(ndtri(estimate.confidence) + max(ndtri(power), 0.0))


def _needed_for_rate(rate: float, threshold: float, confidence: float, power: float) -> int | None:
    """The smallest number of problems for which Clopper and Pearson's bound decides, with probability `power`.

    A rate below the threshold is shown by a small number of hits, and the largest such number is searched: the more
    hits are allowed, the more problems the bound needs, and the more likely it is that no more hits occur.
    """
    betainc = special_functions().betainc
    if rate > threshold:
        rate, threshold = 1 - rate, 1 - threshold

    def problems_for(hits: int) -> int:
        """The smallest number of problems whose upper bound with `hits` is not above the threshold."""
        counts = range(hits + 1, MAX_ASKED + 1)
        return counts.start + bisect_left(counts, confidence, key=lambda n: betainc(hits + 1, n - hits, threshold))

    def is_likely(hits: int) -> bool:
        return bool(betainc(hits + 1, problems_for(hits) - hits, rate) <= 1 - power)

    enough = 1
    while not is_likely(enough - 1):
        enough *= 2
        if enough > threshold * MAX_ASKED:
            return None
    return problems_for(bisect_left(range(enough), True, lo=enough // 2, hi=enough - 1, key=is_likely))


def _exact(values: Sequence[float], confidence: float) -> MeanEstimate:
    """Clopper and Pearson's bounds of a proportion."""
    betaincinv = special_functions().betaincinv
    total, hits = len(values), round(sum(values))
    low = float(betaincinv(hits, total - hits + 1, 1 - confidence)) if hits else 0.0
    high = float(betaincinv(hits + 1, total - hits, confidence)) if hits < total else 1.0
    rate = hits / total
    imagined = 2 * rate**2 + 2 * (1 - rate) ** 2  # two pseudo-observations at each end
    return MeanEstimate(rate, low, high, math.sqrt(rate * (1 - rate)), total, confidence, "exact binomial", imagined)


def _student(
    parts: Sequence[tuple[float, Sequence[float], Sequence[float]]], confidence: float, method: Method
) -> MeanEstimate:
    """Of a sum of signed means. `parts` are sign, values and the pseudo-observations at the ends of their range.

    Pseudo-observations pull the mean towards the middle of the range. A bound must not hold because of that, so the
    wider of the bounds with and without them are used.
    """
    plain: list[SignedValues] = [(sign, np.asarray(values, dtype=np.float64)) for sign, values, _ in parts]
    softened = [
        (sign, np.concatenate([values, ends])) for (sign, values), (_, _, ends) in zip(plain, parts, strict=True)
    ]
    num_problems = min(len(values) for _, values in plain)
    assert num_problems > 0
    bounds = [_bounds(softened, confidence), _bounds(plain, confidence)]
    variance = _variance_of_mean(plain)
    return MeanEstimate(
        mean=float(sum(sign * values.mean() for sign, values in plain)),
        low=min(low for low, _ in bounds),
        high=max(high for _, high in bounds),
        deviation=math.sqrt(variance * num_problems),
        num_problems=num_problems,
        confidence=confidence,
        method=method,
        imagined=max(_variance_of_mean(softened) - variance, 0.0) * num_problems**2,
    )


def _bounds(parts: Sequence[SignedValues], confidence: float) -> Range:
    """Student's bounds, of several parts with Welch's degrees, moved outwards for the third moment (Johnson 1978).

    With skewed values, such as lengths, the plain bound on the side of the long tail is exceeded too often. The bound
    on the other side is conservative and stays.
    """
    counts = [len(values) for _, values in parts]
    if min(counts) < 2:
        return -math.inf, math.inf
    centre = float(sum(sign * values.mean() for sign, values in parts))
    variance = _variance_of_mean(parts)
    if variance <= 0:
        return centre, centre
    degrees = float(sum(counts) - len(counts))
    if len(parts) > 1:  # Welch and Satterthwaite
        degrees = variance**2 / sum(_variance_of_mean([part]) ** 2 / (len(part[1]) - 1) for part in parts)
    third = sum(sign * float(((values - values.mean()) ** 3).mean()) / len(values) ** 2 for sign, values in parts)
    quantile = float(special_functions().stdtrit(max(math.floor(degrees), 1), round(confidence, 12)))
    reach = quantile * math.sqrt(variance)
    shift = third / (6 * variance) * (1 + 2 * quantile**2)
    return centre - reach + min(shift, 0.0), centre + reach + max(shift, 0.0)


def _variance_of_mean(parts: Sequence[SignedValues]) -> float:
    return sum(float(values.var(ddof=1)) / len(values) for _, values in parts if len(values) > 1)
