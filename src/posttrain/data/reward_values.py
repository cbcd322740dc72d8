"""Which numbers can be a reward, and their sums. No torch: worker processes import it."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Sums, squares and float32 have room for it. What is beyond (±1e308 is a finite float) would overflow in the statistics
# of a group, so it is no reward: the completion is unscored, the row of data is not used.
MAX_REWARD = 1e30
NEEDED = f"a finite number within ±{MAX_REWARD:g} is needed"


def is_reward(value: float) -> bool:
    return abs(value) <= MAX_REWARD  # not of NaN


def total(values: Iterable[float]) -> float:
    """`math.fsum`; NaN where that would raise because of an infinity or an overflow."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
