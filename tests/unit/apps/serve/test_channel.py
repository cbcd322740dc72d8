"""Frames between the server and its engine."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from posttrain.apps.serve.channel import EngineChannel, frame, take_frames


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
    theirs.setblocking(False)
    incoming, found = bytearray(), []
    while len(found) < len(values):
        channel.receive(wait=False)  # what the engine does before each step
        with suppress(BlockingIOError):
            incoming += theirs.recv(1 << 20)
        found += take_frames(incoming)
    assert found == values
    assert incoming == b""
