"""Grammars that an answer must obey: a JSON schema, or calls of tools as a family of models writes them.

They are texts in the dialect of Lark that `llguidance` reads (decision 60); `engines/native/constraints.py` makes
masks of them. Reasoning may come before what they describe, in families that have it. Schemas are bounded before
anything is compiled: some that are short take minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from posttrain.data.errors import DataError
from posttrain.data.tool_calls import (
    ANNOTATIONS,
    FORMAT_ROWS,
    AnswerFormat,
    Tools,
    alternatives,
    types_of,
    values_of,
)
from posttrain.files.json_files import JsonMapping, JsonObject, is_deeper_than

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SCHEMA_CHARACTERS = 2**16
MAX_SCHEMA_DEPTH = 48  # of lists and objects
MAX_PROPERTIES = 256  # of one object
MAX_DIVISOR = 10_000  # the product of all `multipleOf`: a state for each remainder

# As Python's `json.dumps` and chat templates write it. Free white space would let a model write nothing else.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = "/(.|\\n)*/"
_SPECIAL = frozenset("\\.+*?()|[]{}^$/#&~-")  # in regular expressions
_MARKER = re.compile(r"<[^>]+>|\[[A-Z_]+\]")

_READ_OF_PARAMETERS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}


class AnswerGrammar:
    """Writes one grammar, for a family and its tokenizer: a marker that is a token of its own is that token."""

    def __init__(self, form: AnswerFormat, tokenizer: PreTrainedTokenizerBase, prompt: str) -> None:
        self._form, self._prompt = form, prompt
        self._tokens = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        self._split = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._rules: dict[str, str] = {}

    def of_schema(self, schema: JsonMapping) -> str:
        """An answer that is JSON of this schema."""
        opening = self._written("<|channel|>final<|message|>") if self._form.has_channels else ""
        return self._whole(f"{opening} {_json(schema)}")

    def of_calls(self, tools: Tools, schema: JsonMapping | None, *, must_call: bool, may_repeat: bool) -> str:
        """Calls of these tools, with arguments that obey their schemas. Without `must_call`, text may come first, or
        be all; with a schema, the answer is calls or JSON of the schema.
        """
        row = FORMAT_ROWS[self._form.name]
        is_list = "grammar_of_lists" in row and "[ARGS]" not in self._tokens
        before, call, separator, after = row["grammar_of_lists" if is_list else "grammar"]
        opening = found[0] if (found := _MARKER.match(before + call)) else ""
        head, _, tail = (call if before else call.removeprefix(opening)).partition("ARGUMENTS")
        for index, function in enumerate(tool["function"] for tool in tools):
            arguments = self._arguments(f"arguments_{index}", function.get("parameters") or {"type": "object"})
            named = self._written(head.replace("NAME", function["name"], 1))
            self._rules[f"call_{index}"] = f"{named} {arguments} {self._written(tail)}"
        any_call = f"({' | '.join(f'call_{index}' for index in range(len(tools)))})"
        next_call = any_call if before else f"{self._written(opening)} {any_call}"
        more = f"({self._written(separator)} {next_call})*" if may_repeat and separator is not None else ""
        self._rules["calls"] = f"{self._written(before.removeprefix(opening))} {any_call} {more} {self._written(after)}"
        calls = f"{self._written(opening)} calls"
        if must_call:
            return self._whole(calls)
        final = self._written("<|channel|>final<|message|>") if self._form.has_channels else ""
        if schema is not None or final:
            return self._whole(f"({final} {_TEXT if schema is None else _json(schema)} | {calls})")
        if not opening:  # calls are bare JSON
            return self._whole(f"(/[^{{\\s](.|\\n)*/ | {calls})")
        return self._whole(f"({_TEXT} | {self._until(opening)} calls)")

    def _whole(self, answer: str) -> str:
        rules = {"start": f"{self._reasoning()} {answer}", **self._rules}
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _reasoning(self) -> str:
        form = self._form
        if form.has_channels:
            opening, closing = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
            return f"({self._written(opening)} {self._until(closing)})?"
        if form.reasoning is None:
            return ""
        thought = f"{self._until(form.reasoning[1])} /\\s*/"
        return thought if form.opens_reasoning(self._prompt) else f"({self._written(form.reasoning[0])} {thought})?"

    def _arguments(self, name: str, schema: JsonMapping) -> str:
        if (around_value := FORMAT_ROWS[self._form.name].get("value")) is None:
            return _json(schema)
        check_schema(schema)
        options = alternatives(schema, schema)
        if len(options) != 1 or (unread := sorted(options[0].keys() - _READ_OF_PARAMETERS)):
            found = unread[0] if len(options) == 1 else "a choice of schemas"
            raise DataError(f"parameters: {found} is not supported by this model, which writes arguments one by one")
        properties, required = options[0].get("properties", {}), options[0].get("required", [])
        is_object = isinstance(properties, dict) and options[0].get("type", "object") == "object"
        if not is_object or not all(isinstance(value, dict) for value in properties.values()):
            raise DataError("parameters: an object is needed, whose properties are schemas, each an object")
        if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
            raise DataError(f"parameters: required is a list of names of properties, found {str(required)[:80]}")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        before, after = around_value
        written = []
        for key, value in properties.items():
            members = alternatives(value, schema)
            types = types_of(members)
            texts = _texts(key, members) if "string" in types or not types else None
            values = _json({**value, **shared}) if texts is None else " | ".join(map(self._written, texts))
            end = f"({values}) {self._written(after)}" if values else self._until(after)
            written.append(f"({self._written(before.replace('KEY', key, 1))} {end}){'' if key in required else '?'}")
        self._rules[name] = " ".join(written) or '""'
        return name

    def _written(self, text: str) -> str:
        """A text as a sequence of literals and tokens."""
        parts, start = [], 0
        for found in self._split.finditer(text):
            parts += [text[start : found.start()], self._tokens[found[0]]]
            start = found.end()
        shown = [part for part in (*parts, text[start:]) if part != ""] or [""]
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _literal(part) for part in shown)

    def _until(self, end: str) -> str:
        """Any text up to and including `end`."""
        if self._split.match(end):
            return f"{_TEXT} {self._written(end)}"
        name = f"until_{len(self._rules)}[lazy]"
        escaped = "".join(
            "\\n" if letter == "\n" else f"\\{letter}" if letter in _SPECIAL else letter for letter in end
        )
        self._rules[name] = f"/(.|\\n)*{escaped}/"
        return name.removesuffix("[lazy]")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _texts(key: str, members: Sequence[JsonObject]) -> list[str]:
    """The texts that a property may be, which its model writes without quotes; none: any."""
    texts: list[str] = []
    for member in members:
        types = types_of([member])
        values = [None] if types == {"null"} else values_of(member)
        is_known = types or not member.keys() - ANNOTATIONS
        if not is_known or member.keys() & {"$ref", "anyOf", "oneOf", "allOf"} or not isinstance(values, list | None):
            raise DataError(f"parameters: {key}: give it a type, and `enum` a list; texts may have no other conditions")
        if values is not None:
            texts += [text for text in values if isinstance(text, str) and "string" in types]
            texts += ["null"] if None in values and "null" in types else []
        elif not types or "string" in types:
            return []
    if not texts:
        raise DataError(f"parameters: no text is a value of {key}")
    return texts


def _json(schema: JsonMapping) -> str:
    check_schema(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE}, ensure_ascii=False)}"


def check_schema(schema: object) -> None:
    """DataError for a schema that is none, or that would take long to compile."""
    if not isinstance(schema, dict):
        raise DataError(f"a JSON schema is an object, found {str(schema)[:80]!r}")
    if is_deeper_than(MAX_SCHEMA_DEPTH, schema):
        raise DataError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    if (length := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
        raise DataError(f"the schema has {length} characters; at most {MAX_SCHEMA_CHARACTERS} are compiled")
    divisor = 1
    for value in _objects(schema):
        properties, step = value.get("properties"), value.get("multipleOf")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise DataError(f"an object of the schema has {len(properties)} properties; at most {MAX_PROPERTIES}")
        if isinstance(step, int | float) and not isinstance(step, bool) and step:
            divisor *= abs(Fraction(str(step)).numerator) if abs(step) <= MAX_DIVISOR else MAX_DIVISOR + 1  # NaN, too
        if divisor > MAX_DIVISOR:
            raise DataError(f"multipleOf is too large; at most {MAX_DIVISOR} in one schema, multiplied")


def _objects(value: object) -> Iterator[JsonMapping]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _objects(inner)
