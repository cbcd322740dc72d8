"""NaN and infinity are refused like null wherever a row needs a text, in every reader, with the row and the column."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from pyarrow import parquet

from posttrain.apps.evaluate.benchmarks import all_final_answers, boxed_in_solution, listed_choices, shuffled_choices
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import (
    load_example_dataset,
    load_judged_dataset,
    load_pair_dataset,
    load_task_dataset,
)
from posttrain.data.errors import DataError
from posttrain.data.sources import Row
from posttrain.data.traces import ReadReport, iter_trace_groups
from posttrain.environments.agreement import Columns, read_samples

CHAT = ChatFormat(byte_tokenizer(CHATML))
NOT_NUMBERS = [math.nan, math.inf, -math.inf]


def tasks(path: str) -> object:
    return load_task_dataset({"data_path": path}, None, CHAT, max_prompt_tokens=None, seed=0)


def examples(path: str) -> object:
    return load_example_dataset({"data_path": path}, None, CHAT, max_total_tokens=1000, only_unmask_final=False, seed=0)


def pairs(path: str) -> object:
    return load_pair_dataset({"data_path": path}, None, CHAT, max_total_tokens=1000, seed=0)


def judged(path: str) -> object:
    return load_judged_dataset({"data_path": path}, None, CHAT, max_total_tokens=1000, seed=0)


def stored(path: str) -> object:
    return read_samples(path, Columns())


RESPONSES = {"input": "2+2?", "output": "4"}
PAIRS = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
JUDGED = {"prompt": "2+2?", "completion": "4", "label": True}
STORED = {"prompt": "2+2?", "response": "4", "reference": "4"}
CASES = [
    *((tasks, RESPONSES, column) for column in RESPONSES),
    *((examples, RESPONSES, column) for column in RESPONSES),
    *((pairs, PAIRS, column) for column in PAIRS),
    *((judged, JUDGED, column) for column in JUDGED),
    *((stored, STORED, column) for column in STORED),
]


@pytest.mark.parametrize("number", NOT_NUMBERS, ids=str)
@pytest.mark.parametrize(
    ("read", "row", "column"), CASES, ids=lambda value: getattr(value, "__name__", str(value)[:12])
)
def test_the_row_and_the_column_are_named(
    read: Callable[[str], object], row: dict[str, Any], column: str, number: float, tmp_path: Path
) -> None:
    rows = [row, {**row, column: number}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(DataError, match=f"row 2.*'{column}'"):
        read(str(file))


def test_a_column_of_parquet(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"input": [1.0, math.nan], "output": ["1", "2"]}), file)
    with pytest.raises(DataError, match="row 2: 'input' is nan; every row needs a value"):
        tasks(str(file))


def test_traces_count_them_as_rows_without_a_text(tmp_path: Path) -> None:
    good = {"input": "2+2?", "output": "4", "final_reward": 1.0, "reference": math.nan}
    rows = [good, {**good, "input": math.nan}, {**good, "output": math.inf}]
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    report = ReadReport()
    groups = list(iter_trace_groups(str(file), report=report))
    assert {reason: tally.count for reason, tally in report.problems.items()} == {"no prompt": 1, "no response": 1}
    assert [trace.reference for group in groups for trace in group.traces] == [None]


@pytest.mark.parametrize("number", NOT_NUMBERS, ids=str)
def test_benchmarks(number: float) -> None:
    choices = {
        "Correct Answer": "a",
        "Incorrect Answer 1": "b",
        "Incorrect Answer 2": "c",
        "Incorrect Answer 3": number,
    }
    readers: list[tuple[Callable[[Row], object], dict[str, Any]]] = [
        (boxed_in_solution, {"answer": number}),
        (all_final_answers, {"final_answer": [number]}),
        (lambda row: listed_choices(row, 0), {"choices": ["a", number], "answer": 0}),
        (lambda row: shuffled_choices(row, 0), choices),
    ]
    for read, values in readers:
        with pytest.raises(DataError, match=r"test\.jsonl, row 3"):
            read(Row(values, "test.jsonl", 3))


def test_a_number_stays_a_number_as_a_reference(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"input": "a", "output": 0.5}) + "\n" + json.dumps({"input": "b", "output": [2.5]}) + "\n"
    )
    assert [task.reference for task in tasks(str(file))] == [0.5, 2.5]  # type: ignore[attr-defined]
