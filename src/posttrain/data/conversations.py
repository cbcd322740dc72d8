"""The shapes in which rows hold text: a string, or a list of messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.errors import DataError
from posttrain.data.sources import Row

if TYPE_CHECKING:  # the command line reads names of datasets without torch
    from posttrain.types import Message


def is_conversation(value: object) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(turn, Mapping) for turn in value)
    )


def _text_of(part: Mapping[str, object], row: Row, place: str, key: str) -> str:
    kind = part.get("type") or ("text" if "text" in part else None)
    if kind != "text":
        raise DataError(
            f"{row.where}: {place} has a part of type {kind!r}; only text is read, {{type: text, text: ...}}"
        )
    return as_text(part.get("text", ""), row, key)


def as_messages(value: Any, row: Row, key: str) -> list[Message]:
    """A list of messages, each with a role and a text. Other keys of a message are left for the chat template."""
    if not is_conversation(value) or not value:
        raise DataError(f"{row.where}: {key!r} must be a list of {{role, content}} messages, found {shown(value)}")
    messages: list[Message] = []
    for position, turn in enumerate(value, start=1):
        content = turn.get("content")
        if content is None and (turn.get("tool_calls") or turn.get("function_call")):
            content = ""
        elif is_conversation(content):  # [{"type": "text", "text": ...}]
            content = "".join(_text_of(part, row, f"message {position} of {key!r}", key) for part in content)
        if not isinstance(turn.get("role"), str) or not isinstance(content, str):
            raise DataError(
                f"{row.where}: message {position} of {key!r} needs the texts 'role' and 'content', found {shown(turn)}"
            )
        # Tables give every message the union of all keys; the absent ones come as null.
        messages.append({**{name: part for name, part in turn.items() if part is not None}, "content": content})
    return messages


def as_prompt(value: object, row: Row, key: str) -> str | list[Message]:
    """Text, or a conversation. A conversation of a single user turn is text, so that a prompt file can wrap it."""
    if is_conversation(value):
        messages = as_messages(value, row, key)
        only_question = len(messages) == 1 and messages[0]["role"] == "user"
        return messages[0]["content"] if only_question else messages
    return as_text(value, row, key)


def as_text(value: object, row: Row, key: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return str(value)
    raise DataError(f"{row.where}: {key!r} must be text, found {shown(value)}")


def shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
