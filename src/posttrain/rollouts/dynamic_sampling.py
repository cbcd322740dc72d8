"""Dynamic sampling (DAPO, arXiv:2503.14476): sample batch after batch until enough groups have rewards that differ.

A group is kept or discarded as a whole, by the scores of its environment, scaled but before any shaping. Sampling noise
is keyed by draw, so a completion does not depend on the batch of its task.

Deviations from NeMo RL: whole groups are kept, not rows; `max_batches` is an exact limit; surplus groups are kept for
the next step, if configured. Their completions keep the version of the weights that sampled them, so that ratios are
taken against the policy that sampled them. The surplus is part of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.algorithms.advantages import has_signal
from posttrain.algorithms.reward_shaping import RewardScaling, shaped
from posttrain.algorithms.rollout_metrics import num_generated_tokens
from posttrain.errors import InputError
from posttrain.roles import RolloutSource
from posttrain.rollouts.surplus import StreamAndSurplus
from posttrain.types import Group, TakenGroups


@dataclass
class DynamicSampling:
    """A `RolloutSource` over another one. The next step uses the surplus first."""

    source: RolloutSource
    position: StreamAndSurplus
    num_per_batch: int  # groups sampled at once
    max_batches: int  # limit per step
    keeps_surplus: bool = True
    looks_at_parts: bool = False
    scaling: RewardScaling | None = None  # may map different rewards to the same value

    def take(self, num_groups: int, step: int) -> TakenGroups:
        earlier = self.position.surplus
        kept: list[Group] = []
        sampled: list[Group] = []
        timings_s: dict[str, float] = {}
        metrics: dict[str, float] = {}
        num_batches = 0
        while len(earlier) + len(kept) < num_groups:
            if num_batches == self.max_batches:
                raise InputError(self._why_too_few(step, num_groups - len(earlier), sampled, len(kept)))
            taken = self.source.take(self.num_per_batch, step)
            num_batches += 1
            sampled += taken.sampled
            kept += [group for group in taken.groups if self.is_useful(group)]
            metrics |= taken.metrics
            for stage, seconds in taken.timings_s.items():
                timings_s[stage] = timings_s.get(stage, 0.0) + seconds
        available = [*earlier, *kept]
        groups, surplus = available[:num_groups], available[num_groups:]
        self.position.surplus = surplus if self.keeps_surplus else []
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        metrics |= {
            # A step that trains only on surplus groups generates nothing.
            "num_generated_tokens": float(num_generated_tokens(sampled)),
            "filtered_reward": sum(rewards) / len(rewards),
            "dynamic_sampling_num_gen_batches": float(num_batches),
            "dynamic_sampling_num_earlier_groups": float(min(len(earlier), num_groups)),
            "dynamic_sampling_num_surplus_groups": float(len(surplus)),
        }
        return TakenGroups(tuple(groups), tuple(sampled), timings_s, metrics)

    def is_useful(self, group: Group) -> bool:
        seen = group if self.scaling is None else shaped([group], [self.scaling])[0]
        return has_signal(seen, in_parts=self.looks_at_parts)

    def _why_too_few(self, step: int, num_needed: int, sampled: Sequence[Group], num_useful: int) -> str:
        why: Counter[str] = Counter()
        for group in sampled:
            rewards = {reward for reward in group.rewards if reward is not None}
            if not rewards:
                why["could not be scored"] += 1
            elif not self.is_useful(group):
                why[f"had reward {min(rewards):g} throughout"] += 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common(3))
        return (
            f"step {step}: after {self.max_batches} batches (grpo.dynamic_sampling_max_gen_batches) only {num_useful} of "
            f"{len(sampled)} groups ({num_useful / max(len(sampled), 1):.0%}) had rewards that differ, and {num_needed} are "
            f"needed; of the others {reasons}. Choose prompts that the model gets right sometimes but not always, sample more "
            "answers per prompt (grpo.num_generations_per_prompt), train on fewer prompts per step, or raise "
            "grpo.dynamic_sampling_max_gen_batches"
        )
