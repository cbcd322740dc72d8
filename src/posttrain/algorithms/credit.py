"""Computes per-token advantages from the scores of a step.

Order, as in NeMo RL: reward scaling and shaping, KL penalty (if it is part of the reward), advantage estimator,
whitening, clipping. Rollouts keep the environment's scores. A rollout's `advantage` is the mean over its tokens; token
advantages differ only if the KL penalty is applied per token, credit is given by turn, or a critic gives it.

**Scaling and shaping** of rewards is a linear map, and penalties for long or truncated answers. The rollout keeps the
environment's score, which the metric `reward` reports. Advantages are computed from the *shaped* reward. Unscored
rollouts stay unscored. Deviation from NeMo RL: answer length counts all of the model's turns, not only the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.algorithms.advantages import Estimator, Whitening, differ
from posttrain.algorithms.batches import Place
from posttrain.data.reward_values import total
from posttrain.policy.objectives.kl import clamped_kl
from posttrain.types import Group, Rollout, Score, TokenBatch


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


@dataclass(frozen=True)
class KlInReward:
    """KL penalty in the reward instead of the loss, between the policy before the step and the reference.

    charged to   sequence: the answer's reward, as a sum over its tokens, before any baseline (RLOO, PPO)
                 token:    each token's own advantage (NeMo RL's REINFORCE++)
                 return:   every token up to the one that caused it (REINFORCE++ of OpenRLHF and verl)
    """

    penalty: float
    charged_to: Literal["sequence", "token", "return"]
    kind: Literal["k1", "k2", "k3"] = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0

    def of_tokens(self, batch: TokenBatch) -> Tensor:
        """KL of every trained token; 0 for other tokens."""
        log_ratio = batch.columns["reference_logprobs"].double() - batch.columns["current_logprobs"].double()
        kl = clamped_kl(log_ratio, self.kind, self.input_clamp, self.output_clamp)
        return torch.where(batch.columns["mask"] != 0, kl, torch.zeros_like(kl))


@dataclass(frozen=True)
class TurnCredit:
    """The tokens of the model's turn t are credited with the rewards from that turn on,

        G_t = r_t + discount r_(t+1) + discount^2 r_(t+2) + …

    compared by the estimator with G_t of those rollouts of the group that have a turn t. What a judge or reward shaping
    adds belongs to the last turn. An answer without a conversation is one turn.
    """

    discount: float

    def returns(self, rollout: Rollout) -> list[float]:
        """G of each turn; empty if the rollout is unscored."""
        reward, conversation = rollout.score.reward, rollout.completion.conversation
        if reward is None:
            return []
        rewards = list(conversation.rewards) if conversation is not None and conversation.rewards else [0.0]
        rewards[-1] += reward - total(rewards)
        found = [0.0]
        for own in reversed(rewards):
            found.append(own + self.discount * found[-1])
        return found[:0:-1]

    def advantages(self, groups: Sequence[Group], estimator: Estimator) -> list[list[list[float]]]:
        """By group, rollout and turn."""
        returns = [[self.returns(rollout) for rollout in group.rollouts] for group in groups]
        num_turns = max((len(own) for group in returns for own in group), default=0)
        by_turn = [
            estimator([[Score(own[turn] if turn < len(own) else None) for own in group] for group in returns])
            for turn in range(num_turns)
        ]
        return [
            [[by_turn[turn][g][r] for turn in range(len(own))] for r, own in enumerate(group)]
            for g, group in enumerate(returns)
        ]

    @staticmethod
    def spans(rollout: Rollout, advantages: Sequence[float], length: int) -> Iterator[tuple[float, int]]:
        """Advantages of the rollout's turns with numbers of tokens, of a row of `length` tokens. What the environment
        writes goes with the turn before it.
        """
        conversation = rollout.completion.conversation
        if conversation is None or len(advantages) == 1:
            yield advantages[0], length
            return
        turn = -1
        for utterance in conversation.utterances:
            turn += utterance.role == "assistant"
            yield advantages[turn], utterance.num_tokens


@dataclass(frozen=True)
class Credit:
    estimator: Estimator
    reward_steps: tuple[RewardStep, ...] = ()
    whitening: Whitening | None = None
    kl: KlInReward | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    turns: TurnCredit | None = None  # None: every token is credited with the whole reward

    compares: ClassVar[bool] = True  # equal rewards give advantage 0

    def __call__(
        self, groups: Sequence[Group], batch: TokenBatch, places: Sequence[Place]
    ) -> tuple[list[Group], TokenBatch, dict[str, float]]:
        """The groups with their advantages, the batch with its column `advantages`, and metrics.

        `places` names the rollout of each row of the batch. With KL in the reward the batch has the columns
        `current_logprobs` and `reference_logprobs`.
        """
        kl = self.kl.of_tokens(batch) if self.kl is not None and batch.responses else None
        metrics = {}
        if kl is not None:
            metrics["kl_penalty"] = float(kl.sum()) / max(float(batch.columns["mask"].sum()), 1.0)
        judged = shaped(groups, self.reward_steps)
        seen = self._with_sequence_kl(judged, batch, kl, places)
        tokens, columns = self._of_tokens(self._spans(seen, batch, places), batch, kl, places)
        if len(tokens):
            metrics["advantage_max"] = float(tokens.abs().max())
        if self.reward_steps:
            rewards = [reward for group in judged for reward in group.rewards if reward is not None]
            metrics |= {"shaped_reward": total(rewards) / len(rewards)} if rewards else {}
        return (
            self._with_advantages(groups, judged, batch, tokens, places),
            batch.with_columns(advantages=tokens.float(), **columns),
            metrics,
        )

    def _with_sequence_kl(
        self, groups: Sequence[Group], batch: TokenBatch, kl: Tensor | None, places: Sequence[Place]
    ) -> list[Group]:
        if kl is None or self.kl is None or self.kl.charged_to != "sequence":
            return list(groups)
        rollouts = [list(group.rollouts) for group in groups]
        for (g, r), of_row in zip(places, kl.split(batch.response_lengths), strict=True):
            rollout = rollouts[g][r]
            assert rollout.score.reward is not None, "rows of a batch are scored"
            reward = rollout.score.reward - self.kl.penalty * float(of_row.sum())
            rollouts[g][r] = replace(rollout, score=replace(rollout.score, reward=reward))
        return [replace(group, rollouts=tuple(own)) for group, own in zip(groups, rollouts, strict=True)]

    def _spans(self, groups: Sequence[Group], batch: TokenBatch, places: Sequence[Place]) -> list[tuple[float, int]]:
        """Advantages with numbers of tokens, in the order of the batch: one for each row, or for each turn."""
        rows = list(zip(places, batch.response_lengths, strict=True))
        if self.turns is not None:
            of_turns, spans = self.turns.advantages(groups, self.estimator), self.turns.spans
            return [span for (g, r), length in rows for span in spans(groups[g].rollouts[r], of_turns[g][r], length)]
        of_rollouts = self.estimator([[rollout.score for rollout in group.rollouts] for group in groups])
        return [(of_rollouts[g][r], length) for (g, r), length in rows]

    def _of_tokens(
        self, spans: Sequence[tuple[float, int]], batch: TokenBatch, kl: Tensor | None, places: Sequence[Place]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The advantages of tokens, and further columns of the batch."""
        values = torch.tensor([value for value, _ in spans], dtype=torch.float64)
        lengths = torch.tensor([length for _, length in spans], dtype=torch.long)
        if self.whitening is not None and self.whitening.over == "rollouts":
            num_rows = Counter(places)  # a rollout counts once, however many branches it has
            values = self.whitening(values, torch.tensor([1 / num_rows[place] for place in places], dtype=values.dtype))
        tokens = values.repeat_interleave(lengths)
        if kl is not None and self.kl is not None and self.kl.charged_to != "sequence":
            charged = kl
            if self.kl.charged_to != "token" and len(kl):  # for each token the KL from it to the end of its answer
                parts = kl.split(batch.response_lengths)
                charged = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
            tokens = tokens - self.kl.penalty * charged
        return self._bounded(tokens, batch), {}

    def _bounded(self, tokens: Tensor, batch: TokenBatch) -> Tensor:
        """Whitened, if that is over tokens, and clipped."""
        if self.whitening is not None and self.whitening.over == "tokens":
            tokens = self.whitening(tokens, batch.columns["mask"].double())
        return tokens.clamp(
            -math.inf if self.clip_low is None else self.clip_low,
            math.inf if self.clip_high is None else self.clip_high,
        )

    def _with_advantages(
        self,
        groups: Sequence[Group],
        judged: Sequence[Group],
        batch: TokenBatch,
        tokens: Tensor,
        places: Sequence[Place],
    ) -> list[Group]:
        """The groups with the environment's scores, advantages and shaped rewards."""
        credited: list[list[Rollout]] = [list(group.rollouts) for group in groups]
        for (g, r), of_row in zip(places, tokens.split(batch.response_lengths), strict=True):
            shaped_reward = judged[g].rollouts[r].score.reward if self.reward_steps else None
            credited[g][r] = replace(credited[g][r], advantage=_mean(of_row), shaped_reward=shaped_reward)
        return [replace(group, rollouts=tuple(own)) for group, own in zip(groups, credited, strict=True)]


@dataclass(frozen=True)
class TokenCredit(Credit):
    """PPO: generalised advantage estimation (arXiv:1506.02438) over the trained tokens of an answer, from a critic.

    The reward comes with the last trained token, and a KL penalty in the reward with each. After the last token nothing
    follows, also where a limit ended the answer: the reward is that of the answer as it is, and nothing later is
    rewarded. Tokens of the environment are no steps: the value of the token before is followed by that of the next
    trained one. Computed in float64. The batch gets the columns `values` and `returns`, what the critic learns.
    """

    values: Callable[[TokenBatch], Tensor] = lambda batch: torch.zeros(len(batch.columns["mask"]))
    gamma: float = 1.0
    lam: float = 0.95

    compares: ClassVar[bool] = False

    def __call__(
        self, groups: Sequence[Group], batch: TokenBatch, places: Sequence[Place]
    ) -> tuple[list[Group], TokenBatch, dict[str, float]]:
        if batch.responses:
            batch = batch.with_columns(values=self.values(batch))
        groups, batch, metrics = super().__call__(groups, batch, places)
        is_trained = batch.columns["mask"] != 0
        if bool(is_trained.any()):
            values, returns = (batch.columns[name][is_trained].double() for name in ("values", "returns"))
            metrics |= {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
            if differ([float(returns.min()), float(returns.max())]):
                unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
                metrics["value_explained_variance"] = 1 - float(unexplained)
        return groups, batch, metrics

    def _of_tokens(
        self, spans: Sequence[tuple[float, int]], batch: TokenBatch, kl: Tensor | None, places: Sequence[Place]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not batch.responses:
            return torch.zeros(0, dtype=torch.float64), {}
        values, is_trained = batch.columns["values"].double(), batch.columns["mask"] != 0
        rewards = torch.zeros_like(values)
        if kl is not None and self.kl is not None:
            rewards -= self.kl.penalty * kl
        starts = torch.tensor([0, *batch.response_lengths[:-1]]).cumsum(0)
        steps = [
            start + own.nonzero().flatten()
            for start, own in zip(starts, is_trained.split(batch.response_lengths), strict=True)
        ]
        for (reward, _), own in zip(spans, steps, strict=True):
            if len(own):
                rewards[own[-1]] += reward
        advantages = generalized_advantages(rewards, values, steps, self.gamma, self.lam)
        columns = {"returns": (advantages + values).float()}
        return torch.where(is_trained, self._bounded(advantages, batch), 0.0), columns


def generalized_advantages(
    rewards: Tensor, values: Tensor, steps: Sequence[Tensor], gamma: float, lam: float
) -> Tensor:
    """A_t = d_t + gamma lam A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t; 0 after the last step.

    `steps`: for each answer, the places of its steps in `rewards` and `values`. Elsewhere the result is 0.
    """
    places = pad_sequence(list(steps), batch_first=True, padding_value=-1)
    is_step = places >= 0
    r, v = (torch.where(is_step, of[places.clamp(min=0)], 0.0) for of in (rewards, values))
    deltas = r + gamma * torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1) - v
    found, carried = torch.zeros_like(deltas), torch.zeros(len(deltas), dtype=deltas.dtype)
    for step in reversed(range(deltas.shape[1])):
        carried = deltas[:, step] + gamma * lam * carried
        found[:, step] = carried
    return torch.zeros_like(values).index_put((places[is_step],), found[is_step])


def _mean(values: Tensor) -> float:
    """The mean; if all values are equal, exactly that value, without rounding error."""
    if not len(values):
        return 0.0
    return float(values[0]) if bool((values == values[0]).all()) else float(values.mean())
