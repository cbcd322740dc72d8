"""Values between the two ends of one server, in frames over a socket pair.

They are pickled: the socket has no name, and both processes are this program.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
from typing import Any

from posttrain import processes


def frame(value: object) -> bytes:
    return processes.frame(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def take_frames(buffer: bytearray) -> list[Any]:
    """The values of all complete frames, which are removed from the buffer."""
    return [pickle.loads(data) for data in processes.take_frames(buffer)]


class EngineChannel:
    """One end, for a loop that never waits to send: what the socket does not take is sent with the next call."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._incoming, self._outgoing = bytearray(), bytearray()

    def send(self, value: object) -> None:
        self._outgoing += frame(value)
        self._flush()

    def receive(self, *, wait: bool) -> list[Any]:
        """The values that have arrived, at least one if `wait`. `ConnectionError` if the other end is closed."""
        while True:
            writing = [self._socket] if self._outgoing else []
            readable, writable, _ = select.select([self._socket], writing, [], None if wait else 0)
            if writable:
                self._flush()
            if readable:
                data = self._socket.recv(1 << 20)
                if not data:
                    raise ConnectionResetError("the other end has gone")
                self._incoming += data
            if (values := take_frames(self._incoming)) or not wait:
                return values

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
