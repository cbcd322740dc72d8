"""Whole runs with environments in processes of their own: they train, and a killed run ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import tiny_runs
from foreign_pythons import OPENENV, VERIFIERS, needs_openenv, needs_verifiers

# As little of the protocol as a server needs: one with the package takes a second to start.
MCP_SERVER = """
import json, sys

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
said = []
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "initialize":
        version = request["params"]["protocolVersion"]
        info = {"name": "memory", "version": "1"}
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif request["method"] == "tools/list":
        answer["result"] = {"tools": [{"name": "keep", "description": "Keeps a text.", "inputSchema": SCHEMA}]}
    elif request["method"] == "tools/call":
        said.append(request["params"]["arguments"]["text"])
        answer["result"] = {"content": [{"type": "text", "text": str(sum(map(len, said)) % 10)}]}
    else:
        answer["error"] = {"code": -32601, "message": "unknown method"}
    print(json.dumps(answer), flush=True)
"""

# The random model calls no tool by itself: its first two turns are taken as calls, the third as the answer.
MCP_CLIENT = """
from posttrain.environments.turns import ToolCall
from posttrain.environments.turns.mcp import McpTools

class Memory(McpTools):
    def step(self, state, response):
        self.is_answer = len(state.actions) == 2
        return super().step(state, response)

    def parse(self, response):
        return [] if self.is_answer else [ToolCall("keep", {"text": response})]
"""


def arguments(model: Path, data: Path, folder: Path, *settings: str, steps: int = 4) -> list[str]:
    given = [word for word in tiny_runs.grpo(model, data, folder, steps=steps) if not word.startswith("env.mine.")]
    return [
        *given,
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=4",
        "grpo.max_rollout_turns=3",
        "policy.max_total_sequence_length=96",
        "policy.generation.max_new_tokens=16",
        "policy.generation.stop_strings=['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', ' ', '=', '+', 'e', 'a']",
        "checkpointing.save_period=1",
        "grpo.val_period=0",
        "data.validation=null",
        "checkpointing.metric_name=null",
        *settings,
    ]


def kill_after_a_checkpoint(given: Sequence[str], folder: Path, log: Path) -> None:
    """Ends the run in its third step."""
    process = tiny_runs.start(given, log)
    assert tiny_runs.wait_until((folder / "step_2").exists, process), log.read_text()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


def left_over(word: str) -> list[str]:
    """Command lines with this word of processes that still run, a while after they were killed."""
    give_up_at = time.monotonic() + 20
    while (found := running(word)) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return found


def running(word: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if word in command and process.status() != psutil.STATUS_ZOMBIE:
                found.append(command)
        except psutil.Error:
            continue
    return found


def test_a_run_with_mcp_tools_resumes_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'posttrain[mcp]'")
    model, data = tiny_runs.save_model(tmp_path / "model"), tiny_runs.save_data(tmp_path / "data")
    (data / "memory_server.py").write_text(MCP_SERVER)
    (data / "memory.py").write_text(MCP_CLIENT)
    settings = [
        f"env.mine.turns={data}/memory.py:Memory",
        f"env.mine.turns_kwargs={{command: [{sys.executable}, {data}/memory_server.py], describe: false}}",
        "env.mine.num_workers=1",
        "env.mine.timeout_s=60",
        f"env.mine.function={data}/rewards.py:odd",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tiny_runs.run(arguments(model, data, whole, *settings)) == 0
    (row, *_) = tiny_runs.rows_of(whole)
    assert row["train/tool_calls"] > 1
    assert row["train/turns"] > 2
    assert row["train/reward_std"] > 0
    assert row["train/unscored"] == 0
    kill_after_a_checkpoint(arguments(model, data, killed, *settings), killed, tmp_path / "log")
    assert tiny_runs.run(arguments(model, data, killed, *settings)) == 0
    assert tiny_runs.results_of(killed) == tiny_runs.results_of(whole)
    assert tiny_runs.weights_of(killed / "step_4") == tiny_runs.weights_of(whole / "step_4")
    assert left_over("memory_server.py") == []


@needs_openenv
def test_a_run_with_an_environment_of_openenv_resumes_with_the_same_bits(tmp_path: Path) -> None:
    model = tiny_runs.save_model(tmp_path / "model")
    subprocess.run([Path(OPENENV).with_name("openenv"), "init", "echo_env"], cwd=tmp_path, check=True)
    given = f"{{package: {tmp_path}/echo_env, observation: echoed_message, metrics: [message_length]}}"
    settings = [
        f"env.mine={{turns: openenv, python: {OPENENV}, num_workers: 2, turns_kwargs: {given}}}",
        "data.default.output_key=''",
    ]
    tasks = tmp_path / "data" / "questions.jsonl"
    assert tiny_runs.main(["agents", "tasks", "--env", "mine", "--out", str(tasks), "--count", "8", *settings]) == 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tiny_runs.run(arguments(model, tasks.parent, whole, *settings)) == 0
    (row, *_) = tiny_runs.rows_of(whole)
    assert row["train/turns"] > 2
    assert row["train/message_length"] > 0
    assert row["train/unscored"] == 0
    assert row["train/reward_std"] > 0
    kill_after_a_checkpoint(arguments(model, tasks.parent, killed, *settings), killed, tmp_path / "log")
    assert tiny_runs.run(arguments(model, tasks.parent, killed, *settings)) == 0
    assert tiny_runs.results_of(killed) == tiny_runs.results_of(whole)
    assert tiny_runs.weights_of(killed / "step_4") == tiny_runs.weights_of(whole / "step_4")
    assert left_over("posttrain_openenv.py") == []


REVERSE_TEXT = Path(__file__).parents[2] / "examples" / "reverse_text.py"


@needs_verifiers
def test_a_run_with_a_taskset_of_verifiers_resumes_with_the_same_bits(tmp_path: Path) -> None:
    model = tiny_runs.save_model(tmp_path / "model")
    given = f"{{taskset: {REVERSE_TEXT}, taskset_config: {{num_tasks: 8, num_words: 1}}}}"
    block = f"env.mine={{agent: verifiers, python: {VERIFIERS}, num_workers: 2, agent_kwargs: {given}}}"
    settings = [block, "data.default.output_key=''"]
    tasks = tmp_path / "data" / "questions.jsonl"
    assert tiny_runs.main(["agents", "tasks", "--env", "mine", "--out", str(tasks), *settings]) == 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tiny_runs.run(arguments(model, tasks.parent, whole, *settings)) == 0
    (row, *_) = tiny_runs.rows_of(whole)
    assert row["train/agent_calls"] == 1
    assert row["train/unscored"] == 0
    assert row["train/reward_std"] > 0
    kill_after_a_checkpoint(arguments(model, tasks.parent, killed, *settings), killed, tmp_path / "log")
    assert tiny_runs.run(arguments(model, tasks.parent, killed, *settings)) == 0
    assert tiny_runs.results_of(killed) == tiny_runs.results_of(whole)
    assert tiny_runs.weights_of(killed / "step_4") == tiny_runs.weights_of(whole / "step_4")
    assert left_over("posttrain_verifiers.py") == []
