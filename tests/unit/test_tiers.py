"""What `make test` runs follows from measured times: `tests/tiers.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tiers

pytest_plugins = ["pytester"]

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


def test_touched_files_are_first_and_every_file_is_reached_within_the_rotation(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcde":
        suite.makepyfile(**{f"test_{name}": "def test_it(): pass"})
    starts = set()
    for day in range(tiers.ROTATION_DAYS):
        monkeypatch.setenv("POSTTRAIN_TEST_DAY", str(day))
        record = suite.inline_run("-p", "no:xdist", "--rotate", "--first", "test_c.py")
        order = list(
            dict.fromkeys(report.nodeid.partition("::")[0] for report in record.getreports("pytest_runtest_logreport"))
        )
        assert order[0] == "test_c.py"
        assert len(order) == 6
        starts.add(order[1])
    assert len(starts) == tiers.ROTATION_DAYS


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
