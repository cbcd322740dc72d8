"""Requests and answers of OpenAI's chat API, as an agent sends and gets them during rollouts. No HTTP and no model.

Sampling belongs to the trainer: temperature, top_p, seed and penalties of a request are replaced by the run's, and
counted. What would change an answer in another way and is not supported is refused with its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from posttrain.files.json_files import JsonMapping, JsonObject

_REPLACED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
    "parallel_tool_calls",
)  # fmt: skip


class RefusedRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    @property
    def body(self) -> JsonObject:
        error = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": error}


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
    function: _Named


class _Part(BaseModel):
    type: Literal["text"]
    text: str


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
    stop: str | list[str] = []
    stream: bool = False
    stream_options: dict[str, bool] = {}
    return_token_ids: bool = False
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    response_format: dict[Literal["type"], Literal["text"]] = {}
    logit_bias: dict[str, float] = Field({}, max_length=0)
    num_overridden: int = 0  # sampling settings that the run's replace

    @field_validator("stop")
    @classmethod
    def _is_list(cls, value: str | list[str]) -> list[str]:
        return [text for text in ([value] if isinstance(value, str) else value) if text]

    @property
    def used_tools(self) -> list[JsonObject]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tool_choice != "none" else []


def read_request(body: bytes) -> ChatRequest:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise RefusedRequest("the body is not a JSON object")
    fields = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
    num_overridden = sum(fields.pop(name, None) is not None for name in _REPLACED)
    num_overridden += fields.get("tool_choice", "auto") not in ("auto", "none")
    try:
        return ChatRequest.model_validate({**fields, "num_overridden": num_overridden})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise RefusedRequest(f"{where} is not supported here", where) from None
        raise RefusedRequest(f"{where} = {str(first['input'])[:80]}: {first['msg']}", where) from None


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
