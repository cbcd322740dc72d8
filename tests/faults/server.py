"""A server and clients that behave badly: it answers the others, keeps within its memory, ends when told to."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import tiny_server

from faults.campaign import Case, Part
from faults.lab import Lab
from faults.mutations import mutated
from posttrain.errors import InputError

KEY = "faults-server-key"
REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
AUTHORISED = {"Authorization": f"Bearer {KEY}"}
SLOW_CLIENTS = 100
CONNECTIONS = 1000
REQUESTS = 10_000
# Of resident memory, over the last nine tenths of the requests. Allocators keep some; a leak of 4 KB a request would be
# 36 MB.
MAX_GROWTH_MB = 24


class Server:
    """`posttrain serve` in a process of its own."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        self.log = log
        command = [
            sys.executable,
            "-m",
            "posttrain.cli.main",
            "serve",
            str(model),
            "--port",
            "0",
            "--served-model-name",
            "tiny",
        ]
        command += ["--device", "cpu", "--precision", "float32", "--max-model-len", "256", "--max-batch-size", "8"]
        command += ["--kv-cache-gib", "0.01", *options]
        environment = {**os.environ, "POSTTRAIN_API_KEY": KEY}
        self.process = subprocess.Popen(
            command, stdout=log.open("wb"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        self.port = self._port()
        self.url = f"http://127.0.0.1:{self.port}"

    def _port(self) -> int:
        end = time.monotonic() + 180
        while time.monotonic() < end:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", self.log.read_text()):
                port = int(found[1])
                with suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        return port
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()}"
            time.sleep(0.1)
        raise AssertionError(f"the server does not start: {self.log.read_text()}")

    def ask(self, timeout_s: float = 60.0, **changes: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/chat/completions", json={**REQUEST, **changes}, headers=AUTHORISED, timeout=timeout_s
        )

    def assert_serves(self) -> None:
        assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-3000:]}"
        answer = self.ask()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] is not None

    def memory_mb(self) -> float:
        server = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (server, *server.children())) / 2**20

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    yield Case("oversized-content-length", partial(on_shared, lab, oversized_content_length))
    yield Case("foreign-origin", partial(foreign_origin, lab))
    for number in range(3 if short else 60):
        yield Case(f"malformed-{number}", partial(on_shared, lab, malformed), tries=20)
    for name, content in BODIES.items():
        if not short or name in SHORT_BODIES:
            yield Case(f"body-{name}", partial(on_shared, lab, bad_body, content))
    yield Case("disconnects", partial(on_shared, lab, disconnects), tries=40)
    yield Case("hosts-that-are-none", partial(on_shared, lab, odd_hosts), tries=len(HOSTS) * len(HOST_PATHS))
    yield Case("adapters-by-hostile-names", partial(hostile_adapters, lab), tries=len(ADAPTER_NAMES))
    yield Case("open-to-the-world-without-a-key", partial(open_to_the_world, lab))
    if not short:
        yield Case("slow-clients", partial(slow_clients, lab), tries=SLOW_CLIENTS)
        yield Case("stop-under-load", partial(stop_under_load, lab))
        yield Case("stop-twice", partial(stop_under_load, lab, twice=True))
        yield Case("1000-at-once", partial(on_shared, lab, many_at_once), tries=CONNECTIONS)
        yield Case("1000-streams", partial(on_shared, lab, many_streams), tries=CONNECTIONS)
        yield Case("memory-over-10000-requests", partial(on_shared, lab, memory), tries=REQUESTS)


PART = Part(
    "server", "the server answers, stays within its memory and ends when told, whatever its clients do", cases, 5
)


def shared_server(lab: Lab) -> Server:
    def make(folder: Path) -> Server:
        server = Server(tiny_server.save_model(folder / "model"), folder / "log")
        lab.open.callback(server.close)
        return server

    server: Server = lab.shared("server", make)
    return server


def on_shared(lab: Lab, deed: Callable[..., None], *arguments: Any) -> None:
    """On a server that all cases share: one that they damage fails the next one, too."""
    *given, _folder, chance = arguments
    server = shared_server(lab)
    deed(server, *given, chance)
    server.assert_serves()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10)


def head(length: int | str, path: str = "/v1/chat/completions", *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


def received(connection: socket.socket, limit_s: float) -> bytes:
    """What comes until the other side closes, or the time is over."""
    connection.settimeout(limit_s)
    content, end = b"", time.monotonic() + limit_s
    with suppress(OSError):
        while time.monotonic() < end and (piece := connection.recv(65536)):
            content += piece
    return content


# -- clients -----------------------------------------------------------------------------------------------------------


def slow_clients(lab: Lab, folder: Path, chance: random.Random) -> None:
    """Heads and bodies that come byte by byte do not keep others out, and are given up."""
    server = Server(tiny_server.save_model(folder / "model"), folder / "log", "--body-timeout-s", "3")
    slow = [connect(server) for _ in range(SLOW_CLIENTS)]
    try:
        for number, client in enumerate(slow):
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" if number % 2 else head(50) + b"{")
        server.assert_serves()
        given_up: set[socket.socket] = set()
        end = time.monotonic() + 30
        while len(given_up) < SLOW_CLIENTS and time.monotonic() < end:
            given_up |= {client for client in slow if client not in given_up and _is_closed(client)}
            time.sleep(0.5)
        assert len(given_up) == SLOW_CLIENTS, f"{SLOW_CLIENTS - len(given_up)} of them are still served after 30 s"
        server.assert_serves()
    finally:
        for client in slow:
            client.close()
        server.close()


def _is_closed(client: socket.socket) -> bool:
    """Sends another byte, and reads what there is."""
    client.setblocking(False)
    try:
        client.send(b"a")
        while client.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def oversized_content_length(server: Server, chance: random.Random) -> None:
    """Refused by its head: nothing is gained by waiting for the body."""
    for length in (10**9, 10**18, 2**63, 10**30):
        with connect(server) as client:
            client.sendall(head(length) + b"{")
            status = received(client, 10.0).split(b"\r\n")[0]  # and not 408, after --body-timeout-s
            assert b" 413 " in status or b" 400 " in status, (length, status)
    for length in ("-1", "x", "1e3", "0x10", ""):
        with connect(server) as client:
            client.sendall(head(length) + b"{}")
            assert b" 400 " in received(client, 5.0).split(b"\r\n")[0], length


def malformed(server: Server, chance: random.Random) -> None:
    """Twenty requests with bytes changed, removed, doubled or added, in the head or the body."""
    body = json.dumps(REQUEST).encode()
    for _ in range(20):
        with connect(server) as client:
            if chance.random() < 0.5:
                content = mutated(body, chance)
                content = head(len(content)) + content
            else:
                content = mutated(head(len(body)), chance) + body
            with suppress(OSError):  # it may close at once
                client.sendall(content)
                client.shutdown(socket.SHUT_WR)
            answer = received(client, 10.0)
            status = answer.split(b"\r\n")[0]
            assert b" 500 " not in status, f"{status!r} for {content!r}"
            assert b"Traceback" not in answer


BODIES: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "deep": b"[" * 200_000,
    "deep-objects": b'{"a":' * 100_000,
    "long-number": b'{"seed": ' + b"9" * 5000 + b"}",
    "not-utf8": b"\xff\xfe\x00",
    "nan": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "infinite": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "many-samples": json.dumps({**REQUEST, "n": 10**9}).encode(),
    "negative-tokens": json.dumps({**REQUEST, "max_tokens": -1}).encode(),
    "many-tokens": json.dumps({**REQUEST, "max_tokens": 10**12}).encode(),
    "tools": json.dumps({**REQUEST, "tools": "all"}).encode(),
    "tools-given": json.dumps({**REQUEST, "tools": [{"type": "function"}]}).encode(),
    "unknown-role": json.dumps({**REQUEST, "messages": [{"role": "god", "content": "x"}]}).encode(),
    "no-messages": json.dumps({**REQUEST, "messages": []}).encode(),
    "messages-of-numbers": json.dumps({**REQUEST, "messages": [1, 2]}).encode(),
    "content-is-null": json.dumps({**REQUEST, "messages": [{"role": "user", "content": None}]}).encode(),
    "content-is-an-image": json.dumps(
        {
            **REQUEST,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ],
        }
    ).encode(),
    "half-a-character": b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}',
    "stop-is-a-bomb": json.dumps({**REQUEST, "stop": ["x" * 100] * 10_000}).encode(),
    "stop-is-empty": json.dumps({**REQUEST, "stop": [""]}).encode(),
    "logit-bias": json.dumps({**REQUEST, "logit_bias": {"99999999": 100}}).encode(),
    "unknown-field": json.dumps({**REQUEST, "temprature": 1}).encode(),
    "unknown-model": json.dumps({**REQUEST, "model": "../../etc/passwd"}).encode(),
    "long-prompt": json.dumps({**REQUEST, "messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode(),
    "twice-the-same-key": b'{"model": "tiny", "model": "other", "messages": [{"role": "user", "content": "x"}]}',
}
SHORT_BODIES = ("deep", "long-number", "nan", "tools", "long-prompt")


def bad_body(server: Server, content: bytes, chance: random.Random) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=content,
        headers={**AUTHORISED, "Content-Type": "application/json"},
        timeout=30,
    )
    refused = (400, 404, 413, 422) if content != BODIES["half-a-character"] else (200, 400, 422)
    assert answer.status_code in refused, f"{answer.status_code}: {answer.text[:500]}"
    assert answer.json(), "an error has a body"


def disconnects(server: Server, chance: random.Random) -> None:
    """Forty clients leave in the middle of a stream; their places are free again."""
    body = json.dumps({**REQUEST, "max_tokens": 200, "stream": True}).encode()
    for _ in range(40):
        client = connect(server)
        client.sendall(head(len(body)) + body)
        received_bytes = client.recv(chance.choice([1, 200, 4096]))
        assert received_bytes
        if chance.random() < 0.5:  # a reset instead of an orderly end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.close()


def many_at_once(server: Server, chance: random.Random) -> None:
    """Each of a thousand gets an answer, or is told to come again."""

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=300, headers=AUTHORISED) as client:
            requests = [client.post(f"{server.url}/v1/chat/completions", json=REQUEST) for _ in range(CONNECTIONS)]
            return [answer.status_code for answer in await asyncio.gather(*requests)]

    codes = asyncio.run(all_of_them())
    counts = {code: codes.count(code) for code in sorted(set(codes))}
    assert set(codes) <= {200, 429, 503}, counts
    assert counts.get(200, 0) >= 8, counts


def many_streams(server: Server, chance: random.Random) -> None:
    """Each of a thousand streams ends with [DONE], or is refused before its first event."""

    async def one(client: httpx.AsyncClient) -> int:
        body = {**REQUEST, "stream": True}
        async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            content = await answer.aread()
        assert answer.status_code != 200 or content.rstrip().endswith(b"data: [DONE]"), content[-300:]
        return answer.status_code

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=300, headers=AUTHORISED) as client:
            return await asyncio.gather(*(one(client) for _ in range(CONNECTIONS)))

    codes = asyncio.run(all_of_them())
    counts = {code: codes.count(code) for code in sorted(set(codes))}
    assert set(codes) <= {200, 429, 503}, counts
    assert counts.get(200, 0) >= 8, counts


HOSTS = ("[", "]", "[::1", "a:b:c", "\x7f", "[" * 5000, "..", "%00", "localhost:99999999999")
HOST_PATHS = ("/health", "/metrics", "/v1/models", "/health/", "/nothing", "//", "/v1/models/%2e%2e%2f%00")


def odd_hosts(server: Server, chance: random.Random) -> None:
    for host in HOSTS:
        for path in HOST_PATHS:
            with connect(server) as client:
                client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status = received(client, 10.0).split(b"\r\n")[0]
            assert status, f"no answer for {host!r} {path}"
            assert b" 500 " not in status, f"{status!r} for {host!r} {path}"


def memory(server: Server, chance: random.Random) -> None:
    """Ten thousand requests: answers, streams, refusals, clients that leave."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        kind = number % 10
        url = f"{server.url}/v1/chat/completions"
        if kind == 0:
            await client.post(url, content=b"{" * 2000)
        elif kind == 1:
            async with client.stream("POST", url, json={**REQUEST, "stream": True}) as answer:
                async for _ in answer.aiter_raw():
                    break
        elif kind == 2:
            await client.post(url, json={**REQUEST, "model": f"no-{number}"})
        elif kind == 3:
            await client.get(f"{server.url}/no/such/path/{number}")
        else:
            text = "".join(chance.choice("abcdef ") for _ in range(20))
            words = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 1 + number % 3,
                "user": f"user-{number}",
            }
            await client.post(url, json={**REQUEST, **words})

    async def many(first: int, count: int) -> None:
        numbers = iter(range(first, first + count))
        async with httpx.AsyncClient(timeout=120, headers=AUTHORISED) as client:

            async def loop() -> None:
                for number in numbers:
                    await one(client, number)

            await asyncio.gather(*(loop() for _ in range(16)))

    asyncio.run(many(0, REQUESTS // 10))
    before = server.memory_mb()
    asyncio.run(many(REQUESTS // 10, REQUESTS - REQUESTS // 10))
    grown = server.memory_mb() - before
    assert grown < MAX_GROWTH_MB, f"{grown:.1f} MB more after {REQUESTS} requests ({before:.0f} MB before)"


ADAPTER_NAMES = (
    "../../etc/passwd",
    "<img src=x onerror=alert(1)>",
    "\x1b[2J\x1b]0;owned\x07",
    'a"b\\c\n# HELP fake\nfake_total 1',
    "__proto__",
    "base_model.model.layers",
    "default",
    "a" * 5000,
    "\u202egpj.exe",
    "{0.__class__}%s%n",
    "\ud800",
    "日本語",
)


def hostile_adapters(lab: Lab, folder: Path, chance: random.Random) -> None:
    """An adapter by a hostile name is served under it, or the name is refused. It is text everywhere."""
    model = tiny_server.save_model(folder / "model")
    adapter = tiny_server.save_adapter(folder / "adapter", model, 1)
    served = 0
    for name in ADAPTER_NAMES:
        try:
            options = tiny_server.options_for(model, adapters={name: str(adapter)})
            with tiny_server.running(options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
                listed = [one["id"] for one in client.get("/v1/models").json()["data"]]
                assert len(listed) == 2, listed
                answer = client.post("/v1/chat/completions", json={**REQUEST, "model": listed[1]})
                assert answer.status_code == 200, f"{name!r}: {answer.status_code} {answer.text[:300]}"
                lines = client.get("/metrics").text.splitlines()
                assert not [line for line in lines if line.startswith(("fake_total", "# HELP fake"))], name
                assert "\x1b" not in "\n".join(lines) + answer.text
                served += 1
        except InputError:
            continue
    assert served, "no adapter was served at all"


# -- servers of their own ----------------------------------------------------------------------------------------------


def stop_under_load(lab: Lab, folder: Path, chance: random.Random, twice: bool = False) -> None:
    """Requests that run are answered, or told that it ends; the process ends in time."""
    server = Server(tiny_server.save_model(folder / "model"), folder / "log", "--drain-timeout-s", "20")
    codes: list[int] = []
    try:

        def client() -> None:
            while server.process.poll() is None:
                try:
                    codes.append(server.ask(timeout_s=40, max_tokens=60).status_code)
                except httpx.HTTPError:
                    codes.append(0)  # no connection: it is gone, or does not take new ones

        clients = [threading.Thread(target=client, daemon=True) for _ in range(8)]
        for one in clients:
            one.start()
        end = time.monotonic() + 60
        while codes.count(200) < 8 and time.monotonic() < end:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        if twice:
            time.sleep(chance.uniform(0, 0.3))
            server.process.send_signal(signal.SIGTERM)
        try:
            code = server.process.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError("still running 60 s after SIGTERM") from None
        assert code in ((0, 1, -signal.SIGTERM, 128 + signal.SIGTERM) if twice else (0,)), (
            f"exit code {code}: {server.log.read_text()[-2000:]}"
        )
        assert set(codes) <= {200, 503, 0}, sorted(set(codes))
        assert "Traceback" not in server.log.read_text(), server.log.read_text()[-3000:]
    finally:
        server.close()


def open_to_the_world(lab: Lab, folder: Path, chance: random.Random) -> None:
    """Without a key, only this machine may ask; unless --no-auth says that it is meant."""
    from faults import processes

    command = ["serve", str(lab.model), "--host", "0.0.0.0", "--port", "0", "--device", "cpu", "--precision", "float32"]
    running = processes.begin(command, folder / "log")
    running.process.join(120)
    still = running.process.is_alive()
    running.kill_all()
    assert not still, f"it listens at 0.0.0.0 without a key: {running.output()}"
    finished = running.finish()
    assert finished.code == 64, finished
    assert "--no-auth" in finished.output, f"the remedy is not named: {finished}"


def foreign_origin(lab: Lab, folder: Path, chance: random.Random) -> None:
    """A page of the web, open in a browser on this machine, must not be able to use a server without a key."""
    with tiny_server.running(tiny_server.options_for(tiny_server.save_model(folder / "model"))) as server:
        url, body = f"{server.url}/v1/chat/completions", json.dumps(REQUEST)
        assert httpx.post(url, content=body, headers={"Content-Type": "application/json"}).status_code == 200
        for headers in (
            {"Origin": "https://evil.example", "Content-Type": "text/plain"},
            {"Origin": "https://evil.example", "Content-Type": "application/json"},
            {"Host": "evil.example", "Content-Type": "application/json"},
        ):
            answer = httpx.post(url, content=body, headers=headers)
            assert answer.status_code in (400, 403, 415, 421), f"{headers}: {answer.status_code} {answer.text[:200]}"
