"""Request bodies: accepted fields, and errors for the rest."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.serve.protocol import (
    _NO_EFFECT,
    ApiError,
    ChatBody,
    CompletionBody,
    FeedbackBody,
    parse_body,
    parse_chat,
    parse_completion,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello"}


CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def refusal(parse: Any, body: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert raised.value.status == 400
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    return raised.value


def test_settings_become_sampling() -> None:
    body = parse_chat(json.dumps({**CHAT, "temperature": 0.3, "top_p": 0.9, "top_k": 7, "stop": "x"}).encode())
    sampling = body.sampling(11, (5,))
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (11, 0.3, 0.9, 7)
    assert (sampling.stop_strings, sampling.end_of_turn_ids) == (("x",), (5,))
    usual = parse_chat(json.dumps(CHAT).encode()).sampling(1)
    assert (usual.temperature, usual.top_p, usual.top_k) == (1.0, 1.0, 0)


def test_boundary_values_of_settings() -> None:
    cold = parse_chat(json.dumps({**CHAT, "temperature": 1e-9, "top_p": 0, "top_k": -1}).encode()).sampling(1)
    assert (cold.temperature, cold.top_k) == (0.0, 0)
    assert 0 < cold.top_p < 1e-3


def test_content_parts_and_developer_role_become_plain_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}]
    found = parse_chat(json.dumps({**CHAT, "messages": messages}).encode()).messages
    assert [message.plain() for message in found] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize("thoughts", ["reasoning_content", "reasoning"])
def test_answers_are_accepted_as_history(thoughts: str) -> None:
    """As OpenAI's client sends them back."""
    asked = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALLED], thoughts: "Hm."}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "4"}]}
    found = parse_chat(json.dumps({**CHAT, "messages": [asked, answer, result]}).encode()).messages
    assert [message.plain() for message in found[1:]] == [
        {"role": "assistant", "content": "", "tool_calls": [CALLED], "reasoning_content": "Hm."},
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    ]


def test_tools_are_passed_on_as_they_were_sent() -> None:
    both = [tool("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}), tool("g")]
    for choice, usable in ((None, both), ("required", both), ("none", []), (named("g"), both[1:])):
        assert parse_chat(json.dumps({**CHAT, "tools": both, "tool_choice": choice}).encode()).usable_tools == usable


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_of_text_and_of_tokens(prompt: Any, expected: Any) -> None:
    assert parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).prompts == expected


def test_labels_and_values_without_effect_are_accepted() -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "presence_penalty": 0, "logit_bias": {},
                "response_format": {"type": "text"}, "n": None, "stream": None, "ignore_eos": None,
                "parallel_tool_calls": True, "tools": [], "functions": [], "tool_choice": "auto", "min_p": 0,
                "repetition_penalty": 1.0, "skip_special_tokens": True, "top_k": -1, "priority": 0}  # fmt: skip
    chat, plain_chat = (parse_chat(json.dumps(body).encode()) for body in ({**CHAT, **harmless}, CHAT))
    assert (chat.messages, chat.sampling(1)) == (plain_chat.messages, plain_chat.sampling(1))
    neutral = {**COMPLETION, "echo": False, "best_of": 1, "suffix": None}
    completion, plain_completion = (parse_completion(json.dumps(body).encode()) for body in (neutral, COMPLETION))
    assert (completion.prompts, completion.sampling(1)) == (plain_completion.prompts, plain_completion.sampling(1))


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_unimplemented_fields_that_change_the_answer_are_refused(extra: dict[str, Any], param: str) -> None:
    error = refusal(parse_chat, {**CHAT, **extra})
    assert (error.param, error.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"temperatur": 1}, "temperatur", "Unrecognized request argument"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages.0.content.0", "'text'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.image_url",
            "missing",
        ),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "two functions"),
        ({"tools": [tool("f x")]}, "tools.0.function.name", "pattern"),
        ({"tool_choice": "required"}, "tool_choice", "no function"),
        ({"tool_choice": "often"}, "tool_choice", "'required'"),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice", "'g'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "'json_object'"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALLED]}]},
            "messages.0.tool_calls",
            "assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages.0.tool_calls.0.function",
            "missing",
        ),
        ({"cache_salt": "x"}, "cache_salt", "Unrecognized request argument"),
    ],
)
def test_wrong_values_name_their_field(extra: dict[str, Any], param: str, words: str) -> None:
    error = refusal(parse_chat, {**CHAT, **extra})
    assert error.param == param
    assert words in error.message


def test_the_table_of_fields_in_the_docs_is_complete_and_right() -> None:
    """Each value of a column: accepted, refused, or unknown to the endpoint."""
    page = (Path(__file__).parents[4] / "docs" / "serve.md").read_text(encoding="utf-8")
    table = page.partition("## Request fields")[2].partition("\n- **")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|", table, re.MULTILINE)
    listed = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    bodies: list[Any] = [ChatBody, CompletionBody]
    for column, kind in enumerate(bodies):
        found = {name for name, values in listed.items() if values[column] != "–"}
        assert found == set(kind.model_fields)
        only = {name for name, values in listed.items() if values[column].startswith("only")}
        assert only == {name for name in _NO_EFFECT if name in kind.model_fields} | {"best_of"} & found


def test_invalid_bodies_are_refused() -> None:
    assert "not valid JSON" in refusal(parse_chat, b"{").message
    assert "the key 'model' is set twice" in refusal(parse_chat, b'{"model": "a", "model": "b"}').message
    assert "nested more than" in refusal(parse_chat, b'{"model": ' + b"[" * 200_000).message
    assert "too many digits" in refusal(parse_chat, b'{"model": ' + b"1" * 5000 + b"}").message
    assert "messages is missing" in refusal(parse_chat, {"model": "m"}).message
    assert "the body: Input should be an object" in refusal(parse_chat, b"[]").message
    assert refusal(parse_completion, {**COMPLETION, "prompt": []}).param == "prompt"
    assert refusal(parse_completion, {**COMPLETION, "best_of": 3}).param == "best_of"
    assert refusal(parse_completion, {**COMPLETION, "echo": True}).param == "echo"
    assert refusal(partial(parse_body, FeedbackBody), {"id": "a", "score": "good"}).param == "score"
