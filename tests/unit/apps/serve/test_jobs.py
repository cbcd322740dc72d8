"""From bodies to jobs: what is refused before it costs anything, and where tokenising happens."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import byte_tokenizer

from posttrain.apps.serve.engine_client import ServedSession
from posttrain.apps.serve.jobs import chat_job, completion_job
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
