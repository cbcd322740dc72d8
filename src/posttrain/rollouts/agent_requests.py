"""Requests and answers of OpenAI's chat API, as an agent sends and gets them during rollouts. No HTTP and no model.

Sampling belongs to the trainer: temperature, top_p, seed and penalties of a request are replaced by the run's, and
counted. What would change an answer in another way and is not supported is refused with its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.files.json_files import JsonMapping, JsonObject

_REPLACED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "stream_options",
    "parallel_tool_calls",
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that are accepted with these values only.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logit_bias": ({},),
}


class RefusedRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    @property
    def body(self) -> JsonObject:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[JsonMapping, ...]  # texts `role` and `content`; `tool_calls` as they came
    tools: tuple[JsonMapping, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    is_stream: bool = False
    with_usage: bool = False  # in a stream
    with_token_ids: bool = False
    num_overridden: int = 0  # sampling settings that the run's replace


def read_request(body: bytes) -> ChatRequest:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise RefusedRequest("the body is not a JSON object")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, accepted in _ONLY.items():
        if (value := fields.pop(name, accepted[0])) not in accepted:
            raise RefusedRequest(f"{name} = {json.dumps(value)[:80]}: {_any_of(accepted)} is supported here", name)
        if name == "tool_choice" and value == "none":
            fields.pop("tools", None)
    streams = fields.get("stream_options")
    request = ChatRequest(
        messages=tuple(_message(message, place) for place, message in enumerate(_list(fields, "messages"))),
        tools=tuple(_list(fields, "tools", _is_tool)),
        max_tokens=_max_tokens(fields),
        stop=_stop(fields.pop("stop", ())),
        is_stream=bool(fields.pop("stream", False)),
        with_usage=isinstance(streams, dict) and bool(streams.get("include_usage")),
        with_token_ids=bool(fields.pop("return_token_ids", False)),
        num_overridden=sum(fields.pop(name, None) is not None for name in _REPLACED),
    )
    if not request.messages:
        raise RefusedRequest("messages is empty", "messages")
    if unknown := sorted(set(fields) - set(_WITHOUT_EFFECT)):
        raise RefusedRequest(f"{unknown[0]} is not supported here", unknown[0])
    return request


def _any_of(accepted: tuple[object, ...]) -> str:
    return " or ".join(json.dumps(value) for value in accepted)


def _list(fields: dict[str, Any], name: str, is_right: Callable[[Any], bool] = lambda value: True) -> list[Any]:
    values = fields.pop(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) and is_right(value) for value in values):
        raise RefusedRequest(f"{name} must be a list of objects in the format of OpenAI's API", name)
    return values


def _is_tool(tool: Any) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(message: JsonMapping, place: int) -> JsonMapping:
    where = f"messages[{place}]"
    if message.get("role") not in _ROLES:
        raise RefusedRequest(f"{where}.role must be one of {', '.join(_ROLES)}", where)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RefusedRequest(f"{where}.content has a part that is not text", where)
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RefusedRequest(f"{where}.content must be text", where)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise RefusedRequest(f"{where}.tool_calls must be calls of functions with `name` and `arguments`", where)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content or "", "tool_calls": calls}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _max_tokens(fields: dict[str, Any]) -> int | None:
    given = [fields.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if not all(type(value) is int and value >= 1 for value in given):
        raise RefusedRequest("max_tokens must be a number of at least 1", "max_tokens")
    return min(given, default=None)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedRequest("stop must be a text, or a list of texts", "stop")
    return tuple(texts)


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatAnswer:
    id: str
    model: str
    message: JsonMapping  # in OpenAI's format
    finish_reason: str
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()

    def body(self, request: ChatRequest) -> JsonObject:
        ids = {"token_ids": list(self.token_ids)} if request.with_token_ids else {}
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": None, **ids}
        answer: JsonObject = {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}
        return {**answer, "prompt_token_ids": list(self.prompt_ids)} if request.with_token_ids else answer

    def stream(self, request: ChatRequest) -> str:
        """The same as server-sent events: the whole answer in one."""
        delta: JsonObject = dict(self.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        head = self._head("chat.completion.chunk")
        ids = {"token_ids": list(self.token_ids)} if request.with_token_ids else {}
        chunks: list[JsonObject] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **ids}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]},
        ]
        if request.with_token_ids:
            chunks[0]["prompt_token_ids"] = list(self.prompt_ids)
        if request.with_usage:
            chunks.append({**head, "choices": [], "usage": self._usage()})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def _head(self, kind: str) -> JsonObject:
        return {"id": self.id, "object": kind, "created": 0, "model": self.model}

    def _usage(self) -> JsonObject:
        prompt, new = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
