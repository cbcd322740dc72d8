"""Benchmarks from folders that hold what the hub has of them, and what is said of a gated one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_layouts import LAYOUTS, save

from posttrain.apps.evaluate.problems import ProblemSet, load_problems
from posttrain.config.evaluation import EvalDataConfig
from posttrain.data.errors import DataError


def load(name: str, path: Path | None = None) -> ProblemSet:
    return load_problems(EvalDataConfig(dataset_name=name, data_path=path and str(path)), seed=42)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_fetched_from_the_hub_is_read_as_the_benchmark(name: str, tmp_path: Path) -> None:
    files, count, answer = LAYOUTS[name]
    found = load(name, save(tmp_path, files))
    assert len(found.problems) == count
    if name.startswith("gpqa"):
        first = found.problems[0]
        assert f"{first.reference}) the electron" in first.prompt, "the letter is that of the right answer"
    else:
        assert found.problems[0].reference == answer
    assert found.is_choice == (name.startswith(("mmlu", "gpqa")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_single_file_of_the_benchmark_is_read(name: str, tmp_path: Path) -> None:
    file, rows = next(iter(LAYOUTS[name][0].items()))
    assert len(load(name, save(tmp_path, {file: rows}) / file).problems) == len(rows)


def test_gpqa_by_name_says_what_to_accept_and_what_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: object, **kwargs: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError) as caught:
        load("gpqa")
    for words in ("huggingface.co/datasets/Idavidrein/gpqa", "hf auth login", "data.data_path=gpqa_diamond.csv"):
        assert words in str(caught.value)


def test_other_benchmarks_by_name_are_not_called_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [][0])
    with pytest.raises(DataError) as caught:
        load("mmlu")
    assert "gated" not in str(caught.value)


def test_a_subset_that_datasets_saved_to_disk_is_read_as_before(tmp_path: Path) -> None:
    import datasets

    rows = LAYOUTS["mmlu"][0]["all/test-00000-of-00001.parquet"]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "all"))
    config = EvalDataConfig(dataset_name="mmlu", data_path=str(tmp_path), subset="all")
    assert [problem.reference for problem in load_problems(config, seed=42).problems] == ["B"]
