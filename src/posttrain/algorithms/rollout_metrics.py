"""What a step's rollouts say of themselves, and what should worry their owner."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from posttrain.types import Group


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards over scored rollouts only; a step without any has no `reward`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.score.reward for r in rollouts if r.score.reward is not None]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    spread = [len({reward for reward in group.rewards if reward is not None}) > 1 for group in groups]
    metrics = {
        "unscored": float(len(rollouts) - len(rewards)),
        "mean_generation_length": statistics.fmean(lengths),
        "max_generation_length": float(max(lengths)),
        "truncation_rate": statistics.fmean(r.truncated for r in rollouts),
        "groups_with_signal": statistics.fmean(spread),
        "num_samples": float(len(rollouts)),
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
    return metrics


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
