"""Values between the two ends of one server, in frames over a socket pair.

They are pickled: the socket has no name, and both processes are this program.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def frame(value: object) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value. `asyncio.IncompleteReadError` or `ConnectionError` if the other end is closed."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


class EngineChannel:
    """One end, for a loop that never waits to send: what the socket does not take at once is sent with the next call."""

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
            if (values := self._whole_frames()) or not wait:
                return values

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def _whole_frames(self) -> list[Any]:
        values: list[Any] = []
        begin = 0
        while len(self._incoming) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, begin)
            data = begin + _LENGTH.size
            if len(self._incoming) < data + length:
                break
            begin = data + length
            values.append(pickle.loads(memoryview(self._incoming)[data:begin]))
        del self._incoming[:begin]
        return values
