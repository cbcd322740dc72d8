"""From bodies to jobs: what is refused before it costs anything, and where tokenising happens."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tiny_models import byte_tokenizer

from posttrain.apps.serve.engine_client import ServedSession
from posttrain.apps.serve.jobs import chat_job, completion_job, read_images
from posttrain.apps.serve.options import ServerLimits
from posttrain.apps.serve.protocol import ApiError, parse_chat, parse_completion
from posttrain.apps.serve.service import Job, Version
from posttrain.data.chat import ChatFormat
from posttrain.engines.native.session import SessionLimits

CONTEXT = 6000


class WatchedTokenizer:
    """Remembers which threads have tokenised."""

    def __init__(self) -> None:
        self._inner = byte_tokenizer()
        self.threads: list[threading.Thread] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread())
        return self._inner(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
def service(tokenizer: WatchedTokenizer) -> Any:
    session = ServedSession(0, SessionLimits(CONTEXT, 8, 260, 100, frozenset()))
    version = Version("production", "m", session, tokenizer, ChatFormat(tokenizer))
    tokenizer.threads.clear()  # of making the chat format
    limits = ServerLimits(max_samples=4, max_completion_tokens=9)
    return SimpleNamespace(version_for=lambda model, key: version, limits=limits)


def job_of(service: Any, **body: Any) -> Job:
    raw = json.dumps({"model": "m", **body}).encode()
    if "messages" in body:
        return asyncio.run(chat_job(service, parse_chat(raw), None))
    return asyncio.run(completion_job(service, parse_completion(raw), None))


def user_message(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a"] * 5}, "5 prompts with n = 1"),
        ({"prompt": ["a"] * 3, "n": 2}, "3 prompts with n = 2"),
        ({"messages": user_message("a"), "n": 5}, "n is 5"),
        ({"prompt": "a" * CONTEXT * 100}, "maximum context length"),
        ({"prompt": ["a", "b" * CONTEXT * 100]}, "maximum context length"),
        ({"messages": user_message("a" * CONTEXT * 100)}, "maximum context length"),
    ],
)
def test_impossible_requests_are_refused_before_tokenising(
    service: Any, tokenizer: WatchedTokenizer, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        job_of(service, **body)
    assert refused.value.status == 400
    assert tokenizer.threads == []


@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_long_texts_are_tokenised_in_a_thread(service: Any, tokenizer: WatchedTokenizer, name: str) -> None:
    for length, beside in ((50, False), (5000, True)):
        tokenizer.threads.clear()
        text = "a" * length
        job = job_of(service, **{name: text if name == "prompt" else user_message(text)})
        assert job.prompt_tokens >= length
        assert (tokenizer.threads[0] is not threading.main_thread()) == beside


def test_default_number_of_tokens_is_the_servers_limit(service: Any) -> None:
    bodies: tuple[dict[str, Any], ...] = ({"prompt": "a"}, {"messages": user_message("a")})
    for limit, expected in ((9, [9, 9]), (100, [16, 100])):
        service.limits = replace(service.limits, max_completion_tokens=limit)
        jobs = [job_of(service, **body) for body in bodies]
        assert [job.requests[0].sampling.max_new_tokens for job in jobs] == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a", "max_tokens": 10}, "max_tokens"),
        ({"messages": user_message("a"), "max_tokens": 10}, "max_tokens"),
        ({"messages": user_message("a"), "max_completion_tokens": 10}, "max_completion_tokens"),
    ],
)
def test_too_many_tokens_error_names_the_field_that_was_sent(service: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError, match=f"{field} is 10: this server gives at most 9") as refused:
        job_of(service, **body)
    assert refused.value.param == field


def refused_field(service: Any, **body: Any) -> str | None:
    with pytest.raises(ApiError) as refused:
        job_of(service, **body)
    assert refused.value.status == 400
    return refused.value.param


@pytest.mark.parametrize("token", [-1, 260, 10**9])
def test_stop_tokens_outside_of_the_vocabulary_are_refused(service: Any, token: int) -> None:
    assert job_of(service, prompt="a", stop_token_ids=[0, 259]).requests[0].sampling.stop_token_ids == (0, 259)
    for body in ({"prompt": "a"}, {"messages": user_message("a")}):
        assert refused_field(service, **body, stop_token_ids=[5, token]) == "stop_token_ids"


@pytest.mark.parametrize("value", [10**400, True], ids=["huge", "true"])
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_field(service: Any, value: Any) -> None:
    schema = {"type": "integer", "multipleOf": value}
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert refused_field(service, messages=user_message("a"), response_format=answer) == "response_format"


def image_parts(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    parts = []
    for size in sizes:
        Image.new("1", size).save(file := io.BytesIO(), "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def test_the_images_of_a_request_are_limited_in_number_and_pixels(service: Any) -> None:
    many = [{"role": "user", "content": image_parts(*[(1, 1)] * 40)}] * 2
    assert refused_field(service, messages=many) == "messages"
    large = [
        {"role": "user", "content": image_parts((8000, 4000))},
        {"role": "user", "content": image_parts((8000, 4001))},
    ]
    assert refused_field(service, messages=large) == "messages.1.content.0.image_url.url"
    assert list(
        asyncio.run(read_images(parse_chat(json.dumps({"model": "m", "messages": large[:1] * 2}).encode())))
    ) == [0, 1]


def test_the_scheme_of_an_image_may_have_any_case() -> None:
    (part,) = image_parts((3, 2))
    part["image_url"]["url"] = part["image_url"]["url"].replace("data:", "DATA:")
    body = parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode())
    assert asyncio.run(read_images(body))[0][0].width == 3
