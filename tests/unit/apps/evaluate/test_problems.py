"""Benchmarks as problems: real rows where they are there, every format, and what bad rows are told."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hub_layouts import LAYOUTS, save

from posttrain.apps.evaluate import problems as module
from posttrain.apps.evaluate.answers import answer_reader
from posttrain.apps.evaluate.benchmarks import BENCHMARKS, find_benchmark, shuffled_choices
from posttrain.apps.evaluate.problems import ProblemSet, load_problems
from posttrain.config.evaluation import EvalDataConfig
from posttrain.data.errors import DataError
from posttrain.data.sources import Row

SHARED = Path(__file__).parents[4].parent / "shared" / "data"


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(**data: Any) -> module.ProblemSet:
    return load_problems(EvalDataConfig(**data), seed=42)


@pytest.mark.parametrize(
    ("name", "file", "count", "expected"),
    [
        ("gsm8k", "gsm8k/test.jsonl", 1055, "18"),
        ("math500", "math/math500_test.jsonl", 400, r"\left( 3, \frac{\pi}{2} \right)"),
        ("aime2024", "competition/aime24.jsonl", 30, "204"),
        ("AIME2025", "competition/aime25.jsonl", 30, "70"),
        ("amc23", "competition/amc23.jsonl", 40, "27"),
        ("olympiadbench", "competition/olympiadbench_en_math.jsonl", 675, "2"),
        ("mmlu", "mmlu/test_sample.jsonl", 1140, "A"),
    ],
)
def test_real_rows(name: str, file: str, count: int, expected: str) -> None:
    if not (SHARED / file).exists():
        pytest.skip(f"no {file} beside the repository")
    found = load(dataset_name=name, data_path=str(SHARED / file))
    assert len(found.problems) == count
    assert found.problems[0].reference == expected
    assert len({problem.id for problem in found.problems}) == count
    assert found.is_choice == (name == "mmlu")


@pytest.mark.parametrize(
    "name",
    [
        "aime2024",
        "AIME2024",
        "AIME2025",
        "math",
        "math500",
        "MATH-500",
        "gsm8k",
        "gpqa",
        "gpqa_diamond",
        "mmlu",
        "mmlu_pro",
    ]
    + ["amc23", "olympiadbench", "mmlu_ZH-CN"],
)
def test_names_of_nemo_rl_lead_to_a_place_on_the_hub(name: str) -> None:
    benchmark = find_benchmark(name)
    assert benchmark is not None
    assert benchmark.hub is not None
    assert benchmark.hub.count("/") == 1


def test_the_hub_is_asked_for_the_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, subset: str | None, *, split: str, cache_dir: str | None) -> list[dict[str, Any]]:
        asked.append((name, subset, split))
        return [{"question": "1+1?", "answer": "two\n#### 2"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load(dataset_name="gsm8k")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert found.problems[0].reference == "2"
    assert found.problems[0].id == "gsm8k:0"


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_files_of_your_own_in_every_format(tmp_path: Path, kind: str) -> None:
    rows = [{"Question": "1 + 1?", "Answer": "2"}, {"Question": "2 + 3?", "Answer": "5"}]
    path = tmp_path / f"sums.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["Question", "Answer"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    named = load(dataset_name=str(path), problem_key="Question", solution_key="Answer")
    unnamed = path.rename(tmp_path / "sums")
    formatted = load(dataset_name=str(unnamed), problem_key="Question", solution_key="Answer", file_format=kind)
    for found in (named, formatted):
        assert [(p.prompt, p.reference) for p in found.problems] == [("1 + 1?", "2"), ("2 + 3?", "5")]
    assert named.name == "sums"


def test_a_format_that_does_not_fit_the_file_is_refused_with_the_files_own_name(tmp_path: Path) -> None:
    file = tmp_path / "h.jsonl"
    file.write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    with pytest.raises(DataError) as caught:
        load(dataset_name=str(file), file_format="csv")
    assert f"data.file_format: csv does not fit {file}, a .jsonl file" in str(caught.value)
    assert "h.csv" not in str(caught.value)
    named_json = file.rename(tmp_path / "h.json")
    assert len(load(dataset_name=str(named_json), file_format="jsonl").problems) == 1, "lines of JSON in a .json file"


def test_choices_are_shown_with_letters_and_a_prompt_file_wraps_them(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "q.jsonl", [{"question": "Which?", "choices": ["x", "y"], "answer": 1}])
    found = load(dataset_name=str(path))
    assert found.is_choice
    assert found.problems[0].prompt == "Which?\n\nA) x\nB) y"
    assert found.problems[0].reference == "B"
    assert "Answer: X" in found.problems[0].messages[-1]["content"]
    (tmp_path / "p.txt").write_text("Choose.\n")  # NeMo RL's own say nothing of the question's place
    wrapped = load(dataset_name=str(path), prompt_file=str(tmp_path / "p.txt"))
    assert wrapped.problems[0].messages[-1]["content"] == "Choose.\n\nWhich?\n\nA) x\nB) y"
    assert wrapped.problems[0].prompt == found.problems[0].prompt


def test_gpqa_is_shuffled_by_the_seed_and_the_letter_follows() -> None:
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    rows = [Row(dict(zip(names, ("right", "w1", "w2", "w3"), strict=True)), "f", number) for number in range(40)]
    choices = [shuffled_choices(row, 1) for row in rows]
    assert all(choice.options["ABCD".index(choice.letter)] == "right" for choice in choices)
    assert {choice.letter for choice in choices} == set("ABCD")
    assert choices == [shuffled_choices(row, 1) for row in rows]
    assert choices != [shuffled_choices(row, 2) for row in rows]


@pytest.mark.parametrize(
    ("rows", "data", "said"),
    [
        ([{"problem": "1+1?"}], {}, "rows.jsonl, row 1: no key 'answer'"),
        (
            [{"problem": "1+1?", "answer": "2"}, {"problem": "2?", "answer": " "}],
            {},
            "row 2: the expected answer is empty",
        ),
        ([{"problem": "1+1?", "answer": []}], {}, "row 1: the expected answer is empty"),
        ([{"problem": "1+1?", "answer": float("nan")}], {}, "row 1: 'answer' is nan; every row needs a value"),
        ([{"problem": "1+1?", "answer": [1, float("inf")]}], {}, "row 1: the expected answer [1, inf] is not a number"),
        ([{"problem": "", "answer": "2"}], {}, "row 1: the problem is empty"),
        ([{"problem": "1+1?", "answer": "2"}], {"problem_key": "quest"}, "no key 'quest'"),
        ([{"problem": "q", "answer": "E", "choices": ["x", "y"]}], {}, "expected a letter from A to B"),
        (
            [{"problem": "q", "answer": "2", "n": 1}] * 2,
            {"id_key": "n"},
            "row 2: data.id_key 'n' is 1, which is there already",
        ),
        (
            [{"problem": "q", "answer": "2", "n": ""}],
            {"id_key": "n"},
            "row 1: data.id_key 'n' is '', which is not a name",
        ),
        ([{"question": "q", "answer": "no hashes"}], {"dataset_name": "gsm8k"}, "no '####'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], data: dict[str, Any], said: str
) -> None:
    path = rows_file(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load(**({"dataset_name": "mine", "data_path": str(path)} | data))
    assert said in str(caught.value)


def test_an_unknown_benchmark_names_the_nearest_and_all() -> None:
    with pytest.raises(DataError) as caught:
        load(dataset_name="math501")
    assert "did you mean 'MATH-500'?" in str(caught.value)
    assert all(benchmark.name in str(caught.value) for benchmark in BENCHMARKS)


def load_named(name: str, path: Path | None = None) -> ProblemSet:
    return load_problems(EvalDataConfig(dataset_name=name, data_path=path and str(path)), seed=42)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_fetched_from_the_hub_is_read_as_the_benchmark(name: str, tmp_path: Path) -> None:
    files, count, answer = LAYOUTS[name]
    found = load_named(name, save(tmp_path, files))
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
    assert len(load_named(name, save(tmp_path, {file: rows}) / file).problems) == len(rows)


def test_gpqa_by_name_says_what_to_accept_and_what_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: object, **kwargs: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError) as caught:
        load_named("gpqa")
    for words in ("huggingface.co/datasets/Idavidrein/gpqa", "hf auth login", "data.data_path=gpqa_diamond.csv"):
        assert words in str(caught.value)


def test_other_benchmarks_by_name_are_not_called_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [][0])
    with pytest.raises(DataError) as caught:
        load_named("mmlu")
    assert "gated" not in str(caught.value)


def test_a_subset_that_datasets_saved_to_disk_is_read_as_before(tmp_path: Path) -> None:
    import datasets

    rows = LAYOUTS["mmlu"][0]["all/test-00000-of-00001.parquet"]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "all"))
    config = EvalDataConfig(dataset_name="mmlu", data_path=str(tmp_path), subset="all")
    assert [problem.reference for problem in load_problems(config, seed=42).problems] == ["B"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "1/2"),
        ("The answer is 0.5.", "1/2"),
        (r"\boxed{\dfrac{2}{4}} ", "1/2"),
        ("She earns 9 * 2 = 18.\n#### 1,234", "1234"),
        ("The answer is $18 per day.", "18"),
        ("We find $x = 3$ and so $x^2 = 9$", "9"),
        ("First 12, then 5 apples.", "5"),
        (r"\boxed{3} no, \boxed{4}", "4"),
        ("", None),
        ("I do not know", None),
    ],
)
def test_mathematics(text: str, answer: str | None) -> None:
    assert answer_reader("math")(text) == answer


def test_multiple_choice_reads_the_letter() -> None:
    assert answer_reader("english_multichoice")("It could be A.\nAnswer: c") == "C"
    assert answer_reader("multilingual_multichoice")("答案是 B") == "B"
    assert answer_reader("english_multichoice")("no idea") is None


def test_other_answers_are_their_text() -> None:
    assert answer_reader("text")(" a  b\n") == "a b"
