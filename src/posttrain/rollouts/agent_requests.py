"""Requests and answers of OpenAI's chat API, as an agent sends and gets them during rollouts. No HTTP and no model.

Sampling belongs to the trainer: temperature, top_p, seed and penalties of a request are replaced by the run's, and
counted; so are conditions on calls, which are not enforced. What would change an answer in another way and is not
supported is refused with its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic_core import ErrorDetails

from posttrain.files.json_files import JsonMapping, JsonObject, parse_json

_REPLACED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
)  # fmt: skip
# Of messages, beside those of `_Message`: for the chat template, or labels that clients send back.
_OF_MESSAGES = {
    "name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal", "annotations",
    "provider_specific_fields",
}  # fmt: skip
_MEMBER_OF_UNION = re.compile(r"(constrained-)?(str|int|float|bool)|\w*list\[.*\]|_?Tool|literal\[.*\]")


class RefusedRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    @property
    def body(self) -> JsonObject:
        error = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": error}


_Stop = Annotated[str, Field(max_length=1000)]


class _Named(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1)


class _Function(_Named):
    arguments: str | dict[str, Any]


class _Call(BaseModel):
    model_config = ConfigDict(extra="allow")
    function: _Function


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: _Named


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    def plain(self) -> JsonObject:
        """With texts `role` and `content`."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_none=True), "role": role, "content": content or ""}


class ChatRequest(BaseModel):
    """The fields with an effect, and the only values of others that are supported."""

    model_config = ConfigDict(extra="forbid", strict=True)
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none", "required"] | _Tool = "auto"  # calls are never forced
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = []
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}
    parallel_tool_calls: bool = True
    return_token_ids: bool = False
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    response_format: dict[Literal["type"], Literal["text"]] = {}
    logit_bias: dict[str, float] = Field({}, max_length=0)
    _num_overridden: int = PrivateAttr(0)

    @field_validator("stop")
    @classmethod
    def _is_list(cls, value: str | list[str]) -> list[str]:
        return [text for text in ([value] if isinstance(value, str) else value) if text]

    @property
    def num_overridden(self) -> int:
        """Sampling settings that the run's replace, and conditions on calls."""
        return self._num_overridden

    @property
    def used_tools(self) -> list[JsonObject]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tool_choice != "none" else []


def _problems(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """Fields, and why they are refused."""
    names, chosen = [tool.function.name for tool in request.tools], request.tool_choice
    if (chosen == "required" and not names) or (isinstance(chosen, _Tool) and chosen.function.name not in names):
        yield "tool_choice", "asks for a call that is not in tools"
    for at, message in enumerate(request.messages):
        more = message.model_extra or {}
        for name in (name for name in more if more[name] is not None and name not in _OF_MESSAGES):
            yield f"messages.{at}.{name}", "is not supported here"
        if message.content is None and message.role != "assistant":
            yield f"messages.{at}.content", "is missing"
        if message.tool_calls and message.role != "assistant":
            yield f"messages.{at}.tool_calls", f"is in a message of {message.role}: only an assistant calls tools"
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text" or "text" not in part.model_fields_set:
                yield f"messages.{at}.content.{place}", "needs the type text and a text; images are not supported"
            for name in (part.model_extra or {}).keys() - {"cache_control"}:
                yield f"messages.{at}.content.{place}.{name}", "is not supported here"


def most_specific(error: ValidationError) -> tuple[ErrorDetails, list[str]]:
    """Of the errors of the first bad field, and its path without the members of unions that pydantic names in it.

    A field with a union type has an error for each member: the deepest is the most specific, one about the type itself
    the least.
    """
    found = [
        (each, [str(part) for part in each["loc"] if not _MEMBER_OF_UNION.fullmatch(str(part))])
        for each in error.errors(include_url=False, include_context=False)
    ]
    same = (one for one in found if one[1][:1] == found[0][1][:1])
    return max(same, key=lambda one: (len(one[1]), not one[0]["type"].endswith("_type")))


def read_request(body: bytes) -> ChatRequest:
    try:
        given = parse_json(body)
    except ValueError as error:
        raise RefusedRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise RefusedRequest("the body is not a JSON object")
    fields = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
    num_overridden = sum(fields.pop(name, None) is not None for name in _REPLACED)
    num_overridden += fields.get("tool_choice", "auto") not in ("auto", "none")
    num_overridden += fields.get("parallel_tool_calls") is False
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first, path = most_specific(error)
        where = ".".join(path)
        if first["type"] == "extra_forbidden":
            raise RefusedRequest(f"{where} is not supported here", where) from None
        raise RefusedRequest(f"{where} = {str(first['input'])[:80]}: {first['msg']}", where) from None
    for field, reason in _problems(request):
        raise RefusedRequest(f"{field} {reason}", field)
    is_strict = any((tool.function.model_extra or {}).get("strict") for tool in request.tools)
    request._num_overridden = num_overridden + is_strict
    return request


@dataclass(frozen=True)
class ChatAnswer:
    id: str
    model: str
    message: JsonMapping  # in OpenAI's format
    finish_reason: str
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()

    def text(self, request: ChatRequest) -> str:
        """JSON, or a stream of events in which the whole answer is one."""
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head: JsonObject = {"id": self.id, "object": kind, "created": 0, "model": self.model}
        prompt, new = len(self.prompt_ids), len(self.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        ids = {"token_ids": self.token_ids} if request.return_token_ids else {}
        first = {**head, **({"prompt_token_ids": self.prompt_ids} if ids else {})}
        if not request.stream:
            choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, **ids}
            return json.dumps({**first, "choices": [choice], "usage": usage})
        calls = [{"index": index, **call} for index, call in enumerate(self.message.get("tool_calls", ()))]
        delta = {**self.message, **({"tool_calls": calls} if calls else {})}
        chunks = [
            {**first, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **ids}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]},
        ]
        if request.stream_options.get("include_usage"):
            chunks.append({**head, "choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
