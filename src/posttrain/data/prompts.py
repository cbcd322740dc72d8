"""Prompt files: a prompt template with one `{}`, and a system prompt."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from posttrain.data.errors import DataError
from posttrain.types import Message


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
        """The conversation for a question. One that is a conversation already keeps its turns; the template is for text.

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
