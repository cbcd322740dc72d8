"""Agents of real packages, unmodified but for the address of the model: every captured token is the engine's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_agents import assert_captured, source

PYTHON = os.environ.get("POSTTRAIN_AGENTS_PYTHON", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_AGENTS_PYTHON names no Python with openai-agents"),
]

OPENAI_AGENTS = """
import json, os, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
task = json.load(sys.stdin)
client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
model = OpenAIChatCompletionsModel(model=os.environ["OPENAI_MODEL"], openai_client=client)


@function_tool
def add(a: int, b: int) -> int:
    return a + b


agent = Agent(name="adder", instructions="Add.", model=model, tools=[add])
history = [{"role": "user", "content": task["messages"][-1]["content"]}]
for question in ("And 2 + 3?", "Thanks."):
    result = Runner.run_sync(agent, history, max_turns=3)
    history = [*result.to_input_list(), {"role": "user", "content": question}]
print(json.dumps({"answer": str(result.final_output)}))
"""


def test_the_openai_agents_sdk_is_one_branch(tmp_path: Path, cleanup: ExitStack) -> None:
    (tmp_path / "program.py").write_text(OPENAI_AGENTS)
    command = [PYTHON, str(tmp_path / "program.py")]
    agents = source(tmp_path, "", cleanup, num_samples=2, max_total_tokens=4096, agent=command)
    groups = agents.take(1, step=1).groups
    for rollout in groups[0].rollouts:
        assert rollout.score.error is None, rollout.score
        assert rollout.completion.conversation is not None
        assert rollout.completion.conversation.counts["calls_with_tools"] >= 2
        assert rollout.completion.branches == ()
    assert_captured(groups, agents.engine)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
