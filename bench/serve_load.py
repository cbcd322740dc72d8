#!/usr/bin/env python3
"""Load on an OpenAI-compatible server: requests per second, time to first token, time between tokens, and whether it is
right.

    posttrain serve models/smollm2-135m-instruct &
    python bench/serve_load.py http://127.0.0.1:8000 --streams 200
    python bench/serve_load.py http://127.0.0.1:8000 --against http://127.0.0.1:8001 --json result.json  # vllm
    python bench/serve_load.py http://127.0.0.1:8000 --request schema    # and with --request chat, for the ratio
    python bench/serve_load.py --serve tiny --streams 200       # starts posttrain with two processes and with one

First every prompt is asked alone, greedily; then all streams at once ask the same prompts. Each answer under load must
be the one that its prompt got alone. The answer to another prompt is *mixed up*; any other answer *differs* (on a GPU,
rounding may depend on the batch). The client only stores what arrives, with its time, and reads it when the load is
over: it takes little from a server on the same machine. `--probe` also checks a posttrain server's manners: keys, 429
when full, places freed by clients that leave. Exits with 1 if a response was lost or mixed up, or a probe failed.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = (
    "river",
    "lamp",
    "copper",
    "tiger",
    "violin",
    "harbour",
    "ember",
    "walnut",
    "glacier",
    "needle",
    "saddle",
    "orchid",
)
MOST_TRIES = 50  # of a request that gets 429
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Returns the {what} at a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name, what in (("get_weather", "weather"), ("get_time", "local time"))
]
# An answer of this schema does not end before it has as many tokens as are asked for.
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1000}


@dataclass
class Answer:
    prompt: int
    text: str = ""
    finished: bool = False
    num_tokens: int = 0
    num_refusals: int = 0  # 429, tried again
    error: str = ""
    began: float = 0.0
    times: list[float] = field(default_factory=list)  # of pieces with text
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # as they arrived, until they are read


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    headers: dict[str, str]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="the server, without /v1")
    parser.add_argument(
        "--serve",
        metavar="MODEL",
        help="instead of a URL: a folder or shape to start posttrain over, with two processes and with one",
    )
    parser.add_argument("--serve-options", default="", help="for both, as one word: '--max-batch-size=256'")
    parser.add_argument("--against", metavar="URL", help="a second server for the ratio, measured after the first")
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    parser.add_argument("--streams", type=int, default=200, help="at the same time (default 200)")
    parser.add_argument("--requests", type=int, help="in all (default: two for each stream)")
    parser.add_argument("--prompts", type=int, default=24, help="that differ (default 24)")
    parser.add_argument("--prompt-words", type=int, default=40, help="of a prompt, about (default 40)")
    parser.add_argument(
        "--shape-words",
        action="store_true",
        help="prompts for the tokenizer of shapes.py; always so with --serve SHAPE",
    )
    parser.add_argument(
        "--request",
        choices=("completion", "chat", "tools", "schema"),
        default="completion",
        help="a text, a chat, a chat with two tools (tool_choice auto), or one whose answer obeys a JSON schema",
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer; all of them are sampled (default 64)")
    parser.add_argument("--api-key", default=os.environ.get("POSTTRAIN_API_KEY", "none"))
    parser.add_argument("--probe", action="store_true", help="also try keys, overload and disconnects (posttrain only)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measure the servers in turn this often; the best counts (1)"
    )
    parser.add_argument("--pid", type=int, help="process of the server, to watch memory and CPU of it and its children")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    args = parser.parse_args()
    if (args.url is None) == (args.serve is None):
        parser.error("give the URL of a server, or --serve MODEL")
    args.shape_words |= args.serve is not None and not Path(args.serve).is_dir()
    return args


def prompt_of(number: int, args: argparse.Namespace) -> str:
    known = [f"t{index}" for index in range(100, 160)] if args.shape_words else WORDS
    words = [known[(number * 7 + place * (number % 5 + 1)) % len(known)] for place in range(args.prompt_words)]
    return (
        f"Request {number}. Repeat these words and then go on with more like them: {' '.join(words)}. Number {number}:"
    )


async def find_model(url: str, key: str, wanted: str | None) -> Target:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient() as client:
        listed = await client.get(f"{url}/v1/models", headers=headers)
    listed.raise_for_status()
    return Target(url.rstrip("/"), wanted or listed.json()["data"][0]["id"], headers)


def body_of(target: Target, prompt: str, max_tokens: int, request: str = "completion") -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": prompt}
    if request != "completion":
        asked = {"messages": [{"role": "user", "content": prompt}]}
    if request == "tools":
        asked["tools"] = TOOLS
    if request == "schema":
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}
    return {
        "model": target.model,
        **asked,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": request != "schema",  # an answer that obeys a schema has to end
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Receiver(asyncio.Protocol):
    """Sends a request, and keeps what comes back with the time of its arrival until the server closes the
    connection.
    """

    def __init__(self, request: bytes) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.closed = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(error)


def request_of(target: Target, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    headers = {**target.headers, "Host": httpx.URL(target.url).netloc.decode(), "Content-Length": str(len(content))}
    headers |= {"Content-Type": "application/json", "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def ask(target: Target, request: bytes, prompt: int) -> Answer:
    """The answer as it arrived: `read` makes sense of it."""
    answer = Answer(prompt, began=time.perf_counter())
    url = httpx.URL(target.url)
    for _ in range(MOST_TRIES):
        try:
            _, receiver = await asyncio.get_running_loop().create_connection(
                lambda: Receiver(request), url.host, url.port or 80
            )
            error = await receiver.closed
        except OSError as failure:
            error, receiver = failure, None
        if error is not None or receiver is None:
            answer.error = f"{type(error).__name__}: {error}"
            return answer
        answer.parts = receiver.parts
        if not (answer.parts and answer.parts[0][1].startswith(b"HTTP/1.1 429")):
            return answer
        answer.num_refusals += 1
        await asyncio.sleep(1.0)
    answer.error = "refused again and again"
    return answer


def read(answer: Answer) -> None:
    """Text, times and errors from the bytes of the response."""
    content, ends, times = b"", [], []
    for at, part in answer.parts:
        content += part
        ends.append(len(content))
        times.append(at)
    answer.parts = []
    head, _, rest = content.partition(b"\r\n\r\n")
    if answer.error or b" 200 " not in head[:20]:
        answer.error = answer.error or f"{head[:40]!r}: {rest[:200]!r}"
        return
    begin, whole = len(head) + 4, len(content)
    while begin < whole:  # chunks of a body of unknown length
        size, _, _ = content[begin : begin + 20].partition(b"\r\n")
        data = begin + len(size) + 2
        begin = data + int(size or b"0", 16) + 2
        at = times[bisect.bisect_left(ends, min(begin, whole))]
        for line in content[data : begin - 2].split(b"\n\n"):
            read_event(line.strip(), at, answer)


def read_event(line: bytes, at: float, answer: Answer) -> None:
    if not line.startswith(b"data: "):
        return
    if line == b"data: [DONE]":
        answer.finished = True
        return
    event = json.loads(line[6:])
    if "error" in event:
        answer.error = str(event["error"])
        return
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
    choice = event["choices"][0] if event["choices"] else {}
    delta = choice.get("delta", {})
    if text := choice.get("text") or delta.get("content") or "".join(map(json.dumps, delta.get("tool_calls") or ())):
        answer.text += text
        answer.times.append(at)


async def load(
    target: Target, args: argparse.Namespace, watch: Watch | None
) -> tuple[list[Answer], list[Answer], float]:
    """The answers to prompts alone, the answers under load, and the seconds that the load took."""
    bodies = [body_of(target, prompt_of(n, args), args.max_tokens, args.request) for n in range(args.prompts)]
    requests = [request_of(target, body) for body in bodies]
    alone = [await ask(target, request, number) for number, request in enumerate(requests)]
    left = iter(range(args.requests or 2 * args.streams))
    answers: list[Answer] = []

    async def stream() -> None:
        for number in left:
            prompt = number % args.prompts
            answers.append(await ask(target, requests[prompt], prompt))

    watching = asyncio.create_task(watch.memory()) if watch is not None else None
    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(args.streams)))
    seconds = time.perf_counter() - began
    if watch is not None and watching is not None:
        watching.cancel()
        watch.stop()
    for answer in (*alone, *answers):
        read(answer)
    return alone, answers, seconds


class Watch:
    """Memory and CPU time of a process and its children."""

    def __init__(self, pid: int) -> None:
        import psutil

        first = psutil.Process(pid)
        self._processes = [first, *first.children(recursive=True)]
        self.bytes: list[int] = []
        self.seconds = self._seconds()  # of CPU, by process; during the load once it has stopped

    async def memory(self) -> None:
        self.seconds = self._seconds()
        while True:
            self.bytes.append(sum(process.memory_info().rss for process in self._processes))
            await asyncio.sleep(0.25)

    def stop(self) -> None:
        self.seconds = [after - before for before, after in zip(self.seconds, self._seconds(), strict=True)]

    def _seconds(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]

    def row(self, num_tokens: float) -> dict[str, float]:
        return {
            "memory_gib_begin": self.bytes[0] / 2**30,
            "memory_gib_most": max(self.bytes) / 2**30,
            "cpu_us_a_token": 1e6 * sum(self.seconds) / num_tokens,
            "of_busiest_process": 1e6 * max(self.seconds) / num_tokens,
        }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def summary(alone: list[Answer], answers: list[Answer], seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    expected = {answer.prompt: answer.text for answer in alone}
    complete = [answer for answer in answers if answer.finished]
    wrong = [answer for answer in complete if answer.text != expected[answer.prompt]]
    # Two prompts may have the same answer: that is no mix-up.
    mixed_up = [answer for answer in wrong if answer.text in expected.values()]
    first = [answer.times[0] - answer.began for answer in complete if answer.times]
    between = [b - a for answer in complete for a, b in zip(answer.times, answer.times[1:], strict=False)]
    row: dict[str, Any] = {
        "requests": len(answers),
        "requests_per_s": len(complete) / seconds,
        "tokens_per_s": sum(answer.num_tokens for answer in complete) / seconds,
        "distinct_answers": len(set(expected.values())),
        "lost": (args.requests or 2 * args.streams) - len(complete),
        "mixed_up": len(mixed_up),
        "differs": len(wrong) - len(mixed_up),
        "refused_429": sum(answer.num_refusals for answer in answers),
        "alone_failed": sum(not answer.finished for answer in alone),
        "errors": sorted({answer.error for answer in [*alone, *answers] if answer.error})[:5],
    }
    for name, values in (("first_token_ms", first), ("between_tokens_ms", between)):
        for share in (0.5, 0.9, 0.99):
            row[f"{name}_p{round(share * 100)}"] = 1000 * percentile(values, share)
    return row


# -- manners -----------------------------------------------------------------------------------------------------------


async def gauge(client: httpx.AsyncClient, target: Target, name: str) -> float:
    text = (await client.get(f"{target.url}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^posttrain_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def probe(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """How a posttrain server handles wrong keys, overload and disconnects."""
    body = {**body_of(target, prompt_of(0, args), 64), "n": 1}
    url = f"{target.url}/v1/completions"
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        if args.api_key != "none":
            found["without_key"] = (await client.post(url, json=body)).status_code
        found["too_large"] = (await client.post(url, content=b" " * 2**23, headers=target.headers)).status_code
        found["too_long"] = (
            await client.post(url, json={**body, "max_tokens": 10**6}, headers=target.headers)
        ).status_code

        streams = [client.stream("POST", url, json=body, headers=target.headers) for _ in range(1000)]
        opened = await asyncio.gather(*(stream.__aenter__() for stream in streams))
        statuses = [response.status_code for response in opened]
        refusals = [response for response in opened if response.status_code == 429]
        found["of_1000_at_once"] = {str(status): statuses.count(status) for status in sorted(set(statuses))}
        found["retry_after"] = sorted({response.headers.get("retry-after", "") for response in refusals})
        # All of them leave in the middle of their answers.
        await asyncio.gather(*(stream.__aexit__(None, None, None) for stream in streams))
        began = time.perf_counter()
        while await gauge(client, target, "running_samples") + await gauge(client, target, "waiting_samples"):
            if time.perf_counter() - began > 30:
                break
            await asyncio.sleep(0.02)
        found["places_free_after_s"] = time.perf_counter() - began
        found["pages_in_use"] = await gauge(client, target, "kv_cache_pages_in_use")
    return found


def probe_failures(found: dict[str, Any]) -> list[str]:
    wanted = {"without_key": 401, "too_large": 413, "too_long": 400}
    wrong = [
        f"{name}: {found[name]}, not {status}" for name, status in wanted.items() if found.get(name, status) != status
    ]
    if set(found["of_1000_at_once"]) - {"200", "429"}:
        wrong.append(f"1000 at once: {found['of_1000_at_once']}")
    if found["places_free_after_s"] > 10 or found["pages_in_use"]:
        wrong.append(f"places are not free: {found['places_free_after_s']:.1f} s, {found['pages_in_use']:g} pages")
    return wrong


# -- report ------------------------------------------------------------------------------------------------------------


def table(rows: dict[str, dict[str, Any]]) -> str:
    names = list(rows)
    keys = [key for key, value in rows[names[0]].items() if isinstance(value, int | float)]
    lines = [f"{'':<24}" + "".join(f"{name:>22}" for name in names) + (f"{'ratio':>9}" if len(names) == 2 else "")]
    for key in keys:
        values = [rows[name].get(key, float("nan")) for name in names]  # not every server is watched
        line = f"{key:<24}" + "".join(f"{value:>22.4g}" for value in values)
        if len(names) == 2 and values[1] and ("per_s" in key or "_ms_" in key or "cpu" in key or "busiest" in key):
            line += f"{values[0] / values[1]:>9.2f}"
        lines.append(line)
    return "\n".join(lines)


async def main_async(args: argparse.Namespace, pids: Mapping[str, int]) -> int:
    """`pids`: of the servers that can be watched, by URL."""
    rows: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    result: dict[str, Any] = {"settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    result["settings"].pop("api_key")
    for url in [args.url, *([args.against] if args.against else [])] * args.rounds:
        target = await find_model(url, args.api_key, args.model)
        watch = Watch(pids[url]) if url in pids else None
        alone, answers, seconds = await load(target, args, watch)
        row = summary(alone, answers, seconds, args)
        if watch is not None:
            row |= watch.row(row["tokens_per_s"] * seconds)
        failures += [f"{url}: {row[name]} {name}" for name in ("lost", "mixed_up", "alone_failed") if row[name]]
        failures += [f"{url}: {error}" for error in row["errors"]]
        name = url.removeprefix("http://")
        rows[name] = max(rows.get(name, row), row, key=lambda each: each["requests_per_s"])
    print(table(rows))
    result["servers"] = rows
    if args.probe:
        target = await find_model(args.url, args.api_key, args.model)
        result["probe"] = await probe(target, args)
        print("\n" + "\n".join(f"{name:<24}{value}" for name, value in result["probe"].items()))
        failures += probe_failures(result["probe"])
    result["failures"] = failures
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + ("\n".join(f"FAILED {line}" for line in failures) or "no response was lost or mixed up"))
    return 1 if failures else 0


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """`posttrain serve` over a folder, or over random weights of a shape; its URL and process."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        if not Path(model).is_dir():
            import torch
            from shapes import make_model, make_tokenizer

            made = make_model(model, "cpu", torch.float32)
            made.save_pretrained(folder)
            make_tokenizer(made.config.vocab_size).save_pretrained(folder)
        command = [sys.executable, "-m", "posttrain", "serve", folder if not Path(model).is_dir() else model]
        command += ["--served-model-name", "bench", "--port", "0", *options]
        server = subprocess.Popen(command, stderr=log)
        try:
            while not (ready := re.search(r"ready: (\S+)/v1", Path(log.name).read_text())):
                if server.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} has ended: {Path(log.name).read_text()[-2000:]}")
                time.sleep(0.1)
            yield ready[1], server.pid
        finally:
            server.terminate()
            server.wait()


def main() -> int:
    args = arguments()
    if args.serve is None:
        return asyncio.run(main_async(args, {args.url: args.pid} if args.pid else {}))
    options = args.serve_options.split()
    with served(args.serve, [*options, "--processes=2"]) as two, served(args.serve, [*options, "--processes=1"]) as one:
        args.url, args.against = two[0], one[0]
        print(f"{args.url}: engine in a process of its own\n{args.against}: in one process\n")
        return asyncio.run(main_async(args, dict([two, one])))


if __name__ == "__main__":
    sys.exit(main())
