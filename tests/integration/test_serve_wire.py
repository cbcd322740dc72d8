"""What a streamed answer is on the wire: chunks, connections that are used again, and clients that read slowly."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pytest
from tiny_server import RunningServer, options_for, running, save_model

from posttrain.apps.serve import server as server_module

pytestmark = pytest.mark.timeout(180)

HIGH_WATER_BYTES = 2**16  # of asyncio: what is written beyond it waits until the client has read


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(options_for(save_model(tmp_path_factory.mktemp("model")))) as server:
        yield server


@contextmanager
def connected(server: RunningServer, receive_buffer: int | None = None) -> Iterator[tuple[socket.socket, BinaryIO]]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(30)
        client.connect((host, int(port)))
        with client.makefile("rb") as reader:
            yield client, reader


def request(version: str = "1.1", **settings: Any) -> bytes:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "ignore_eos": True, "seed": 1, **settings}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_head(reader: BinaryIO) -> tuple[int, dict[str, str]]:
    status = int(reader.readline().split()[1])
    headers: dict[str, str] = {}
    while (line := reader.readline()) != b"\r\n":
        name, _, value = line.decode().strip().partition(": ")
        headers[name.lower()] = value
    return status, headers


def read_chunks(reader: BinaryIO) -> list[bytes]:
    """The body, by the rules of RFC 9112: a size, the data, an empty line; a size of zero is the end."""
    chunks: list[bytes] = []
    while True:
        size = int(reader.readline().removesuffix(b"\r\n"), 16)
        data = reader.read(size)
        assert reader.read(2) == b"\r\n"
        if not size:
            return chunks
        chunks.append(data)


def text_of(events: bytes, index: int = 0) -> str:
    *events_before, done, nothing = events.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events_before]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def whole_text(reader: BinaryIO, client: socket.socket, **settings: Any) -> str:
    client.sendall(request(**settings))
    _, headers = read_head(reader)
    return str(json.loads(reader.read(int(headers["content-length"])))["choices"][0]["text"])


def test_stream_is_valid_chunks_and_the_connection_serves_more_requests(server: RunningServer) -> None:
    with connected(server) as (client, reader):
        expected = whole_text(reader, client)
        for _ in range(2):
            client.sendall(request(stream=True))
            status, headers = read_head(reader)
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert "content-length" not in headers
            chunks = read_chunks(reader)
            assert len(chunks) > 5
            assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
            assert text_of(b"".join(chunks)) == expected
        client.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_head(reader)[0] == 200
        assert whole_text(reader, client) == expected


def test_pipelined_streams_are_answered_in_order(server: RunningServer) -> None:
    with connected(server) as (client, reader):
        expected = [whole_text(reader, client, seed=seed) for seed in (1, 2, 3)]
        client.sendall(b"".join(request(stream=True, seed=seed) for seed in (1, 2, 3)))
        found = []
        for _ in expected:
            assert read_head(reader)[0] == 200
            found.append(text_of(b"".join(read_chunks(reader))))
    assert found == expected


def test_client_of_http_1_0_gets_no_chunks(server: RunningServer) -> None:
    with connected(server) as (client, reader):
        expected = whole_text(reader, client)
        client.sendall(request("1.0", stream=True))
        status, headers = read_head(reader)
        assert (status, headers.get("transfer-encoding")) == (200, None)
        assert text_of(reader.read()) == expected


def test_slow_client_gets_everything_and_the_server_buffers_little(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[int] = []  # bytes in the buffers of connections when they were paused
    pause, made = server_module._Protocol.pause_writing, server_module._Protocol.connection_made

    def with_a_small_socket(connection: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        made(connection, transport)

    def remember(connection: Any) -> None:
        paused.append(connection.transport.get_write_buffer_size())
        pause(connection)

    monkeypatch.setattr(server_module._Protocol, "connection_made", with_a_small_socket)
    monkeypatch.setattr(server_module._Protocol, "pause_writing", remember)
    settings: dict[str, Any] = {"max_tokens": 200, "n": 8, "logprobs": 20}
    with connected(server, receive_buffer=2048) as (client, reader):
        client.sendall(request(stream=True, **settings))
        server.wait_until(lambda: paused)
        [session] = server.service.engine.sessions
        server.wait_until(lambda: session.counts.num_active == 0)  # all tokens were sampled, and wait
        read_head(reader)
        slow = b"".join(read_chunks(reader))
        expected = whole_text(reader, client, **settings)
    assert text_of(slow) == expected
    assert paused[0] < 2 * HIGH_WATER_BYTES


def test_client_that_leaves_while_it_does_not_read_frees_its_slots(server: RunningServer) -> None:
    with connected(server, receive_buffer=2048) as (client, _):
        client.sendall(request(stream=True, max_tokens=200, n=8, logprobs=20))
        server.wait_until(lambda: server.service.num_inside == 8)
    server.wait_until_empty()
