"""Runs the app until a signal, then until the running requests are answered."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.apps.serve.app import create_app
from posttrain.apps.serve.listener import listen, url_of
from posttrain.apps.serve.protocol import ApiError
from posttrain.apps.serve.service import Service

# For the last bytes of complete answers.
_FLUSH_S = 2
_KEEP_ALIVE_S = 30
_TICKS_PER_LOOK = 5  # between checks for silent connections; uvicorn ticks ten times a second


class _Protocol(H11Protocol):
    """Requests that are not HTTP get an error in the same format. Implements `app.Connection`: uvicorn and h11 write
    the head and the end of a streamed response, and the chunks between them are framed here, which takes a tenth of
    the time.
    """

    def __init__(self, config: uvicorn.Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)

    def can_write_chunk(self) -> bool:
        # HTTP/1.0 has no chunks, so it goes through h11.
        is_open = not (self.flow.write_paused or self.transport.is_closing())
        return is_open and self.scope["http_version"] == "1.1"

    def write_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(ApiError(400, msg).body).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """SIGTERM or Ctrl-C: new requests are refused with 503, running ones get up to `drain_timeout_s`, then it ends.

    A second signal ends it at once. `num_cut` is then the number of unfinished samples. `on_ready` is called when the
    server accepts connections and handles signals.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        drain_timeout_s: float,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._on_ready = on_ready
        self._silent_since: dict[Any, float] = {}  # by connection
        self.num_cut = 0
        config = uvicorn.Config(
            create_app(service),
            http=_Protocol,
            host=host,
            port=port,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
            backlog=2048,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # When the engine has ended, its requests have failed. A supervisor starts both again.
        await self._service.engine.start(on_end=partial(setattr, self, "should_exit", True))
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_LOOK == 0:
            self._close_silent()
        return await super().on_tick(counter)

    def _close_silent(self) -> None:
        """uvicorn waits without limit for the head of a request; here it has the time limit of a body."""
        now, patience_s = time.monotonic(), self._service.limits.body_timeout_s
        silent = [connection for connection in self.server_state.connections if _is_silent(connection)]
        self._silent_since = {connection: self._silent_since.get(connection, now) for connection in silent}
        for connection, since in self._silent_since.items():
            if now - since > patience_s:
                connection.transport.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        if waiting := self._service.num_inside:
            say(f"draining: {waiting} samples are being answered; at most {self._drain_timeout_s:g} s")
        end = time.monotonic() + self._drain_timeout_s
        while self._service.num_inside and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        self._service.end()
        # Clients that do not read the error are disconnected; uvicorn would log a traceback for each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)
        self.num_cut = self._service.num_cut + self._service.num_inside
        await self._service.engine.stop()


def _is_silent(connection: object) -> bool:
    """No request is being answered, and no keep-alive time limit of uvicorn is running."""
    answering = getattr(connection, "cycle", None)
    is_idle = answering is None or answering.response_complete
    return is_idle and getattr(connection, "timeout_keep_alive_task", None) is None


def run(service: Service, host: str, port: int, drain_timeout_s: float) -> int:
    """Serve until a signal; the exit code: 0, or 1 if requests were cut off or the engine has ended."""
    gc.freeze()  # loaded objects stay: garbage collections would scan them repeatedly
    with listen(host, port) as listener:
        ready = f"ready: {url_of(listener)}v1  models: {', '.join(service.models)}"
        server = DrainingServer(service, host, listener.getsockname()[1], drain_timeout_s, lambda: say(ready))
        server.run(sockets=[listener])
    if service.engine.ending is not None:
        say(f"{service.engine.ending}; start the server again")
        return 1
    if server.num_cut:
        say(f"ended with {server.num_cut} samples unfinished")
        return 1
    say("ended; every request was answered")
    return 0


def say(line: str) -> None:
    print(f"posttrain serve: {line}", file=sys.stderr, flush=True)
