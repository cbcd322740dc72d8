"""GRPO's group advantages: how much better a completion is than the others of its group.

    A_i = r_i - b_i,   divided by (std_i + 1e-6) if rewards are normalised and std_i > 0

With a leave-one-out baseline, b_i and std_i are the mean and the standard deviation (with Bessel's correction) of the
*other* rewards; otherwise of all of them. Rewards that are all equal give A = 0. If only the others are equal, std_i is
exactly 0 and A_i stays unnormalised. That case is found by comparing rewards, not by computing a variance: rounding would
leave a tiny one, and dividing by it makes A_i explode.

Unscored rollouts take no part: they are in nobody's baseline, and their advantage is 0. So is that of a group with fewer
than two scored rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EPSILON = 1e-6
SAME = 1e-9  # rewards closer than this, relatively, differ by the rounding of their parts, not in what they say


@dataclass(frozen=True)
class GroupAdvantages:
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    clip_low: float | None = None
    clip_high: float | None = None

    def __call__(self, rewards: Sequence[float | None]) -> list[float]:
        scored = [(i, r) for i, r in enumerate(rewards) if r is not None]
        advantages = [0.0] * len(rewards)
        if len(scored) < 2 or len({reward for _, reward in scored}) == 1:
            return advantages
        for i, reward in scored:
            peers = [r for j, r in scored if j != i or not self.use_leave_one_out_baseline]
            advantage = reward - math.fsum(peers) / len(peers)
            spread = _standard_deviation(peers)
            if self.normalize_rewards and spread > 0:
                advantage /= spread + EPSILON
            advantages[i] = self._clip(advantage)
        return advantages

    def _clip(self, advantage: float) -> float:
        if self.clip_low is not None:
            advantage = max(advantage, self.clip_low)
        if self.clip_high is not None:
            advantage = min(advantage, self.clip_high)
        return advantage


def _standard_deviation(values: Sequence[float]) -> float:
    if len(values) < 2 or max(values) - min(values) <= SAME * max(abs(v) for v in values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
