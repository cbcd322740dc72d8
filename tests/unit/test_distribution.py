"""How tests are distributed over processes: `tests/distribution.py`."""

from __future__ import annotations

import re
from pathlib import Path

import distribution
import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest("pytest_plugins = ['distribution']")
    pytester.makeini("[pytest]\nmarkers = ray: needs Ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(distribution.__file__).parent))
    monkeypatch.setenv("SCENE", str(pytester.path))
    return pytester


def run(suite: pytest.Pytester) -> pytest.RunResult:
    return suite.runpytest_subprocess("-v", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")


@pytest.mark.full
def test_tests_of_a_file_share_a_process_and_so_do_those_with_ray(suite: pytest.Pytester) -> None:
    marked = "import pytest\n@pytest.mark.ray\ndef test_ray(): pass\n"
    plain = "import time\ndef test_one(): time.sleep(0.2)\ndef test_two(): time.sleep(0.2)\n"
    suite.makepyfile(test_a=marked + plain, test_b=plain, test_c=marked + plain)
    lines = re.findall(r"\[(gw\d)\].*PASSED (test_\w\.py)::(test_\w+)", run(suite).stdout.str())
    assert len(lines) == 8
    places: dict[str, set[str]] = {}
    for worker, file, name in lines:
        places.setdefault(name if name == "test_ray" else file, set()).add(worker)
    assert all(len(workers) == 1 for workers in places.values())
    assert len({*places["test_a.py"], *places["test_b.py"], *places["test_c.py"]}) == 2


# Both processes die at about the same time: each waits until the other has begun.
DYING = """
import os, pathlib, signal, time

def test_it():
    here, name = pathlib.Path(os.environ["SCENE"]), "NAME"
    if (here / name).exists() and not AGAIN:
        return
    (here / name).touch()
    while not (here / "OTHER").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def test_another(): pass
"""


@pytest.mark.full
@pytest.mark.parametrize(("again", "outcomes"), [(False, {"passed": 4}), (True, {"passed": 3, "failed": 1})])
def test_a_test_whose_process_died_runs_once_more(
    again: bool, outcomes: dict[str, int], suite: pytest.Pytester
) -> None:
    for name, other, dies_again in (("a", "b", False), ("b", "a", again)):
        code = DYING.replace("NAME", name).replace("OTHER", other).replace("AGAIN", str(dies_again))
        suite.makepyfile(**{f"test_{name}": code})
    result = run(suite)
    found = result.parseoutcomes()
    assert {name: found[name] for name in found if name in ("passed", "failed")} == outcomes
    result.stdout.fnmatch_lines(["run again: *test_a.py::test_it*signal 9 (SIGKILL)"])
    assert result.ret == (1 if again else 0)
