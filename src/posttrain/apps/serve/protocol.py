"""Request bodies, validated, and API errors, in the format of OpenAI's API.

A field that would change the answer and is not implemented is refused, never ignored. Fields that only label a request
are accepted. Besides OpenAI's own fields there are some of vLLM's by its names, such as `top_k`, `return_token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from posttrain.files.json_files import JsonObject, parse_json
from posttrain.rollouts.agent_requests import most_specific
from posttrain.types import SMALLEST_TEMPERATURE, ImageRef, Sampling

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_TOOLS = 128
MAX_IMAGES = 64
_SMALLEST_TOP_P = 1e-6

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
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Accepted with values that change nothing, refused otherwise; see `_NO_EFFECT`.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None

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
            stop_token_ids=tuple(self.stop_token_ids or ()),
            end_of_turn_ids=end_of_turn_ids,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] | None = None  # has no effect


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(_Strict):
    name: str = Field(min_length=1)
    arguments: str  # JSON


class CallInMessage(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of clients that send the deltas of a stream back


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: list[CallInMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    refusal: None = None  # clients send answers of the API back unchanged
    annotations: list[object] | None = None
    audio: None = None
    function_call: None = None

    @property
    def image_urls(self) -> dict[int, str]:
        """By their places in the content."""
        parts = self.content if isinstance(self.content, list) else ()
        return {place: part.image_url.url for place, part in enumerate(parts) if isinstance(part, ImagePart)}

    def plain(self, images: Mapping[int, ImageRef] = MappingProxyType({})) -> JsonObject:
        """In the format of `ToolChat.render`. `images` are those of `image_urls`."""
        text: str | list[JsonObject]
        if images:
            assert isinstance(self.content, list)
            text = [
                {"type": "image", "image": images[place]} if place in images else part.model_dump()
                for place, part in enumerate(self.content)
            ]
        else:
            parts = self.content if isinstance(self.content, list) else ()
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            text = self.content if isinstance(self.content, str) else text
        message: JsonObject = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        more = {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content or self.reasoning}
        if self.role == "tool":
            more["name"] = self.name
        return message | {field: value for field, value in more.items() if value}


class Function(_Strict):
    name: str = Field(pattern=r"^[\w.:-]{1,64}$")
    description: str | None = None
    parameters: dict[str, object] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class NamedSchema(_Strict):
    name: str
    description: str | None = None
    schema_: dict[str, object] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def schema_of_answer(self) -> dict[str, object] | None:
        """None: the answer is free text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return None if self.type == "text" else {"type": "object"}


class PromptFields(_Strict):
    """What the prompt of a chat is made of."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def tool_schemas(self) -> list[JsonObject]:
        """As they were sent."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]


class ChatBody(PromptFields, _Body):
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    functions: list[object] | None = None
    function_call: object = None
    modalities: list[str] | None = None

    @property
    def lists_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def usable_tools(self) -> list[JsonObject]:
        """Those that the answer may call."""
        if self.tool_choice == "none":
            return []
        only = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        return [tool for tool in self.tool_schemas() if only is None or tool["function"]["name"] == only]


class CompletionBody(_Body):
    usual_new_tokens: ClassVar[int | None] = 16

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def lists_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, of text or of tokens."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else self.prompt  # type: ignore[return-value]


class FeedbackBody(_Strict):
    """A user's score of an answer: the KPI of a canary."""

    id: str
    score: float = Field(allow_inf_nan=False)


class TokenizeTextBody(_Strict):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatBody(PromptFields):
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


# Fields that are not implemented, and the values with which they change nothing.
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "repetition_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "priority": (None, 0),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "include_reasoning": (None, True),
    "modalities": (None, ["text"]),
    "echo": (None, False),
    "suffix": (None, ""),
}


def parse_chat(body: bytes) -> ChatBody:
    parsed = parse_body(ChatBody, body)
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    check_prompt(parsed)
    if parsed.must_call and not parsed.usable_tools:
        named = f" {parsed.tool_choice.function.name!r}" if isinstance(parsed.tool_choice, Tool) else ""
        raise bad_request(f"tool_choice asks for a call, and tools has no function{named}", "tool_choice")
    given = parsed.response_format
    if given is not None and (given.type == "json_schema") != (given.json_schema is not None):
        raise bad_request("response_format: json_schema goes with the type json_schema", "response_format")
    return parsed


def check_prompt(body: PromptFields) -> None:
    if (number := sum(len(message.image_urls) for message in body.messages)) > MAX_IMAGES:
        raise bad_request(f"messages: {number} images; at most {MAX_IMAGES} in a request", "messages")
    for index, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise bad_request(f"messages.{index}.content is missing", f"messages.{index}.content")
        if message.image_urls and message.role != "user":
            raise bad_request(
                f"messages.{index}.content: images are read in messages of the user, this is one of {message.role}",
                f"messages.{index}.content",
            )
        if message.tool_calls and message.role != "assistant":
            field = f"messages.{index}.tool_calls"
            raise bad_request(f"{field}: only an assistant calls tools, this is a message of {message.role}", field)
    names = [tool.function.name for tool in body.tools or ()]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise bad_request(f"tools: two functions are called {repeated!r}", "tools")


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
    first, path = most_specific(error)
    if path[:1] == ["messages"] and path[2:3] == ["content"] and len(path) > 4:
        del path[4]  # the type of a content part, by which pydantic chose its class
    field = ".".join(path)
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg']}")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {field}", field, "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"{field} is missing", field)
    given = repr(first["input"])
    shown = given if len(given) <= 80 else given[:80] + "…"
    return bad_request(f"{field or 'the body'}: {first['msg']} (got {shown})", field or None)
