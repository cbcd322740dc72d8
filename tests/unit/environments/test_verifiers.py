"""Tasksets of verifiers, with the real package in its own Python: rewards, metrics, and what becomes of failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from foreign_pythons import VERIFIERS, needs_verifiers

from posttrain.cli.main import main
from posttrain.environments import check_environments
from posttrain.environments.agents.pool import AgentPool
from posttrain.environments.agents.runner import Endpoint
from posttrain.environments.agents.verifiers import Verifiers
from posttrain.environments.item import Unscored
from posttrain.environments.settings import read_agents
from posttrain.environments.turns import TurnTask
from posttrain.errors import InputError

TASKSET = """
import os
import verifiers.v1 as vf

class Data(vf.TaskData):
    wanted: str

class Task(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def same(self, trace: vf.Trace) -> float:
        if self.data.wanted == "raise":
            raise RuntimeError("broken reward")
        if self.data.wanted == "exit":
            os._exit(9)
        return float(trace.last_reply == self.data.wanted)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class Words(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for word in ("yes", "raise", "exit"):
            yield Task(Data(prompt=f"say {word}", wanted=word), self.config.task)

__all__ = ["Words"]
"""


class Model(BaseHTTPRequestHandler):
    """Answers "yes" to everything."""

    keys: list[str | None]
    closed = threading.Event()
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Authorization"])
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        said = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def finish(self) -> None:
        super().finish()
        self.closed.set()

    def log_message(self, format: str, *values: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    Model.keys = []
    Model.closed.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "the-key", "m")
    server.shutdown()
    server.server_close()


@needs_verifiers
def test_rewards_and_metrics_are_those_of_the_taskset_and_failures_are_no_zeros(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    (tmp_path / "words.py").write_text(TASKSET)
    environment = Verifiers(str(tmp_path / "words.py"), python=VERIFIERS)
    try:
        rows = environment.tasks("train", None)
        assert [row["input"] for row in rows] == ["say yes", "say raise", "say exit"]
        good, raises, exits = (TurnTask("", [], None, row) for row in rows)
        assert environment(good, endpoint) == {"reward": 2.0, "same": 2.0, "length": 3.0}
        assert Model.keys == ["Bearer the-key"]
        assert Model.closed.wait(30), "each rollout has a client of its own"
        with pytest.raises(Unscored, match="broken reward"):
            environment(raises, endpoint)
        with pytest.raises(Unscored, match="process ended with exit code 9"):
            environment(exits, endpoint)
        assert environment(good, endpoint) == {"reward": 2.0, "same": 2.0, "length": 3.0}  # in a new process
        with pytest.raises(Unscored, match="the taskset has no such task at index 0"):
            environment(TurnTask("", [], None, {**rows[0], "task": "other"}), endpoint)
        with pytest.raises(Unscored, match="the row names no task"):
            environment(TurnTask("", [], None), endpoint)
    finally:
        environment.side.end()


@needs_verifiers
@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({}, "missing a required argument: 'taskset'"),
        ({"taskset": "no-such-taskset"}, "the taskset 'no-such-taskset' cannot be used"),
        ({"taskset": "nowhere/it.py"}, "there is no file nowhere/it.py"),
        ({"taskset": "{words}", "taskset_config": {"size": 3}}, "size"),
        ({"taskset": "{words}", "harness": "no-such-harness"}, "no-such-harness"),
    ],
)
def test_bad_arguments_are_refused_before_the_run(kwargs: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(TASKSET)
    given = {name: str(tmp_path / "words.py") if value == "{words}" else value for name, value in kwargs.items()}
    with pytest.raises(InputError, match=r"env\.it\.agent cannot start") as refused:
        check_environments({"it": {"agent": "verifiers", "python": VERIFIERS, "agent_kwargs": given}})
    assert problem in str(refused.value)


def test_a_python_without_the_package_is_refused_before_the_run(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\nexec /usr/bin/env python3 -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(InputError, match=r"has no verifiers: verifiers>=0\.4,<0\.5 is needed"):
        check_environments({"it": {"agent": "verifiers", "python": str(bare), "agent_kwargs": {"taskset": "x"}}})


def test_the_code_of_a_taskset_is_its_file(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(TASKSET)
    block = {"agent": "verifiers", "agent_kwargs": {"taskset": "words.py"}}
    pool = AgentPool(read_agents({"it": block}, tmp_path)["it"])
    assert pool.code_files == [tmp_path / "words.py"]
    pool.close()


@pytest.mark.parametrize(("option", "value"), [("--split", "test"), ("--count", "0")])
def test_options_of_tasks_without_effect_are_refused(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["agents", "tasks", "--env", "it", "--out", str(tmp_path / "rows"), option, value]
    assert main([*words, "policy.model_name=m", "env.it.agent=verifiers"]) == 64
    assert option in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()
