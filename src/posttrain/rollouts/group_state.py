"""Groups as plain values, and back: what a checkpoint may hold. Nothing is lost that training or a report looks at.

A value that is not plain (a dataset may have anything as its expected answer) becomes its text, which is how the run's
files show it anyway. A task's record is left out: its answers are rollouts of the group by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from posttrain.errors import InputError
from posttrain.types import Completion, Conversation, Group, Rollout, Score, Task, Utterance

CLASSES = {cls.__name__: cls for cls in (Group, Task, Rollout, Completion, Score, Conversation, Utterance)}
CLASS = "class"  # the key that says which of them a map stands for
LEFT_OUT = ("recorded",)
# Fields that older checkpoints hold. The score of a conversation's turns is in the rollout's score as well.
DROPPED = {"Conversation": {"score", "to_judge"}}


def to_plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if is_dataclass(value) and type(value).__name__ in CLASSES:
        own = {f.name: to_plain(getattr(value, f.name)) for f in fields(value) if f.name not in LEFT_OUT}
        return {CLASS: type(value).__name__, **own}
    if isinstance(value, Mapping):
        return {"map": [(to_plain(key), to_plain(item)) for key, item in value.items()]}
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return str(value)


def from_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(from_plain(item) for item in value)
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        return {from_plain(key): from_plain(item) for key, item in value["map"]}
    cls = CLASSES[value[CLASS]]
    known = {f.name for f in fields(cls)}
    given = {name: item for name, item in value.items() if name not in (CLASS, *DROPPED.get(value[CLASS], ()))}
    strange = sorted(set(given) - known)
    if strange:
        raise InputError(
            f"the checkpoint's groups were saved by another version of posttrain: {value[CLASS]} has no {', '.join(strange)}"
        )
    return cls(**{name: from_plain(item) for name, item in given.items()})
