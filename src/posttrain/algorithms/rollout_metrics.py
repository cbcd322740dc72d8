"""Metrics of the rollouts of a step, and warnings about rollouts without a learning signal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from posttrain.algorithms.advantages import has_signal
from posttrain.types import Group

MAX_GROUPS_COMPARED, MAX_TOKENS_COMPARED = 64, 1024  # limits the cost of the repetition metric to milliseconds


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards over scored rollouts only; without any, `reward` is omitted."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.score.reward for r in rollouts if r.score.reward is not None]
    lengths = [r.completion.num_sampled for r in rollouts]
    metrics = {
        "unscored": float(len(rollouts) - len(rewards)),
        "mean_generation_length": statistics.fmean(lengths),
        "max_generation_length": float(max(lengths)),
        "num_generated_tokens": float(num_generated_tokens(groups)),
        "truncation_rate": statistics.fmean(r.truncated for r in rollouts),
        "groups_with_signal": statistics.fmean(has_signal(group) for group in groups),
        "num_samples": float(len(rollouts)),
        "distinct_answers": statistics.fmean(_share_of_distinct(group) for group in groups),
        "repetition": _repetition(groups),
    }
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.pstdev(rewards)
        metrics["reward_min"] = min(rewards)
        metrics["reward_max"] = max(rewards)
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.score.parts.items():
            parts.setdefault(name, []).append(value)
    metrics |= {f"reward/{name}": statistics.fmean(values) for name, values in parts.items()}
    return metrics | _conversation_metrics(groups)


def _share_of_distinct(group: Group) -> float:
    return len({rollout.completion.token_ids for rollout in group.rollouts}) / len(group.rollouts)


def _repetition(groups: Sequence[Group]) -> float:
    """Fraction of 4-grams that occurred earlier in the same answer, over the first answer of each group."""
    shares = []
    for group in groups[:MAX_GROUPS_COMPARED]:
        ids = group.rollouts[0].completion.token_ids[:MAX_TOKENS_COMPARED]
        runs = [ids[i : i + 4] for i in range(len(ids) - 3)]
        shares.append(1 - len(set(runs)) / len(runs) if runs else 0.0)
    return statistics.fmean(shares)


def num_generated_tokens(groups: Sequence[Group]) -> int:
    """Tokens sampled in this run, without recorded answers."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return sum(completion.num_sampled for completion in completions if completion.logprobs)


def _conversation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over multi-turn rollouts, if there are any."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    found = [(c, c.conversation) for c in completions if c.conversation is not None]
    if not found:
        return {}
    names = dict.fromkeys(name for _, conversation in found for name in conversation.counts)
    return {
        "turns": statistics.fmean(conversation.num_turns for _, conversation in found),
        "environment_tokens": statistics.fmean(len(c.token_ids) - c.num_sampled for c, _ in found),
        **{name: statistics.fmean(conversation.counts.get(name, 0.0) for _, conversation in found) for name in names},
    }


def rollout_warnings(groups: Sequence[Group], step: int) -> list[str]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.score.reward for r in rollouts if r.score.reward is not None]
    if not rewards:
        first = next((r.score.error for r in rollouts if r.score.error), "no reason given")
        return [f"step {step}: none of the {len(rollouts)} rollouts could be scored, so nothing was learnt ({first})"]
    if len(set(rewards)) == 1:
        truncated = statistics.fmean(r.truncated for r in rollouts)
        hint = (
            f"{truncated:.0%} of the completions were cut off at policy.generation.max_new_tokens"
            if truncated > 0.5
            else "the prompts are too easy or too hard for the model, or the reward does not see what differs"
        )
        return [
            f"step {step}: all {len(rewards)} rewards are {rewards[0]:g}, so every advantage is 0 and nothing is learnt; {hint}"
        ]
    return []
