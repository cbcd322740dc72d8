"""Which of the sampled groups a step trains on: all of them, or, with dynamic sampling, those that teach something.

Dynamic sampling (DAPO, arXiv:2503.14476): sample batch after batch until enough groups have rewards that differ. A group
is judged as a whole, by what the environment said, scaled but before any shaping. Sampling noise is keyed by draw, so it makes no
difference to a completion in which batch its task came.

Deviations from NeMo RL: whole groups are kept, not rows; `max_batches` is exactly that many; groups beyond what a step
needs are kept for the next one, if wanted. Those were sampled by earlier weights: they are marked as off-policy, so that
their ratios are taken against the policy that sampled them. What is kept is part of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.algorithms.advantages import has_signal
from posttrain.algorithms.reward_shaping import RewardScaling, shaped
from posttrain.algorithms.rollout_metrics import num_generated_tokens
from posttrain.errors import InputError
from posttrain.roles import Stateful
from posttrain.rollouts.group_state import from_plain, to_plain
from posttrain.types import Group

SURPLUS = "dynamic_sampling"  # key in the checkpoint's state


class Collection(Protocol):
    """The groups of one step while they are being sampled."""

    @property
    def num_to_draw(self) -> int:
        """Groups to sample next; 0 when there are enough."""

    def add(self, groups: Sequence[Group]) -> None: ...

    @property
    def groups(self) -> list[Group]:
        """Those to train on."""

    @property
    def sampled(self) -> list[Group]:
        """All that were sampled in this step."""

    @property
    def num_earlier(self) -> int:
        """How many of `groups`, from the first, were sampled in an earlier step."""

    def metrics(self) -> dict[str, float]: ...


class GroupSelection(Protocol):
    def begin(self, step: int) -> Collection: ...


@dataclass
class _OneBatch:
    num_to_draw: int
    groups: list[Group] = field(default_factory=list)
    num_earlier: int = 0

    def add(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.num_to_draw = 0

    @property
    def sampled(self) -> list[Group]:
        return self.groups

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class EveryGroup:
    num_groups: int

    def begin(self, step: int) -> Collection:
        return _OneBatch(self.num_groups)


@dataclass
class DynamicSampling:
    """Keeps the surplus of a step, if it `keeps_surplus`, and hands it out first in the next one."""

    num_groups: int  # that a step trains on
    num_per_batch: int  # that are sampled at once
    max_batches: int  # in one step
    keeps_surplus: bool = True
    looks_at_parts: bool = False
    scaling: RewardScaling | None = None  # may map rewards that differ to the same one
    surplus: list[Group] = field(default_factory=list)

    def begin(self, step: int) -> Collection:
        return _Filtered(self, step, earlier=self.surplus)

    def is_useful(self, group: Group) -> bool:
        seen = group if self.scaling is None else shaped([group], [self.scaling])[0]
        return has_signal(seen, in_parts=self.looks_at_parts)

    def state_dict(self) -> dict[str, Any]:
        return {"surplus": [to_plain(group) for group in self.surplus]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.surplus = [from_plain(group) for group in state["surplus"]]


@dataclass(frozen=True)
class StreamAndSurplus:
    """The position in the data and the groups kept for the next step, as one part of a checkpoint."""

    stream: Stateful
    selection: DynamicSampling

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), SURPLUS: self.selection.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stream.load_state_dict(state)
        # A run that began without dynamic sampling has kept nothing.
        self.selection.load_state_dict(state.get(SURPLUS, {"surplus": []}))


class _Filtered:
    def __init__(self, owner: DynamicSampling, step: int, earlier: Sequence[Group]) -> None:
        self._owner, self._step = owner, step
        self._earlier = list(earlier)
        self._kept: list[Group] = []
        self.sampled: list[Group] = []
        self._num_batches = 0
        self._share_out()

    @property
    def num_to_draw(self) -> int:
        if len(self._earlier) + len(self._kept) >= self._owner.num_groups:
            return 0
        if self._num_batches >= self._owner.max_batches:
            raise InputError(self._explain_failure())
        return self._owner.num_per_batch

    def add(self, groups: Sequence[Group]) -> None:
        self.sampled += groups
        self._kept += [group for group in groups if self._owner.is_useful(group)]
        self._num_batches += 1
        self._share_out()

    def _share_out(self) -> None:
        surplus = [*self._earlier, *self._kept][self._owner.num_groups :]
        self._owner.surplus = surplus if self._owner.keeps_surplus else []

    @property
    def groups(self) -> list[Group]:
        return [*self._earlier, *self._kept][: self._owner.num_groups]

    @property
    def num_earlier(self) -> int:
        return min(len(self._earlier), self._owner.num_groups)

    def metrics(self) -> dict[str, float]:
        rewards = [reward for group in self.groups for reward in group.rewards if reward is not None]
        num_surplus = len(self._earlier) + len(self._kept) - len(self.groups)
        return {
            # A step that lives on what an earlier one left over has generated nothing.
            "num_generated_tokens": float(num_generated_tokens(self.sampled)),
            "filtered_reward": sum(rewards) / len(rewards),
            "dynamic_sampling_num_gen_batches": float(self._num_batches),
            "dynamic_sampling_num_earlier_groups": float(self.num_earlier),
            "dynamic_sampling_num_surplus_groups": float(num_surplus),
        }

    def _explain_failure(self) -> str:
        owner, num_sampled = self._owner, len(self.sampled)
        useful = len(self._kept)
        why: Counter[str] = Counter()
        for group in self.sampled:
            rewards = {reward for reward in group.rewards if reward is not None}
            if not rewards:
                why["could not be scored"] += 1
            elif not owner.is_useful(group):
                why[f"had reward {min(rewards):g} throughout"] += 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common(3))
        return (
            f"step {self._step}: after {self._num_batches} batches (grpo.dynamic_sampling_max_gen_batches) only {useful} of "
            f"{num_sampled} groups ({useful / max(num_sampled, 1):.0%}) had rewards that differ, and "
            f"{owner.num_groups - len(self._earlier)} are needed; of the others {reasons}. Choose prompts that the model "
            "gets right sometimes but not always, sample more answers per prompt (grpo.num_generations_per_prompt), train on "
            "fewer prompts per step, or raise grpo.dynamic_sampling_max_gen_batches"
        )
