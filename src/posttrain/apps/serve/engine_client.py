"""The server's end of the engine: sends requests, and passes the tokens of a step to their receivers.

Everything here runs on the server's event loop. The engine's end is `engine_loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.apps.serve.channel import frame, take_frames
from posttrain.apps.serve.engine_host import EngineHost
from posttrain.apps.serve.engine_loop import AddRequests, Cancel, EngineReport, StopEngine
from posttrain.engines.native.session import SessionCounts, SessionLimits, SessionRequest, TokenEvent

log = logging.getLogger("posttrain.serve")


class TokenReceiver(Protocol):
    """Gets what the engine sends for its requests."""

    def receive(self, tokens: list[TokenEvent]) -> None:
        """All tokens that have arrived: those of several steps if the server is slower than the engine."""

    def fail(self, message: str) -> None:
        """One of its requests has ended without an answer."""


@dataclass(eq=False)
class ServedSession:
    """The facts of a session in the server: what never changes, and the counts after its last step."""

    index: int
    limits: SessionLimits
    counts: SessionCounts = field(default_factory=SessionCounts)


class EngineClient(asyncio.Protocol):
    def __init__(self, host: EngineHost, limits: Sequence[SessionLimits]) -> None:
        self.sessions = [ServedSession(*numbered) for numbered in enumerate(limits)]
        self.ending: str | None = None  # how the engine ended, if not by `stop`
        self.host = host
        self._receivers: dict[str, TokenReceiver] = {}  # by request
        self._broken: set[tuple[int, str | None]] = set()
        self._incoming = bytearray()
        self._stopping = False

    async def start(self, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called if the engine ends, but not by `stop`, after its requests have failed."""
        self._on_end = on_end
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self.host.connection)
        self.host.start()

    def works(self, session: ServedSession, adapter: str) -> bool:
        return self.ending is None and self._broken.isdisjoint(((session.index, None), (session.index, adapter)))

    def submit(self, session: ServedSession, requests: Sequence[SessionRequest], receiver: TokenReceiver) -> None:
        self._receivers |= dict.fromkeys((request.id for request in requests), receiver)
        self._transport.write(frame(AddRequests(session.index, tuple(requests))))

    def cancel(self, session: ServedSession, request_id: str) -> None:
        """The receiver gets nothing more of the request. Finished and unknown requests are ignored."""
        self._receivers.pop(request_id, None)
        self._transport.write(frame(Cancel(session.index, request_id)))

    async def stop(self, timeout_s: float = 30.0) -> None:
        """End the engine after its current step. Unfinished requests are dropped."""
        self._stopping = True
        self._transport.write(frame(StopEngine()))
        await asyncio.to_thread(self.host.stop, timeout_s)
        self._transport.close()

    # -- called by the event loop --------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        try:
            if reports := [EngineReport(*values) for values in take_frames(self._incoming)]:
                self._hand_out(reports)
        except Exception:
            log.exception("a message of the engine cannot be read")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._stopping:
            self._ended = asyncio.create_task(self._fail_all())  # referenced, or it could be collected

    async def _fail_all(self) -> None:
        self.ending = await asyncio.to_thread(self.host.ending)
        for receiver in set(self._receivers.values()):
            receiver.fail(self.ending)
        self._on_end()

    def _hand_out(self, reports: Sequence[EngineReport]) -> None:
        self._broken = reports[-1].broken  # first: a client that gets a failure may ask again at once
        for session, counts in zip(self.sessions, reports[-1].counts, strict=True):
            session.counts = counts
        arrived: dict[TokenReceiver, list[TokenEvent]] = {}
        for report in reports:
            for token in map(TokenEvent._make, report.tokens):
                if (receiver := self._receivers.get(token.request_id)) is not None:
                    arrived.setdefault(receiver, []).append(token)
        for receiver, tokens in arrived.items():
            receiver.receive(tokens)
        for report in reports:
            for request_id, message in report.failures:
                if (failed := self._receivers.pop(request_id, None)) is not None:
                    failed.fail(message)
