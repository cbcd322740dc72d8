"""Agents that own their loop: what they are answered, what is captured, and what becomes of those that fail."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_tokenizers import CHATML
from tiny_models import byte_tokenizer, tiny_model

from posttrain.algorithms.batches import rollout_batch
from posttrain.config.data import EnvironmentConfig
from posttrain.data.chat import ChatFormat
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.environments.agents.pool import AgentClock
from posttrain.environments.agents.runner import code_files
from posttrain.errors import InputError
from posttrain.rollouts.agent_endpoint import AgentSession, PendingCall
from posttrain.rollouts.agent_requests import RefusedRequest, read_request
from posttrain.rollouts.agents import AgentRollouts, build_conversations
from posttrain.rollouts.call_journal import CallJournal
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.types import Completion, Group, Message, NoiseKey, Sampling, Score, Task

BYTES = byte_tokenizer()
CHAT = ChatFormat(BYTES, CHATML)


class Recorded:
    """An engine that keeps what it was asked and what it answered."""

    def __init__(self, max_total_tokens: int = 512) -> None:
        sizes = {"max_position_embeddings": max_total_tokens} if max_total_tokens > 512 else {}
        model = tiny_model("llama", vocab_size=len(BYTES), eos_token_id=BYTES.eos_token_id, **sizes)
        self.engine = NativeEngine(model, BYTES, NativeSettings(page_size=4, max_total_tokens=max_total_tokens))
        self.log: dict[tuple[int, ...], Completion] = {}
        self.batches: list[int] = []

    def generate(
        self, tasks: Sequence[Task], num_samples: int, sampling: Sampling, key: NoiseKey, progress: Any = None
    ) -> list[list[Completion]]:
        answers = self.engine.generate(tasks, num_samples, sampling, key, progress)
        self.batches.append(len(tasks))
        for task, (answer,) in zip(tasks, answers, strict=True):
            self.log[(*task.prompt_ids, *answer.token_ids)] = answer
        return answers


class Judge:
    def score(self, tasks: Any, completions: Sequence[Completion], progress: Any = None) -> list[Score]:
        return [Score(float(len(completion.text))) for completion in completions]

    def close(self) -> None: ...


class Tasks:
    def take(self, count: int) -> Sequence[Task]:
        made = []
        for draw in range(count):
            messages: list[Message] = [{"role": "user", "content": "ab" * (draw + 1)}]
            text, ids = CHAT.prompt(messages)
            made.append(Task(draw, f"t:{draw}", text, tuple(ids), "ref", "agent", tuple(messages), {"row": draw}))
        return made


# The openai client takes seconds to import: most agents here do without it.
OPENING = """
import json, os, subprocess, sys, threading, time, urllib.request

def post(endpoint, body, **headers):
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **headers}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

def ask(endpoint, messages, **fields):
    return post(endpoint, {"model": "any", "messages": messages, **fields})["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

"""


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def source(
    folder: Path,
    code: str,
    cleanup: ExitStack,
    *,
    num_samples: int = 2,
    max_calls: int = 8,
    has_journal: bool = False,
    warn: Callable[[str], None] = pytest.fail,
    max_total_tokens: int = 512,
    **block: Any,
) -> AgentRollouts:
    file = folder / "agent.py"
    file.write_text(OPENING + textwrap.dedent(code))
    environment = EnvironmentConfig.model_validate(
        {"agent": f"{file}:solve", "num_workers": 2, "type": "length", "limit": 5, **block}
    )
    fresh = FreshRollouts(
        Tasks(),
        Recorded(max_total_tokens),
        Judge(),
        num_samples,
        Sampling(8, end_of_turn_ids=CHAT.stop_token_ids),
        seed=3,
    )
    made = build_conversations(
        {"agent": environment},
        CHAT,
        model="tiny",
        max_turns=max_calls,
        max_total_tokens=max_total_tokens - 12,
        warn=warn,
        cleanup=cleanup,
        journals=(folder / "agent_calls", "run") if has_journal else None,
    )(fresh)
    assert isinstance(made, AgentRollouts)
    return made


def last_answer(rollout: Any) -> Completion:
    ids = rollout.completion.token_ids
    return Completion(
        ids[max(i for i, mine in enumerate(rollout.completion.trained) if not mine) + 1 :], (), "", "stop"
    )


def rows_of(groups: Sequence[Group]) -> list[Completion]:
    return [row for group in groups for rollout in group.rollouts for row in rollout.completion.rows]


def assert_captured(groups: Sequence[Group], engine: Any) -> None:
    """Every sampled token of every branch is the engine's, with its log-probability; each is trained once."""
    trained = 0
    for row in rows_of(groups):
        place, ids = 0, (*row.prompt_ids, *row.token_ids)
        begin = len(row.prompt_ids)
        while place < len(row.token_ids):
            ends = [end for end in range(len(ids), begin + place, -1) if ids[:end] in engine.log]
            answers = [
                engine.log[ids[:end]] for end in ends if end - len(engine.log[ids[:end]].token_ids) == begin + place
            ]
            if not answers:  # context
                assert not row.trained[place]
                assert row.logprobs[place] == 0.0
                place += 1
                continue
            (answer,) = answers
            length = len(answer.token_ids)
            assert row.logprobs[place : place + length] == answer.logprobs
            trained += sum(row.trained[place : place + length])
            place += length
    assert trained == sum(len(answer.token_ids) for answer in engine.log.values())
    assert rollout_batch(groups).num_tokens == trained


TALK = """
def solve(task, endpoint):
    messages = list(task.messages)
    for turn in range(3):
        messages += [ask(endpoint, messages), user(f"more {turn}")]
    return float(task.metadata["row"])
"""


def test_a_conversation_is_one_branch_of_exactly_the_tokens_that_were_sampled(
    tmp_path: Path, cleanup: ExitStack
) -> None:
    agents = source(tmp_path, TALK, cleanup)
    groups = agents.take(2, step=1).groups
    assert [rollout.score for group in groups for rollout in group.rollouts] == [
        Score(float(row)) for row in (0, 0, 1, 1)
    ]
    assert_captured(groups, agents.engine)
    assert agents.engine.batches == [2, 2, 2, 2, 2, 2]  # type: ignore[attr-defined]
    for rollout in groups[0].rollouts:
        completion = rollout.completion
        assert completion.branches == ()
        assert completion.prompt_ids == groups[0].task.prompt_ids
        assert completion.conversation is not None
        assert completion.conversation.num_turns == 3
        assert completion.conversation.counts["agent_calls"] == 3
    first, second = (rollout.completion.token_ids for rollout in groups[0].rollouts)
    assert first != second


OPENAI = """
import asyncio, openai
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

async def solve(task, endpoint):
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = list(task.messages)
    for _ in range(2):
        whole = await client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=[TOOL], temperature=0.3, seed=1,
            extra_body={"return_token_ids": True},
        )
        assert whole.usage.completion_tokens == len(whole.choices[0].token_ids)
        messages += [whole.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "result"}]
    stream = await client.chat.completions.create(model="x", messages=messages, stream=True, tools=[TOOL])
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return "final " + text
"""


@pytest.mark.full
def test_the_openai_client_with_tools_and_streams(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, OPENAI, cleanup, num_samples=1)
    groups = agents.take(2, step=1).groups
    assert_captured(groups, agents.engine)
    for group in groups:
        (rollout,) = group.rollouts
        assert rollout.score.reward == len("final ") + len(
            agents.endpoint.writer.read((), last_answer(rollout), ()).content
        )
        assert rollout.completion.branches == ()
        assert rollout.completion.conversation is not None
        assert rollout.completion.conversation.counts["overridden_sampling"] == 4


@pytest.mark.full
def test_the_agent_of_the_tutorial_is_scored_and_captured(tmp_path: Path, cleanup: ExitStack) -> None:
    tutorial = Path(__file__).parents[3] / "docs" / "tutorials" / "own-agent.md"
    (code,) = re.findall(r"```python\n# agent\.py\n(.*?)```", tutorial.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) < 12  # and the name of the file
    agents = source(tmp_path, code, cleanup, num_samples=1, max_calls=4)
    groups = agents.take(2, step=1).groups
    assert_captured(groups, agents.engine)
    for group in groups:
        (rollout,) = group.rollouts
        assert rollout.score.scored
        assert rollout.completion.branches == ()
        assert rollout.completion.conversation is not None
        assert 1 <= rollout.completion.conversation.num_turns <= 3


REWRITES = """
def solve(task, endpoint):
    messages = list(task.messages)
    for turn in range(2):
        messages += [ask(endpoint, messages), user(f"more {turn}")]
    ask(endpoint, messages)
    rewritten = [*messages[:2], user("else")]  # keeps the first answer
    messages = [*rewritten, ask(endpoint, rewritten), user("more")]
    ask(endpoint, messages)
    ask(endpoint, [{"role": "system", "content": "summary"}, user("go on")])  # compacted
    ask(endpoint, [{"role": "system", "content": "summary"}, user("go on")])  # the same once more
    return 1
"""


def test_a_rewritten_history_is_a_new_branch_and_every_sampled_token_is_trained_once(
    tmp_path: Path, cleanup: ExitStack
) -> None:
    agents = source(tmp_path, REWRITES, cleanup)
    groups = agents.take(1, step=1).groups
    assert_captured(groups, agents.engine)
    for rollout in groups[0].rollouts:
        rows = rollout.completion.rows
        assert len(rows) == 4
        assert len({row.token_ids for row in rows}) == 4  # equal prompts draw anew
        shared = [row for row in rows if row.prompt_ids == groups[0].task.prompt_ids]
        assert len(shared) == 2
        assert rollout.completion.num_sampled == sum(sum(row.trained) for row in rows)


FAILING = {
    "raises": ("raise ValueError('no idea')", "ValueError: no idea"),
    "exits": ("sys.exit(3)", "SystemExit: 3"),
    "dies": ("os._exit(4)", "the worker process exited with code 4"),
    "killed": ("os.kill(os.getpid(), 9)", "killed by signal 9"),
    "hangs": ("time.sleep(1000)", "timeout after 900 s"),
    "nothing": ("return None", "the agent returned None"),
    "text": ("return object()", "a number, or a dict of named numbers, is needed"),
}


@dataclass
class LongWork(AgentClock):
    """After the first answer the agent seems to have worked for long, in all or since that answer."""

    in_all_s: float = 1e6

    def answered(self) -> None:
        super().answered()
        self.waited_s -= self.in_all_s
        self.changed_at -= 1e6


def let_hang(agents: AgentRollouts, monkeypatch: pytest.MonkeyPatch, in_all_s: float = 1e6) -> None:
    """The agents of the first task reach their limit as soon as they were answered, however busy the machine is."""
    open_session = agents.endpoint.open

    def opened(task: Task, sample: int) -> AgentSession:
        session = open_session(task, sample)
        session.clock = LongWork(in_all_s=in_all_s) if task.draw == 0 else session.clock
        return session

    monkeypatch.setattr(agents.endpoint, "open", opened)


@pytest.mark.parametrize("ending", FAILING)
def test_an_agent_that_fails_leaves_an_unscored_rollout_with_the_reason(
    ending: str, tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reason = FAILING[ending]
    script = f"""
    def solve(task, endpoint):
        ask(endpoint, task.messages)
        if task.metadata["row"] == 0:
            {code}
        return 2.0
    """
    agents = source(tmp_path, script, cleanup, num_samples=1)
    if ending == "hangs":
        let_hang(agents, monkeypatch)
    failed, fine = (group.rollouts[0] for group in agents.take(2, step=1).groups)
    assert failed.score.reward is None
    assert reason in str(failed.score.error)
    assert fine.score == Score(2.0)
    assert len(failed.completion.token_ids) > 0  # what it sampled is shown, not trained


def test_an_agent_that_works_too_long_between_requests_is_ended(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    def solve(task, endpoint):
        ask(endpoint, task.messages)
        time.sleep(1000)
    """
    agents = source(tmp_path, script, cleanup, num_samples=1, turn_timeout_s=600)
    let_hang(agents, monkeypatch, in_all_s=0)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score.error == "the agent asked nothing for 600 s (turn_timeout_s)"
    assert len(group.rollouts[0].completion.token_ids) > 0


def test_time_for_the_model_and_for_tools_is_told_apart(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    def solve(task, endpoint):
        ask(endpoint, task.messages)
        time.sleep(0.3)
        return 1.0
    """
    agents = source(tmp_path, script, cleanup)
    generate = agents.engine.generate
    monkeypatch.setattr(agents.engine, "generate", lambda *given: time.sleep(0.2) or generate(*given))
    times = agents.take(1, step=1).timings_s
    assert times["generation/agents_working"] >= 0.3
    assert times["generation/waiting_for_model"] >= 0.2
    assert times["generation"] >= 0.5


def test_time_in_which_the_endpoint_works_is_not_the_agents(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = source(tmp_path, TALK, cleanup, num_samples=1)
    first, seen = agents.endpoint.writer.first, []

    def rendered(messages: Any, tools: Any) -> tuple[int, ...]:
        seen.extend(session.clock.num_waiting for session in agents.endpoint._sessions.values())
        return first(messages, tools)

    monkeypatch.setattr(agents.endpoint.writer, "first", rendered)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score == Score(0.0)
    assert seen == [1]


def pending(agents: AgentRollouts, sample: int) -> PendingCall:
    task = agents.stream.take(1)[0]
    session = agents.endpoint.open(task, sample)
    request = read_request(json.dumps({"messages": list(task.messages)}).encode())
    return PendingCall(session, request, session.tree.call(task.messages, request.used_tools, agents.sampling))


def test_a_batch_waits_for_other_agents_however_long_the_engine_was_busy(tmp_path: Path, cleanup: ExitStack) -> None:
    endpoint = (agents := source(tmp_path, TALK, cleanup)).endpoint
    first = pending(agents, 0)
    first.since -= 1000  # while the batch before was sampled
    endpoint._pending = [first]
    assert endpoint.next_batch(lambda: 2) == []
    assert endpoint._collects_since is not None
    endpoint._collects_since -= 1000
    assert endpoint.next_batch(lambda: 2) == [first]
    endpoint._pending = [first]
    assert endpoint.next_batch(lambda: 2) == []


def test_an_agent_that_works_for_long_delays_one_batch_only(tmp_path: Path, cleanup: ExitStack) -> None:
    endpoint = (agents := source(tmp_path, TALK, cleanup)).endpoint
    slow, first = pending(agents, 1).session, pending(agents, 0)
    slow.clock.changed_at = time.monotonic()
    endpoint._pending = [first]
    assert endpoint.next_batch(lambda: 2) == []
    slow.clock.changed_at -= 1000
    assert endpoint.next_batch(lambda: 2) == [first]
    slow.clock.ask()  # it waits in a request that was answered meanwhile
    endpoint._pending = [first]
    assert endpoint.next_batch(lambda: 2) == []


def test_a_batch_in_the_journal_is_whole_although_a_rollout_ended_meanwhile(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, TALK, cleanup, has_journal=True)
    journal = agents.endpoint.journal = agents.journal
    assert journal is not None
    journal.begin(1, agents.sampling)
    batch = [pending(agents, 0), pending(agents, 1)]
    agents.endpoint.end(batch[0].session)
    agents.endpoint.reply([(one, Completion((5, 6), (-1.0, -2.0), "ab", "stop")) for one in batch])
    assert [len(one.session.tree.calls) for one in batch] == [0, 1]
    again = CallJournal(journal.path, journal.identity, pytest.fail)
    again.begin(1, agents.sampling)
    (found,) = again.batches({one.session.rollout: one for one in batch})
    assert [(rollout, call.answer.token_ids) for rollout, call in found] == [((0, 0), (5, 6)), ((0, 1), (5, 6))]
    again.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "insert", "header"])
def test_a_journal_is_used_up_to_a_damaged_line(damage: str, tmp_path: Path, cleanup: ExitStack) -> None:
    warnings: list[str] = []

    def groups() -> Sequence[Group]:
        with ExitStack() as stack:
            return source(tmp_path, TALK, stack, has_journal=True, warn=warnings.append).take(2, step=3).groups

    whole, path = groups(), tmp_path / "agent_calls" / "generation.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    if damage == "insert":
        lines.insert(middle, b"\xff\x00[\n")
    else:
        middle = 0 if damage == "header" else middle
        at = len(lines[middle]) // 2
        kept = lines[middle][at + 1 :] if damage != "cut" else b"\n"
        lines[middle] = lines[middle][:at] + bytes([lines[middle][at] ^ 1]) + kept
    path.write_bytes(b"".join(lines))
    assert groups() == whole
    (warning,) = warnings
    assert warning.startswith(f"{path}: line {middle + 1} is damaged")
    warnings.clear()
    assert groups() == whole  # what was damaged is no longer there
    assert not warnings


def test_an_answer_of_the_greatest_length_is_judged_and_kept(tmp_path: Path, cleanup: ExitStack) -> None:
    script = """
    def solve(task, endpoint):
        ask(endpoint, task.messages)
        return chr(0x1F600) * 500_000
    """
    agents = source(tmp_path, script, cleanup, num_samples=1)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score == Score(500_000.0)
    talk = group.rollouts[0].completion.conversation
    assert talk is not None
    assert len(talk.answer or "") == 500_000


def test_prefill_is_counted_of_agents_and_of_others(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = source(tmp_path, TALK, cleanup, num_samples=1)
    own, other = agents.stream.take(2)
    agents.others.metrics = {"prefill_tokens_computed": 3.0}
    monkeypatch.setattr(agents.others, "sample", lambda tasks, step: [[] for _ in tasks])

    def run(sessions: Any, step: int) -> list[Any]:
        agents.metrics = {"prefill_tokens_computed": 4.0}
        return [None for _ in sessions]

    monkeypatch.setattr(agents, "_run", run)
    agents.sample([own, replace(other, environment="other")], step=1)
    assert agents.metrics == {"prefill_tokens_computed": 7.0}
    agents.sample([own], step=1)
    assert agents.metrics == {"prefill_tokens_computed": 4.0}


def test_an_agent_waits_until_its_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = AgentClock(), time.monotonic()
    clock.ask()
    seen = []
    monkeypatch.setattr(time, "monotonic", lambda: seen.append(clock.num_waiting) or now)
    clock.answered()
    assert (seen, clock.num_waiting) == ([1], 0)


NOTED = """
def solve(task, endpoint):
    ask(endpoint, task.messages)
    with open(BEGUN, "a") as file:
        print(task.reference, file=file)
    return REWARD
"""


@pytest.mark.full
def test_a_journal_gives_results_of_the_same_code_and_the_same_tasks_only(tmp_path: Path, cleanup: ExitStack) -> None:
    begun = tmp_path / "begun"

    class OtherTasks(Tasks):
        def take(self, count: int) -> Sequence[Task]:
            first, second = super().take(count)
            return [first, replace(second, reference="other")]

    def rewards(reward: str, stream: Tasks) -> list[float | None]:
        script = NOTED.replace("BEGUN", repr(str(begun))).replace("REWARD", reward)
        with ExitStack() as cleanup:
            agents = source(tmp_path, script, cleanup, num_samples=1, has_journal=True)
            agents.stream = stream
            return [group.rollouts[0].score.reward for group in agents.take(2, step=3).groups]

    assert rewards("1.0", Tasks()) == rewards("1.0", Tasks()) == [1.0, 1.0]
    assert begun.read_text().split() == ["ref", "ref"]
    assert rewards("1.0", OtherTasks()) == [1.0, 1.0]
    assert begun.read_text().split()[2:] == ["other"]
    assert rewards("2.0", OtherTasks()) == [2.0, 2.0]


def test_the_code_of_an_agent_is_what_its_setting_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "path")
    for name in ("agent.py", "tools.py", "data.txt", "path/package/__init__.py", "path/package/solver.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def names(agent: str | list[str]) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in code_files(agent, tmp_path)]

    assert names("agent.py:solve") == names(["python", "agent.py", "x" * 5000]) == ["agent.py", "tools.py"]
    assert names("package.solver:solve") == ["path/package/__init__.py", "path/package/solver.py"]
    assert names("package.solve") == names(["python", "-m", "package"]) == names("package.solver.solve")
    assert names(["./data.txt"]) == ["agent.py", "data.txt", "tools.py"]
    assert names("missing:solve") == []


FORKS = """
def solve(task, endpoint):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    with open(task.metadata["pids"], "a") as file:
        print(started.pid, file=file)
    ask(endpoint, task.messages)
    END
"""


@pytest.mark.parametrize("ending", ["return 1.0", "raise ValueError", "os._exit(1)", "time.sleep(1000)"])
def test_children_of_an_agent_end_with_it(
    ending: str, tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = FORKS.replace("END", ending).replace('task.metadata["pids"]', repr(str(tmp_path / "pids")))
    agents = source(tmp_path, script, cleanup, num_samples=1)
    if ending == "time.sleep(1000)":
        let_hang(agents, monkeypatch)
    (group,) = agents.take(1, step=1).groups
    assert (group.rollouts[0].score.reward == 1.0) == (ending == "return 1.0"), group.rollouts[0].score
    started = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(started) == 1
    psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=30)
    assert not psutil.pid_exists(started[0])
    mine = psutil.Process().children(recursive=True)
    assert not [child for child in mine if "time.sleep(1000)" in " ".join(child.cmdline())]


KEYS = """
def solve(task, endpoint):
    import dataclasses
    ask(endpoint, task.messages)
    status = []
    for key in (ENDED, "", "guessed"):
        try:
            ask(dataclasses.replace(endpoint, api_key=key), task.messages)
        except urllib.error.HTTPError as error:
            status.append(error.code)
    return float(status == [401, 401, 401])
"""


def test_the_key_of_another_rollout_that_ended_or_of_none_is_refused(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, "def solve(task, endpoint): pass", cleanup, num_samples=1)
    ended = agents.endpoint.open(agents.stream.take(1)[0], 0)
    agents.endpoint.end(ended)
    (tmp_path / "agent.py").write_text(OPENING + KEYS.replace("ENDED", repr(ended.key)))
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score == Score(1.0)


def test_limits_of_calls_and_tokens(tmp_path: Path, cleanup: ExitStack) -> None:
    script = """
    def solve(task, endpoint):
        try:
            ask(endpoint, [user("x" * 600)])
        except urllib.error.HTTPError as error:
            code = json.load(error)["error"]["code"]
        first, second, last = (ask(endpoint, task.messages) for _ in range(3))
        return float("limit of 2 requests" in last["content"] and code == "context_length_exceeded")
    """
    agents = source(tmp_path, script, cleanup, num_samples=1, max_calls=2)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score == Score(1.0)
    assert_captured([group], agents.engine)
    conversation = group.rollouts[0].completion.conversation
    assert conversation is not None
    assert {"agent_calls": 2, "out_of_turns": 1, "out_of_tokens": 1}.items() <= conversation.counts.items()


@pytest.mark.parametrize("refused", ["task.messages", "[user('x' * 600)]"], ids=["over the limit", "too long"])
def test_an_agent_that_asks_on_whatever_it_is_answered_is_ended(
    refused: str, tmp_path: Path, cleanup: ExitStack
) -> None:
    script = f"""
    def solve(task, endpoint):
        while True:
            try:
                ask(endpoint, {refused})
            except urllib.error.HTTPError:
                pass
    """
    agents = source(tmp_path, script, cleanup, num_samples=1, max_calls=2, timeout_s=60)
    (group,) = agents.take(1, step=1).groups
    assert "asked on after" in str(group.rollouts[0].score.error)
    assert ("max_rollout_turns" in str(group.rollouts[0].score.error)) is (refused == "task.messages")


def test_connections_of_one_rollout_are_limited_and_end_with_it(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.rollouts.agent_endpoint.MAX_CONNECTIONS", 2)
    agents = source(tmp_path, TALK, cleanup)
    session, other = (agents.endpoint.open(agents.stream.take(1)[0], sample) for sample in (0, 1))
    opened = []

    def status(key: str) -> int:
        connection = HTTPConnection("127.0.0.1", agents.endpoint._server.server_port, timeout=30)
        opened.append(connection)
        connection.request("POST", "/v1/chat/completions", b"{}", {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        answer.read()
        assert (answer.getheader("Connection") == "close") is (answer.status == 429)
        return answer.status

    assert [status(key) for key in (session.key, session.key, session.key, other.key)] == [400, 400, 429, 400]
    kept = [connection.sock for connection in opened if connection.sock is not None]
    assert len(kept) == 3
    agents.endpoint.end(session)
    assert [connection.recv(1) for connection in kept[:2]] == [b"", b""]
    assert len(other.connections) == 1
    agents.endpoint.end(other)
    for connection in opened:
        connection.close()


def test_connections_without_a_key_give_way(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, TALK, cleanup)
    server = agents.endpoint._server
    server._free = threading.BoundedSemaphore(2)
    held = [socket.create_connection(("127.0.0.1", server.server_port), timeout=30) for _ in range(3)]
    assert held[0].recv(1) == b""
    held[2].sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
    assert held[2].recv(12) == b"HTTP/1.1 200"
    for connection in held:
        connection.close()


def test_requests_with_limits_of_their_own_are_sampled_together(tmp_path: Path, cleanup: ExitStack) -> None:
    script = """
    def solve(task, endpoint):
        row = task.metadata["row"]
        answer = post(endpoint, {"messages": list(task.messages), "max_tokens": row + 2, "return_token_ids": True})
        return float(len(answer["choices"][0]["token_ids"]) <= row + 2)
    """
    agents = source(tmp_path, script, cleanup, num_samples=1)
    groups = agents.take(2, step=1).groups
    assert [group.rollouts[0].score for group in groups] == [Score(1.0)] * 2
    assert agents.engine.batches == [2]  # type: ignore[attr-defined]
    assert_captured(groups, agents.engine)


def test_a_retry_gets_the_first_answer_again(tmp_path: Path, cleanup: ExitStack) -> None:
    script = """
    def solve(task, endpoint):
        body = {"messages": list(task.messages), "return_token_ids": True}
        first, other = post(endpoint, body), post(endpoint, body)
        again = post(endpoint, body, **{"x-stainless-retry-count": "1"})
        return float(again == other and first["choices"] != other["choices"])
    """
    agents = source(tmp_path, script, cleanup, num_samples=1)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score == Score(1.0)
    assert len(group.rollouts[0].completion.rows) == 2


def test_an_agent_that_never_asks_is_unscored(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, "def solve(task, endpoint): return 1.0", cleanup, num_samples=1)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score.error == "the agent never asked the model"


def test_an_agent_gets_no_credential_that_it_was_not_given_and_no_proxy_to_the_endpoint(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "mine.example")
    script = """
    def solve(task, endpoint):
        ask(endpoint, task.messages)
        names = [name for name, value in os.environ.items() if "secret" in value]
        return json.dumps([names, os.environ["GIVEN"], os.environ["NO_PROXY"].split(",")[0]])
    """
    agents = source(tmp_path, script, cleanup, num_samples=1, env={"GIVEN": "1", "HF_TOKEN": None})
    (group,) = agents.take(1, step=1).groups
    talk = group.rollouts[0].completion.conversation
    assert talk is not None
    assert json.loads(str(talk.answer)) == [["HF_TOKEN"], "1", "mine.example"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match=r"env\.agent\.env\.HF_TOKEN"):
        source(tmp_path, script, cleanup, env={"HF_TOKEN": None})


def test_a_command_gets_the_task_and_prints_its_result(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, "", cleanup, num_samples=1, agent=["python3", str(tmp_path / "command.py")])
    (tmp_path / "command.py").write_text(
        OPENING
        + """
from types import SimpleNamespace
task = json.load(sys.stdin)
endpoint = SimpleNamespace(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print("progress")
if task["metadata"]["row"] == 1:
    sys.exit(2)
if task["metadata"]["row"] == 2:
    print("no json")
else:
    ask(endpoint, task["messages"])
    print(json.dumps({"answer": "four"}))
"""
    )
    scores = [group.rollouts[0].score for group in agents.take(3, step=1).groups]
    assert scores[0] == Score(4.0)
    assert scores[1].error == "the agent ended with exit code 2"
    assert scores[2].error == "the last line that the agent printed is not JSON: 'no json'"


FLOOD = """
import sys, tracemalloc
from posttrain.environments.agents.runner import AgentItem, Endpoint, agent_runner
from posttrain.environments.item import Unscored
from posttrain.environments.turns.interface import TurnTask

tracemalloc.start()
code = 'import sys; [print("a" * 2**20) for _ in range(100)]; sys.stdin.read(); print(LAST)'
runner = agent_runner({"agent": [sys.executable, "-c", code], "kwargs": {}, "base_folder": "."})
try:
    print(runner(AgentItem(TurnTask("t", (), ""), Endpoint("", "", ""), "")).fields)
except Unscored as error:
    print(error)
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [("1.5", "1.5"), ("chr(120) * 2**24", "the last line that the agent printed has more than 8 MiB")],
    ids=["a result", "no end"],
)
def test_of_what_a_command_prints_the_end_is_kept(last: str, expected: str) -> None:
    script = FLOOD.replace("LAST", last)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    text, peak_bytes = said.stdout.splitlines()
    assert expected in text
    assert int(peak_bytes) < 50 << 20


def test_answers_do_not_depend_on_which_agents_run_beside(tmp_path: Path, cleanup: ExitStack) -> None:
    agents = source(tmp_path, TALK, cleanup, num_samples=3)
    beside = {row.token_ids for row in rows_of(agents.take(2, step=1).groups[:1])}
    agents.num_samples = 2
    alone = {row.token_ids for row in rows_of(agents.take(1, step=1).groups)}
    assert alone < beside


SUB_AGENTS = """
def solve(task, endpoint):
    done = threading.Barrier(3)
    def work(name, wait):
        time.sleep(wait)
        messages = [{"role": "system", "content": name}, *task.messages]
        for _ in range(2):
            messages += [ask(endpoint, messages), user("more")]
        done.wait()
    waits = WAITS
    for name, wait in zip("ab", waits):
        threading.Thread(target=work, args=(name, wait)).start()
    done.wait(60)
    return 1.0
"""


def test_sub_agents_side_by_side_give_the_same_branches_in_any_order(tmp_path: Path, cleanup: ExitStack) -> None:
    found = []
    for waits in ("(0, 0.3)", "(0.3, 0)"):
        agents = source(tmp_path, SUB_AGENTS.replace("WAITS", waits), cleanup, num_samples=1)
        groups = agents.take(1, step=1).groups
        assert_captured(groups, agents.engine)
        found.append([(row.prompt_ids, row.token_ids, row.trained) for row in rows_of(groups)])
    assert found[0] == found[1]
    assert len(found[0]) == 2


REFUSED = {
    "n": 2,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "tool_choice": "sometimes",
    "logit_bias": {"5": 1.0},
    "functions": [],
    "messages": [{"role": "robot", "content": "?"}],
    "max_tokens": 0,
    "stop": [3],
    "tools": [{"type": "function"}],
    "num_overridden": 5,
}


USER: dict[str, Any] = {"role": "user", "content": "?"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def refused(**body: Any) -> str | None:
    with pytest.raises(RefusedRequest) as raised:
        read_request(json.dumps({"messages": [USER], **body}).encode())
    assert raised.value.status == 400
    return raised.value.param


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, "content"),
        ({**USER, "cache": True}, "cache"),
        ({**USER, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, "content.0"),
        ({**USER, "content": [{"type": "text", "text": "a", "bold": True}]}, "content.0.bold"),
        ({**USER, "content": 5}, "content"),
        ({**USER, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, "tool_calls"),
    ],
)
def test_what_a_message_cannot_have_is_refused_with_its_field(message: Any, field: str) -> None:
    assert refused(messages=[USER, message]) == f"messages.1.{field}"


def test_fields_that_do_not_fit_others_are_refused() -> None:
    assert str(refused(tools=[{"type": "custom", "function": {"name": "add"}}])).startswith("tools")
    assert refused(stop=["x"] * 17) == "stop"
    assert refused(tool_choice="any") == "tool_choice"
    assert refused(stop="x" * 1001) == refused(stop=5) == "stop"
    read_request(json.dumps({"messages": [USER], "stop": ["x"] * 16}).encode())
    other = {"type": "function", "function": {"name": "other"}}
    assert refused(tool_choice=other, tools=[TOOL]) == refused(tool_choice="required") == "tool_choice"
    assert str(refused(stream=True, stream_options={"include_usage": True, "x": True})).startswith("stream_options.x")


def test_conditions_on_calls_are_counted_and_labels_of_clients_are_accepted() -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": None,
        "annotations": [],
        "provider_specific_fields": {},
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}],
    }
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    messages = [USER, answer, {"role": "tool", "tool_call_id": "1", "content": parts}, {**USER, "name": "me"}]
    for fields, count in (
        ({"parallel_tool_calls": True, "stream": True, "stream_options": {"include_usage": True}}, 0),
        ({"parallel_tool_calls": False, "tool_choice": TOOL}, 2),
        ({"tools": [strict]}, 1),
    ):
        request = read_request(json.dumps({"messages": messages, "tools": [TOOL], **fields}).encode())
        assert request.num_overridden == count
        assert request.messages[2].plain()["content"] == "ab"


@pytest.mark.parametrize(("length", "status"), [("²", 400), ("", 400), ("9" * 5000, 413)])
def test_a_length_that_is_no_number_is_refused_and_the_connection_closed(
    length: str, status: int, tmp_path: Path, cleanup: ExitStack
) -> None:
    agents = source(tmp_path, TALK, cleanup)
    with socket.create_connection(("127.0.0.1", agents.endpoint._server.server_port), timeout=30) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {length}\r\n\r\nGET".encode("latin-1")
        )
        with connection.makefile("rb") as stream:
            answer = stream.read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1


def test_an_error_of_the_endpoint_is_the_reason_of_its_rollout(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    def solve(task, endpoint):
        try:
            return ask(endpoint, task.messages)["content"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["error"]["message"])
    """
    agents = source(tmp_path, script, cleanup, num_samples=1)
    monkeypatch.setattr(agents.endpoint, "_enter", lambda pending, is_retry: 1 // 0)
    (group,) = agents.take(1, step=1).groups
    assert "RuntimeError: internal error: ZeroDivisionError" in str(group.rollouts[0].score.error)


def test_what_is_not_supported_is_refused_with_its_name(tmp_path: Path, cleanup: ExitStack) -> None:
    script = f"""
    def solve(task, endpoint):
        ask(endpoint, task.messages, user="me", temperature=0.1, max_tokens=3, stop="x", n=1, tools=None)
        named = []
        for name, value in {REFUSED!r}.items():
            try:
                post(endpoint, {{"messages": list(task.messages), name: value}})
            except urllib.error.HTTPError as error:
                named.append((error.code, json.load(error)["error"]["param"].split(".")[0]))
        assert named == [(400, name) for name in {list(REFUSED)!r}], named
        return 1.0
    """
    agents = source(tmp_path, script, cleanup, num_samples=1)
    (group,) = agents.take(1, step=1).groups
    assert group.rollouts[0].score == Score(1.0)
    assert_captured([group], agents.engine)
