"""Runs the dashboard until a signal."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import uvicorn

from posttrain.serve.listener import listen, url_of
from posttrain.ui.access import Access
from posttrain.ui.app import create_app
from posttrain.ui.catalogue import Catalogue

_FLUSH_S = 1  # for answers that are being sent; streams of changes end by themselves


class WatchServer(uvicorn.Server):
    def __init__(self, catalogue: Catalogue, access: Access, on_ready: Callable[[], None] = lambda: None) -> None:
        app = create_app(catalogue, access, is_ending=lambda: self.should_exit)
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_FLUSH_S
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def run(catalogue: Catalogue, access: Access, host: str, port: int, *, on_ready: Callable[[str], None]) -> int:
    with listen(host, port) as listener:
        server = WatchServer(catalogue, access, lambda: on_ready(url_of(listener)))
        server.run(sockets=[listener])
    print("posttrain watch: ended", file=sys.stderr)
    return 0
