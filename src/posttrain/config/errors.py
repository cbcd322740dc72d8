"""What a user gets for a config that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from posttrain.errors import InputError
from posttrain.redaction import shown_setting

UNKNOWN_KEY = "unknown_key"  # type of an error; the value is not shown, because the key may be a misspelled `api_key`


class ConfigError(InputError):
    """A config problem that the user can repair; the message names the key, where it was set, and the remedy."""


def message_of(problem: ErrorDetails) -> str:
    """Pydantic's message about one value, worded like the config's own errors."""
    return problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def explain_errors(error: ValidationError, path: str = "") -> list[str]:
    """One line for each key that pydantic refuses; `path` is the key of the map that was validated."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        key = ".".join([*([path] if path else []), *map(str, problem["loc"])])
        value = problem["input"]
        if problem["type"] == "missing":
            line = f"{key} is missing"
        elif isinstance(value, Mapping) or problem["type"] == UNKNOWN_KEY:
            line = f"{key}: {message_of(problem)}"
        else:
            line = f"{key} is {shown_setting(key, value):.200}: {message_of(problem)}"
        lines.setdefault(key, line)
    return list(lines.values())
