"""A server with OpenAI's API as the model: a real one on this machine that fails in the ways servers do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from posttrain.apps.evaluate.server import OpenAiServer, ServedCompletion
from posttrain.config.evaluation import OpenAiConfig
from posttrain.errors import InputError
from posttrain.types import Completion, NoiseKey, Sampling, Task

SAMPLING = Sampling(max_new_tokens=7, temperature=0.5, top_p=0.9, stop_strings=("END",))


class Server(ThreadingHTTPServer):
    """`script` maps a prompt to the replies that its requests get, one after another; the last one stays."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[str, list[Any]] = {}
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self._send(200, {"data": [{"id": "the-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        with self.server.lock:
            self.server.bodies.append({"path": self.path, **body})
            replies = self.server.script.get(prompt, ["fine"])
            reply = replies[min(self.server.asked[prompt], len(replies) - 1)]
            self.server.asked[prompt] += 1
        if isinstance(reply, threading.Event):
            reply.wait()
            reply = "late"
        if isinstance(reply, int):
            self._send(reply, {"error": {"message": "no"}})
        elif isinstance(reply, dict):
            self._send(200, reply)
        else:
            choice = {"message": {"content": reply}, "text": reply, "finish_reason": "stop"}
            self._send(200, {"choices": [choice], "usage": {"completion_tokens": 5}})

    def _send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def asking(server: Server, **settings: Any) -> OpenAiServer:
    config = OpenAiConfig(num_concurrent=4, max_retries=2, timeout_s=10, **settings)
    return OpenAiServer(server.url, config, first_wait_s=0.001)


def ask(client: OpenAiServer, prompts: Mapping[int, str], num_samples: int = 1) -> list[list[Completion]]:
    """`prompts` by their place in the dataset."""
    tasks = [
        Task(index, f"p{index}", prompt, (), messages=({"role": "user", "content": prompt},))
        for index, prompt in prompts.items()
    ]
    return client.generate(tasks, num_samples, SAMPLING, NoiseKey(3, 0))


def num_tokens(completion: Completion) -> int | None:
    assert isinstance(completion, ServedCompletion)
    return completion.num_tokens


def test_answers_come_back_in_order_with_their_lengths(server: Server) -> None:
    server.script = {f"q{i}": [f"answer {i}"] for i in range(6)}
    found = ask(asking(server), {i: f"q{i}" for i in range(6)}, 2)
    texts = [[answer.text for answer in row if answer.error is None] for row in found]
    assert texts == [[f"answer {i}"] * 2 for i in range(6)]
    assert {num_tokens(answer) for row in found for answer in row} == {5}
    first = server.bodies[0]
    assert (first["path"], first["model"], first["max_tokens"]) == ("/v1/chat/completions", "the-model", 7)
    assert (first["temperature"], first["top_p"], first["stop"]) == (0.5, 0.9, ["END"])
    assert "top_k" not in first
    assert len({body["seed"] for body in server.bodies}) == 12, "each sample has a seed of its own"


def test_seeds_are_keyed_by_the_problem_and_not_by_the_order(server: Server) -> None:
    for order in ([0, 1, 2], [2, 1, 0]):
        ask(asking(server), {i: f"q{i}" for i in order})
    seeds = [
        {body["messages"][-1]["content"]: body["seed"] for body in part}
        for part in (server.bodies[:3], server.bodies[3:])
    ]
    assert seeds[0] == seeds[1]


def test_failures_are_tried_again_and_then_unscored_never_wrong(server: Server) -> None:
    server.script = {"busy": [503, 429, "late"], "down": [500], "bad": [400], "odd": [{"nothing": 1}]}
    server.script["cut"] = [{"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}]
    server.script["filtered"] = [{"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}]
    choice = {"message": {"content": "x"}, "finish_reason": "stop"}
    server.script["uncounted"] = [{"choices": [choice], "usage": {"completion_tokens": "n/a"}}]
    server.script["number"] = [{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}]
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    server.script["parts"] = [{"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}]
    names = ["busy", "down", "bad", "odd", "cut", "filtered", "uncounted", "number", "parts"]
    found = dict(zip(names, (row[0] for row in ask(asking(server), dict(enumerate(names)))), strict=True))
    assert found["busy"].text == "late"
    assert found["cut"].finish_reason == "length"
    for name in ("cut", "uncounted"):
        assert num_tokens(found[name]) is None, "no usage, or none that can be read: an unknown length is not 0"
    assert found["parts"].text == "42"
    for name in ("busy", "cut", "uncounted", "parts"):
        assert found[name].error is None
    for name, said in {
        "down": "HTTP 500",
        "bad": "HTTP 400",
        "odd": "no answer in it",
        "number": "no answer in it",
        "filtered": "content_filter",
    }.items():
        assert said in str(found[name].error)
    assert server.asked["down"] == 3
    assert server.asked["bad"] == 1, "a request that is wrong stays wrong"


def test_a_server_that_answers_nothing_ends_the_evaluation(server: Server) -> None:
    server.script = {"q": [500]}
    with pytest.raises(InputError, match=r"none of 2 requests was answered .*HTTP 500.*the same command resumes"):
        ask(asking(server), {0: "q"}, 2)


@pytest.mark.parametrize("is_silent", [False, True])
def test_interrupt_does_not_wait_for_retries_or_replies(server: Server, is_silent: bool) -> None:
    answers = threading.Event()
    server.script = {f"q{i}": [answers if is_silent else 503] for i in range(6)}
    client = replace(asking(server), first_wait_s=60.0)
    before = set(threading.enumerate())

    def interrupt() -> None:
        while sum(server.asked.values()) < 4:  # as many as may be under way
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ask(client, {i: f"q{i}" for i in range(6)})
    answers.set()
    for thread in set(threading.enumerate()) - before:
        if "process_request" not in thread.name:  # the server's, which wait for the connection to be closed
            thread.join(30)
            assert not thread.is_alive()
    assert sum(server.asked.values()) == 4, "nothing was asked again, and nothing else"
    client.close()


def test_internal_error_ends_all_threads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OpenAiServer, path: str, body: object) -> None:
        raise ZeroDivisionError(path)

    monkeypatch.setattr(OpenAiServer, "_ask", fail)
    with pytest.raises(ZeroDivisionError):
        ask(asking(server), {i: f"q{i}" for i in range(6)})


def test_wrong_key_is_not_retried(server: Server) -> None:
    server.script = {"q": [401]}
    with pytest.raises(InputError, match="HTTP 401"):
        ask(asking(server), {0: "q"}, 100)
    assert server.asked["q"] <= 8


def test_the_key_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    asking(server, api_key_env_var="MY_KEY")
    monkeypatch.delenv("MY_KEY")
    asking(server, api_key_env_var="MY_KEY")
    assert server.keys == ["Bearer secret", None]


def test_plain_text_and_further_fields(server: Server) -> None:
    ask(asking(server, api="completions", extra_body={"min_p": 0.1}), {0: "q"})
    assert server.bodies[0]["path"] == "/v1/completions"
    assert server.bodies[0]["prompt"] == "q"
    assert server.bodies[0]["min_p"] == 0.1


def test_an_address_without_a_server_is_named() -> None:
    with pytest.raises(InputError, match=r"http://127.0.0.1:9/v1: no answer .*is the server there\?"):
        OpenAiServer("http://127.0.0.1:9/v1", OpenAiConfig())
