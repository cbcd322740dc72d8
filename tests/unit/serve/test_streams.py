"""Streams, the places that they hold in the engine, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.engines.native.session import SessionRequest, TokenEvent
from posttrain.serve import app as app_module
from posttrain.serve.metrics import ServeMetrics
from posttrain.serve.options import ServerLimits
from posttrain.serve.protocol import ApiError, unavailable
from posttrain.serve.service import Job, Ticket
from posttrain.types import Sampling


def test_client_that_stops_reading_its_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SLOW_READER_S", 0.05)
    closed: list[bool] = []
    ticket: Any = SimpleNamespace(
        job=SimpleNamespace(id="chatcmpl-1"), time_limit_s=0.05, close=lambda: closed.append(True)
    )

    async def content() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"

    async def never(*_message: Any) -> Any:
        await asyncio.Event().wait()

    async def serve() -> None:
        stream = app_module._Stream(ticket, content(), {})
        await asyncio.wait_for(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, never, never), timeout=10)

    asyncio.run(serve())
    assert closed == [True]


def test_tokens_before_the_end_are_delivered_before_it() -> None:
    service: Any = SimpleNamespace(
        limits=ServerLimits(), metrics=ServeMetrics(), engine=SimpleNamespace(submit=lambda *order: None)
    )
    version: Any = SimpleNamespace(name="production", session=None)
    request = SessionRequest("r", (5,), Sampling(2), seed=0)

    async def read(*events: TokenEvent) -> list[int]:
        ticket = Ticket(service, Job("job", "tiny", version, [request]))
        for event in events:
            ticket._events.put_nowait(event)
        ticket.give_up("shutdown", unavailable("the end"))
        received: list[int] = []
        with suppress(ApiError):
            async for batch in ticket.batches():
                received += [event.token_id for event in batch]
            return received
        return [*received, -1]

    first, last = TokenEvent("r", 0, 7, -1.0), TokenEvent("r", 0, 8, -1.0, "length")
    assert asyncio.run(read(first)) == [7, -1]
    assert asyncio.run(read(first, last)) == [7, 8], "an answer that is complete is no error"


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
