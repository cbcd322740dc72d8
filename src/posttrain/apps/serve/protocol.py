"""Request bodies, validated, and API errors, in the format of OpenAI's API.

A field that would change the answer and is not implemented is refused, never ignored. Fields that only label a request
are accepted. Besides OpenAI's own fields there are `top_k` and `ignore_eos`, as in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from posttrain.files.json_files import parse_json
from posttrain.types import SMALLEST_TEMPERATURE, Sampling

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
_SMALLEST_TOP_P = 1e-6
_TYPE_NAME = re.compile(r"(constrained-)?(str|int|float|bool)|\w*list\[.*\]")

AnyBody = TypeVar("AnyBody", bound=BaseModel)
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class ApiError(Exception):
    """An HTTP status and an error body in the format of OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", headers={"Retry-After": "5"})


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, kind="timeout_error", code="request_timeout")


def failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: answers are not padded here


class _Body(_Strict):
    """The fields of both endpoints."""

    usual_new_tokens: ClassVar[int | None] = None  # the default of `max_tokens`; None: what the context leaves

    model: str
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Accepted with values that change nothing, refused otherwise; see `_NO_EFFECT`.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # These label a request and change no answer.
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int, end_of_turn_ids: tuple[int, ...] = ()) -> Sampling:
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            max_new_tokens,
            temperature=temperature if temperature >= SMALLEST_TEMPERATURE else 0.0,
            top_p=1.0 if self.top_p is None else max(self.top_p, _SMALLEST_TOP_P),
            top_k=max(self.top_k or 0, 0),
            end_of_turn_ids=end_of_turn_ids,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None  # clients send answers of the API back unchanged
    annotations: list[object] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """In the format of chat templates."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(_Body):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    tools: list[object] | None = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: list[object] | None = None
    function_call: object = None
    response_format: dict[str, object] | None = None
    modalities: list[str] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_Body):
    usual_new_tokens: ClassVar[int | None] = 16

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, of text or of tokens."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else self.prompt  # type: ignore[return-value]


class FeedbackBody(_Strict):
    """A user's score of an answer: the KPI of a canary."""

    id: str
    score: float = Field(allow_inf_nan=False)


# Fields that are not implemented, and the values with which they change nothing.
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None,),
    "tool_choice": (None, "none", "auto"),
    "functions": (None,),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "echo": (None, False),
    "suffix": (None, ""),
}


def parse_chat(body: bytes) -> ChatBody:
    parsed = parse_body(ChatBody, body)
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return parsed


def parse_completion(body: bytes) -> CompletionBody:
    parsed = parse_body(CompletionBody, body)
    if parsed.best_of not in (None, parsed.num_samples):
        raise bad_request(f"best_of is {parsed.best_of}: not implemented, leave it out", "best_of")
    if not parsed.prompt:
        raise bad_request("prompt is empty", "prompt")
    return parsed


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    try:
        parse_json(body)  # refuses what pydantic lets pass, such as a key that is set twice
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from error
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    for field, harmless in _NO_EFFECT.items():
        if field in parsed.model_fields_set and getattr(parsed, field) not in harmless:
            raise bad_request(
                f"{field} is not implemented by this server; leave it out", field, "unsupported_parameter"
            )
    if getattr(parsed, "stream_options", None) is not None and not getattr(parsed, "stream", None):
        raise bad_request("stream_options needs stream: true", "stream_options")
    return parsed


def _explained(error: ValidationError) -> ApiError:
    """The first error, with the name of the field."""
    found = error.errors(include_url=False, include_context=False)
    # A field with a union type has an error for each member: the deepest is the most specific, one about the type
    # itself the least.
    first = max(
        (each for each in found if each["loc"][:1] == found[0]["loc"][:1]),
        key=lambda each: (len(_path(each["loc"])), not each["type"].endswith("_type")),
    )
    field = ".".join(_path(first["loc"]))
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg']}")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {field}", field, "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"{field} is missing", field)
    given = repr(first["input"])
    shown = given if len(given) <= 80 else given[:80] + "…"
    return bad_request(f"{field or 'the body'}: {first['msg']} (got {shown})", field or None)


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """Field names and indices, without the names of the union members that pydantic adds."""
    return [str(part) for part in loc if not _TYPE_NAME.fullmatch(str(part))]
