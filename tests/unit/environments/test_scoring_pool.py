"""Whatever a reward function does, its completion is unscored with the reason, and every other one gets its reward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from posttrain.environments import ScoringRouter, build_environments
from posttrain.types import Completion, Score, Task

# The response says what the function does. Those that end by themselves come first; the last ones never end.
REWARDS = """
    import asyncio, ctypes, os, random, re, signal, subprocess, sys, threading, time

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no text either")

    def leave_a_child(own_session):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=own_session)
        with open(os.path.join(os.path.dirname(__file__), "children"), "a") as file:
            file.write(f"{child.pid}\\n")

    def act(prompt, response, reference):
        if response == "good": return 0.25
        if response == "raise": raise ValueError("first line\\nsecond line")
        if response == "raise unprintable": raise Unprintable
        if response == "sys.exit": sys.exit(3)
        if response == "keyboard interrupt": raise KeyboardInterrupt
        if response == "os._exit": os._exit(7)
        if response == "segfault": ctypes.string_at(0)
        if response == "out of memory": return bytearray(1 << 45)
        if response == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if response == "close everything": os.closerange(0, 256)
        if response == "string": return "0.5"
        if response == "none": return None
        if response == "nan": return float("nan")
        if response == "infinity": return float("inf")
        if response == "extreme": return -1e308
        if response == "extreme sum": return {"a": 1e308, "b": 1e308}
        if response == "unpicklable": return lambda: 1
        if response == "recursion": return act(prompt, response, reference)
        if response == "noise":
            for _ in range(20): os.write(1, b"n" * 50_000)
            print("noise" * 1000, file=sys.stderr)
            return 0.5
        if response == "fork": return 0.75 if os.fork() else 9.0
        if response == "die and leave a child":
            if os.fork() == 0:
                time.sleep(600)
            os._exit(5)
        if response == "hang": time.sleep(600)
        if response == "hang in c": re.match(r"(a+)+$", "a" * 60 + "b")
        if response == "hang deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(600)
        if response == "hang with children":
            leave_a_child(False)
            leave_a_child(True)
            time.sleep(600)
        if response == "leave a child":
            leave_a_child(False)
            return 1.0
        if response == "print and hang":
            while True: print("x" * 10_000)

    def random_reward(response):
        return random.random() + (hash(response) % 7)

    def process_id(response):
        return os.getpid()

    def has_torch(response):
        return "torch" in sys.modules
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards.py").write_text(textwrap.dedent(REWARDS))
    return folder


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[ScoringRouter]:
    with build_environments({"mine": {"function": "rewards.py:act", "timeout_s": 60, "num_workers": 2}}, folder) as env:
        yield env


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[ScoringRouter]:
    with build_environments({"mine": {"function": "rewards.py:act", "timeout_s": 3, "num_workers": 3}}, folder) as env:
        yield env


def score(environment: ScoringRouter, responses: list[str], name: str = "mine") -> list[Score]:
    tasks = [Task(draw=n, id=f"t:{n}", prompt="p", prompt_ids=(), environment=name) for n in range(len(responses))]
    return environment.score(tasks, [Completion((), (), text, "stop") for text in responses])


def alive(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(process_ids: list[int]) -> list[int]:
    give_up_at = time.monotonic() + 20
    while (left := [pid for pid in process_ids if alive(pid)]) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize(
    ("misbehaviour", "error"),
    [
        ("raise", "ValueError: first line second line"),
        ("raise unprintable", "Unprintable"),
        ("sys.exit", "SystemExit: 3"),
        ("keyboard interrupt", "KeyboardInterrupt"),
        ("os._exit", "the worker process exited with code 7"),
        ("segfault", "the worker process was killed by signal 11 (SIGSEGV)"),
        ("killed", "the worker process was killed by signal 9 (SIGKILL)"),
        ("close everything", "the worker process exited with code 1"),
        ("string", "the reward function returned '0.5' (str)"),
        ("none", "the reward function returned None"),
        ("nan", "the reward function returned nan"),
        ("infinity", "the reward function returned inf"),
        ("extreme", "the reward function returned -1e+308"),
        ("extreme sum", "the reward function returned part 'a' = 1e+308"),
        ("unpicklable", "the reward function returned <function"),
        ("recursion", "RecursionError"),
        ("die and leave a child", "the worker process exited with code 5"),
    ],
)
def test_a_misbehaving_reward_is_unscored_and_its_neighbours_are_scored(
    patient: ScoringRouter, misbehaviour: str, error: str
) -> None:
    scores = score(patient, ["good", misbehaviour, "good"])
    assert [one.reward for one in scores] == [0.25, None, 0.25]
    assert str(scores[1].error).startswith(error)
    assert "\n" not in str(scores[1].error)
    assert len(str(scores[1].traceback)) < 9000


def test_a_worker_that_ran_out_of_memory_gets_no_other_answer(patient: ScoringRouter) -> None:
    """It ends after its reply; an answer sent to it meanwhile would be lost."""
    scores = score(patient, ["out of memory", "good"] * 6)
    assert [one.reward for one in scores] == [None, 0.25] * 6
    assert {one.error for one in scores} == {"MemoryError", None}


def test_the_traceback_shows_the_users_code_and_not_ours(patient: ScoringRouter) -> None:
    (raised, crashed) = score(patient, ["raise", "segfault"])
    assert 'raise ValueError("first line' in str(raised.traceback)
    assert "posttrain" not in str(raised.traceback).replace("posttrain_reward", "")
    assert "rewards.py" in str(crashed.traceback)


def test_printing_a_lot_does_no_harm_and_is_passed_on_in_part(
    patient: ScoringRouter, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [one.reward for one in score(patient, ["noise", "good"])] == [0.5, 0.25]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "[env.mine] " in shown.err
    assert len(shown.err) < 2000


def test_a_forked_child_that_comes_back_gives_no_second_verdict(patient: ScoringRouter) -> None:
    assert [one.reward for one in score(patient, ["fork", "fork", "good", "fork"])] == [0.75, 0.75, 0.25, 0.75]


def test_hanging_rewards_are_killed_after_the_timeout(hasty: ScoringRouter) -> None:
    scores = score(hasty, ["hang", "good", "hang in c", "hang deaf", "print and hang", "good"])
    assert [one.reward for one in scores] == [None, 0.25, None, None, None, 0.25]
    assert {one.error for one in scores if not one.scored} == {"timeout after 3 s"}
    assert "rewards.py" in str(scores[0].traceback), "the stack says where it hung"
    assert "rewards.py" in str(scores[2].traceback)


def test_what_a_killed_reward_started_is_killed_with_it(hasty: ScoringRouter, folder: Path) -> None:
    (folder / "children").write_text("")
    assert score(hasty, ["hang with children"])[0].error == "timeout after 3 s"
    children = [int(line) for line in (folder / "children").read_text().split()]
    assert len(children) == 2
    assert wait_until_gone(children) == []


def test_closing_ends_the_workers_and_the_children_they_left_behind(folder: Path) -> None:
    (folder / "children").write_text("")
    blocks = {
        "mine": {"function": "rewards.py:act", "num_workers": 1},
        "pid": {"function": "rewards.py:process_id", "num_workers": 1},
    }
    environment = build_environments(blocks, folder)
    assert [one.reward for one in score(environment, ["leave a child"] * 3)] == [1.0] * 3
    processes = [int(line) for line in (folder / "children").read_text().split()]
    assert len(processes) == 3
    processes.append(int(score(environment, ["x"], "pid")[0].reward or 0))
    assert all(alive(process) for process in processes)
    environment.close()
    environment.close()
    assert wait_until_gone(processes) == []


def test_rewards_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    responses = [f"answer {n}" for n in range(40)]
    results = []
    for num_workers in (1, 3):
        block = {"function": "rewards.py:random_reward", "num_workers": num_workers}
        with build_environments({"mine": block}, folder) as environment:
            results.append([one.reward for one in score(environment, responses)])
    assert results[0] == results[1]
    assert len(set(results[0])) == len(responses)


def test_the_pool_survives_hundreds_of_completions_of_which_many_fail(patient: ScoringRouter) -> None:
    responses = ["os._exit" if n % 20 == 0 else "raise" if n % 3 == 0 else "good" for n in range(400)]
    finished: list[int] = []
    tasks = [Task(draw=n, id=str(n), prompt="", prompt_ids=(), environment="mine") for n in range(len(responses))]
    scores = patient.score(tasks, [Completion((), (), text, "stop") for text in responses], finished.append)
    assert [one.reward for one in scores] == [0.25 if text == "good" else None for text in responses]
    assert sum(finished) == len(responses)


def test_a_large_completion_passes_through(folder: Path) -> None:
    (folder / "length.py").write_text("def length(prompt, response): return len(response) + len(prompt)\n")
    with build_environments({"mine": {"function": "length.py:length"}}, folder) as environment:
        assert score(environment, ["x" * 3_000_000, "\ud800 lone surrogate"])[0].reward == 3_000_001


def test_a_worker_that_died_while_idle_is_replaced_and_no_completion_pays(folder: Path) -> None:
    block = {"function": "rewards.py:process_id", "num_workers": 1}
    with build_environments({"mine": block}, folder) as environment:
        first = int(score(environment, ["x"])[0].reward or 0)
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone([first]) == []
        second = score(environment, ["x"])[0].reward
        assert second is not None
        assert second != first


def test_a_function_that_stops_importing_leaves_all_unscored_after_a_few_starts(tmp_path: Path) -> None:
    file = tmp_path / "flaky.py"
    file.write_text(
        f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\nimport no_such_module\ndef f(response): return 1\n"
    )
    with build_environments({"mine": {"function": "flaky.py:f", "num_workers": 2}}, tmp_path) as environment:
        scores = score(environment, ["a"] * 50)
        assert {one.reward for one in scores} == {None}
        assert "no worker of env.mine could start" in str(scores[0].error)
        assert "No module named 'no_such_module'" in str(scores[0].error)
        assert 1 <= len((tmp_path / "starts").read_text()) <= 4
        file.write_text("def f(response): return 1\n")  # fixed while the run goes on
        assert [one.reward for one in score(environment, ["a"] * 3)] == [1.0] * 3


def test_a_module_that_kills_its_worker_at_import_does_not_loop(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import os\nos._exit(4)\n")
    with build_environments({"mine": {"function": "exits.py:f"}}, tmp_path) as environment:
        assert "exited with code 4" in str(score(environment, ["a"] * 5)[4].error)


def test_a_reference_that_cannot_be_sent_is_unscored(patient: ScoringRouter) -> None:
    tasks = [Task(0, "0", "p", (), lambda: 1, "mine"), Task(1, "1", "p", (), 1, "mine")]
    scores = patient.score(tasks, [Completion((), (), "good", "stop")] * 2)
    assert "cannot be sent to a worker" in str(scores[0].error)
    assert [one.reward for one in scores] == [None, 0.25]


def test_workers_never_import_torch_and_neither_does_checking_a_config(folder: Path) -> None:
    with build_environments({"mine": {"function": "rewards.py:has_torch"}}, folder) as environment:
        assert score(environment, ["x"])[0].reward == 0.0
    code = (
        "import sys; from posttrain.environments import check_environments\n"
        "check_environments({'math': {}, 'mine': {'function': 'rewards.py:act'}})\n"
        "assert not {'torch', 'math_verify', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


DRIVER = """
    import os, sys
    from posttrain.environments import build_environments
    from posttrain.types import Completion, Task
    environment = build_environments({"mine": {"function": "act.py:act", "timeout_s": 600, "num_workers": 2}})
    tasks = [Task(n, str(n), "", (), None, "mine") for n in range(4)]
    environment.score(tasks, [Completion((), (), text, "stop") for text in ("fast", "fast", "sleep", "deaf")])
"""
DRIVEN = """
    import os, re, signal, subprocess, sys
    def act(response):
        if response == "fast":
            return 1
        child = subprocess.Popen(["sleep", "600"])
        with open("processes", "a") as file:
            file.write(f"{os.getpid()} {child.pid}\\n")
        if response == "sleep":
            child.wait()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        re.match(r"(a+)+$", "a" * 60 + "b")
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_workers_and_their_children_end_with_the_process_that_started_them(
    tmp_path: Path, ending: signal.Signals
) -> None:
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    (tmp_path / "act.py").write_text(textwrap.dedent(DRIVEN))
    driver = subprocess.Popen(
        [sys.executable, "driver.py"], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        give_up_at = time.monotonic() + 120
        noted = tmp_path / "processes"
        while not (noted.exists() and len(noted.read_text().split()) == 4):
            assert time.monotonic() < give_up_at, "the workers did not start"
            assert driver.poll() is None, driver.communicate()[1]
            time.sleep(0.05)
        processes = [int(word) for word in noted.read_text().split()]
        assert all(alive(process) for process in processes)
        os.killpg(driver.pid, ending)  # as the terminal does with Ctrl-C: to the whole foreground group
        error_output = driver.communicate(timeout=60)[1]
        assert wait_until_gone(processes) == []
        assert error_output.count("Traceback") == (0 if ending is signal.SIGKILL else 1), "only the driver may complain"
    finally:
        driver.kill()
        driver.wait()


def test_a_printed_key_of_several_lines_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["-----BEGIN X PRIVATE KEY-----", "MIIEplanted/abcd", "EFGHplanted+ij=", "-----END X PRIVATE KEY-----"]
    monkeypatch.setenv("SSH_PRIVATE_KEY", "\n".join(lines))
    (tmp_path / "tell.py").write_text(
        "import os\ndef tell(response):\n    print(os.environ['SSH_PRIVATE_KEY'], flush=True)\n    return 1.0\n"
    )
    with build_environments({"mine": {"function": "tell.py:tell", "num_workers": 1}}, tmp_path) as environment:
        assert score(environment, ["x"])[0].reward == 1.0
    shown = capsys.readouterr().err
    assert "[env.mine] ***" in shown
    assert "planted" not in shown
