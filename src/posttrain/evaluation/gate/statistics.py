"""How sure a mean over problems is, and how many problems it would take to be surer. Knows no metric and no file.

The unit is the problem: samples of one problem are not independent, so each problem contributes one number. Bounds are
one-sided, at the confidence asked for:

- one evaluation, every value 0 or 1: Clopper-Pearson, which is exact;
- other values with a known range (rates, rewards): Student's t after adding two imagined problems at each end of the range,
  as Agresti and Coull do for proportions;
- differences of two evaluations on the same problems: Student's t on the differences, with one imagined problem at each
  end, as Bonett and Price do for paired proportions; on different problems: Welch's t, with one at each end of either
  evaluation, as Agresti and Caffo do;
- values without a range (lengths, costs): Student's t as it is.

The imagined problems keep the bounds honest where all values happen to be equal: without them, thirty answers without a
change would prove that nothing changes. Where the plain bounds are wider, they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from posttrain.evaluation.gate.distributions import beta_quantile, normal_quantile, t_quantile

Range = tuple[float, float]
Method = Literal["exact binomial", "t", "paired t", "unpaired t"]
MAX_ASKED = 10_000_000  # a number of problems beyond which there is no point in naming it


@dataclass(frozen=True)
class Estimate:
    """A mean with one-sided bounds: below `low`, and above `high`, it is with probability 1 - confidence at most, each."""

    mean: float
    low: float
    high: float
    deviation: float  # of one problem, as the bounds see it
    num_problems: int
    confidence: float
    method: Method
    systematic: float = 0.0  # error, part of both bounds, that more problems would not make smaller


def with_systematic_error(estimate: Estimate, error: float) -> Estimate:
    return replace(estimate, low=estimate.low - error, high=estimate.high + error, systematic=error)


def estimate_mean(values: Sequence[float], confidence: float, value_range: Range | None) -> Estimate:
    """Of one evaluation."""
    assert len(values) > 0
    if value_range == (0.0, 1.0) and set(values) <= {0.0, 1.0}:
        return _exact(values, confidence)
    ends = () if value_range is None else (*value_range, *value_range)
    return _student(np.asarray(values, dtype=np.float64), ends, confidence, "t")


def estimate_paired(differences: Sequence[float], confidence: float, value_range: Range | None) -> Estimate:
    """Of the differences of two evaluations of the same problems. `value_range` is that of the differences."""
    assert len(differences) > 0
    return _student(np.asarray(differences, dtype=np.float64), value_range or (), confidence, "paired t")


def estimate_unpaired(
    left: Sequence[float],
    right: Sequence[float],
    confidence: float,
    left_range: Range | None,
    right_range: Range | None,
) -> Estimate:
    """Of mean(left) - mean(right), for evaluations of different problems."""
    assert len(left) > 0
    assert len(right) > 0
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    soft_a = np.concatenate([a, np.asarray(left_range or (), dtype=np.float64)])
    soft_b = np.concatenate([b, np.asarray(right_range or (), dtype=np.float64)])
    bounds = [_welch_bounds(soft_a, soft_b, confidence)]
    if len(a) > 1 and len(b) > 1:
        bounds.append(_welch_bounds(a, b, confidence))
    fewer = min(len(a), len(b))
    return Estimate(
        mean=float(a.mean() - b.mean()),
        low=min(low for low, _ in bounds),
        high=max(high for _, high in bounds),
        deviation=math.sqrt((_variance(soft_a) / len(soft_a) + _variance(soft_b) / len(soft_b)) * fewer),
        num_problems=fewer,
        confidence=confidence,
        method="unpaired t",
    )


def _welch_bounds(a: NDArray[np.float64], b: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    if len(a) < 2 or len(b) < 2:
        return -math.inf, math.inf
    spread_a, spread_b = _variance(a) / len(a), _variance(b) / len(b)
    below = spread_a**2 / (len(a) - 1) + spread_b**2 / (len(b) - 1)  # Welch and Satterthwaite
    degrees = (spread_a + spread_b) ** 2 / below if below > 0 else float(len(a) + len(b) - 2)
    third = _third_moment(a) / len(a) ** 2 - _third_moment(b) / len(b) ** 2
    return _bounds(float(a.mean() - b.mean()), spread_a + spread_b, third, degrees, confidence)


def needed_problems(estimate: Estimate, threshold: float, power: float) -> int | None:
    """How many problems would tell the mean from `threshold` with probability `power`, if it is what it seems to be.

    The usual sample size ((z of confidence + z of power) * deviation / distance)^2. None: more than `MAX_ASKED`.
    """
    distance = abs(estimate.mean - threshold)
    if distance == 0:
        return None
    quantiles = normal_quantile(estimate.confidence) + max(normal_quantile(power), 0.0)
    needed = (quantiles * estimate.deviation / distance) ** 2
    if needed > MAX_ASKED:
        return None
    # The bounds were wider than this formula thinks, or the question would not arise.
    return max(math.ceil(needed), estimate.num_problems + 1)


def detectable_distance(estimate: Estimate, num_problems: int, power: float) -> float:
    """The smallest distance from a threshold that so many problems would show."""
    quantiles = normal_quantile(estimate.confidence) + max(normal_quantile(power), 0.0)
    return quantiles * estimate.deviation / math.sqrt(num_problems)


def _exact(values: Sequence[float], confidence: float) -> Estimate:
    """Clopper and Pearson's bounds of a proportion."""
    total, hits = len(values), round(sum(values))
    error = 1 - confidence
    low = beta_quantile(error, hits, total - hits + 1) if hits else 0.0
    high = beta_quantile(confidence, hits + 1, total - hits) if hits < total else 1.0
    softened = (hits + 2) / (total + 4)  # where all are equal, they still are not without spread
    deviation = math.sqrt(softened * (1 - softened))
    return Estimate(hits / total, low, high, deviation, total, confidence, "exact binomial")


def _student(values: NDArray[np.float64], ends: Sequence[float], confidence: float, method: Method) -> Estimate:
    softened = np.concatenate([values, np.asarray(ends, dtype=np.float64)])
    low, high = _t_bounds(softened, confidence)
    if ends and len(values) > 1:
        # The imagined problems pull towards the middle of the range, which must not be what makes a bound hold.
        plain_low, plain_high = _t_bounds(values, confidence)
        low, high = max(min(low, plain_low), min(ends)), min(max(high, plain_high), max(ends))
    deviation = math.sqrt(_variance(softened))
    return Estimate(float(values.mean()), low, high, deviation, len(values), confidence, method)


def _t_bounds(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    if len(values) < 2:
        return -math.inf, math.inf
    count = len(values)
    spread, third = _variance(values) / count, _third_moment(values) / count**2
    return _bounds(float(values.mean()), spread, third, count - 1, confidence)


def _bounds(centre: float, variance: float, third: float, degrees: float, confidence: float) -> tuple[float, float]:
    """Student's bounds of a mean with this variance, moved outwards for its third moment (Johnson 1978).

    Of skewed values, such as lengths, the plain bound on the side of the long tail is passed too often. The bound on the
    other side is too careful then; it stays as it is.
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
