"""Filters leave out what they should, count it by reason, and refuse what makes no sense."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from trace_files import is_complete, trace, write_lines, write_parquet

from posttrain.data.errors import DataError
from posttrain.data.traces import ReadReport, TraceColumns, TraceFilters, iter_trace_groups

ROWS = [
    trace("q", "a", 0.2, model="m1", time="2026-01-01", level=1, ok=True),
    trace("q", "b", 0.5, model="m2", time="2026-02-01T12:00:00", level=2, ok=False),
    trace("q", "c", 0.9, model="m3", time="2026-02-01T23:30:00-02:00", level=None, ok=True),
    trace("q", "d", 1.0, model=None, time=None, level=2, ok=None),
]


def kept(path: str, filters: TraceFilters) -> tuple[str, dict[str, int]]:
    report = ReadReport()
    groups = iter_trace_groups(path, TraceColumns(), filters, report=report)
    responses = "".join(str(one.response) for group in groups for one in group.traces)
    assert is_complete(report)
    return responses, {reason: tally.count for reason, tally in report.filtered.items()}


@pytest.fixture(params=["t.jsonl", "t.parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (write_parquet if request.param == "t.parquet" else write_lines)(tmp_path / request.param, ROWS)


def test_a_reward_at_the_threshold_passes(path: str) -> None:
    found = kept(path, TraceFilters(min_reward_threshold=0.5))
    assert found == ("bcd", {"reward below min_reward_threshold": 1})


def test_dates(path: str) -> None:
    assert kept(path, TraceFilters(since="2026-02-01")) == ("bc", {"no readable time": 1, "outside the dates": 1})
    # 23:30 at -02:00 is the next day in UTC.
    assert kept(path, TraceFilters(since=date(2026, 2, 1), until="2026-02-02"))[0] == "b"
    assert kept(path, TraceFilters(until="2026-02-01T12:00:00"))[0] == "a"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"model": "m1"}, "a"),
        ({"model": ["m1", "m3"]}, "ac"),
        ({"model": None}, "d"),
        ({"level": 2}, "bd"),
        ({"level": "2"}, "bd"),
        ({"ok": "true"}, "ac"),
        ({"ok": True}, "ac"),
        ({"ok": False, "model": "m2"}, "b"),
        ({"model": "M1"}, ""),
    ],
)
def test_columns_that_must_have_a_value(path: str, where: dict[str, Any], expected: str) -> None:
    found, counts = kept(path, TraceFilters(where=where))
    assert found == expected
    assert sum(counts.values()) == 4 - len(expected)


def test_times_as_numbers_and_as_timestamps(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    moment = datetime(2026, 3, 1, tzinfo=UTC)
    for number, value in enumerate([moment.timestamp(), 1000 * moment.timestamp(), moment]):
        path = write_parquet(tmp_path / f"{number}.parquet", [trace("q", "a", 1.0, time=value)])
        [group] = iter_trace_groups(path)
        assert group.traces[0].time == moment
        assert kept(path, TraceFilters(since="2026-03-01", until="2026-03-02"))[0] == "a"


def test_a_column_that_is_not_there(path: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'modle' \(where\) \(did you mean 'model'\?\)"):
        kept(path, TraceFilters(where={"modle": "m1"}))
    timeless = write_lines(tmp_path / "x.jsonl", [trace("q", "a", 1)])
    with pytest.raises(DataError, match="need a column with the time"):
        kept(timeless, TraceFilters(since="2026-01-01"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"since": "soon"}, "since: 'soon' is not a date"),
        ({"since": "2026-02-01", "until": "2026-02-01"}, "no trace could pass"),
        ({"duplicates": "some"}, "duplicates is 'some'.*'exact'"),
        ({"near_similarity": 0.2}, "near_similarity is 0.2.*0.7"),
        ({"min_reward_threshold": float("nan")}, "min_reward_threshold is nan.*finite number"),
    ],
)
def test_filters_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TraceFilters(**wrong)
