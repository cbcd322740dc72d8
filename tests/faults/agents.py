"""Agents that hang, die, flood, rewrite their history, use a wrong key, cut the connection or fork; and runs that are
killed in the middle of their episodes.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.lab import Lab

TIMEOUT_S = 6
NUM_MIXED = 200  # agents
NUM_KILLS = 40

# `ask(messages)` asks the model, `post(body, key)` too; `raw(data)` sends bytes and closes the connection.
UNSCORED = {
    "raises": "ask(messages); raise ValueError('no idea')",
    "raises-a-novel": "raise ValueError('x' * 5_000_000)",
    "raises-half-a-character": "raise ValueError(chr(0xD800))",
    "exits": "ask(messages); sys.exit(0)",
    "exits-at-once": "os._exit(7)",
    "killed": "ask(messages); os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "ask(messages); os.kill(os.getpid(), signal.SIGSEGV)",
    "stopped": "ask(messages); os.kill(os.getpid(), signal.SIGSTOP)",
    "hangs": "time.sleep(1000)",
    "hangs-after-an-answer": "ask(messages); time.sleep(1000)",
    "busy-and-deaf": "[signal.signal(n, signal.SIG_IGN) for n in (2, 14, 15)]\n    while True: pass",
    "returns-nothing": "ask(messages)",
    "returns-nan": "ask(messages); return float('nan')",
    "returns-infinity": "ask(messages); return float('inf')",
    "returns-an-object": "ask(messages); return object()",
    "returns-a-huge-answer": "ask(messages); return 'x' * 600_000",
    "never-asks": "return 1.0",
    "wrong-key-only": "post({'messages': messages}, 'guessed')",
    "no-key": "post({'messages': messages}, '')",
    "cuts-and-dies": "raw(request(messages)[:-9]); os._exit(1)",
    "cuts-while-it-waits-and-dies": "raw(request(messages)); os._exit(1)",
    "forks-and-dies": "os.fork(); ask(messages); os._exit(1)",
    "forks-a-bomb-and-dies": "[subprocess.Popen(['sleep', '1000'], start_new_session=True) for _ in range(20)]\n"
    "    ask(messages); os.kill(os.getpid(), signal.SIGKILL)",
    "closes-its-pipes": "ask(messages); os.closerange(0, 100)",
    "too-long-a-prompt": "ask([user('x' * 4000)])",
    "asks-on-and-on": "while True: ask(messages)",
    "not-supported": "post({'messages': messages, 'n': 3})",
}
# They end as they should: with the reward that they return.
SCORED = {
    "floods-with-requests": "[ask(messages) for _ in range(20)]",
    "floods-side-by-side": "threads(lambda: ask(messages), 24)",
    "floods-with-wrong-keys": "threads(lambda: refused(lambda: post({'messages': messages}, 'no')), 40); ask(messages)",
    "floods-the-log": "ask(messages); print('x' * 10_000_000); sys.stderr.write('y' * 10_000_000)",
    "floods-with-connections": "held = [connect() for _ in range(150)]; [one.close() for one in held]; ask(messages)",
    "holds-connections": "global kept; kept = [connect() for _ in range(10)]; ask(messages)",
    "huge-body": "refused(lambda: ask([user('x' * 40_000_000)])); ask(messages)",
    "deep-body": "raw(head(200_000) + b'[' * 200_000); ask(messages)",
    "body-that-is-none": "raw(head(9) + b'\\xff' * 9); ask(messages)",
    "length-that-is-none": "raw(head(-5)); ask(messages)",
    "not-http": "raw(bytes(range(256)) * 100); ask(messages)",
    "cuts-in-the-head": "raw(request(messages)[:20]); ask(messages)",
    "cuts-in-the-body": "raw(request(messages)[:-9]); ask(messages)",
    "cuts-while-it-waits": "raw(request(messages)); ask(messages)",
    "too-long-a-prompt-first": "refused(lambda: ask([user('x' * 4000)])); ask(messages)",
    "not-supported-first": "refused(lambda: post({'messages': messages, 'n': 3})); ask(messages)",
    "nested-messages": "refused(lambda: post({'messages': [{'role': 'user', 'content': {'a': 1}}]})); ask(messages)",
    "wrong-key-first": "refused(lambda: post({'messages': messages}, 'guessed')); ask(messages)",
    "rewrites-its-history": "first = ask(messages); ask([*messages, first, user('a')]); ask([*messages, user('b')])\n"
    "    ask([*messages, {**first, 'content': 'else'}, user('a')]); ask([user('c')])",
    "repeats-itself": "[ask(messages) for _ in range(4)]",
    "forks-children-that-stay": "pid = os.fork()\n    if not pid:\n        time.sleep(1000)\n    ask(messages)",
    "forks-children-that-ask": "pid = os.fork()\n    if not pid:\n        refused(lambda: ask(messages)); os._exit(0)\n"
    "    ask(messages); os.waitpid(pid, 0)",
    "leaves-threads": "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); ask(messages)",
    "asks-after-its-end": "ask(messages)\n    threading.Timer(0.3, lambda: refused(lambda: ask(messages))).start()",
    "changes-its-environment": "ask(messages); os.environ.clear(); os.chdir('/')",
}
SHORT = ("raises", "killed", "wrong-key-only", "floods-with-requests", "cuts-while-it-waits", "rewrites-its-history")

AGENT = """
import functools, json, os, random, signal, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from pathlib import Path

HERE = Path(__file__).parent

def user(text):
    return {"role": "user", "content": text}

def refused(call):
    try:
        call()
    except (OSError, urllib.error.HTTPError):
        pass

def threads(call, count):
    all_of_them = [threading.Thread(target=call) for _ in range(count)]
    [one.start() for one in all_of_them]
    [one.join() for one in all_of_them]

def note(name):
    file = os.open(HERE / "begun", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{name}\\n".encode())
    os.close(file)

def tools(endpoint):
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")

    def post(body, key=endpoint.api_key):
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def ask(messages):
        return post({"messages": messages, "max_tokens": 5})["choices"][0]["message"]

    def head(length):
        key = f"Authorization: Bearer {endpoint.api_key}"
        return f"POST /v1/chat/completions HTTP/1.1\\r\\n{key}\\r\\nContent-Length: {length}\\r\\n\\r\\n".encode()

    def request(messages):
        body = json.dumps({"messages": messages}).encode()
        return head(len(body)) + body

    def connect():
        return socket.create_connection((host, int(port)), 60)

    def raw(data):
        refused(lambda: send(data))

    def send(data):
        with connect() as connection:
            connection.sendall(data)

    return dict(post=post, ask=ask, head=head, request=request, connect=connect, raw=raw)

def usual(messages):
    ask(messages)
    return 0.75

FAULTS

def solve(task, endpoint):
    name = random.choice(NAMES)
    note(name)
    globals().update(tools(endpoint))
    function, reward = CHOICES[name]
    returned = function(list(task.messages))
    return returned if reward is None or name == "usual" else reward
"""


def write_agent(folder: Path, codes: Mapping[str, str]) -> dict[str, float | None]:
    """An agent that misbehaves in one of these ways, or not. Returns the reward of each; None: unscored."""
    rewards: dict[str, float | None] = {"usual": 0.75}
    functions, choices = [], ["'usual': (usual, 0.75)"]
    for number, (name, code) in enumerate(codes.items()):
        functions.append(f"def fault_{number}(messages):\n    {code}\n")
        rewards[name] = None if name in UNSCORED else 0.25 + number / 1024
        choices.append(f"{name!r}: (fault_{number}, {rewards[name]!r})")
    made = "\n".join([*functions, f"CHOICES = {{{', '.join(choices)}}}", "NAMES = list(CHOICES)"])
    (folder / "agent.py").write_text(AGENT.replace("FAULTS", made))
    return rewards


def arguments(lab: Lab, folder: Path, *more: str, steps: int) -> list[str]:
    given = tiny_runs.grpo(lab.model, lab.data, folder / "run", steps=steps)
    return [
        *(word for word in given if not word.startswith("env.mine.function")),
        f"env.mine.agent={folder / 'agent.py'}:solve",
        "env.mine.num_workers=8",
        f"env.mine.timeout_s={TIMEOUT_S}",
        f"env.mine.env.FAULTS_FOLDER={folder}",
        "grpo.max_rollout_turns=8",
        "policy.max_total_sequence_length=96",
        "grpo.val_period=0",
        *more,
    ]


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name, code in {**UNSCORED, **SCORED}.items():
        if not short:
            yield Case(f"agent:{name}", partial(misbehaving, lab, {name: code}, 2, 4))
    chosen = {name: code for name, code in {**UNSCORED, **SCORED}.items() if not short or name in SHORT}
    prompts, per_prompt = (2, 8) if short else (25, 8)
    tries = prompts * per_prompt if short else NUM_MIXED
    yield Case("agents:mixed", partial(misbehaving, lab, chosen, prompts, per_prompt), tries=tries)
    yield Case("worker:killed", partial(killed_worker, lab, "agent"))
    for number in range(1 if short else NUM_KILLS):
        yield Case(f"run:killed-{number}", partial(killed_run, lab))
    if not short:
        yield Case("turns:killed-worker", partial(killed_worker, lab, "turns"))
        yield Case("run:killed-with-a-damaged-journal", partial(killed_run, lab, damages_journal=True))


PART = Part(
    "agents",
    "an agent that fails leaves its rollout unscored, with the reason; a killed run repeats its agents",
    cases,
    20,
)


def completions_of(run: Path) -> list[dict[str, object]]:
    from posttrain.reporting.rows import read_rollouts

    files = sorted((run / "rollouts").glob("step_*.jsonl.gz"))
    return [one for file in files for group in read_rollouts(file) for one in group["completions"]]


def assert_nothing_is_left(folder: Path) -> None:
    """No process that an agent or a worker has started, 10 s after the end of the run."""
    end = time.monotonic() + 10
    while left := [one for one in psutil.process_iter() if _is_of(one, folder)]:
        if time.monotonic() > end:
            told = [(one.pid, one.cmdline()) for one in left]
            processes.kill(left)
            raise AssertionError(f"processes are left: {told}")
        time.sleep(0.1)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        variables = process.environ()
        is_there = process.status() != psutil.STATUS_ZOMBIE
        return is_there and variables.get("FAULTS_FOLDER") == str(folder) and "POSTTRAIN_WORKER" in variables
    return False


def misbehaving(
    lab: Lab, codes: Mapping[str, str], num_prompts: int, num_samples: int, folder: Path, chance: random.Random
) -> None:
    rewards = write_agent(folder, codes)
    words = arguments(lab, folder, f"grpo.num_prompts_per_step={num_prompts}", steps=1)
    words += [
        f"grpo.num_generations_per_prompt={num_samples}",
        f"policy.train_global_batch_size={num_prompts * num_samples}",
    ]
    words += [f"grpo.seed={chance.randrange(1000)}"]
    surroundings = processes.Surroundings({"FAULTS_FOLDER": str(folder)})
    finished = processes.run(words, folder / "log", surroundings, limit_s=900)
    names = (folder / "begun").read_text().split()
    is_all_lost = all(rewards[name] is None for name in names)
    assert finished.code == (1 if is_all_lost else 0), finished
    assert "\nTraceback" not in finished.output, f"a traceback of ours: {finished}"  # that of an agent is indented
    assert_nothing_is_left(folder)
    found = completions_of(folder / "run")
    assert len(found) == num_prompts * num_samples == len(names), f"{len(found)} rollouts of {len(names)} agents"
    expected = Counter(rewards[name] for name in names)
    assert Counter(one["reward"] for one in found) == expected, (
        f"{expected} by {Counter(names)}; {Counter(str(one['error'])[-120:] for one in found)}; {finished}"
    )
    for one in found:
        assert one["reward"] is not None or one["error"], f"no reason: {one}"
        assert one["reward"] is not None or one["advantage"] == 0, one
    for row in tiny_runs.results_of(folder / "run"):
        assert row["train/unscored"] == expected[None], row
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row


# -- workers that are killed in mid-episode ----------------------------------------------------------------------------

TURNS = """
import os, time
from pathlib import Path
from posttrain.environments.turns import Turn, TurnEnvironment

HERE = Path(__file__).parent

class Talk(TurnEnvironment):
    def reset(self, task):
        return {"turn": 0}

    def step(self, state, response):
        state["turn"] += 1
        if (HERE / "hold").exists():
            (HERE / f"held_{os.getpid()}").touch()
            time.sleep(100)
        return Turn(state, "1", reward=0.25, done=state["turn"] == 2)
"""


def killed_worker(lab: Lab, kind: str, folder: Path, chance: random.Random) -> None:
    """One worker is killed by another process, in the middle of an episode; the others go on."""
    hold = "if (HERE / 'hold').exists():\n        (HERE / f'held_{os.getpid()}').touch()\n        time.sleep(100)"
    write_agent(folder, {"raises": f"ask(messages)\n    {hold}\n    raise ValueError"})
    words = arguments(lab, folder, "env.mine.timeout_s=120", "env.mine.num_workers=2", steps=1)
    if kind == "turns":
        (folder / "talk.py").write_text(TURNS)
        words = [word for word in words if not word.startswith(("env.mine.agent", "env.mine.env"))]
        words += [f"env.mine.turns={folder / 'talk.py'}:Talk"]
    (folder / "hold").touch()
    running = processes.begin(words, folder / "log")
    assert running.wait_for(lambda: any(folder.glob("held_*"))), running.output()
    (folder / "hold").unlink()
    time.sleep(0.3)
    victims = [int(path.name.removeprefix("held_")) for path in folder.glob("held_*")]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    finished = running.finish()
    assert finished.code == 0, finished
    found = completions_of(folder / "run")
    killed = [one for one in found if one["reward"] is None and "signal 9" in str(one["error"])]
    assert len(killed) == len(victims), f"{len(killed)} of {len(victims)} killed; {finished}"
    assert len(found) == 16
    assert all(one["reward"] in (0.75, 0.5, 0.25) or one["error"] for one in found), found


# -- runs that are killed in mid-episode -------------------------------------------------------------------------------

# Deterministic: what an agent does follows from its task, its noise and the answers that it gets.
DETERMINISTIC = ("raises", "exits-at-once", "killed", "rewrites-its-history", "repeats-itself", "wrong-key-first")
KILLED_STEPS, PER_STEP = 3, 16


def deterministic_run(lab: Lab, folder: Path) -> list[str]:
    codes = {name: code for name, code in {**UNSCORED, **SCORED}.items() if name in DETERMINISTIC}
    codes |= {"talks": "first = ask(messages); second = ask([*messages, first, user('1')])\n"
              "    time.sleep(random.random() / 5); ask([*messages, first, user('1'), second, user('2')])"}  # fmt: skip
    write_agent(folder, codes)
    return arguments(lab, folder, "checkpointing.save_period=1", steps=KILLED_STEPS)


def whole_run(lab: Lab) -> Path:
    def make(folder: Path) -> Path:
        finished = processes.run(deterministic_run(lab, folder), folder / "log")
        assert finished.code == 0, finished
        return folder / "run"

    found: Path = lab.shared("agents", make)
    return found


def killed_run(lab: Lab, folder: Path, chance: random.Random, damages_journal: bool = False) -> None:
    whole, words, run = whole_run(lab), deterministic_run(lab, folder), folder / "run"
    surroundings = processes.Surroundings({"FAULTS_FOLDER": str(folder)})
    begun = folder / "begun"
    for attempt in range(5):
        first = PER_STEP + 4 if damages_journal else 1
        num_begun = chance.randrange(first, KILLED_STEPS * PER_STEP)
        running = processes.begin(words, folder / f"log_{attempt}", surroundings)
        running.wait_for(lambda: begun.exists() and begun.read_text().count("\n") >= num_begun)  # noqa: B023
        time.sleep(chance.uniform(0, 0.3))
        running.process.kill()
        if running.finish().code == -signal.SIGKILL:
            break
        shutil.rmtree(run)  # it was over before the kill: this was none
        begun.unlink()
    else:
        raise AssertionError("the run was over five times before it could be killed")
    assert_nothing_is_left(folder)
    if damages_journal:
        journal = run / "agent_calls" / "generation.jsonl"
        data = bytearray(journal.read_bytes())
        data[len(data) // 2] ^= 1
        journal.write_bytes(data)
    finished = processes.run(words, folder / "log", surroundings)
    assert finished.code == 0, finished
    assert not damages_journal or "is damaged" in finished.output, finished
    assert "\nTraceback" not in finished.output, f"a traceback of ours: {finished}"  # that of an agent is indented
    assert_nothing_is_left(folder)
    ours, expected = tiny_runs.results_of(run), tiny_runs.results_of(whole)
    assert ours == expected, f"{ours} instead of {expected}"
    last = f"step_{KILLED_STEPS}"
    assert tiny_runs.weights_of(run / last) == tiny_runs.weights_of(whole / last), "other weights"
    samples = {path.name: path.read_bytes() for path in (whole / "rollouts").glob("*")}
    assert {path.name: path.read_bytes() for path in (run / "rollouts").glob("*")} == samples, "other samples"
    assert len(completions_of(run)) == KILLED_STEPS * PER_STEP
    assert all(one["reward"] is None or float(str(one["reward"])) > 0 for one in completions_of(run)), "a zero"
