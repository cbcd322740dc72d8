"""Reward scaling and shaping: a linear map, and penalties for long or truncated answers.

The rollout keeps the environment's score, which the metric `reward` reports. Advantages are computed from the *shaped*
reward. Unscored rollouts stay unscored.

Deviation from NeMo RL: answer length counts all of the model's turns, not only the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.types import Group, Rollout


@dataclass(frozen=True)
class RewardScaling:
    """Clamps the reward and its components to the source range and maps them linearly to the target range."""

    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __call__(self, rollout: Rollout) -> Rollout:
        score = rollout.score
        if score.reward is None:
            return rollout
        parts = {name: self._scaled(value) for name, value in score.parts.items()}
        return replace(rollout, score=replace(score, reward=self._scaled(score.reward), parts=parts))

    def _scaled(self, reward: float) -> float:
        inside = min(max(reward, self.source_min), self.source_max)
        share = (inside - self.source_min) / (self.source_max - self.source_min)
        return self.target_min + share * (self.target_max - self.target_min)


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft punishment (arXiv:2503.14476): grows linearly over the last `overlong_buffer_length` tokens."""

    max_response_length: int
    overlong_buffer_length: int
    overlong_buffer_penalty: float = 1.0

    def __call__(self, rollout: Rollout) -> Rollout:
        score = rollout.score
        if score.reward is None:
            return rollout
        beyond = rollout.completion.num_sampled - (self.max_response_length - self.overlong_buffer_length)
        penalty = min(-beyond / self.overlong_buffer_length * self.overlong_buffer_penalty, 0.0)
        return replace(rollout, score=replace(score, reward=score.reward + penalty))


@dataclass(frozen=True)
class CutOffPenalty:
    """Rewards of truncated answers are multiplied by `factor`."""

    factor: float

    def __call__(self, rollout: Rollout) -> Rollout:
        score = rollout.score
        if score.reward is None or not rollout.truncated:
            return rollout
        return replace(rollout, score=replace(score, reward=self.factor * score.reward))


RewardStep = RewardScaling | OverlongPenalty | CutOffPenalty


def shaped(groups: Sequence[Group], steps: Sequence[RewardStep]) -> list[Group]:
    """The groups with shaped rewards; the shaping steps are applied in order."""

    def through(rollout: Rollout) -> Rollout:
        for step in steps:
            rollout = step(rollout)
        return rollout

    return [replace(group, rollouts=tuple(map(through, group.rollouts))) for group in groups]
