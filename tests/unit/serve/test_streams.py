"""Streams and the places that they hold in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.serve import app as app_module


def test_a_client_that_does_not_read_its_stream_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
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
