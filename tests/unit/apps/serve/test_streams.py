"""Streams, the places that they hold in the engine, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import byte_tokenizer

from posttrain.apps.serve import app as app_module
from posttrain.apps.serve.jobs import choices_of
from posttrain.apps.serve.metrics import ServeMetrics
from posttrain.apps.serve.options import ServerLimits
from posttrain.apps.serve.protocol import unavailable
from posttrain.apps.serve.responses import DONE, AnswerText, ResponseWriter
from posttrain.apps.serve.service import Job, Ticket
from posttrain.engines.native.session import SessionRequest, TokenEvent
from posttrain.types import Sampling

BYTES = byte_tokenizer()
LAST: Any = {"finish_reason": "length"}


class FakeConnection:
    """A client that reads at once, or not."""

    def __init__(self) -> None:
        self.is_open = True
        self.parts: list[bytes] = []

    def can_write_chunk(self) -> bool:
        return self.is_open

    def write_chunk(self, data: bytes) -> None:
        self.parts.append(data)


class Streamed:
    """A streamed response over a fake engine: its ticket gets tokens by hand."""

    def __init__(self, limits: ServerLimits | None = None, connection: FakeConnection | None = None) -> None:
        self.cancelled: list[str] = []
        engine = SimpleNamespace(
            submit=lambda session, requests, receiver: setattr(self, "ticket", receiver),
            cancel=lambda session, request_id: self.cancelled.append(request_id),
        )
        service: Any = SimpleNamespace(
            limits=limits or ServerLimits(), metrics=ServeMetrics(), engine=engine, leave=lambda *ticket: None
        )
        service.admit = lambda job, read: Ticket(service, job, read)
        version: Any = SimpleNamespace(
            name="production", session=None, tokenizer=BYTES, stop_ids=lambda sampling: frozenset()
        )
        job = Job("cmpl-1", "tiny", version, [SessionRequest("r", (5,), Sampling(200), seed=0)])
        writer = ResponseWriter(job, chat=False, streams=True, includes_usage=False)
        self.ticket: Ticket
        self.sent: list[Any] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.connection = connection
        self._stream = app_module._Stream(service, job, AnswerText(choices_of(job)), writer, False, {})

    async def run(self) -> None:
        async def never() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await self.may_send.wait()
            self.sent.append(message)

        await asyncio.wait_for(
            self._stream({"type": "http", "state": {"connection": self.connection}}, never, send), 10
        )

    def tokens(self, text: str, **options: Any) -> None:
        self.ticket.receive([TokenEvent("r", 0, token, -1.0, **options) for token in BYTES(text)["input_ids"]])

    @property
    def events(self) -> list[bytes]:
        """That were sent through ASGI."""
        return [message["body"] for message in self.sent[1:]]


def texts(events: list[bytes]) -> list[str]:
    """Of events, before the last."""
    return [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_client_that_stops_reading_its_stream_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "SLOW_READER_S", 0.05)

    async def serve() -> Streamed:
        streamed = Streamed(ServerLimits(request_timeout_s=0.05))
        streamed.may_send.clear()
        await streamed.run()
        return streamed

    assert asyncio.run(serve()).cancelled == ["r"]
    assert "stopped reading" in caplog.text


def test_tokens_before_the_end_are_delivered_before_it() -> None:
    async def read(*tokens: dict[str, Any]) -> list[bytes]:
        streamed = Streamed()
        for options in tokens:
            streamed.tokens("a", **options)
        streamed.ticket.give_up("shutdown", unavailable("the end"))
        await streamed.run()
        return streamed.events

    first, last = asyncio.run(read({}))
    assert texts([first]) == ["a"]
    assert b"the end" in last
    whole, last = asyncio.run(read({}, LAST))
    assert texts([whole]) == ["aa"]
    assert last == DONE, "an answer that is complete is no error"


def test_tokens_are_written_in_the_callback_and_wait_for_a_slow_client() -> None:
    async def serve() -> Streamed:
        streamed = Streamed(connection=FakeConnection())
        task, connection = asyncio.create_task(streamed.run()), streamed.connection
        assert connection is not None
        await settle()
        streamed.tokens("a")
        streamed.tokens("b")
        assert texts(connection.parts) == ["a", "b"]
        connection.is_open = False
        streamed.may_send.clear()
        streamed.tokens("c")
        await settle()
        connection.is_open = True  # but the task is still sending: a later token must not overtake
        for letter in "defgh":
            streamed.tokens(letter)
        assert (len(connection.parts), streamed.events) == (2, [])
        streamed.may_send.set()
        await settle()
        assert texts(streamed.events) == ["c", "defgh"]
        streamed.tokens("i", **LAST)
        await task
        assert texts(connection.parts[2:]) == ["i"]
        return streamed

    assert asyncio.run(serve()).events[-1] == DONE


@pytest.mark.parametrize("connection", [FakeConnection(), None], ids=["in the callback", "in the task"])
def test_error_in_one_answer_ends_only_that_answer(
    caplog: pytest.LogCaptureFixture, connection: FakeConnection | None
) -> None:
    async def serve() -> list[bytes]:
        streamed = Streamed(connection=connection)
        task = asyncio.create_task(streamed.run())
        await settle()
        streamed.ticket.receive([TokenEvent("r", 7, 65, -1.0)])  # no such sample
        await task
        return streamed.events

    assert b"internal error" in asyncio.run(serve())[-1]
    assert "its tokens cannot be read" in caplog.text


def test_client_disconnect_during_upload_is_handled(caplog: pytest.LogCaptureFixture) -> None:
    service: Any = SimpleNamespace(limits=ServerLimits(), metrics=ServeMetrics(), api_keys=(), no_auth=True)
    messages = iter([{"type": "http.request", "body": b'{"a', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(app_module.create_app(service)(scope, receive, send))
    assert caplog.records == []
    assert sent[0]["status"] == app_module.CLIENT_CLOSED_REQUEST
