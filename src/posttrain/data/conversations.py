"""How rows hold text, a string or a list of messages; and prompt files, which put a question into a conversation."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.errors import DataError
from posttrain.data.sources import Row

if TYPE_CHECKING:  # the command line reads names of datasets without torch
    from posttrain.types import Message


def is_conversation(value: object) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(turn, Mapping) for turn in value)
    )


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
            kinds = [part.get("type") or ("text" if "text" in part else None) for part in content]
            if other := [kind for kind in kinds if kind != "text"]:
                raise DataError(
                    f"{row.where}: message {position} of {key!r} has a part of type {other[0]!r}; text is read here, "
                    "{type: text, text: ...}, and images in the user's messages of rows"
                )
            content = "".join(as_text(part.get("text", ""), row, key) for part in content)
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


# -- prompt files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptFiles:
    """How a question becomes a conversation. Empty texts leave it as it is."""

    template: str = ""
    system: str = ""

    @classmethod
    def read(cls, prompt_file: str | None, system_prompt_file: str | None) -> PromptFiles:
        # The line break that ends a text file is not part of the prompt.
        template = _read(prompt_file, "prompt_file").removesuffix("\n") if prompt_file else ""
        if prompt_file:
            _check_template(template, prompt_file)
        return cls(template, _read(system_prompt_file, "system_prompt_file").strip() if system_prompt_file else "")

    def messages(self, question: str | list[Message], system: str = "") -> list[Message]:
        """The conversation for a question. One that is a conversation keeps its turns; the template is for text.

        `system` is the row's own system message; it takes precedence over the file.
        """
        if isinstance(question, str):
            question = [{"role": "user", "content": self.template.format(question) if self.template else question}]
        system = system or self.system
        if system and question[0]["role"] != "system":
            return [{"role": "system", "content": system}, *question]
        return list(question)


def _read(file: str, key: str) -> str:
    path = Path(file).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        looked = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise DataError(f"{key}: file not found: {file}{looked}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: {file} cannot be read: {error}") from error


def _check_template(template: str, file: str) -> None:
    """Exactly one `{}`. Literal braces are doubled, as in any Python format string."""
    remedy = r"it needs exactly one {} where the question goes; other braces are doubled, as in \boxed{{}}"
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise DataError(f"prompt_file {file}: {error}; {remedy}") from error
    if fields not in ([""], ["0"]):
        found = ", ".join(f"{{{field}}}" for field in fields) or "none"
        raise DataError(f"prompt_file {file}: placeholders found: {found}; {remedy}")
