"""Calls and reasoning in answers of each family, read whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_tokenizers import CHATML, TEMPLATE_FAMILIES, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.data.tool_calls import FORMATS, Answer, AnswerFormat, ToolCall, answer_format, parse_tool_calls
from posttrain.data.tool_prompts import ToolChat, answer_text, describe

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a thing.",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string"},
                "count": {"type": "integer"},
                "filter": {"type": "object"},
                "or_null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["what"],
        },
    },
}
CALL = ToolCall("find", {"what": "1", "count": 2})
OTHER = ToolCall("look", {})
JSON = '{"what": "1", "count": 2}'

# The text of both calls, as each family writes them.
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=what>\n1\n</parameter>\n<parameter=count>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>\n</tool_call>",
    "glm45": "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>1</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>look</tool_call>",
    "llama3_json": f'<|python_tag|>{{"name": "find", "parameters": {JSON}}}; {{"name": "look", "parameters": {{}}}}',
    "mistral": f"[TOOL_CALLS]find[ARGS]{JSON}[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "openai": f"<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}<|call|>"
    "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>",
}
# An answer without calls, in `openai` with its channels.
SAID = {
    "openai": "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is <so>."
}
CHANNELS = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
)


def in_pieces(form: AnswerFormat, text: str, sizes: list[int], **options: Any) -> Answer:
    reader, answer, start = form.reader([TOOL], **options), Answer(), 0
    while start < len(text):
        size = sizes[start % len(sizes)]
        answer += reader.push(text[start : start + size])
        start += size
    return answer + reader.finish()


@pytest.mark.parametrize("name", WRITTEN)
def test_every_family_is_read_whole_and_in_pieces(name: str) -> None:
    form, before = FORMATS[name], CHANNELS if name == "openai" else "I look.\n\n"
    text = before + WRITTEN[name]
    answer = form.parse(text, [TOOL])
    assert answer.calls == (CALL, OTHER)
    assert answer.content == "I look."
    assert answer.reasoning == ("Let me see." if name == "openai" else "")
    assert in_pieces(form, text, [1]) == in_pieces(form, text, [3, 1, 7]) == answer


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_arguments_survive_whatever_they_contain(name: str, data: st.DataObject) -> None:
    plain = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
    # Markers of the format inside of a value cannot be told from the format's own.
    values = plain.filter(lambda text: not any(mark in text for mark in ("<", "[", "`", "｜")) and text == text.strip())
    arguments = {"what": data.draw(values), "count": data.draw(st.integers(-9, 9)), "filter": {"a": [1.5, None]}}
    call = ToolCall("find", arguments)
    written = {
        "qwen3_coder": lambda: (
            "<tool_call>\n<function=find>\n"
            + "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in arguments.items())
            + "</function>\n</tool_call>"
        ),
        "glm45": lambda: (
            "<tool_call>find\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_raw(v)}</arg_value>\n" for k, v in arguments.items())
            + "</tool_call>"
        ),
    }.get(name, lambda: WRITTEN[name].replace(JSON, json.dumps(arguments, ensure_ascii=False)))()
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    assert FORMATS[name].parse(written, [TOOL]).calls[:1] == (call,)
    assert in_pieces(FORMATS[name], written, sizes) == FORMATS[name].parse(written, [TOOL])


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_without_calls_is_its_text(name: str) -> None:
    text = SAID.get(name, " It is <so>.\n")
    answer = FORMATS[name].parse(text, [TOOL])
    assert (answer.content, answer.calls) == ("It is <so>." if name == "openai" else text, ())
    assert in_pieces(FORMATS[name], text, [2]) == answer


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "openai"])
def test_without_tools_calls_stay_in_the_text(name: str) -> None:
    text = WRITTEN[name]
    assert FORMATS[name].parse(text, reads_calls=False) == Answer(text)
    assert in_pieces(FORMATS[name], text, [2], reads_calls=False) == Answer(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'See <tool_call>{"name": "find", "arguments": {</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"count": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "argu'),
        ("mistral", "[TOOL_CALLS]oops"),
        ("glm45", "<tool_call>two words</tool_call>"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
    ],
)
def test_a_malformed_call_stays_in_the_text_and_is_counted(name: str, text: str) -> None:
    answer = FORMATS[name].parse(text, [TOOL])
    assert (answer.content, answer.num_malformed, answer.tool_calls) == (text, 1, [])


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.timeout(20)
def test_long_nonsense_is_read_in_no_time(name: str) -> None:
    for filling in (" ", "\n", "<", "{", "<arg_key>", "<parameter=a>", "```json", "[ARGS]", "a"):
        opening = "<|channel|>x to=f<|message|>" if name == "openai" else FORMATS[name].opening[0]
        FORMATS[name].parse(f"{opening}f<｜tool▁sep｜>f```json{filling * 4000}x", [TOOL])


def test_a_bare_object_is_a_call_only_if_it_looks_like_one() -> None:
    form = FORMATS["llama3_json"]
    assert form.parse('{"name": "look", "parameters": {}}').calls == (OTHER,)
    assert form.parse('{"answer": 42}') == Answer('{"answer": 42}')
    assert form.parse('[{"name": "look", "parameters": {}}] and more').content.endswith("and more")


def test_values_without_quotes_get_the_type_of_their_schema() -> None:
    text = "<tool_call>find<arg_key>what</arg_key><arg_value>1</arg_value><arg_key>or_null</arg_key><arg_value>null"
    text += (
        "</arg_value><arg_key>count</arg_key><arg_value>many</arg_value><arg_key>new</arg_key><arg_value>3</arg_value>"
    )
    (call,) = FORMATS["glm45"].parse(f"{text}</tool_call>", [TOOL]).tool_calls
    assert call.arguments == {"what": "1", "or_null": None, "count": "many", "new": "3"}


@pytest.mark.parametrize(
    "parameters",
    [["x"], {"properties": ["x"]}, {"properties": {"what": {"anyOf": None}}}, {"properties": {"what": {"type": [{}]}}}],
)
def test_a_schema_that_is_none_gives_texts(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    text = "<tool_call>find<arg_key>what</arg_key><arg_value>1</arg_value></tool_call>"
    (call,) = FORMATS["glm45"].parse(text, [tool]).tool_calls
    assert call.arguments == {"what": "1"}


def test_types_are_found_beside_other_conditions_and_behind_references() -> None:
    count = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "minimum": 0, "x-unit": "s"}
    schema = {"properties": {"count": count}, "$defs": {"n": {"type": "integer"}}, "anyOf": [{"required": ["count"]}]}
    text = "<tool_call>find<arg_key>count</arg_key><arg_value>3</arg_value></tool_call>"
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    (call,) = FORMATS["glm45"].parse(text, [tool]).tool_calls
    assert call.arguments == {"count": 3}


@pytest.mark.parametrize("prompt", ["", "…<think>\n"])
def test_reasoning_is_kept_apart(prompt: str) -> None:
    form = answer_format("<tool_call> <think> </think>", writes_tools=True)
    text = ("" if prompt else "<think>\n") + f"Hm.\n\nYes.\n</think>\n\nFine.\n{WRITTEN['hermes']}"
    answer = form.parse(text, [TOOL], prompt=prompt)
    assert answer == Answer("Fine.", "Hm.\n\nYes.", (CALL, OTHER)) == in_pieces(form, text, [1, 4], prompt=prompt)
    assert form.parse("Hm. <think>a</think>") == Answer("Hm. <think>a</think>"), "only at the beginning"
    assert form.parse("<think>cut off") == Answer(reasoning="cut off")


def test_a_message_is_in_the_format_of_the_api_and_ids_repeat() -> None:
    message = Answer("", "Hm.", (CALL,)).message("key")
    assert message["content"] is None
    assert message["reasoning_content"] == "Hm."
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "find", "arguments": JSON})
    assert (
        call["id"]
        == Answer(calls=(CALL,)).message("key")["tool_calls"][0]["id"]
        != Answer(calls=(CALL,)).message("other")["tool_calls"][0]["id"]
    )
    assert Answer().message("key") == {"role": "assistant", "content": ""}


# -- templates ---------------------------------------------------------------------------------------------------------

# Each writes calls as its family does; the rest is ours.
_TURNS = (
    "{%- if tools %}[T{{ tools | tojson }}T]{%- endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content "
    "or '' }}CALLS<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
_EACH = "{%- for c in m.tool_calls or [] %}CALL{%- endfor %}"
TEMPLATES = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm45": "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{%- if c.id | length != 9 %}{{ raise_exception('an id has nine letters') }}{%- endif %}",
    # As the old template of R1: arguments are a text.
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + "
    "'\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
    "deepseek_v31": "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments | tojson + "
    "'<｜tool▁call▁end｜>' }}",
    # Not a known format, though it looks like one.
    "": '<tool_call>:{"call": "{{ c.function.name }}", "with": {{ c.function.arguments | tojson }}}</tool_call>',
}
HISTORY = [
    {"role": "user", "content": "Find it."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_with_a_long_id", "type": "function", "function": {"name": "find", "arguments": '{"what":"x"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_with_a_long_id", "content": "Found."},
]


def tool_chat(template: str | None) -> ToolChat:
    return ToolChat(ChatFormat(byte_tokenizer(template)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_in_the_template_and_reads_what_it_writes(name: str) -> None:
    chat = tool_chat(_TURNS.replace("CALLS", _EACH.replace("CALL", TEMPLATES[name])))
    assert chat.writes_tools
    assert chat.answers.name == name
    text = chat.render(HISTORY, [TOOL])
    assert "Found." in text
    assert text.startswith("[T[{")
    if name:
        turn = text.partition("Find it.")[2].partition("assistant\n")[2].partition("<|im_end|>")[0]
        assert chat.answers.parse(turn, [TOOL]).calls == (ToolCall("find", {"what": "x"}),)


@pytest.mark.parametrize("template", [CHATML, None, TEMPLATE_FAMILIES["gemma"].template])
def test_templates_without_tools_get_a_description_and_calls_in_the_text(template: str | None) -> None:
    chat = tool_chat(template)
    if template is not None and "bos_token" in template:
        chat.chat.tokenizer.bos_token = "<eos>"
    assert (chat.writes_tools, chat.answers.name) == (False, "hermes")
    text = chat.render(HISTORY, [TOOL])
    assert describe([TOOL]) in text
    assert '<tool_call>{"name": "find", "arguments": {"what": "x"}}</tool_call>' in text
    assert "Found." in text
    assert "tool_call" not in chat.render(HISTORY[:1])


def test_arguments_that_are_no_object_are_refused() -> None:
    for arguments in ("[1]", "{", '"text"'):
        turn = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        with pytest.raises(DataError, match="arguments of a tool call"):
            tool_chat(CHATML).render([HISTORY[0], turn])


def test_markers_that_are_special_tokens_are_part_of_the_text() -> None:
    tokenizer = byte_tokenizer(CHATML, special_tokens=("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]"))
    ids = tokenizer("<|im_start|>[TOOL_CALLS]look[ARGS]{}<|im_end|>", add_special_tokens=False)["input_ids"]
    text = answer_text(tokenizer, ids, FORMATS["mistral"])
    assert text == "[TOOL_CALLS]look[ARGS]{}"
    assert FORMATS["mistral"].parse(text).calls == (OTHER,)


def test_turns_of_environments_are_read_as_before() -> None:
    assert parse_tool_calls('{"name": "look", "arguments": {}}') == [OTHER]
    nested = '<tool_call>{"name": "look", "arguments": {"a": "<tool_call>"}}</tool_call>'
    assert parse_tool_calls(nested) == [ToolCall("look", {"a": "<tool_call>"})]
