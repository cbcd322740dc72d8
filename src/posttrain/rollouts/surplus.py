"""Surplus groups that a step keeps for the next one, as part of a checkpoint.

A checkpoint holds plain values: numbers, texts, bytes, lists and maps. A value of another kind (a dataset may have
anything as its expected answer) is saved as its text, as in the run's files. A task's recorded answers are not saved
with it: they are already rollouts of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace

from posttrain.errors import InputError
from posttrain.roles import Stateful
from posttrain.rollouts.multi_turn import Dialogue
from posttrain.rollouts.next_turn import Exchange
from posttrain.types import Completion, Conversation, Group, Rollout, Score, Task, Unfinished, Utterance

SURPLUS = "dynamic_sampling"  # key in the checkpoint's state
UNKNOWN_VERSION = -1  # for checkpoints written before versions were saved

CLASSES = {
    cls.__name__: cls
    for cls in (
        Group, Task, Rollout, Completion, Unfinished, Score, Conversation, Utterance, Dialogue, Exchange,
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
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
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
