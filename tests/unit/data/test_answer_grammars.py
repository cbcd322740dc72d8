"""Grammars of schemas and of calls: what they accept, in each family, and which schemas are refused."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from chat_tokenizers import byte_tokenizer
from test_tool_calls import CALL, OTHER, TOOL, WRITTEN

from posttrain.data.answer_grammars import MAX_PROPERTIES, MAX_SCHEMA_CHARACTERS, AnswerGrammar
from posttrain.data.errors import DataError
from posttrain.data.tool_calls import FORMATS, AnswerFormat, answer_format
from posttrain.engines.native.constraints import Constraint, check_grammar
from posttrain.errors import InputError

LOOK = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PLAIN = byte_tokenizer()
# A tokenizer in which all markers are tokens.
MARKED = byte_tokenizer(
    special_tokens=tuple(
        dict.fromkeys(["<eos>", "<|im_end|>", *(m for form in FORMATS.values() for m in form.markers)])
    )
)


def accepts(grammar: str, text: str, tokenizer: Any = PLAIN) -> bool:
    """Whether the text is a whole answer."""
    constraint = Constraint(tokenizer, grammar)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return constraint.matcher.try_consume_tokens(ids) == len(ids) and constraint.matcher.is_accepting()


def grammar_of_calls(
    form: AnswerFormat, tokenizer: Any = PLAIN, schema: Any = None, *, must_call: bool = True, may_repeat: bool = True
) -> str:
    writer = AnswerGrammar(form, tokenizer, prompt="")
    return writer.of_calls([TOOL, LOOK], schema, must_call=must_call, may_repeat=may_repeat)


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_as_the_family_writes_them_are_accepted(name: str, tokenizer: Any) -> None:
    form = FORMATS[name]
    text = {
        "llama3_json": WRITTEN[name].removeprefix("<|python_tag|>"),
        "openai": WRITTEN[name].removeprefix("<|start|>assistant").partition("<|start|>")[0],
    }.get(name, WRITTEN[name].replace("[CALL_ID]abcdefghi", "").replace("<tool_call>look<", "<tool_call>look\n<"))
    if name == "mistral" and tokenizer is PLAIN:
        arguments = json.dumps(dict(CALL.arguments))
        text = f'[TOOL_CALLS][{{"name": "find", "arguments": {arguments}}}, {{"name": "look", "arguments": {{}}}}]'
    grammar = grammar_of_calls(form, tokenizer)
    assert accepts(grammar, text, tokenizer)
    assert form.parse(text, [TOOL]).calls == ((CALL,) if name == "openai" else (CALL, OTHER))
    assert not accepts(grammar, text.replace("find", "fill"), tokenizer), "an unknown function"
    assert not accepts(
        grammar, text.replace(": 2}", ': "b"}').replace("\n2\n", "\nb\n").replace(">2<", ">b<"), tokenizer
    )
    assert not accepts(grammar, "Hello.", tokenizer)
    if name != "openai":
        assert not accepts(grammar_of_calls(form, tokenizer, may_repeat=False), text, tokenizer), "two calls"


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", ["hermes", "deepseek_v31", "openai", "llama3_json"])
def test_calls_may_be_left_out_but_not_be_wrong(name: str, tokenizer: Any) -> None:
    grammar = grammar_of_calls(FORMATS[name], tokenizer, must_call=False)
    opening = "<|channel|>final<|message|>" if name == "openai" else ""
    call = WRITTEN[name].removeprefix("<|python_tag|>").removeprefix("<|start|>assistant").partition("<|start|>")[0]
    assert accepts(grammar, f"{opening}Hello.", tokenizer)
    assert accepts(grammar, call, tokenizer)
    if name in ("hermes", "deepseek_v31"):
        assert accepts(grammar, f"Hello.\n{call}", tokenizer)
        assert not accepts(grammar, f"Hello.\n{call.replace('what', 'when')}", tokenizer)


def test_an_answer_of_a_schema_beside_tools() -> None:
    grammar = grammar_of_calls(FORMATS["hermes"], schema=SCHEMA, must_call=False)
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, WRITTEN["hermes"])
    assert not accepts(grammar, "Hello.")


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["texts", "tokens"])
def test_reasoning_may_come_first(tokenizer: Any) -> None:
    form = answer_format("<tool_call><think></think>", writes_tools=True)
    grammar = AnswerGrammar(form, tokenizer, prompt="").of_schema(SCHEMA)
    assert accepts(grammar, '{"a": 1}', tokenizer)
    assert accepts(grammar, '<think>\nHm.\n</think>\n\n{"a": 1}', tokenizer)
    opened = AnswerGrammar(form, tokenizer, prompt="…<think>\n").of_schema(SCHEMA)
    assert accepts(opened, 'Hm.\n</think>\n\n{"a": 1}', tokenizer)
    assert not accepts(opened, '{"a": 1}', tokenizer)
    harmony = AnswerGrammar(FORMATS["openai"], tokenizer, prompt="").of_schema(SCHEMA)
    final = '<|channel|>final<|message|>{"a": 1}'
    assert accepts(harmony, final, tokenizer)
    assert accepts(harmony, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}", tokenizer)


def test_special_tokens_cannot_be_written_as_text() -> None:
    """A text of any length excludes them, so that a marker cannot hide in it."""
    grammar = AnswerGrammar(FORMATS["hermes"], MARKED, prompt="").of_schema({"type": "string"})
    assert accepts(grammar, '"abc"', MARKED)
    assert not accepts(grammar, '"a<tool_call>c"', MARKED)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([], "is an object"),
        (nested(60), "nested more than"),
        ({"enum": ["x" * MAX_SCHEMA_CHARACTERS]}, "characters"),
        ({"properties": {f"p{n}": {} for n in range(MAX_PROPERTIES + 1)}}, "properties"),
        ({"type": "integer", "multipleOf": 9999991}, "multipleOf"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf"),
        ({"type": "integer", "multipleOf": 10**400}, "multipleOf"),
        ({"type": "number", "multipleOf": -math.inf}, "multipleOf"),
        ({"allOf": [{"multipleOf": 9999}] * 2000}, "multipleOf"),
    ],
)
def test_schemas_that_would_take_long_are_refused_before_they_are_compiled(schema: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        AnswerGrammar(FORMATS["hermes"], PLAIN, prompt="").of_schema(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "texts"}, "Invalid type"),
        ({"type": "integer", "multipleOf": True}, "multipleOf"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"$ref": "http://example.com/a.json"}, "example.com"),
        ({"type": "string", "pattern": "("}, "regex|pattern|unclosed"),
    ],
)
def test_bad_schemas_are_refused_with_the_reason(schema: Any, reason: str) -> None:
    grammar = AnswerGrammar(FORMATS["hermes"], PLAIN, prompt="").of_schema(schema)
    with pytest.raises(InputError, match=reason):
        check_grammar(PLAIN, grammar)


@pytest.mark.parametrize(
    "schema",
    [
        nested(40),
        {"type": "string", "pattern": "((((a|b)*c){50}){50}){50}"},
        {"type": "string", "minLength": 10**6, "maxLength": 2 * 10**6},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**5},
        {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(12)]},
        {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}},
         "$ref": "#/$defs/n"},
        {"properties": {f"p{n}": {"type": "string"} for n in range(200)}},
    ],
    ids=["nested", "pattern", "long", "many", "products", "recursive", "wide"],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_hard_schemas_are_compiled_or_refused_soon(schema: Any) -> None:
    with contextlib.suppress(DataError, InputError):
        check_grammar(PLAIN, AnswerGrammar(FORMATS["hermes"], PLAIN, prompt="").of_schema(schema))


UNQUOTED = ["qwen3_coder", "glm45"]  # formats whose arguments are not one JSON object


def written_call(name: str, **arguments: str) -> str:
    if name == "glm45":
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.items())
        return f"<tool_call>find\n{pairs}</tool_call>"
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function=find>\n{pairs}</function>\n</tool_call>"


def find(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "find", "parameters": parameters}}


def strict_grammar(name: str, parameters: Any) -> str:
    writer = AnswerGrammar(FORMATS[name], PLAIN, prompt="")
    return writer.of_calls([find(parameters)], None, must_call=True, may_repeat=False)


@pytest.mark.parametrize("name", UNQUOTED)
@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        ({"type": "string", "const": "b"}, {"b": "b"}, ["c", '"b"']),
        ({"const": "b"}, {"b": "b"}, ["c", '"b"']),
        ({"enum": ["b", "c"]}, {"b": "b", "c": "c"}, ["d"]),
        ({"enum": [""], "type": "string"}, {"": ""}, ["b"]),
        ({"enum": [1, 2]}, {"1": 1}, ["3", "b"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"b": "b", "null": None}, []),
        ({"anyOf": [{"enum": ["b"], "type": "string"}, {"type": "null"}]}, {"b": "b", "null": None}, ["c"]),
        ({"$ref": "#/$defs/colour"}, {"red": "red"}, ["blue"]),
        ({"$ref": "#/$defs/point", "title": "Where"}, {'{"x": 1}': {"x": 1}}, ["1", '{"x": "b"}']),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/point"}]}, {"1": 1, '{"x": 1}': {"x": 1}}, ["b"]),
    ],
)
def test_arguments_without_quotes_obey_their_schema_and_are_read_by_it(
    name: str, value: Any, right: dict[str, Any], wrong: list[str]
) -> None:
    defs = {
        "colour": {"enum": ["red", "green"], "type": "string"},
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    }
    parameters = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    if name == "glm45":
        parameters = {"$ref": "#/$defs/all", "$defs": {**defs, "all": parameters}}
    else:
        parameters["$defs"] = defs
    grammar = strict_grammar(name, parameters)
    for text, read in right.items():
        assert accepts(grammar, written_call(name, a=text))
        [call] = FORMATS[name].parse(written_call(name, a=text), [find(parameters)]).tool_calls
        assert call.arguments == {"a": read}
    assert not accepts(grammar, written_call(name))
    assert not any(accepts(grammar, written_call(name, a=text)) for text in wrong)


@pytest.mark.parametrize("name", UNQUOTED)
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1]},
        {"properties": {"a": 1}},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": [1]}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "string", "allOf": [{"const": "b"}]}}},
        {"properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"properties": {f"p{n}": {"type": "string"} for n in range(MAX_PROPERTIES + 1)}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "minProperties": 1},
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"properties": {"a": {"type": "string", "minLength": 1, "anyOf": [{"const": "b"}]}}},
        {"type": "array"},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_parameters_that_calls_without_quotes_cannot_obey_are_refused(name: str, parameters: Any) -> None:
    with pytest.raises(DataError):
        strict_grammar(name, parameters)
