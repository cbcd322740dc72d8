"""An environment of tools: the model calls them turn by turn; its first turn without a call is the answer.

The answer goes to the judge of the block. A call that cannot be read, or that names no tool of this environment, gets
an error message and is counted; so does a call that the tool rejects. Neither ends the conversation.

The driver reads the calls in the format of the model's chat template (`data/tool_calls.py`). A turn that nobody has
read is read here: calls of Hermes and Qwen templates, or nothing but a JSON object or a list of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from posttrain.environments.turns.interface import (
    MAX_OBSERVATION_CHARACTERS,
    Observation,
    Response,
    Turn,
    TurnEnvironment,
)
from posttrain.files.json_files import JsonMapping

# Counted in every turn, so that a step without any has a 0 and not a gap.
COUNTS = ("tool_calls", "malformed_tool_calls", "failed_tool_calls")


class ToolError(Exception):
    """The tool cannot do what the model asked for; the message is for the model to read."""


class ToolEnvironment(TurnEnvironment):
    """Subclasses give `tools` and `call`. The state is the task, unless `reset` makes another."""

    max_calls_per_turn = 8

    @abstractmethod
    def call(self, state: Any, name: str, arguments: JsonMapping) -> str:
        """The result of one call, as text. `ToolError` is shown to the model; any other error leaves it unscored."""

    def parse(self, response: str) -> Sequence[ToolCall | MalformedCall]:
        """The calls in a turn. Override it for another way of writing them."""
        return response.calls if isinstance(response, Response) else parse_tool_calls(response)

    def step(self, state: Any, response: str) -> Turn:
        calls = self.parse(response)
        if not calls:
            return Turn(state, done=True, answer=response, counts=dict.fromkeys(COUNTS, 0))
        counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        asked = calls[: self.max_calls_per_turn]
        limit = MAX_OBSERVATION_CHARACTERS // len(asked) - 200
        results: list[Observation] = [_cut(self._result(state, call, counts), limit) for call in asked]
        if len(calls) > self.max_calls_per_turn:
            counts["malformed_tool_calls"] += len(calls) - self.max_calls_per_turn
            results.append(f"error: only {self.max_calls_per_turn} calls are answered in one turn")
        return Turn(state, results, counts=dict(counts))

    def _result(self, state: Any, call: ToolCall | MalformedCall, counts: Counter[str]) -> str:
        problem = call.reason if isinstance(call, MalformedCall) else self._problem(call)
        if problem or isinstance(call, MalformedCall):
            counts["malformed_tool_calls"] += 1
            return f"error: {problem}"
        counts["tool_calls"] += 1
        try:
            return self.call(state, call.name, call.arguments)
        except ToolError as error:
            counts["failed_tool_calls"] += 1
            return f"error: {error}"

    def _problem(self, call: ToolCall) -> str:
        """What is wrong with a call by the schemas in `tools`; empty if nothing is."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}
        if not schemas:
            return ""
        if call.name not in schemas:
            return f"there is no tool {call.name[:40]!r}; there is {', '.join(schemas)}"
        for name in schemas[call.name].get("required", ()):
            if name not in call.arguments:
                return f"{call.name} needs the argument {name!r}"
        for name, value in call.arguments.items():
            properties = schemas[call.name].get("properties", {})
            if name not in properties:
                return f"{call.name} has no argument {str(name)[:40]!r}; it has {', '.join(properties)}"
            kind = properties[name].get("type", ()) if isinstance(properties[name], Mapping) else ()
            kinds = [kind] if isinstance(kind, str) else kind
            if kinds and not any(_is_a(value, each) for each in kinds):
                return f"{call.name}: the argument {name!r} must be a {' or '.join(kinds)}"
        return ""


def _cut(result: str, limit: int) -> str:
    if not isinstance(result, str) or len(result) <= limit:
        return result
    return f"{result[:limit]}\n[cut here: the result has {len(result)} characters, {limit} are shown]"


def schema_of(name: str, description: str, argument: str, about: str) -> JsonMapping:
    """Of a tool with one text as its argument, in OpenAI's format."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": about}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _is_a(value: object, kind: str) -> bool:
    expected = _TYPES.get(kind, (object,))
    return isinstance(value, expected) and (not isinstance(value, bool) or bool in expected or object in expected)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
