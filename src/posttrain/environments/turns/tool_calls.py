"""Parses the tool calls in a model's turn.

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

is the documented format, that of Hermes and Qwen templates; several in one turn are fine. A turn that is nothing but such
an object, or a list of them, is taken as a call too: Llama 3.1 and Mistral write them so. `parameters` is another word for
`arguments`, and arguments may be a JSON text, as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from posttrain.files.json_files import JsonMapping

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# The end of the turn closes a call as well: a stop string or the end of the turn may have taken the place of the tag.
_CALL = re.compile(rf"{OPENING}(.*?)(?:{CLOSING}|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: JsonMapping


@dataclass(frozen=True)
class MalformedCall:
    reason: str  # for the model to read


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls of a turn in their order; none if it is an answer."""
    tagged = _CALL.findall(text)
    if tagged:
        return [_read(body) for body in tagged]
    return _bare_calls(text.strip())


def _read(body: str) -> ToolCall | MalformedCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        return MalformedCall(f"the tool call is not valid JSON{where}")
    return _to_call(value)


def _to_call(value: object) -> ToolCall | MalformedCall:
    if not isinstance(value, dict):
        return MalformedCall('a tool call is an object: {"name": ..., "arguments": {...}}')
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return MalformedCall("the tool call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return MalformedCall("the arguments of the tool call are not valid JSON")
    if not isinstance(arguments, dict):
        return MalformedCall("the arguments of the tool call are not an object")
    return ToolCall(name, arguments)


def _bare_calls(text: str) -> list[ToolCall | MalformedCall]:
    """A whole turn of JSON. What does not look like calls is an answer, not a malformed call."""
    if not text.startswith(("{", "[")):
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    values = value if isinstance(value, list) else [value]
    looks_right = all(isinstance(v, dict) and "name" in v and {"arguments", "parameters"} & set(v) for v in values)
    return [_to_call(v) for v in values] if values and looks_right else []
