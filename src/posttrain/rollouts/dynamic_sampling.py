"""Dynamic sampling (DAPO, arXiv:2503.14476): sample batch after batch until enough groups have rewards that differ.

A group is kept or discarded as a whole, by the scores of its environment, scaled but before any shaping. Sampling noise
is keyed by draw, so a completion does not depend on the batch of its task.

Deviations from NeMo RL: whole groups are kept, not rows; `max_batches` is an exact limit; surplus groups are kept for
the next step, if configured. Their completions keep the version of the weights that sampled them, so that ratios are
taken against the policy that sampled them. The surplus is part of the checkpoint.

A checkpoint holds plain values: numbers, texts, bytes, lists and maps. A value of another kind (a dataset may have
anything as its expected answer) is saved as its text, as in the run's files. A task's recorded answers are not saved
with it: they are already rollouts of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace

from torch import Tensor

from posttrain.algorithms.advantages import has_signal
from posttrain.algorithms.credit import RewardScaling, shaped
from posttrain.algorithms.step_reports import num_generated_tokens
from posttrain.errors import InputError
from posttrain.roles import RolloutSource, Stateful
from posttrain.rollouts.multi_turn import Dialogue
from posttrain.rollouts.turn_prompts import Exchange
from posttrain.types import (
    Completion,
    Conversation,
    Group,
    ImageRef,
    OpenGroup,
    Rollout,
    Score,
    TakenGroups,
    Task,
    Unfinished,
    Utterance,
)

WAITING, WORKING = "generation/waiting_for_model", "generation/agents_working"  # means of rollouts; other times add up


@dataclass
class DynamicSampling:
    """A `RolloutSource` over another one. The next step uses the surplus first."""

    source: RolloutSource
    position: StreamAndSurplus
    num_per_batch: int  # groups sampled at once
    max_batches: int  # limit per step
    keeps_surplus: bool = True
    looks_at_parts: bool = False
    looks_at_turns: bool = False
    scaling: RewardScaling | None = None  # may map different rewards to the same value
    when_earlier: Callable[[OpenGroup], None] | None = None  # gets every group of the surplus that this step trains on

    def take(self, num_groups: int, step: int) -> TakenGroups:
        earlier = self.position.surplus
        kept: list[Group] = []
        sampled: list[Group] = []
        times: dict[str, list[float]] = {}
        metrics: dict[str, float] = {}
        num_batches = 0
        # Their source has told of them in the step that sampled them; since then the run may have been resumed.
        if self.when_earlier is not None:
            for group in earlier[:num_groups]:
                self.when_earlier(OpenGroup(group.task, 0, tuple(rollout.completion for rollout in group.rollouts)))
        while len(earlier) + len(kept) < num_groups:
            if num_batches == self.max_batches:
                raise InputError(self._why_too_few(step, num_groups - len(earlier), sampled, len(kept)))
            taken = self.source.take(self.num_per_batch, step)
            num_batches += 1
            sampled += taken.sampled
            kept += [group for group in taken.groups if self.is_useful(group)]
            for name, value in taken.metrics.items():
                metrics[name] = value + (metrics.get(name, 0.0) if name.startswith("prefill_tokens") else 0.0)
            for stage, seconds in taken.timings_s.items():
                times.setdefault(stage, []).append(seconds)
        timings_s = {
            stage: sum(each) / (len(each) if stage in (WAITING, WORKING) else 1) for stage, each in times.items()
        }
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
        return has_signal(seen, in_parts=self.looks_at_parts, in_turns=self.looks_at_turns)

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
            f"step {step}: after {self.max_batches} batches (grpo.dynamic_sampling_max_gen_batches) only {num_useful} "
            f"of {len(sampled)} groups ({num_useful / max(len(sampled), 1):.0%}) had rewards that differ, and "
            f"{num_needed} are needed; of the others {reasons}. Choose prompts that the model gets right sometimes but "
            "not always, sample more answers per prompt (grpo.num_generations_per_prompt), train on fewer prompts per "
            "step, or raise grpo.dynamic_sampling_max_gen_batches"
        )


SURPLUS = "dynamic_sampling"  # key in the checkpoint's state
UNKNOWN_VERSION = -1  # for checkpoints written before versions were saved

CLASSES = {
    cls.__name__: cls
    for cls in (
        Group, Task, Rollout, Completion, Unfinished, Score, Conversation, Utterance, Dialogue, Exchange, ImageRef,
    )
}  # fmt: skip
CLASS = "class"  # the key that names the class of a map
# Fields that are not saved, and their value after loading. A dialogue's task is read from the data again.
NOT_SAVED: dict[str, dict[str, object]] = {"Task": {"recorded": ()}, "Dialogue": {"task": None}}
# Fields that older checkpoints hold. The rollout's score includes the score of the turns.
NO_LONGER_READ = {"Conversation": ("score", "to_judge")}


@dataclass
class StreamAndSurplus:
    """The position in the data and the groups kept for the next step."""

    stream: Stateful
    surplus: list[Group] = field(default_factory=list)

    def state_dict(self) -> dict[str, object]:
        return {**self.stream.state_dict(), SURPLUS: {"surplus": [to_plain(group) for group in self.surplus]}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.stream.load_state_dict(state)
        # A run started without dynamic sampling has no surplus.
        saved = state.get(SURPLUS)
        groups = [from_plain(row) for row in saved["surplus"]] if isinstance(saved, Mapping) else []
        self.surplus = [_with_versions(group) for group in groups if isinstance(group, Group)]


def _with_versions(group: Group) -> Group:
    """Older versions of posttrain saved completions without a version; they were sampled in an earlier step."""

    def marked(rollout: Rollout) -> Rollout:
        completion = rollout.completion
        if completion.versions or not completion.logprobs:
            return rollout
        return replace(rollout, completion=replace(completion, versions=((0, UNKNOWN_VERSION),)))

    return replace(group, rollouts=tuple(map(marked, group.rollouts)))


def to_plain(value: object) -> object:
    """Plain numbers, strings, tuples, lists and maps; `from_plain` restores an equal value."""
    if value is None or type(value) in (bool, int, float, str, bytes, Tensor):
        return value
    if isinstance(value, ImageRef):
        value = replace(value, source=value.data)
    if is_dataclass(value) and type(value).__name__ in CLASSES:
        name = type(value).__name__
        kept = [f.name for f in fields(value) if f.name not in NOT_SAVED.get(name, ())]
        return {CLASS: name, **{field: to_plain(getattr(value, field)) for field in kept}}
    if isinstance(value, Mapping):
        return {"map": [(to_plain(key), to_plain(item)) for key, item in value.items()]}
    if isinstance(value, tuple):
        if set(map(type, value)) <= {int, float}:  # the tokens of an answer
            return value
        return tuple(to_plain(item) for item in value)
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return str(value)


def from_plain(value: object) -> object:
    if isinstance(value, tuple):
        return value if set(map(type, value)) <= {int, float} else tuple(from_plain(item) for item in value)
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        return {from_plain(key): from_plain(item) for key, item in value["map"]}
    name = value[CLASS]
    given = {key: item for key, item in value.items() if key not in (CLASS, *NO_LONGER_READ.get(name, ()))}
    unknown = sorted(set(given) - {f.name for f in fields(CLASSES[name])})
    if unknown:
        raise InputError(
            f"the checkpoint's groups were saved by another version of posttrain: {name} has no {', '.join(unknown)}"
        )
    build: Callable[..., object] = CLASSES[name]
    return build(**NOT_SAVED.get(name, {}), **{key: from_plain(item) for key, item in given.items()})
