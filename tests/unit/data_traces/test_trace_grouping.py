"""Groups do not depend on how much fits into memory, and neither does their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_files import chat_trace, random_rows, trace, write_lines, write_parquet

from posttrain.data.traces import PairRules, ReadReport, TraceFilters, iter_pair_rows, iter_trace_groups
from posttrain.data.traces import grouping as grouping_module


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("traces")
    for number in range(3):
        write_parquet(folder / f"{number}.parquet", random_rows(700, 150, seed=number))
    return str(folder)


@pytest.mark.parametrize(("memory_bytes", "bits"), [(1, 6), (3000, 1), (40_000, 6)])
def test_spilling_changes_nothing(
    path: str, memory_bytes: int, bits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, pairs = list(iter_trace_groups(path)), list(iter_pair_rows(path))
    assert len(expected) == 150
    monkeypatch.setattr(grouping_module, "BITS_PER_CUT", bits)
    monkeypatch.setattr(grouping_module, "DEEPEST_CUT", 8)
    monkeypatch.setattr(grouping_module, "MAX_OPEN_RUNS", 7)  # several rounds of merging
    monkeypatch.setattr("posttrain.data.traces.files.BLOCK_BYTES", 4000)
    options: dict[str, Any] = {"memory_bytes": memory_bytes, "scratch": str(tmp_path)}
    assert list(iter_trace_groups(path, **options)) == expected
    assert list(iter_pair_rows(path, **options)) == pairs
    assert not list(tmp_path.iterdir())


def test_duplicates_are_found_across_spilled_parts(path: str) -> None:
    one, other = ReadReport(), ReadReport()
    filters = TraceFilters(duplicates="exact")
    assert list(iter_trace_groups(path, None, filters, report=one)) == list(
        iter_trace_groups(path, None, filters, report=other, memory_bytes=2000)
    )
    assert one.filtered["exact duplicate"].count == other.filtered["exact duplicate"].count > 100


def test_a_group_larger_than_memory_is_still_one_group(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [trace("same", f"answer {n}", n % 2) for n in range(500)])
    [group] = iter_trace_groups(path, memory_bytes=500)
    assert [one.response for one in group.traces] == [f"answer {n}" for n in range(500)]


def test_temporary_files_go_when_the_reader_stops_early(path: str, tmp_path: Path) -> None:
    groups = iter_trace_groups(path, memory_bytes=1000, scratch=str(tmp_path))
    next(groups)
    assert list(tmp_path.iterdir())
    groups.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_group_ids_keep_equal_prompts_apart_and_different_prompts_too(tmp_path: Path) -> None:
    rows = [
        chat_trace("hello", "a", 1, group_id="one"),
        chat_trace("hello", "b", 0, group_id="two"),
        chat_trace("hi", "c", 0, group_id="one"),
        chat_trace("hello", "d", 0, group_id="one"),
    ]
    path = write_lines(tmp_path / "t.jsonl", rows)
    report = ReadReport()
    split = [[one.response for one in group.traces] for group in iter_trace_groups(path, report=report)]
    assert split == [["a", "d"], ["b"], ["c"]]
    assert report.ids_with_several_prompts == 1
    # An answer is only preferred to another answer to the very same prompt.
    [pair] = iter_pair_rows(path, rules=PairRules(strategy="all"))
    assert (pair["chosen_response"], pair["rejected_response"]) == ("a", "d")
