"""Groups made by hand, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.types import Completion, Group, Rollout, Score, Task

Reward = float | None | Mapping[str, float]


def rollout(reward: Reward, num_tokens: int = 1, *, cut_off: bool = False, first_token: int = 0) -> Rollout:
    """A reward given as parts is their sum."""
    parts = reward if isinstance(reward, Mapping) else {}
    total = sum(parts.values()) if isinstance(reward, Mapping) else reward
    completion = Completion(
        tuple(range(first_token, first_token + num_tokens)),
        tuple(-0.1 * (t + 1) for t in range(num_tokens)),
        f"text {first_token}",
        "length" if cut_off else "stop",
    )
    return Rollout(completion, Score(total, dict(parts), error=None if total is not None else "timeout"))


def group(draw: int, rewards: Sequence[Reward], lengths: Sequence[int] = ()) -> Group:
    """Sample i has `lengths[i]` tokens, or i + 1."""
    rollouts = [
        rollout(reward, lengths[i] if lengths else i + 1, first_token=100 * draw + 10 * i)
        for i, reward in enumerate(rewards)
    ]
    return Group(Task(draw, f"set:{draw}", "prompt", (1, 2)), tuple(rollouts))
