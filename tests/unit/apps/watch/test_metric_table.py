"""Metrics as the dashboard reads them: only what is new, and again from the start when a resume has cut the file."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.apps.watch.metric_table import MetricTable, tail_rows
from posttrain.apps.watch.places import LocalPlace


class CountingPlace(LocalPlace):
    num_read = 0

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        content = super().read(name, start, end)
        self.num_read += len(content)
        return content


def line(step: int, **values: float | None) -> str:
    return json.dumps({"step": step, **{f"train/{name}": value for name, value in values.items()}}) + "\n"


def table_of(tmp_path: Path, text: str) -> tuple[MetricTable, Path, CountingPlace]:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    place = CountingPlace(tmp_path)
    return MetricTable(place).refresh(), file, place


def test_new_rows_are_read_without_the_old_ones(tmp_path: Path) -> None:
    table, file, place = table_of(tmp_path, "".join(line(step, reward=step) for step in range(1, 501)))
    place.num_read = 0
    with file.open("a") as more:
        more.write(line(501, reward=501))
    steps, values = table.refresh().series("train/reward")
    assert steps.tolist() == values.tolist() == list(range(1, 502))
    assert place.num_read < 600


def test_unchanged_file_is_not_read(tmp_path: Path) -> None:
    table, _, place = table_of(tmp_path, line(1, reward=1.0))
    place.num_read = 0
    table.refresh()
    assert place.num_read == 0


def test_incomplete_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    whole = line(2, reward=2.0)
    table, file, _ = table_of(tmp_path, line(1, reward=1.0) + whole[:9])
    assert table.last_step == 1
    with file.open("a") as more:
        more.write(whole[9:])
    assert table.refresh().last_step == 2


def test_file_that_was_cut_by_a_resume_is_read_again(tmp_path: Path) -> None:
    table, file, _ = table_of(tmp_path, "".join(line(step, reward=0.0) for step in range(1, 11)))
    file.write_text(
        "".join(line(step, reward=1.0 if step > 5 else 0.0) for step in range(1, 21))
    )  # cut at 5, then longer
    steps, values = table.refresh().series("train/reward")
    assert steps.tolist() == list(range(1, 21))
    assert values.sum() == 15


def test_deleted_file_empties_the_table(tmp_path: Path) -> None:
    table, file, _ = table_of(tmp_path, line(1, reward=1.0))
    file.unlink()
    assert table.refresh().keys == []


def test_null_is_a_gap_and_an_absent_key_is_none(tmp_path: Path) -> None:
    table, _, _ = table_of(tmp_path, line(1, reward=1.0, kl=0.1) + line(2, reward=None) + line(3, reward=3.0, kl=0.3))
    assert table.curve("train/reward", 10) == {"steps": [1, 2, 3], "mean": [1.0, None, 3.0]}
    assert table.curve("train/kl", 10) == {"steps": [1, 3], "mean": [0.1, 0.3]}
    assert table.curve("train/unknown", 10) == {"steps": [], "mean": []}


def test_validation_row_beside_its_step_is_merged(tmp_path: Path) -> None:
    table, _, _ = table_of(tmp_path, line(1, reward=1.0) + json.dumps({"step": 1, "validation/accuracy": 0.5}) + "\n")
    assert table.curve("validation/accuracy", 10) == {"steps": [1], "mean": [0.5]}
    assert table.last("train/reward") == 1.0


def test_curve_of_a_range_of_steps(tmp_path: Path) -> None:
    table, _, _ = table_of(tmp_path, "".join(line(step, x=step) for step in range(100)))
    assert table.curve("train/x", 10, first=90, last=93)["steps"] == [90, 91, 92, 93]


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    bad = '[1]\nnot json\n{"step": "x"}\n{"step": 1e400}\n' + "[" * 5000 + "\n"
    table, _, _ = table_of(tmp_path, bad + line(1, reward=1.0))
    assert table.series("train/reward")[0].tolist() == [1]


def test_tail_reads_the_end_only(tmp_path: Path) -> None:
    _, _, place = table_of(tmp_path, "".join(line(step, reward=step) for step in range(10_000)))
    place.num_read = 0
    rows = tail_rows(place, "metrics.jsonl", 1000)
    assert rows[-1]["step"] == 9999
    assert place.num_read <= 1000
