"""Quantiles of the normal, Student's t and beta distributions, from the incomplete beta function. Pure maths."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

_MAX_TERMS = 10_000
_TINY = 1e-300


def normal_quantile(share: float) -> float:
    return NormalDist().inv_cdf(share)


@lru_cache(maxsize=4096)
def t_quantile(share: float, degrees: float) -> float:
    """The value that Student's t with so many degrees of freedom is below with probability `share`."""
    if share < 0.5:
        return -t_quantile(1 - share, degrees)
    if share == 0.5:
        return 0.0
    # P(T > t) = I(x; degrees/2, 1/2) / 2 with x = degrees / (degrees + t^2)
    x = beta_quantile(2 * (1 - share), degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)


def beta_quantile(share: float, a: float, b: float) -> float:
    return _bisected(lambda x: beta_cdf(x, a, b), share)


def _bisected(cdf: Callable[[float], float], share: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if cdf(middle) < share else (low, middle)
    return (low + high) / 2


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I(x; a, b), by Lentz's continued fraction."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # there the fraction converges fast for the mirrored function
        return 1 - beta_cdf(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, _inverse(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MAX_TERMS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = _inverse(1 + numerator * d)
            c = 1 + numerator / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _inverse(value: float) -> float:
    return 1 / (value if abs(value) > _TINY else _TINY)
