"""A server's engine in a process of its own: the same answers, and what happens when one of the two ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_server import RunningServer, options_for, running, save_adapter, save_model

HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 150, "ignore_eos": True, "stream": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": HELLO, "n": 3, "seed": 1}),
    (
        "chat/completions",
        {"messages": HELLO, "seed": 2, "temperature": 0.7, "top_p": 0.8, "logprobs": True, "top_logprobs": 4},
    ),
    ("chat/completions", {"messages": HELLO, "seed": 3, "stop": ["a", "e", "\x00"], "max_tokens": 60}),
    ("completions", {"prompt": ["one", "two"], "seed": 4, "logprobs": 3, "n": 2}),
    ("completions", {"prompt": "greedy", "temperature": 0, "ignore_eos": True, "stream": True}),
    ("completions", {"prompt": [5, 6, 7], "seed": 6, "model": "polite", "stream": True}),
    ("completions", {"prompt": "x" * 300}),
    ("completions", {"prompt": [1, 10**6]}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def answers(server: RunningServer) -> list[Any]:
    """Everything but the names and times of the answers."""
    with httpx.Client(base_url=f"{server.url}/v1/", timeout=60) as client:
        texts = [client.post(path, json={"model": "tiny", **body}).text for path, body in REQUESTS]
    found: list[Any] = []
    for text in texts:
        parts = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
        events = [json.loads(part) for part in parts if part != "[DONE]"]
        # How tokens are spread over events depends on who is faster.
        merged: dict[int, str] = {}
        for event in events if len(parts) > 1 else []:
            for choice in event.pop("choices"):
                merged[choice["index"]] = merged.get(choice["index"], "") + choice["text"]
        last = {key: value for key, value in events[-1].items() if key not in ("id", "created")}
        found.append((last, merged))
    return found


@pytest.mark.invariant
def test_answers_are_those_of_a_server_in_one_process(model: Path, tmp_path: Path) -> None:
    options = options_for(model, adapters={"polite": str(save_adapter(tmp_path / "polite", model, seed=1))})
    with running(options) as server:
        expected = answers(server)
    with running(replace(options, processes=2)) as server:
        assert answers(server) == expected
        server.wait_until_empty()
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'posttrain_running_samples{version="production"} 0.0' in metrics
        assert 'posttrain_kv_cache_pages_in_use{version="production"} 0.0' in metrics
        pid: int = server.service.engine.host.pid  # type: ignore[attr-defined]
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    assert any("error" in last for last, _ in expected), "the last two are refused"
    assert sum("choices" in last or bool(merged) for last, merged in expected) == 6


@contextmanager
def command_line_server(model: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, str]]:
    """`posttrain serve`, its engine and its URL. The engine is stopped (SIGSTOP): requests get no token."""
    command = [sys.executable, "-m", "posttrain", "serve", str(model), "--port", "0", "--device", "cpu"]
    command += ["--processes", "2", "--served-model-name", "tiny"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "ready: " in line)
        children = psutil.Process(server.pid).children()  # one of them renders chat templates
        [engine] = [child for child in children if any("engine_host" in part for part in child.cmdline())]
        engine.suspend()
        yield server, engine, line.split("ready: ")[1].split("/v1")[0]
    finally:
        server.kill()
        server.wait()


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(model: Path) -> None:
    with command_line_server(model) as (server, engine, url):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as response:
            for process in (engine, server):  # as a supervisor that signals every process of the service
                process.send_signal(signal.SIGTERM)
            assert_drains(url)
            engine.resume()
            events = [line for line in response.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert server.wait(30) == 0
        assert server.stderr is not None
        assert "every request was answered" in server.stderr.read()


def assert_drains(url: str) -> None:
    """While a request is running, the server refuses others."""
    end = time.monotonic() + 30
    while (health := httpx.get(f"{url}/health")).status_code != 503:
        assert time.monotonic() < end
    assert health.json()["status"] == "draining"
    assert httpx.post(f"{url}/v1/chat/completions", json=LONG).status_code == 503


def test_killed_engine_fails_its_requests_and_ends_the_server(model: Path) -> None:
    with command_line_server(model) as (server, engine, url):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as response:
            assert response.status_code == 200
            engine.kill()
            events = [line for line in response.iter_lines() if line]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["message"] == "the engine's process has ended by SIGKILL"
        assert error["type"] == "server_error"
        assert server.wait(30) == 1
        assert server.stderr is not None
        assert "the engine's process has ended by SIGKILL; start the server again" in server.stderr.read()


def test_killed_server_takes_its_engine_with_it(model: Path) -> None:
    """Even an engine that is inside a step and does not look at its socket."""
    with command_line_server(model) as (server, engine, _):
        server.kill()
        server.wait()
        gone, alive = psutil.wait_procs([engine], timeout=30)
        assert (len(gone), alive) == (1, [])


def test_engine_killed_while_loading_is_reported(model: Path) -> None:
    from posttrain.apps.serve.engine_host import EngineProcess
    from posttrain.apps.serve.sessions import ModelsToLoad
    from posttrain.errors import HardwareError
    from posttrain.models.accepted_names import resolve_model

    process = EngineProcess()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HardwareError, match="has ended by SIGKILL while it loaded the models"):
        process.load(ModelsToLoad(resolve_model(model), {}, None, options_for(model).engine), lambda line: None)
