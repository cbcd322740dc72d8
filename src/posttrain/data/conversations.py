"""The shapes in which rows hold text: a string, or a list of messages; and the two answers of a preference row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.errors import DataError
from posttrain.data.sources import Row
from posttrain.types import Message

TIE = "tie: neither answer is preferred"
NO_SHARED_PROMPT = "the two answers do not follow the same conversation"


@dataclass(frozen=True)
class Preference:
    """What a row of preference data says, whatever its shape. `problem` says why it cannot be used."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
    problem: str = ""


def is_conversation(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(turn, Mapping) for turn in value)
    )


def as_messages(value: Any, row: Row, key: str) -> list[Message]:
    """A list of messages, each with a role and a text. Other keys of a message are left for the chat template."""
    if not is_conversation(value) or not value:
        raise DataError(f"{row.where}: {key!r} must be a list of {{role, content}} messages, found {_shown(value)}")
    messages: list[Message] = []
    for position, turn in enumerate(value, start=1):
        content = turn.get("content")
        if content is None and turn.get("tool_calls"):
            content = ""
        elif is_conversation(content):  # [{"type": "text", "text": ...}]
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(turn.get("role"), str) or not isinstance(content, str):
            raise DataError(
                f"{row.where}: message {position} of {key!r} needs the texts 'role' and 'content', found {_shown(turn)}"
            )
        # Tables give every message the union of all keys; the absent ones come as null.
        messages.append({**{name: part for name, part in turn.items() if part is not None}, "content": content})
    return messages


def as_prompt(value: Any, row: Row, key: str) -> str | list[Message]:
    """Text, or a conversation. A conversation of a single user turn is text, so that a prompt file can wrap it."""
    if is_conversation(value):
        messages = as_messages(value, row, key)
        only_question = len(messages) == 1 and messages[0]["role"] == "user"
        return messages[0]["content"] if only_question else messages
    return as_text(value, row, key)


def as_text(value: Any, row: Row, key: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{row.where}: {key!r} must be text, found {_shown(value)}")


def read_preference(row: Row, prompt_key: str, chosen_key: str, rejected_key: str) -> Preference:
    """Recognises the shapes in use: ranked completions, HelpSteer3's two responses, NeMo-Aligner's keys, chosen/rejected."""
    if row.get(chosen_key) is None:
        if "completions" in row.values:
            return _from_ranks(row)
        if "overall_preference" in row.values:
            return _from_helpsteer(row)
        if "chosen_response" in row.values:
            chosen_key, rejected_key = "chosen_response", "rejected_response"
    before, chosen = _answer(row.field(chosen_key, setting="chosen_key"), row, chosen_key)
    before_rejected, rejected = _answer(row.field(rejected_key, setting="rejected_key"), row, rejected_key)
    problem = "" if before == before_rejected else NO_SHARED_PROMPT
    prompt = before or as_prompt(row.field(prompt_key, setting="prompt_key"), row, prompt_key)
    return Preference(prompt, chosen, rejected, problem)


def _answer(value: Any, row: Row, key: str) -> tuple[list[Message], str]:
    """The answer, and the conversation before it when the value holds that as well."""
    if not is_conversation(value):
        return [], as_text(value, row, key)
    messages = as_messages(value, row, key)
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{row.where}: {key!r} must end with an assistant's turn, it ends with {messages[-1]['role']!r}"
        )
    return messages[:-1], messages[-1]["content"]


def _from_ranks(row: Row) -> Preference:
    """`context` and `completions` with ranks, 0 the best: the best against the worst."""
    prompt = as_prompt(row.field("context"), row, "context")
    completions = row.field("completions")
    usable = is_conversation(completions) and len(completions) >= 2
    if not usable or not all("rank" in completion and "completion" in completion for completion in completions):
        raise DataError(
            f"{row.where}: 'completions' needs two records with 'rank' and 'completion', found {_shown(completions)}"
        )
    ordered = sorted(completions, key=lambda completion: completion["rank"])
    (_, chosen), (_, rejected) = (_answer(ordered[end]["completion"], row, "completion") for end in (0, -1))
    return Preference(prompt, chosen, rejected, TIE if ordered[0]["rank"] == ordered[-1]["rank"] else "")


def _from_helpsteer(row: Row) -> Preference:
    """`overall_preference` is negative where the first response is the better one and 0 for a tie."""
    prompt = as_prompt(row.field("context"), row, "context")
    first, second = (as_text(row.field(key), row, key) for key in ("response1", "response2"))
    preference = row.field("overall_preference")
    chosen, rejected = (first, second) if preference < 0 else (second, first)
    return Preference(prompt, chosen, rejected, TIE if preference == 0 else "")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
