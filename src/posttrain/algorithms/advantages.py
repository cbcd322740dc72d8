"""Advantage estimators: one advantage per rollout, computed per group from the rewards of a step.

`GroupAdvantages` is GRPO's (arXiv:2402.03300), and with other switches RLOO's (arXiv:2402.14740) and Dr. GRPO's
(arXiv:2503.20783); `NoBaseline` is REINFORCE++ without a baseline (arXiv:2501.03262); `AdvantagesPerReward` is GDPO's
(arXiv:2601.05242), which computes advantages per reward component. `Whitening` normalises the advantages of a step to
mean 0 and variance 1, over rollouts or over tokens.

    A_i = r_i - b_i,   divided by (std + epsilon) if rewards are normalised and std > 0

With a leave-one-out baseline, b_i is the mean of the *other* rewards of the group; otherwise of all of them. std is the
standard deviation of all rewards of the group, or of the step (`std_over: batch`). `std_over: others` is NeMo RL's:
with a leave-one-out baseline, std_i is the deviation of the other rewards. It can be small where r_i is far from them,
so A_i has no bound; if the others are all equal, A_i stays undivided. Equality is decided by comparing rewards: a
computed variance could be tiny but non-zero due to rounding.

Unscored rollouts are excluded from baselines and have advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from posttrain.config.grpo import AdvEstimatorConfig
from posttrain.data.reward_values import total
from posttrain.errors import InputError
from posttrain.types import Group, Score

SAME = 1e-9  # relative tolerance: smaller differences are rounding errors

Rewards = Sequence[float | None]  # rewards of one group; None: unscored
Scores = Sequence[Score]  # scores of one group


class Estimator(Protocol):
    def __call__(self, batch: Sequence[Scores]) -> list[list[float]]:
        """One advantage per rollout of each group; 0 for unscored rollouts."""


def differ(values: Sequence[float]) -> bool:
    """Whether any two values differ by more than rounding error."""
    return len(values) > 1 and max(values) - min(values) > SAME * max(abs(value) for value in values)


def part_names(score: Score) -> list[str]:
    """The reward components of a score. Names with a slash (`code/num_tests`) are details and left out."""
    return [name for name in score.parts if "/" not in name]


def has_signal(group: Group, *, in_parts: bool = False, in_turns: bool = False) -> bool:
    """Whether the scores of the group's rollouts differ, before any shaping.

    `in_parts`, `in_turns`: a difference in any reward component, or in the rewards of any turn, counts even if the
    totals are equal.
    """
    scores = [rollout.score for rollout in group.rollouts if rollout.score.scored]
    if differ([score.reward for score in scores if score.reward is not None]):
        return True
    talks = [rollout.completion.conversation for rollout in group.rollouts if rollout.score.scored and in_turns]
    turns = [talk.rewards for talk in talks if talk is not None]
    if any(differ([own[turn] for own in turns if turn < len(own)]) for turn in range(max(map(len, turns), default=0))):
        return True
    names = {name for score in scores for name in part_names(score)} if in_parts else set()
    return any(differ([score.parts[name] for score in scores if name in score.parts]) for name in names)


@dataclass(frozen=True)
class Spread:
    """How to turn a standard deviation into a divisor. Frameworks differ in these three choices."""

    ddof: Literal[0, 1] = 1  # 1: Bessel's correction
    epsilon: float = 1e-6
    form: Literal["std_plus", "variance_plus", "variance_floor"] = "std_plus"

    def divisor(self, variance: float) -> float:
        if self.form == "variance_plus":
            return math.sqrt(variance + self.epsilon)
        if self.form == "variance_floor":
            return math.sqrt(max(variance, self.epsilon))
        return math.sqrt(variance) + self.epsilon

    def of(self, values: Sequence[float]) -> float | None:
        """The divisor for these values; None if they are all equal."""
        if len(values) <= self.ddof or not differ(values):
            return None
        mean = total(values) / len(values)
        return self.divisor(total((v - mean) * (v - mean) for v in values) / (len(values) - self.ddof))


@dataclass(frozen=True)
class GroupAdvantages:
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    std_over: Literal["group", "others", "batch"] = "group"
    spread: Spread = field(default_factory=Spread)
    group_of_one: Literal["zero", "reward"] = "zero"  # the only scored rollout of its group

    def __call__(self, batch: Sequence[Scores]) -> list[list[float]]:
        return self.of_rewards([[score.reward for score in scores] for scores in batch])

    def of_rewards(self, batch: Sequence[Rewards]) -> list[list[float]]:
        whole = self.spread.of([reward for rewards in batch for reward in rewards if reward is not None])
        return [self._of_group(rewards, whole) for rewards in batch]

    def _of_group(self, rewards: Rewards, whole: float | None) -> list[float]:
        scored = [(i, reward) for i, reward in enumerate(rewards) if reward is not None]
        advantages = [0.0] * len(rewards)
        if len(scored) == 1 and self.group_of_one == "reward":
            index, reward = scored[0]
            # Same as frameworks that keep such a reward: mean 0, variance 1.
            advantages[index] = reward / self.spread.divisor(1.0) if self.normalize_rewards else reward
        if len({reward for _, reward in scored}) < 2:
            return advantages
        group = whole if self.std_over == "batch" else self.spread.of([reward for _, reward in scored])
        for i, reward in scored:
            peers = [other for j, other in scored if j != i or not self.use_leave_one_out_baseline]
            advantage = reward - total(peers) / len(peers)
            divisor = self.spread.of(peers) if self.std_over == "others" else group
            advantages[i] = advantage / divisor if self.normalize_rewards and divisor is not None else advantage
        return advantages


@dataclass(frozen=True)
class NoBaseline:
    """The reward itself; whitening then compares it with all rollouts of the step (REINFORCE++ without a baseline)."""

    def __call__(self, batch: Sequence[Scores]) -> list[list[float]]:
        return [[score.reward if score.reward is not None else 0.0 for score in scores] for scores in batch]


@dataclass(frozen=True)
class AdvantagesPerReward:
    """Weighted sum of per-component advantages, with components in alphabetical order."""

    each: GroupAdvantages
    weights: tuple[float, ...] | None = None  # None: weight 1 for every component

    def __call__(self, batch: Sequence[Scores]) -> list[list[float]]:
        total = [[0.0] * len(scores) for scores in batch]
        if not any(score.scored for scores in batch for score in scores):
            return total
        names = self._part_names(batch)
        weights = self.weights or (1.0,) * len(names)
        for name, weight in zip(names, weights, strict=True):
            of_part = self.each.of_rewards([[s.parts[name] if s.scored else None for s in scores] for scores in batch])
            for sums, advantages in zip(total, of_part, strict=True):
                sums[:] = [a + weight * b for a, b in zip(sums, advantages, strict=True)]
        return total

    def _part_names(self, batch: Sequence[Scores]) -> list[str]:
        found = {tuple(sorted(part_names(score))) for scores in batch for score in scores if score.scored}
        if len(found) > 1:
            kinds = " and ".join(", ".join(names) or "none" for names in sorted(found))
            raise InputError(
                f"grpo.adv_estimator.name: gdpo needs the same reward parts of every rollout, but there are {kinds}; "
                "train environments with other parts in runs of their own, or use grpo"
            )
        names = list(found.pop())
        if len(names) < 2:
            raise InputError(
                f"grpo.adv_estimator.name: gdpo needs rewards of at least two parts, but these have "
                f"{', '.join(names) or 'none'}; name several rewards in the environment, or use grpo"
            )
        if self.weights is not None and len(self.weights) != len(names):
            raise InputError(
                f"grpo.adv_estimator.reward_weights: {len(self.weights)} weights for the {len(names)} parts "
                f"{', '.join(names)}; give one for each, in this order"
            )
        return names


@dataclass(frozen=True)
class Whitening:
    """Advantages minus their mean, by their standard deviation, over scored rollouts or trained tokens."""

    over: Literal["rollouts", "tokens"]
    spread: Spread

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Statistics are computed in float64 over `values` where `weights` is 1, and applied to all values."""
        count = float(weights.sum())
        if count == 0:
            return values
        mean = (values * weights).sum() / count
        centred = values - mean
        counted = values[weights != 0]
        if count <= self.spread.ddof or not differ([float(counted.min()), float(counted.max())]):
            return torch.zeros_like(values)
        variance = float((centred.square() * weights).sum()) / (count - self.spread.ddof)
        return centred / self.spread.divisor(variance)


# -- estimators by name ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EstimatorForm:
    """How to build an estimator, and its defaults for config values that are null."""

    build: Callable[[AdvEstimatorConfig, Spread], Estimator]
    whiten_over: Literal["none", "rollouts", "tokens"] = "none"
    whiten_by: Spread = field(default_factory=Spread)
    kl_charged_to: Literal["sequence", "token", "return"] = "sequence"
    loss_normalizer: Literal["max_tokens"] | None = None
    credits_parts: bool = False  # a difference in a reward component is a signal, even if the totals are equal


def _group(options: AdvEstimatorConfig, spread: Spread, normalize: bool, leave_one_out: bool) -> GroupAdvantages:
    return GroupAdvantages(normalize, leave_one_out, options.std_over, spread, options.group_of_one)


def _grpo(options: AdvEstimatorConfig, spread: Spread) -> GroupAdvantages:
    return _group(options, spread, options.normalize_rewards, options.use_leave_one_out_baseline)


ESTIMATORS: Mapping[str, EstimatorForm] = {
    "grpo": EstimatorForm(_grpo),
    "rloo": EstimatorForm(lambda options, spread: _group(options, spread, False, True)),
    "dr_grpo": EstimatorForm(
        lambda options, spread: _group(options, spread, False, False), loss_normalizer="max_tokens"
    ),
    "reinforce_plus_plus": EstimatorForm(
        lambda options, spread: _group(options, spread, False, False) if options.minus_baseline else NoBaseline(),
        whiten_over="tokens",
        whiten_by=Spread(0, 1e-8, "variance_floor"),
        kl_charged_to="token",
    ),
    "gae": EstimatorForm(  # of `TokenCredit`, which takes the rewards themselves
        lambda options, spread: NoBaseline(),
        whiten_over="tokens",
        whiten_by=Spread(1, 1e-8, "variance_plus"),
        kl_charged_to="token",
    ),
    "gdpo": EstimatorForm(
        lambda options, spread: AdvantagesPerReward(
            _grpo(options, spread), None if options.reward_weights is None else tuple(options.reward_weights)
        ),
        whiten_over="rollouts",
        whiten_by=Spread(1, 0.0, "std_plus"),
        kl_charged_to="token",
        credits_parts=True,
    ),
}
