"""The server's end of the engine: sends requests, and passes the tokens of a step to their sinks.

Everything here runs on the server's event loop. The engine's end is `engine_loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.engines.native.session import (
    Event,
    FailureEvent,
    SessionCounts,
    SessionLimits,
    SessionRequest,
    TokenEvent,
)
from posttrain.serve.channel import frame, read_frame
from posttrain.serve.engine_host import EngineHost
from posttrain.serve.engine_loop import AddRequests, Cancel, EngineReport, StopEngine

log = logging.getLogger("posttrain.serve")

Sink = Callable[[Event], None]


@dataclass(eq=False)
class ServedSession:
    """The facts of a session in the server: what never changes, and the counts after its last step."""

    index: int
    limits: SessionLimits
    counts: SessionCounts = field(default_factory=SessionCounts)


class EngineClient:
    def __init__(self, host: EngineHost, limits: Sequence[SessionLimits]) -> None:
        self.sessions = [ServedSession(*numbered) for numbered in enumerate(limits)]
        self.ending: str | None = None  # how the engine ended, if not by `stop`
        self.host = host
        self._sinks: dict[str, Sink] = {}  # by request
        self._broken: set[tuple[int, str | None]] = set()
        self._stopping = False

    async def start(self, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called if the engine ends, but not by `stop`, after its requests have failed."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.host.connection)
        self._reading = asyncio.create_task(self._read(reader, on_end))
        self.host.start()

    def works(self, session: ServedSession, adapter: str) -> bool:
        return self.ending is None and self._broken.isdisjoint(((session.index, None), (session.index, adapter)))

    def submit(self, session: ServedSession, requests: Sequence[SessionRequest], sink: Sink) -> None:
        """`sink` is called with every event of the requests."""
        self._sinks |= dict.fromkeys((request.id for request in requests), sink)
        self._writer.write(frame(AddRequests(session.index, tuple(requests))))

    def cancel(self, session: ServedSession, request_id: str) -> None:
        """The request gets no further event. Finished and unknown requests are ignored."""
        self._sinks.pop(request_id, None)
        self._writer.write(frame(Cancel(session.index, request_id)))

    async def stop(self, timeout_s: float = 30.0) -> None:
        """End the engine after its current step. Unfinished requests are dropped."""
        self._stopping = True
        self._writer.write(frame(StopEngine()))
        await asyncio.to_thread(self.host.stop, timeout_s)
        self._reading.cancel()
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader, on_end: Callable[[], None]) -> None:
        try:
            while True:
                self._hand_out(EngineReport(*await read_frame(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("a message of the engine cannot be read")
        if self._stopping:
            return
        self.ending = await asyncio.to_thread(self.host.ending)
        for request_id, sink in self._sinks.items():
            sink(FailureEvent(request_id, self.ending))
        on_end()

    def _hand_out(self, report: EngineReport) -> None:
        self._broken = report.broken  # first: a client that gets a failure may ask again at once
        for session, counts in zip(self.sessions, report.counts, strict=True):
            session.counts = counts
        for token in report.tokens:
            event = TokenEvent._make(token)
            if (sink := self._sinks.get(event.request_id)) is not None:
                sink(event)
        for request_id, message in report.failures:
            if (sink := self._sinks.pop(request_id, None)) is not None:
                sink(FailureEvent(request_id, message))
