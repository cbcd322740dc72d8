"""Processes of tests that die: `tests/lost_workers.py`."""

from __future__ import annotations

from pathlib import Path

import lost_workers
import pytest

pytest_plugins = ["pytester"]

# Both processes die at about the same time: each waits until the other has begun.
CASES = """
import os, pathlib, signal, time, pytest

def die(name, other, ending):
    here = pathlib.Path(os.environ["SCENE"])
    if (here / name).exists():
        return
    (here / name).touch()
    while not (here / other).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), ending)

@pytest.mark.xdist_group("a")
def test_a(): die("a", "b", signal.SIGKILL)

@pytest.mark.xdist_group("b")
def test_b(): die("b", "a", ENDING)

@pytest.mark.xdist_group("c")
def test_c(): pass
"""


@pytest.mark.full
@pytest.mark.parametrize(("ending", "outcomes"), [("SIGKILL", {"passed": 3}), ("SIGTERM", {"passed": 3, "failed": 1})])
def test_what_was_killed_from_outside_runs_again_and_every_other_end_is_a_failure(
    ending: str, outcomes: dict[str, int], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_it=CASES.replace("ENDING", f"signal.{ending}"))
    pytester.makeconftest("pytest_plugins = ['lost_workers']")
    monkeypatch.setenv("PYTHONPATH", str(Path(lost_workers.__file__).parent))
    monkeypatch.setenv("SCENE", str(pytester.path))
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    found = result.parseoutcomes()
    assert {name: found[name] for name in found if name in ("passed", "failed")} == outcomes
    result.stdout.fnmatch_lines(["run again: *test_it.py::test_a*signal 9 (SIGKILL)"])
    assert result.ret == (1 if "failed" in outcomes else 0)
