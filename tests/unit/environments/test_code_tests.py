"""Code is judged by its tests; what is not the code's fault is not judged at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from posttrain.config.rewards import parse_reward
from posttrain.environments import build_environments, check_environments, code_tests
from posttrain.environments.code_suites import CallSuite, ProgramSuite, StepSuite, read_suite
from posttrain.environments.code_tests import code_scorer, extracted_code
from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.environments.sandbox import levels
from posttrain.environments.sandbox.program import SandboxFailure, SandboxUnavailable
from posttrain.environments.sandbox.sandbox import Sandbox
from posttrain.errors import InputError
from posttrain.types import Completion, Task

Scorer = Callable[[ScoringItem], dict[str, float]]


def scorer(**keys: Any) -> Scorer:
    try:
        return code_scorer({**parse_reward({"type": "code", **keys}).model_dump(mode="json"), "base_folder": "."})
    except BadSetup as error:
        if "no sandbox for" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def all_passed() -> Scorer:
    return scorer(time_limit_s=2)


@pytest.fixture(scope="module")
def share_passed() -> Scorer:
    return scorer(reward="share_passed", time_limit_s=1)


def item(code: str, tests: Any, **metadata: Any) -> ScoringItem:
    return ScoringItem("", f"Here it is:\n```python\n{code}\n```\nDone.", tests, metadata=metadata)


ADD = "def add(a, b):\n    return a + b"
HUMAN_EVAL = (
    "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"
)
GOLD: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "assert lines": (ADD, "assert add(1, 2) == 3\nassert add(0, 0) == 0", {}),
    "assert lines after set-up": (ADD, "x = 5\nassert add(1, x) == 6", {}),
    "a list of asserts": (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], {}),
    "a list as JSON": (ADD, json.dumps(["assert add(1, 2) == 3"]), {}),
    "MBPP": (ADD, None, {"test_list": ["assert m.isclose(add(1, 2), 3)"], "test_setup_code": "import math as m"}),
    "HumanEval": (ADD, HUMAN_EVAL, {"entry_point": "add"}),
    "HumanEval with its call": (ADD, HUMAN_EVAL + "\ncheck(add)\n", {}),
    "HumanEval in one map": (ADD, {"test": HUMAN_EVAL, "entry_point": "add"}, {}),
    "test functions": (
        ADD,
        "def test_one():\n    assert add(1, 2) == 3\n\ndef test_two():\n    assert add(1, 1) == 2\n",
        {},
    ),
    "programs": (
        "print(sum(map(int, input().split())))",
        {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7  \n\n"]},
        {},
    ),
    "programs as a list": ("print(input()[::-1])", [{"input": "ab", "output": "ba"}], {}),
    "APPS calls": (ADD, {"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [3, 0]}, {}),
    "calls of a method": (
        "class Solution:\n    def f(self, x):\n        return (x, x / 3)",
        {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 0.33333333333333331]]},
        {},
    ),
    "LiveCodeBench calls": (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional"}], {"func_name": "add"}),
    "as in a file of its own": (f"{ADD}\ndef f(x: int): ...", ["assert f.__annotations__['x'] is int"], {}),
}


@pytest.mark.parametrize("form", GOLD)
def test_the_gold_answer_scores_one_and_a_wrong_one_zero(form: str, all_passed: Scorer) -> None:
    code, tests, metadata = GOLD[form]
    assert all_passed(item(code, tests, **metadata))["reward"] == 1.0
    wrong = "def add(a, b):\n    return 77\nprint('wrong')\nclass Solution:\n    def f(self, x):\n        return x"
    assert all_passed(item(wrong, tests, **metadata))["reward"] == 0.0


def test_share_passed_is_the_share_and_all_passed_all_or_nothing(all_passed: Scorer, share_passed: Scorer) -> None:
    half = item(
        "def f(x):\n    return 2", ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 2", "assert f(4) == 5"]
    )
    assert share_passed(half) == {"reward": 0.5, "tests_passed": 2.0, "tests_total": 4.0, "has_code": 1.0}
    assert all_passed(half)["reward"] == 0.0
    programs = item("print(3)", {"inputs": ["", "", ""], "outputs": ["3", "4", "3"]})
    assert share_passed(programs)["reward"] == pytest.approx(2 / 3)
    calls = item("def f(x):\n    return 2", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]})
    assert share_passed(calls)["reward"] == 0.5
    hangs = item("def f(x):\n    while x > 1: pass\n    return x", [f"assert f({x}) == {x}" for x in (1, 2, 0)])
    assert share_passed(hangs)["tests_passed"] == 1.0, "before it hung"


MISBEHAVIOUR = {
    "raises": "def f(x):\n    raise ValueError",
    "does not compile": "def f(x:\n",
    "never ends": "def f(x):\n    while True: pass",
    "sleeps": "import time\ndef f(x):\n    time.sleep(60)",
    "crashes": "import ctypes\ndef f(x):\n    ctypes.string_at(0)",
    "exits well": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits in the test": "import os\ndef f(x):\n    os._exit(0)",
    "raises SystemExit in the test": "def f(x):\n    raise SystemExit(0)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "kills everybody": "import os\nos.kill(-1, 9)\nos.kill(1, 9)\ndef f(x): return 0",
    "eats memory": "def f(x):\n    return len(bytearray(8 << 30))",
    "prints for ever": "def f(x):\n    while True: print('x' * 10000)",
    "forks for ever": "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "claims to have passed": "import os\nos.write(3, b'0 passed\\n1 passed\\n' * 9)\nprint('passed')\nos._exit(0)",
    "garbles the report": "import os\nos.write(3, bytes(range(256)) * 100)\nos._exit(0)",
    "closes every pipe": "import os\nos.closerange(0, 256)\ndef f(x): return 0",
    "replaces print and exit": "import builtins, os\nos._exit = builtins.print = lambda *a: None\nraise BaseException",
    "replaces exec": "import builtins\nbuiltins.exec = lambda *a, **k: ''\ndef f(x): return 0",
    "replaces compile": "import builtins\nbuiltins.compile = lambda *a, **k: ''\ndef f(x): return 0",
}


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_whatever_else_code_does_is_a_reward_of_zero_and_never_unscored(what: str, share_passed: Scorer) -> None:
    found = share_passed(item(MISBEHAVIOUR[what], ["assert f(1) == 1"]))
    assert found["reward"] == 0.0


def test_a_set_up_that_fails_is_not_the_codes_fault(all_passed: Scorer) -> None:
    metadata = {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import no_such_module"}
    with pytest.raises(Unscored, match=r"set-up.*no_such_module"):
        all_passed(item(ADD, None, **metadata))
    forged = "import os\nos.write(3, b'setup ImportError\\n' * 2)\ndef add(a, b):\n    return 0"
    assert all_passed(item(forged, ["assert add(1, 2) == 3"]))["reward"] == 0


def test_code_cannot_read_what_is_expected_of_it(share_passed: Scorer) -> None:
    """Of programs and calls the expected values never enter the sandbox."""
    spy = "import os, sys\nfound = [open(os.path.join(r, n)).read() for r, _, names in os.walk('.') for n in names]\n"
    programs = item(spy + "print('42' * 3 in str(found))", {"inputs": ["", ""], "outputs": ["424242", "False"]})
    assert share_passed(programs)["tests_passed"] == 1.0
    equal_to_all = "class Any:\n    def __eq__(self, other): return True\ndef f(): return Any()"
    assert share_passed(item(equal_to_all, {"fn_name": "f", "inputs": [[]], "outputs": [1]}))["reward"] == 0.0


def test_a_failing_sandbox_is_unscored_after_a_second_try(monkeypatch: pytest.MonkeyPatch, all_passed: Scorer) -> None:
    real, calls = Sandbox.run, []

    def failing(times: int) -> Callable[..., Any]:
        def run(self: Sandbox, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) <= times:
                raise SandboxFailure("unshare(pid namespace): No space left on device")
            return real(self, *arguments)

        return run

    right = item(ADD, ["assert add(1, 2) == 3"])
    monkeypatch.setattr(Sandbox, "run", failing(1))
    assert all_passed(right)["reward"] == 1.0
    calls.clear()
    monkeypatch.setattr(Sandbox, "run", failing(2))
    with pytest.raises(Unscored, match="the sandbox failed: unshare"):
        all_passed(right)


def test_a_sandbox_that_breaks_during_a_run_is_unscored_for_right_and_wrong_code_alike(share_passed: Scorer) -> None:
    """The interpreter that the scorer found is gone: nothing the code does can be told from that."""
    bench = next(
        cell.cell_contents for cell in share_passed.__closure__ or () if hasattr(cell.cell_contents, "sandbox")
    )
    broken = code_tests._Bench(
        sandbox=bench.sandbox,
        interpreter=levels.Interpreter("/no/such/python", ()),
        limits=bench.limits,
        budget_s=10.0,
        sys_path=(),
        output_match="lines",
    )
    for code in (ADD, "raise ValueError"):
        with pytest.raises(Unscored, match="the sandbox failed"):
            broken.passed(code, StepSuite((("assert add(1, 2) == 3", True),)), stop_early=False)


@pytest.mark.parametrize(("program_s", "overhead_s"), [(0.7, 0.0), (0.05, 1.0)], ids=["slow code", "slow machine"])
def test_out_of_time_is_unscored_unless_the_code_used_the_time(
    program_s: float, overhead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = scorer(time_limit_s=1, wall_time_limit_s=1, timeout_s=2.5, reward="share_passed")
    programs = item("print(1)", {"inputs": [""] * 9, "outputs": ["1"] * 9})
    real_run, now = Sandbox.run, 100.0

    def timed_run(self: Sandbox, *arguments: Any) -> Any:
        """The real outcome, at the speed that is to be tested."""
        nonlocal now
        now += program_s + overhead_s
        program, limits, *rest = arguments
        return replace(real_run(self, program, replace(limits, cpu_s=60, wall_s=60.0), *rest), wall_s=program_s)

    monkeypatch.setattr(Sandbox, "run", timed_run)
    monkeypatch.setattr(code_tests, "time", SimpleNamespace(monotonic=lambda: now))
    if overhead_s:
        with pytest.raises(Unscored, match="this machine ran"):
            score(programs)
    else:
        assert 0 < score(programs)["tests_passed"] < 9


@pytest.mark.parametrize(
    ("tests", "metadata", "reason"),
    [
        (None, {}, "has no tests"),
        ("", {}, "has no tests"),
        ("assert (", {}, "is not Python"),
        ("x = 1", {}, "no assert line"),
        (HUMAN_EVAL, {}, "entry_point"),
        (HUMAN_EVAL, {"entry_point": "f(); import os"}, "is not a name"),
        ({"inputs": ["1"], "outputs": []}, {}, "as many inputs as outputs"),
        ([{"input": "1"}], {}, "test 1 of the task has no `input` or no `output`"),
        (["assert True", "assert ("], {}, "test 2 of the task is not Python"),
        ([{"input": "x", "output": "3", "testtype": "functional"}], {"func_name": "f"}, "not JSON"),
        (5, {}, "cannot be read"),
    ],
)
def test_tests_that_cannot_be_read_leave_the_code_unscored(
    tests: Any, metadata: dict[str, Any], reason: str, all_passed: Scorer
) -> None:
    with pytest.raises(Unscored, match=reason):
        all_passed(item(ADD, tests, **metadata))


def test_three_kinds_of_tests_are_recognised() -> None:
    assert isinstance(read_suite({"inputs": ["1"], "outputs": ["1"]}, {}), ProgramSuite)
    assert read_suite({"inputs": [["a", "b"]], "outputs": [["c"]]}, {}) == ProgramSuite((("a\nb", "c"),))
    assert isinstance(read_suite({"inputs": [[1]], "outputs": [1], "fn_name": "f"}, {}), CallSuite)
    assert read_suite("x = 1\nassert x", {}) == StepSuite((("x = 1", False), ("assert x", True)))


@pytest.mark.parametrize(
    ("response", "code_block", "code"),
    [
        ("```python\na\n```\nthen\n```python\nb\n```", "python", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "python", "a\n"),
        ("```python\na\n```\n```text\nb\n```", "any", "b\n"),
        ("```py\na\n```", "python", "a\n"),
        ("```Python title=x\na\n```", "python", "a\n"),
        ("- item:\n  ```python\n  if a:\n    b\n  ```", "python", "if a:\n  b\n"),
        ("```\na\n```", "python", None),
        ("```\na\n```", "any", "a\n"),
        ("```python\nnever closed", "python", None),
        ("say ```python a``` here", "python", None),
        ("no code", "python", None),
        ("x = 1", "whole", "x = 1"),
    ],
)
def test_which_block_is_the_code(response: str, code_block: str, code: str | None) -> None:
    assert extracted_code(response, code_block) == code


def test_an_answer_without_code_is_wrong(all_passed: Scorer) -> None:
    found = all_passed(ScoringItem("", "I do not know.", ["assert f(1)"]))
    assert (found["reward"], found["has_code"]) == (0.0, 0.0)


def test_settings_change_what_they_say() -> None:
    tokens = item("print('1   2')", {"inputs": [""], "outputs": ["1 2"]})
    assert scorer()(tokens)["reward"] == 0.0
    assert scorer(output_match="tokens")(tokens)["reward"] == 1.0
    assert scorer(tests_key="mine")(item(ADD, None, mine=["assert add(1, 1) == 2"]))["reward"] == 1.0
    with pytest.raises(Unscored, match="no 'mine'; it has other"):
        scorer(tests_key="mine")(item(ADD, None, other=1))
    writes = item("open('f', 'wb').write(b'x' * (3 << 20))\nprint(1)", {"inputs": [""], "outputs": ["1"]})
    assert scorer(max_files_mib=2)(writes)["reward"] == 0.0
    assert scorer(max_files_mib=8)(writes)["reward"] == 1.0
    hoards = item("x = bytearray(300 << 20)\nprint(1)", {"inputs": [""], "outputs": ["1"]})
    assert scorer(max_memory_mib=200)(hoards)["reward"] == 0.0
    assert scorer(max_memory_mib=512)(hoards)["reward"] == 1.0
    prints = item("print('x' * 5000)", {"inputs": [""], "outputs": ["x" * 5000]})
    assert scorer(max_output_kib=2)(prints)["reward"] == 0.0
    assert scorer(max_output_kib=16)(prints)["reward"] == 1.0


def test_packages_and_paths_are_visible_on_request(tmp_path: Path) -> None:
    imports = item("import psutil", ["assert psutil"])
    assert scorer()(imports)["reward"] == 0.0
    assert scorer(site_packages=True)(imports)["reward"] == 1.0
    words = tmp_path / "words.txt"
    words.write_text("one")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    reads = item(f"words = open({str(words)!r}).read()", ["assert words == 'one'"])
    assert scorer()(reads)["reward"] == 0.0
    assert scorer(read_only_paths=[str(words)])(reads)["reward"] == 1.0


def test_a_sandbox_that_is_not_strict_enough_ends_the_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable = Mock(side_effect=SandboxUnavailable("level 'namespaces' does not work here: sysctl …"))
    monkeypatch.setattr(code_tests, "open_sandbox", unavailable)
    with pytest.raises(BadSetup, match="`sandbox: strict`: level 'namespaces' does not work"):
        code_scorer(parse_reward({"type": "code"}).model_dump())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"timeout_s": 5}, r"env\.code cannot start: timeout_s is 5,(.|\n)*at least 17"),
        ({"python": "/no/such/python"}, "cannot be used as a Python"),
        ({"sandbox": "loose"}, "sandbox"),
        ({"sandbx": "strict"}, "did you mean 'sandbox'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_environments({"code": {"type": "code", **keys}})


def test_in_a_pool_of_workers_each_answer_gets_its_own_verdict() -> None:
    scorer()  # skips where there is no sandbox
    task = Task(0, "t", "", (), reference=["assert add(1, 2) == 3"], environment="code")
    answers = [ADD, "def add(a, b): return 0", "import os\nos._exit(0)", "while True: pass"]
    completions = [Completion((), (), f"```python\n{code}\n```", "stop") for code in answers]
    tasks = [task, task, task, task]
    broken = Task(1, "u", "", (), reference="assert (", environment="code")
    blocks = {"code": {"type": "code", "time_limit_s": 1, "wall_time_limit_s": 6, "num_workers": 2}}
    with build_environments(blocks) as environments:
        scores = environments.score([*tasks, broken], [*completions, completions[0]])
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0, 0.0, None]
    assert scores[0].parts == {"tests_passed": 1.0, "tests_total": 1.0, "has_code": 1.0}
    assert "is not Python" in (scores[4].error or "")
