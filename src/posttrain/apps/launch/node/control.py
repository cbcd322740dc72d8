"""The connections of a gang: every member has one to rank 0, over which one line of JSON is one message.

When a process ends, its machine closes the connection, and the other side reads the end of file immediately. A machine
that fails does not close connections: then pings stop, and after `SILENCE_S` the connection counts as closed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from posttrain.errors import reason_of

PING_S = 1.0
SILENCE_S = 15.0
_RETRY_S = 0.2
_SAY_S = 30.0
_LONGEST_LINE = 65536

Message = Mapping[str, object]


class Link:
    """One connection. `receive` and `closed` are called in a separate thread."""

    def __init__(
        self,
        connection: socket.socket,
        receive: Callable[[Link, Message], None],
        closed: Callable[[Link], None],
        *,
        ping_s: float = PING_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.own_address = str(connection.getsockname()[0])
        self.peer_address = str(connection.getpeername()[0])
        self._connection = connection
        self._receive, self._closed = receive, closed
        self._ping_s = ping_s
        self._sending = threading.Lock()
        self._over = threading.Event()
        connection.settimeout(silence_s)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for work in (self._read, self._ping):
            threading.Thread(target=work, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """A closed connection is no error: its end is reported to `closed`."""
        with self._sending, suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ping(self) -> None:
        while not self._over.wait(self._ping_s):
            self.send({"type": "ping"})

    def _read(self) -> None:
        try:
            with self._connection, self._connection.makefile("rb") as lines:
                while line := lines.readline(_LONGEST_LINE):
                    message = json.loads(line)
                    if isinstance(message, dict) and message.get("type") != "ping":
                        self._receive(self, message)
        except (OSError, ValueError):
            pass  # cut off, silent, or no member of a gang
        self._over.set()
        self._closed(self)


class Listener:
    """Accepts connections on `port` (0: any that is free)."""

    def __init__(
        self, port: int, receive: Callable[[Link, Message], None], closed: Callable[[Link], None], host: str = ""
    ) -> None:
        self._server = socket.create_server((host, port), backlog=1024)
        self.port = int(self._server.getsockname()[1])
        self._receive, self._closed = receive, closed
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
                Link(connection, self._receive, self._closed).start()
            except OSError:
                return

    def close(self) -> None:
        self._server.close()


def connect(
    host: str,
    port: int,
    receive: Callable[[Link, Message], None],
    closed: Callable[[Link], None],
    *,
    limit_s: float,
    say: Callable[[str], None],
    is_given_up: Callable[[], bool] = lambda: False,
) -> Link | None:
    """A connection to rank 0, whose pod may still be starting. None after `limit_s`, or once `is_given_up`."""
    start = last_said = time.monotonic()
    while not is_given_up():
        try:
            return Link(socket.create_connection((host, port), timeout=5.0), receive, closed)
        except OSError as error:
            now = time.monotonic()
            if now - start > limit_s:
                say(f"{host}:{port} has not answered for {limit_s:.0f} s: {reason_of(error)}")
                return None
            if now - last_said > _SAY_S:
                last_said = now
                say(f"waiting for rank 0 at {host}:{port}: {reason_of(error)}")
        time.sleep(_RETRY_S)
    return None


def port_is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
