"""The files that lm-eval writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.apps.evaluate.harness import _read_lm_eval
from posttrain.apps.evaluate.results import EvaluationError

RUN: Any = SimpleNamespace(main_metric=lambda task, names: names[0])


def written(folder: Path, *tasks: str) -> Path:
    for task in tasks:
        row = {"doc_id": 0, "target": "4", "resps": [["four"]], "filtered_resps": ["4"], "filter": "none"}
        row |= {"metrics": ["right"], "right": float(len(task)), "arguments": {"gen_args_0": {"arg_0": ["2 + 2"]}}}
        (folder / f"samples_{task}_2026-01-01T00-00-00.5.jsonl").write_text(json.dumps(row) + "\n")
    about = {"configs": {"sum": {}, "sum_2x": {}}, "versions": {}}
    (folder / "results_2026-01-01T00-00-00.5.json").write_text(json.dumps(about))
    return folder


def test_a_task_whose_name_begins_another_has_its_own_samples(tmp_path: Path) -> None:
    found = list(_read_lm_eval(RUN, written(tmp_path, "sum", "sum_2x")))
    assert [result.problems[0].samples[0].reward for result in found] == [3.0, 6.0]


def test_a_task_without_samples_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no samples of the task 'sum_2x'"):
        list(_read_lm_eval(RUN, written(tmp_path, "sum")))
