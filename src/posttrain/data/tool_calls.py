"""Tool calls and reasoning in the text of an answer, by family of models. Text in, values out; no tokenizer, no torch.

`answer_format` chooses the format from a chat template. `AnswerFormat.parse` reads a whole answer, `reader` reads one
in pieces as they are sampled; both give the same. A call that cannot be read stays in the text, and is counted.

In turns of an environment with tools, calls of Hermes and Qwen templates, and a turn that is nothing but JSON, are read
from every model (`parse_tool_calls`).

Names of formats are those of vLLM's `--tool-call-parser`. The text must contain the special tokens that are `markers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping, JsonObject

Tools = Sequence[JsonMapping]  # JSON schemas, OpenAI's format
ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$defs", "definitions",
}  # fmt: skip


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: JsonMapping

    def in_message(self, call_id: str) -> JsonObject:
        """In OpenAI's format, where arguments are a JSON text."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class MalformedCall:
    reason: str  # for the model to read


AnyCall = ToolCall | MalformedCall
ReadCalls = Callable[[str, Tools], list[AnyCall]]


@dataclass(frozen=True)
class Answer:
    """An answer, or the next piece of one."""

    content: str = ""  # malformed calls are part of it
    reasoning: str = ""
    calls: tuple[AnyCall, ...] = ()

    def __add__(self, later: Answer) -> Answer:
        return Answer(self.content + later.content, self.reasoning + later.reasoning, self.calls + later.calls)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [call for call in self.calls if isinstance(call, ToolCall)]

    @property
    def num_malformed(self) -> int:
        return len(self.calls) - len(self.tool_calls)

    def message(self, key: str) -> JsonObject:
        """In OpenAI's format. The ids of calls are derived from `key`: equal for equal keys."""
        calls = [call.in_message(call_id(key, index)) for index, call in enumerate(self.tool_calls)]
        message: JsonObject = {"role": "assistant", "content": self.content or (None if calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return {**message, "tool_calls": calls} if calls else message


def call_id(key: str, index: int) -> str:
    """Nine letters and digits, the only ids that Mistral's templates accept."""
    return sha256_of(f"{key} {index}")[:9]


# -- formats -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerFormat:
    """How models of one family write calls and reasoning."""

    name: str  # empty: the format of calls is unknown, and they are not read
    opening: tuple[str, ...] = ()  # markers that begin a call
    closing: tuple[str, ...] = ()  # that end one; without any, the next call does; the end of the answer always does
    dropped: tuple[str, ...] = ()  # markers around calls
    read: ReadCalls = field(default=lambda body, tools: [], repr=False)
    may_be_bare: bool = False  # an answer that is nothing but JSON may be calls
    reasoning: tuple[str, str] | None = None  # markers around it
    has_channels: bool = False  # harmony: each part of an answer has a header
    written: str = ""  # a call, with NAME and ARGUMENTS; for templates that do not write calls

    def write(self, name: str, arguments: str) -> str:
        return self.written.replace("NAME", name, 1).replace("ARGUMENTS", arguments, 1)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the reader must see even if they are special tokens."""
        return (*self.opening, *self.closing, *self.dropped, *(self.reasoning or ()))

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends inside of reasoning, which the answer continues."""
        return self.reasoning is not None and not self.has_channels and prompt.rstrip().endswith(self.reasoning[0])

    def reader(self, tools: Tools = (), *, prompt: str = "", reads_calls: bool = True) -> AnswerReader:
        """Of the answer to `prompt`. The values of some formats have types only by the schemas in `tools`."""
        kind = _ChannelReader if self.has_channels else AnswerReader
        return kind(self, tools, reads_calls=reads_calls and bool(self.name), in_reasoning=self.opens_reasoning(prompt))

    def parse(self, text: str, tools: Tools = (), *, prompt: str = "", reads_calls: bool = True) -> Answer:
        reader = self.reader(tools, prompt=prompt, reads_calls=reads_calls)
        return reader.push(text) + reader.finish()


def answer_format(template: str | None, *, writes_tools: bool) -> AnswerFormat:
    """The format in which a model with this chat template answers.

    `writes_tools`: the template's output depends on tools. For other templates tools are described in a system message,
    and calls are written as that message says, by default in the format `hermes`.
    """
    text = template or ""
    found = next((name for name, row in FORMAT_ROWS.items() if all(mark in text for mark in row["marks"])), "")
    form = FORMATS[found]
    if not (writes_tools or form.written):
        form = FORMATS["hermes"]
    if form.has_channels:
        return form
    pair = next((pair for pair in (("<think>", "</think>"), ("[THINK]", "[/THINK]")) if pair[1] in text), None)
    return replace(form, reasoning=pair)


# -- calls -------------------------------------------------------------------------------------------------------------


def parse_tool_calls(text: str) -> list[AnyCall]:
    """The calls of a turn in their order; none if it is an answer."""
    return list(FORMATS["hermes"].parse(text).calls) or _bare_calls(text.strip())


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _loads(text: str) -> Any:
    """ValueError for what is not JSON, or too deep."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _json_call(body: str, tools: Tools = ()) -> list[AnyCall]:
    try:
        return [_to_call(_loads(body))]
    except ValueError as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        return [MalformedCall(f"the tool call is not valid JSON{where}")]


def _to_call(value: object) -> AnyCall:
    if not isinstance(value, dict):
        return MalformedCall('a tool call is an object: {"name": ..., "arguments": {...}}')
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _call(name: object, arguments: object) -> AnyCall:
    if not isinstance(name, str) or not name:
        return MalformedCall("the tool call has no name")
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except ValueError:
            return MalformedCall("the arguments of the tool call are not valid JSON")
    if not isinstance(arguments, dict):
        return MalformedCall("the arguments of the tool call are not an object")
    return ToolCall(name, arguments)


def _bare_calls(text: str, tools: Tools = ()) -> list[AnyCall]:
    """A whole turn of JSON: an object, a list, or several objects with `;` between them. What does not look like calls
    is an answer, not a malformed call.
    """
    values: list[object] = []
    decoder, rest = json.JSONDecoder(parse_constant=_no_constant), text.strip()
    if not rest.startswith(("{", "[")):
        return []
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            values += value if isinstance(value, list) and not values else [value]
            separator, rest = rest[end:].lstrip()[:1], rest[end:].lstrip()[1:].lstrip()
            if separator not in ("", ";") or (separator and not rest):
                return []
    except (ValueError, RecursionError):
        return []
    looks_right = all(isinstance(v, dict) and "name" in v and {"arguments", "parameters"} & set(v) for v in values)
    return [_to_call(v) for v in values] if values and looks_right else []


def _coder_call(body: str, tools: Tools) -> list[AnyCall]:
    """<function=f>, then <parameter=a> value </parameter>."""
    found = re.search(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", body, re.DOTALL)
    if found is None:
        return [MalformedCall("the tool call names no function: <function=NAME>")]
    name = found[1].strip()
    values = re.findall(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", found[2], re.DOTALL)
    # One line break around a value belongs to the format.
    pairs = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in values}
    return [ToolCall(name, _typed(pairs, name, tools))]


def _glm_call(body: str, tools: Tools) -> list[AnyCall]:
    """f, then <arg_key>a</arg_key> <arg_value>value</arg_value>."""
    name = body.partition("<arg_key>")[0].strip()
    pairs = re.findall(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", body, re.DOTALL)
    if not re.fullmatch(r"[\w.:-]+", name):
        return [MalformedCall("the tool call names no function")]
    return [ToolCall(name, _typed({key.strip(): value for key, value in pairs}, name, tools))]


def _typed(values: Mapping[str, str], name: str, tools: Tools) -> JsonObject:
    """Values that are written without quotes: the schema decides whether they are texts."""
    functions = (_object(tool.get("function")) for tool in tools)
    schema = next((_object(one.get("parameters")) for one in functions if one.get("name") == name), {})
    given = (one["properties"] for one in alternatives(schema, schema) if "properties" in one)
    properties = _object(next(given, None))
    types = {key: types_of(alternatives(properties.get(key), schema)) for key in values}
    return {key: _typed_value(value, types[key]) for key, value in values.items()}


def _object(value: object) -> JsonObject:
    """An object of a schema that nobody has checked; empty if it is something else."""
    return value if isinstance(value, dict) else {}


def alternatives(schema: object, root: JsonMapping) -> list[JsonObject]:
    """The schemas of which a value obeys one: members of `anyOf`, and what `$ref` names in `root`. What a schema says
    beside them is one more.
    """
    waiting, found, followed = [_object(schema)], list[JsonObject](), set[str]()
    while waiting:
        one = dict(waiting.pop())
        members, ref = list(one.pop("anyOf")) if isinstance(one.get("anyOf"), list) else [], one.get("$ref")
        if isinstance(ref, str) and ref.startswith("#/") and ref not in followed:
            followed.add(ref)
            target: Any = root
            for name in ref[2:].split("/"):
                target = _object(target).get(name)
            if isinstance(target, dict):
                members.append(target)
                del one["$ref"]
        own, rest = one.keys() & {"type"}, one.keys() - ANNOTATIONS - {"type"}
        waiting += [{key: one[key] for key in own} | _object(member) for member in reversed(members)]
        if rest or not members:
            found.append({key: one[key] for key in rest} if members else one)
    return found


def values_of(schema: JsonMapping) -> list[Any] | None:
    """Those of `const` or `enum`; None: it has neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def types_of(schemas: Sequence[JsonMapping]) -> set[str]:
    """Those that schemas name, or those of their values, as far as texts and null are concerned."""
    found: set[str] = set()
    for schema in schemas:
        named, values = schema.get("type"), values_of(schema)
        if named is None and isinstance(values, list):
            named = ["null" if one is None else "string" if isinstance(one, str) else "number" for one in values]
        found |= {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    return found


def _typed_value(text: str, types: set[str]) -> Any:
    if not types or ("string" in types and not ("null" in types and text == "null")):
        return text
    try:
        return _loads(text)
    except ValueError:
        return text


def _mistral_calls(body: str, tools: Tools) -> list[AnyCall]:
    """A JSON list of calls, or f[ARGS]{...}; some write f[CALL_ID]id[ARGS]{...}."""
    if "[ARGS]" not in body:
        return _bare_calls(body) or [MalformedCall("the tool calls are not a JSON list")]
    name, _, arguments = body.partition("[ARGS]")
    return [_call(name.partition("[CALL_ID]")[0].strip(), arguments)]


def _deepseek_call(body: str, tools: Tools) -> list[AnyCall]:
    """f<sep>{...}; before V3.1: function<sep>f and fenced JSON."""
    name, _, rest = body.partition("<｜tool▁sep｜>")
    if "```json" in rest:
        name, _, rest = rest.partition("```json")
        rest = rest.strip().removesuffix("```")
    return [_call(name.strip(), rest)]


# By name, in the order in which a chat template is compared with their `marks`.
FORMAT_ROWS: Mapping[str, JsonMapping] = yaml.safe_load(
    Path(__file__).with_name("tool_formats.yaml").read_text("utf-8")
)


def _format(name: str, row: JsonMapping) -> AnswerFormat:
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key in _FIELDS}
    return AnswerFormat(name, **{**known, **({"read": globals()[row["read"]]} if "read" in row else {})})


_FIELDS = {one.name for one in fields(AnswerFormat)}
FORMATS = {"": AnswerFormat(""), **{name: _format(name, row) for name, row in FORMAT_ROWS.items()}}


# -- readers -----------------------------------------------------------------------------------------------------------


class AnswerReader:
    """Splits an answer while it arrives. Text that may be the beginning of a marker is held back, so is white space
    that may stand before one, and a call is given when it is complete.
    """

    def __init__(self, form: AnswerFormat, tools: Tools, *, reads_calls: bool, in_reasoning: bool) -> None:
        self._form, self._tools, self._reads_calls = form, tools, reads_calls
        self._part = "reasoning" if in_reasoning else "content"  # or "call"
        self._is_first = True  # nothing but white space has come
        self._strips = in_reasoning  # white space that comes next belongs to the format
        self._held = ""
        self._opened = ""  # the marker of the call that is being read
        self._space = ""  # white space before it

    def push(self, text: str) -> Answer:
        start = max(0, len(self._held) - _longest(self._markers()))  # before it there is no marker
        self._held += text
        answer = Answer()
        while found := self._first_marker(start):
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            answer += self._at_marker(before, found[0])
            start = 0
        if self._part in ("content", "reasoning"):
            end = len(self._held) - overlap(self._held, self._markers())
            end = len(self._held[:end].rstrip())
            given, self._held = self._held[:end], self._held[end:]
            answer += self._give(given)
        return answer

    def finish(self) -> Answer:
        """What was held back, after the last piece."""
        held, self._held = self._held, ""
        if self._part == "call":
            return self._read(held, "")
        return self._give(held.rstrip() if self._part == "reasoning" or self._strips else held)

    def _markers(self) -> tuple[str, ...]:
        form, opening = self._form, self._form.opening if self._reads_calls else ()
        if self._part == "call":
            return form.closing or opening
        if self._part == "reasoning":
            assert form.reasoning is not None
            return (form.reasoning[1],)
        dropped = form.dropped if self._reads_calls else ()
        return (*opening, *dropped, *(form.reasoning[:1] if form.reasoning and self._is_first else ()))

    def _first_marker(self, start: int) -> re.Match[str] | None:
        if self._part == "content" and self._is_first and (begins := self._held.lstrip()):
            opening = self._form.reasoning[0] if self._form.reasoning else ""
            self._is_first = begins.startswith(opening) or opening.startswith(begins)
            if self._reads_calls and self._form.may_be_bare and begins[0] in "{[":
                self._part, self._opened = "call", ""
        markers = self._markers()
        return re.compile("|".join(map(re.escape, markers))).search(self._held, start) if markers else None

    def _at_marker(self, before: str, marker: str) -> Answer:
        """The text before a marker, which begins another part."""
        was = self._part
        answer = self._read(before, marker) if was == "call" else self._give(before.rstrip())
        self._space = before[len(before.rstrip()) :] if was == "content" else ""
        self._strips, self._is_first = True, False
        if marker in self._form.opening:
            self._part, self._opened = "call", marker
        else:
            opens_reasoning = (
                was == "content" and self._form.reasoning is not None and marker == self._form.reasoning[0]
            )
            self._part = "reasoning" if opens_reasoning else "content"
        return answer

    def _give(self, text: str) -> Answer:
        if self._strips:
            text = text.lstrip()
        if text:
            self._strips = self._is_first = False
        return Answer(text) if self._part == "content" else Answer(reasoning=text)

    def _read(self, body: str, marker: str) -> Answer:
        calls = self._calls(body)
        if calls and all(isinstance(call, ToolCall) for call in calls):
            return Answer(calls=tuple(calls))
        malformed = tuple(call for call in calls if isinstance(call, MalformedCall))
        closing = marker if marker in self._form.closing else ""
        return Answer(f"{self._space}{self._opened}{body}{closing}", calls=malformed)

    def _calls(self, body: str) -> list[AnyCall]:
        return self._form.read(body, self._tools)


class _ChannelReader(AnswerReader):
    """Harmony: `<|channel|>analysis<|message|>…<|end|>`, then `<|start|>assistant<|channel|>` with the next header. A
    header with a recipient, `to=functions.f`, is a call's; `final` and `commentary` are content.
    """

    def __init__(self, form: AnswerFormat, tools: Tools, *, reads_calls: bool, in_reasoning: bool) -> None:
        super().__init__(form, tools, reads_calls=reads_calls, in_reasoning=False)
        self._part, self._name = "header", ""

    def push(self, text: str) -> Answer:
        if (
            self._part == "header"
            and not self._held
            and text
            and not text.lstrip().startswith(("<", "assistant", "to="))
        ):
            self._part = "content"  # a model that writes no header
        return super().push(text)

    def finish(self) -> Answer:
        if self._part == "header":
            self._held = ""  # without its end it says nothing
        return super().finish()

    def _markers(self) -> tuple[str, ...]:
        return ("<|message|>",) if self._part == "header" else (*self._form.closing, *self._form.opening)

    def _at_marker(self, before: str, marker: str) -> Answer:
        if marker != "<|message|>":
            answer = self._read(before, marker) if self._part == "call" else self._give(before.rstrip())
            self._part = "header"
            self._held = marker + self._held if marker in self._form.opening else self._held
            return answer
        recipient = re.search(r"\bto=(?:functions\.)?([\w.:-]+)", before)
        channel = before.rpartition("<|channel|>")[2].strip()
        self._strips, self._opened = True, f"{before}<|message|>"
        self._name = recipient[1] if recipient else ""
        is_call = recipient is not None and self._reads_calls
        self._part = "call" if is_call else "reasoning" if channel.startswith("analysis") else "content"
        return Answer()

    def _give(self, text: str) -> Answer:
        return Answer() if self._part == "header" else super()._give(text)

    def _calls(self, body: str) -> list[AnyCall]:
        return [_call(self._name, body)]


def overlap(text: str, strings: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a prefix of one of the strings, but not all of it."""
    longest = min(len(text), _longest(strings) - 1)
    ends = range(longest, 0, -1)
    return next((n for n in ends if any(len(one) > n and one.startswith(text[-n:]) for one in strings)), 0)


def _longest(strings: Sequence[str]) -> int:
    return max(map(len, strings), default=0)
