"""What `make test` runs follows from measured times: `tests/tiers.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tiers

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

CASES = """
import pytest

@pytest.fixture(scope="module")
def trained():
    return 1

@pytest.mark.parametrize("case", [1, 2, 3])
def test_cases(case): pass

def test_quick(): pass

def test_long(): pass

@pytest.mark.invariant
@pytest.mark.parametrize("case", [1, 2])
def test_promise(case): pass

def test_of_a_run(trained): pass

@pytest.mark.full
def test_cross_product(): pass
"""
TIMES = {"test_cases[1]": 0.9, "test_cases[2]": 1.0, "test_cases[3]": 1.0, "test_long": 4.0, "test_promise[1]": 9.0,
         "test_promise[2]": 9.0, "@trained": 5.0}  # fmt: skip
FAST = {"test_cases[1]", "test_cases[2]", "test_quick", "test_promise[1]"}
REST = {"test_cases[3]", "test_long", "test_promise[2]", "test_of_a_run", "test_cross_product"}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makepyfile(test_it=CASES)
    pytester.makeconftest("pytest_plugins = ['tiers']")
    durations = pytester.path / "durations.json"
    durations.write_text(json.dumps({"test_it.py": TIMES}))
    monkeypatch.setattr(tiers, "FILE", durations)
    monkeypatch.setattr(tiers, "LAST_RUN", pytester.path / "results" / "last.json")
    monkeypatch.delenv("POSTTRAIN_TEST_TIER", raising=False)
    return pytester


def names(result: pytest.HookRecorder) -> set[str]:
    passed, skipped, failed = result.listoutcomes()
    assert not skipped
    assert not failed
    return {report.nodeid.partition("::")[2] for report in passed}


@pytest.mark.parametrize(("tier", "expected"), [("fast", FAST), ("rest", REST), ("full", FAST | REST)])
def test_a_tier_is_chosen_by_times(suite: pytest.Pytester, tier: str, expected: set[str]) -> None:
    assert names(suite.inline_run("-p", "no:xdist", "--tier", tier)) == expected


def test_no_test_is_started_that_would_end_too_late(suite: pytest.Pytester) -> None:
    ran = names(suite.inline_run("-p", "no:xdist", "--until", str(time.time() + 3.0)))
    assert ran == {
        "test_cases[1]",
        "test_cases[2]",
        "test_cases[3]",
        "test_quick",
        "test_of_a_run",
        "test_cross_product",
    }


def test_touched_files_are_first_and_another_file_follows_each_day(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcde":
        suite.makepyfile(**{f"test_{name}": "def test_it(): pass"})
    tiers.FILE.write_text(json.dumps({f"test_{name}.py": {"test_it": 20.0} for name in "abcde"}))
    second = []
    for day in (0, tiers.ROTATION_DAYS // 2):
        monkeypatch.setenv("POSTTRAIN_TEST_DAY", str(day))
        record = suite.inline_run("-p", "no:xdist", "--rotate", "--first", "test_c.py")
        order = list(
            dict.fromkeys(report.nodeid.partition("::")[0] for report in record.getreports("pytest_runtest_logreport"))
        )
        assert order[0] == "test_c.py"
        assert len(order) == 6
        second.append(order[1])
    assert second[0] != second[1]


@pytest.mark.parametrize("touched", ["nothing", "everything"])
@pytest.mark.parametrize("of_ray", [True, False])
def test_every_file_is_run_within_the_rotation(of_ray: bool, touched: str) -> None:
    """By the measured times, also those of the fast tier: one worker for `DAY_S` a day, whatever was touched."""
    seconds = {}
    for name, times in tiers.read_durations().items():
        marks = [line for line in (ROOT / name).read_text().splitlines() if "mark.ray" in line]
        # A file with Ray in some of its tests counts in both lists.
        if marks if of_ray else not any(line.startswith("pytestmark") for line in marks):
            seconds[name] = sum(times.values())
    missing = set(seconds)
    for day in range(tiers.ROTATION_DAYS):
        left = tiers.DAY_S
        for name in tiers.rotated(seconds, 1000 + day, seconds if touched == "everything" else ()):
            left -= seconds[name]
            if left < 0:
                break
            missing.discard(name)
    assert not missing


def test_only_tests_that_exist_have_times() -> None:
    """The names of functions; what their cases are called is known after collection only."""
    for name, times in tiers.read_durations().items():
        functions = {one.partition("[")[0].rpartition("::")[2] for one in times if not one.startswith("@")}
        text = (ROOT / name).read_text()
        assert not [function for function in functions if f"def {function}(" not in text], name


def test_times_are_recorded(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_it="import time, pytest\n"
        "@pytest.fixture(scope='module')\ndef slow(): time.sleep(0.5)\n"
        "def test_a(slow): time.sleep(0.3)\n"
        "def test_b(slow): pass\n"
    )
    suite.inline_run("-p", "no:xdist", "--record-durations")
    times = json.loads(Path(tiers.FILE).read_text())["test_it.py"]
    assert times.keys() == {"@slow", "test_a"}
    assert times["@slow"] >= 0.5
    assert 0.3 <= times["test_a"] < 0.5


def test_fixtures_of_a_file_end_before_another_file_begins(suite: pytest.Pytester) -> None:
    """Also where the last test of the first file is left out for lack of time."""
    shared = "import pytest\n@pytest.fixture(scope='module')\ndef shared(): yield\ndef test_a(shared): pass\n"
    suite.makepyfile(test_it=shared + "def test_b(shared): pass\n", test_next=shared)
    tiers.FILE.write_text(json.dumps({"test_it.py": {"test_b": 60.0}}))
    record = suite.inline_run("-p", "no:xdist", "--until", str(time.time() + 30.0))
    assert names(record) == {"test_a"}
    assert len(record.getreports("pytest_runtest_logreport")) == 6
