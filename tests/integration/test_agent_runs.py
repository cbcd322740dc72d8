"""Whole runs with an agent that owns its loop: they train, and a run that was killed in the middle of an episode ends
with the same bits.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import tiny_runs

AGENT = """
import json, os, sys, time, urllib.request
from pathlib import Path

FOLDER = Path(__file__).parent

def ask(endpoint, messages):
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    body = json.dumps({"messages": messages, "max_tokens": 6}).encode()
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]

def solve(task, endpoint):
    with (FOLDER / "begun").open("a") as file:
        print(task.messages[-1]["content"], file=file)
    messages = list(task.messages)
    texts = []
    for turn in range(2):
        if turn == 1 and (FOLDER / "hold").exists() and (FOLDER / "begun").read_text().count("\\n") >= 22:
            (FOLDER / "held").touch()
            while (FOLDER / "hold").exists():
                time.sleep(0.01)
        answer = ask(endpoint, messages)
        texts.append(answer["content"])
        messages += [answer, {"role": "user", "content": "1"}]
    answer = ask(endpoint, [{"role": "user", "content": "2"}])  # another branch
    return sum(ord(c) % 2 for text in texts for c in text + answer["content"]) / 10
"""


def arguments(model: Path, data: Path, folder: Path) -> list[str]:
    given = [word for word in tiny_runs.grpo(model, data, folder, steps=4) if not word.startswith("env.mine.function")]
    return [
        *given,
        f"env.mine.agent={data / 'agent.py:solve'}",
        "env.mine.num_workers=4",
        "grpo.num_prompts_per_step=2",
        "grpo.max_rollout_turns=4",
        "policy.max_total_sequence_length=96",
        "checkpointing.save_period=1",
        "grpo.val_period=0",
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tiny_runs.save_data(tmp_path / "data")
    (folder / "agent.py").write_text(AGENT)
    return folder


@pytest.mark.invariant
def test_a_run_killed_in_the_middle_of_episodes_ends_with_the_same_bits(tmp_path: Path, data: Path) -> None:
    model = tiny_runs.save_model(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tiny_runs.run(arguments(model, data, whole)) == 0
    (row, *_) = tiny_runs.rows_of(whole)
    assert row["train/agent_calls"] == 3
    assert row["train/branches"] == 2
    assert row["train/unscored"] == 0
    begun = data / "begun"
    num_begun = len(begun.read_text().splitlines())
    assert num_begun == 4 * 8

    begun.unlink()
    (data / "hold").touch()
    process = tiny_runs.start(arguments(model, data, killed), tmp_path / "log")
    assert tiny_runs.wait_until((data / "held").exists, process), (tmp_path / "log").read_text()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    (data / "hold").unlink()
    journal = killed / "agent_calls" / "generation.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert lines[0]["step"] == 3
    num_ended = sum("end" in line for line in lines)
    assert num_ended >= 1
    assert sum("batch" in line for line in lines) >= 4
    num_begun = len(begun.read_text().splitlines())
    assert tiny_runs.run(arguments(model, data, killed)) == 0
    assert (
        len(begun.read_text().splitlines()) == num_begun + (8 - num_ended) + 8
    )  # those that had ended are not repeated
    assert tiny_runs.results_of(killed) == tiny_runs.results_of(whole)
    assert tiny_runs.weights_of(killed / "step_4") == tiny_runs.weights_of(whole / "step_4")


def check(model: Path, data: Path, folder: Path, *more: str) -> int:
    return tiny_runs.main(["agents", "check", *arguments(model, data, folder)[1:], *more])


def test_check_shows_what_was_captured_and_whether_it_repeats(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_runs.save_model(tmp_path / "model")
    assert check(model, data, tmp_path / "run") == 0
    shown = capsys.readouterr().out
    assert "branch 2: prompt of" in shown
    assert "agent_calls 3, branches 2" in shown
    assert shown.endswith("the second rollout is the same\n")
    assert not (tmp_path / "run").exists()
    (data / "agent.py").write_text(AGENT.replace('"content": "1"', '"content": str(time.time_ns() % 997)'))
    assert check(model, data, tmp_path / "run") == 2
    (data / "agent.py").write_text("def solve(task, endpoint): return 1.0")
    assert check(model, data, tmp_path / "run") == 65


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["env.mine.agent=missing.py:solve"], "env.mine.agent"),
        (["env.mine.agent={data}/agent.py:nothing"], "agent.py has no 'nothing'; the functions it has: ask, solve"),
        (["env.mine.agent={data}/agent.py:FOLDER"], "not a function"),
        (["env.mine.agent={data}/agent.py:ask", "env.mine.agent_kwargs={x: 1}"], "unexpected keyword argument 'x'"),
        (["env.mine.agent=solve"], "env.mine.agent = 'solve' names no function"),
        (["env.mine.agent=[no-such-program, x]"], "there is no program 'no-such-program'"),
        (["env.mine.agent=[]"], "env.mine.agent is a list without words"),
        (["env.mine.agent=null", "env.mine.type=math", "env.mine.turn_timeout_s=3"], "env.mine.turn_timeout_s"),
        (["env.mine.turns=calculator"], "env.mine has both `turns` and `agent`"),
        (["grpo.max_rollout_turns=1"], "env.mine.agent takes turns with the model, but grpo.max_rollout_turns = 1"),
        (["policy.router_replay.enabled=true"], "the experts of env.mine.agent are not kept"),
        (["grpo.async_grpo.enabled=true"], "an agent (env.mine.agent) cannot be carried over"),
    ],
)
def test_bad_settings_are_refused_with_their_name(
    settings: list[str], problem: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_runs.save_model(tmp_path / "model")
    given = [word.replace("{data}", str(data)) for word in settings]
    assert tiny_runs.run([*arguments(model, data, tmp_path / "run"), *given]) == 64
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.ray
@pytest.mark.full
def test_two_ranks_answer_agents_as_one_process_does(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")
    model = tiny_runs.save_model(tmp_path / "model")
    for name, ranks in (
        ("one", ["cluster.launcher=local"]),
        ("two", ["cluster.launcher=ray", "cluster.gpus_per_node=2"]),
    ):
        words = [*arguments(model, data, tmp_path / name), "grpo.max_num_steps=2", *ranks]
        assert tiny_runs.run(words) == 0
    tiny_runs.assert_same_curves(tmp_path / "two", tmp_path / "one", but="prefill_tokens")
