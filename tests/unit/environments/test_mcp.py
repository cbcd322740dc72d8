"""Tools of MCP servers: real ones, over standard input and output and over HTTP, and what becomes of failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from gangs import free_port

from posttrain.environments import check_environments
from posttrain.environments.settings import read_turns
from posttrain.environments.turns import TurnTask
from posttrain.environments.turns.interface import TurnItem
from posttrain.environments.turns.pool import TurnOutcome, TurnRouter
from posttrain.errors import InputError
from posttrain.types import Score

EXAMPLES = Path(__file__).parents[3] / "examples"
pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'posttrain[mcp]'")

SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server, total = MCPServer("tools"), 0

@server.tool()
def add(amount: int) -> str:
    "Adds to a running total."
    global total
    total += amount
    return str(total)

@server.tool()
def refuse(why: str) -> str:
    "Refuses."
    raise ToolError(f"no: {why}")

@server.tool()
def crash() -> str:
    "Ends the server."
    os._exit(3)

@server.tool()
def hang() -> str:
    "Does not answer."
    time.sleep(600)

@server.tool()
def clock() -> str:
    "Never the same."
    return str(time.time_ns())

if sys.argv[1:]:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Conversation:
    """One rollout, as the multi-turn rollouts ask for its turns."""

    def __init__(self, router: TurnRouter, name: str) -> None:
        self.router, self.name = router, name
        (begun,) = router.ask([("tools", TurnItem("reset", task=TurnTask("?", [], None)))])
        assert isinstance(begun, TurnOutcome), begun
        self.state = begun.state

    def say(self, text: str) -> Score:
        (outcome,) = self.router.ask(
            [("tools", TurnItem("step", state=self.state, response=text, conversation=self.name))]
        )
        if isinstance(outcome, TurnOutcome) and not outcome.done:
            self.state = outcome.state
        return outcome

    def reads(self, text: str) -> str:
        outcome = self.say(text)
        assert isinstance(outcome, TurnOutcome), outcome
        return "\n".join(message["content"] for message in outcome.observation)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


def routed(server: Path, num_workers: int = 1, timeout_s: float = 60, **kwargs: Any) -> TurnRouter:
    given = {"command": [sys.executable, str(server)], **kwargs}
    block = {"turns": "mcp", "turns_kwargs": given, "num_workers": num_workers, "timeout_s": timeout_s}
    return TurnRouter(read_turns({"tools": block}))


@pytest.fixture(scope="module")
def router(server: Path) -> Iterator[TurnRouter]:
    with closing(routed(server)) as made:
        yield made


def servers_of(server: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(server) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def are_gone(server: Path) -> bool:
    """A process that was killed needs a moment to end."""
    give_up_at = time.monotonic() + 20
    while servers_of(server) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return not servers_of(server)


def test_each_rollout_has_a_server_of_its_own_which_ends_with_it(router: TurnRouter, server: Path) -> None:
    assert [tool["function"]["name"] for tool in router.tools("tools")] == ["add", "refuse", "crash", "hang", "clock"]
    assert router.tools("tools")[0]["function"]["parameters"]["required"] == ["amount"]
    first, second = Conversation(router, "first"), Conversation(router, "second")
    assert [first.reads(called("add", amount=3)), second.reads(called("add", amount=5))] == ["3", "5"]
    assert first.reads(called("add", amount=4) + called("add", amount=1)) == "7\n8"
    assert len(servers_of(server)) == 2
    for conversation in (first, second):
        outcome = conversation.say("It is 8.")
        assert isinstance(outcome, TurnOutcome)
        assert (outcome.done, outcome.answer) == (True, "It is 8.")
    assert are_gone(server)


def test_what_the_server_refuses_is_for_the_model_to_read(router: TurnRouter) -> None:
    talk = Conversation(router, "refused")
    outcome = talk.say(called("refuse", why="it is late") + called("add", amount="many") + called("ad", amount=1))
    assert isinstance(outcome, TurnOutcome)
    texts = [message["content"] for message in outcome.observation]
    assert "no: it is late" in texts[0]
    assert "amount" in texts[1]
    assert texts[2].startswith("error: there is no tool 'ad'; there is add, ")
    assert outcome.counts == {"tool_calls": 2, "failed_tool_calls": 2, "malformed_tool_calls": 1}
    talk.say("So be it.")


def test_a_server_that_dies_leaves_the_rollout_unscored_and_the_next_one_works(
    router: TurnRouter, server: Path
) -> None:
    talk, other = Conversation(router, "dies"), Conversation(router, "lives")
    assert talk.reads(called("add", amount=3)) == "3"
    outcome = talk.say(called("crash"))
    assert (outcome.reward, outcome.error) == (
        None,
        "the MCP server failed in the tool 'crash': MCPError: Connection closed",
    )
    assert other.reads(called("add", amount=5)) == "5"
    other.say("Done.")
    assert are_gone(server)


def test_a_worker_that_dies_costs_nothing_where_the_server_repeats_itself(server: Path) -> None:
    with closing(routed(server, num_workers=2)) as router:
        talk, clock = Conversation(router, "again"), Conversation(router, "clock")
        assert talk.reads(called("add", amount=3) + called("add", amount=4)) == "3\n7"
        assert clock.reads(called("clock"))
        for worker in [process for process in psutil.Process().children() if "worker.py" in str(process.cmdline())]:
            worker.send_signal(signal.SIGKILL)
            psutil.wait_procs([worker], timeout=10)
        assert talk.reads(called("add", amount=1)) == "8"
        outcome = clock.say(called("add", amount=1))
        assert outcome.reward is None
        assert outcome.error is not None
        assert "does not repeat itself: action 1 of 1" in outcome.error
    assert are_gone(server)


def test_a_tool_that_hangs_is_given_up_and_its_server_killed(server: Path) -> None:
    with closing(routed(server, timeout_s=8)) as router:
        outcome = Conversation(router, "hangs").say(called("hang"))
        assert outcome.reward is None
        assert outcome.error is not None
        assert "did not answer within" in outcome.error or "timeout after 8 s" in outcome.error
    assert are_gone(server)


def test_sessions_beyond_the_limit_are_closed_and_repeated_when_needed(server: Path) -> None:
    with closing(routed(server, max_open=1)) as router:
        first, second = Conversation(router, "first"), Conversation(router, "second")
        assert [first.reads(called("add", amount=3)), second.reads(called("add", amount=5))] == ["3", "5"]
        assert len(servers_of(server)) == 1
        assert first.reads(called("add", amount=4)) == "7"


def test_one_server_for_a_worker_where_it_keeps_nothing(server: Path) -> None:
    with closing(routed(server, per="worker", tools=["add", "clock"], describe=False)) as router:
        assert router.tools("tools") == ()
        first, second = Conversation(router, "first"), Conversation(router, "second")
        assert [first.reads(called("add", amount=3)), second.reads(called("add", amount=5))] == ["3", "8"]
        assert "there is no tool 'crash'" in second.reads(called("crash"))
        assert len(servers_of(server)) == 1


def test_the_same_over_http(server: Path, tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(server), str(port)], stdout=log, stderr=log)
    try:
        while b"running on" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        with closing(routed(server, command=None, url=f"http://127.0.0.1:{port}/mcp", timeout_s=20)) as router:
            talk = Conversation(router, "web")
            assert talk.reads(called("add", amount=3)) == "3"
            process.kill()
            process.wait()
            outcome = talk.say(called("add", amount=1))
            assert outcome.reward is None
            assert "the MCP server failed in the tool 'add'" in str(outcome.error)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({}, "either command (a list of words that starts a server) or url is needed"),
        ({"command": "server.py"}, "command is 'server.py': a list of words such as"),
        ({"url": "localhost:8000"}, "url is 'localhost:8000': http://"),
        ({"url": "http://127.0.0.1:1/mcp"}, "`http://127.0.0.1:1/mcp` cannot be used: it cannot be reached"),
        ({"command": ["no-such-program"]}, "`no-such-program` cannot be used"),
        ({"command": ["false"]}, "`false` cannot be used: it cannot be reached"),
        ({"command": ["cat"], "per": "turn"}, "per is 'turn': rollout or worker is needed"),
        ({"comand": ["cat"]}, "unexpected keyword argument 'comand'"),
    ],
)
def test_bad_arguments_are_refused_before_the_run(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=r"env\.tools\.turns cannot start") as refused:
        check_environments({"tools": {"turns": "mcp", "turns_kwargs": kwargs, "timeout_s": 20}})
    assert problem in str(refused.value)


def test_a_tool_that_the_server_lacks_is_refused_before_the_run(server: Path) -> None:
    given = {"command": [sys.executable, str(server)], "tools": ["ad"]}
    with pytest.raises(InputError, match="tools: the server has no ad; it has add, refuse"):
        check_environments({"tools": {"turns": "mcp", "turns_kwargs": given}})


def test_servers_do_not_see_the_variables_of_the_run(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    with closing(routed(server, env={"GIVEN": "1"})) as router:
        Conversation(router, "env").reads(called("add", amount=1))
        (process,) = servers_of(server)
        variables = process.environ()
        assert variables["GIVEN"] == "1"
        assert "A_SECRET" not in variables
        assert "PATH" in variables or not os.environ.get("PATH")


def test_the_example_calculates_and_remembers() -> None:
    config = yaml.safe_load((EXAMPLES / "configs" / "grpo_mcp.yaml").read_text())
    (block,) = config["env"].values()
    program, path = block["turns_kwargs"]["command"]
    assert program == "python"
    with closing(routed(EXAMPLES.parent / path)) as router:
        names = [tool["function"]["name"] for tool in router.tools("tools")]
        rollout = Conversation(router, "one")
        assert rollout.reads(called("calculate", expression="17 * 23")) == "391"
        assert rollout.reads(called("calculate", expression="1 / 0")).endswith("division by zero")
        assert rollout.reads(called("recall")) == "17 * 23 = 391"
        assert names == ["calculate", "recall"]
