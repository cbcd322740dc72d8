"""Frames between the server and its engine."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from posttrain.serve.channel import EngineChannel, frame, read_frame


def test_values_arrive_whole_and_in_order_however_the_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    assert channel.receive(wait=False) == []
    sent = frame({"a": 1}) + frame([2.5, None]) + frame("x" * 300)
    ours.sendall(sent[:5])
    assert channel.receive(wait=False) == []
    ours.sendall(sent[5:-1])
    assert channel.receive(wait=True) == [{"a": 1}, [2.5, None]]
    ours.sendall(sent[-1:])
    assert channel.receive(wait=True) == ["x" * 300]
    ours.close()
    with pytest.raises(ConnectionError):
        channel.receive(wait=True)


def test_sender_does_not_wait_for_a_reader_that_is_busy() -> None:
    ours, theirs = socket.socketpair()
    channel = EngineChannel(ours)
    values = [[number] * 100_000 for number in range(20)]  # more than a socket buffers
    for value in values:
        channel.send(value)  # would block for good if it waited

    async def read() -> list[Any]:
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        found = []
        for _ in values:
            task = asyncio.create_task(read_frame(reader))
            while not task.done():
                channel.receive(wait=False)  # what the engine does before each step
                await asyncio.sleep(0)
            found.append(task.result())
        writer.close()
        return found

    assert asyncio.run(read()) == values
