"""The benchmarks of `posttrain eval` by name: where their data is, and what each field means. Tables and small readers.

Names are NeMo RL's; case, dashes and underscores do not matter. Settings that the mathematics sets share with training
are in `data/named_datasets.py`; the split here is the test split.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import yaml

from posttrain.data.conversations import as_text
from posttrain.data.errors import DataError, nearest
from posttrain.data.named_datasets import (
    RESPONSE_DATASETS,
    NamedDataset,
    ResponseSpec,
    find_spec,
    folded,
    spec_of,
    unreadable,
)
from posttrain.data.row_dataset import keyed_order
from posttrain.data.sources import Row
from posttrain.environments.math_answers import last_boxed
from posttrain.files.json_files import JsonMapping

Judge = Literal["math", "english_multichoice", "multilingual_multichoice"]
LETTERS = string.ascii_uppercase


@dataclass(frozen=True)
class Choices:
    """The options of a multiple-choice problem in the order in which they are shown, and the letter of the right
    one."""

    options: tuple[str, ...]
    letter: str


@dataclass(frozen=True)
class Benchmark(ResponseSpec):
    split: str = "test"
    choices: Callable[[Row, int], Choices] | None = None  # of the row and the seed; None: the answer is free
    judge: Judge = "math"
    about: str = ""
    is_gated: bool = False  # gated on the hub: its terms must be accepted


def boxed_in_solution(row: Row) -> str:
    """MATH states its answer in the worked solution; a copy with a column of its own is read from there."""
    answer = row.get("answer")
    if answer is not None:
        return as_text(answer, row, "answer")
    boxed = last_boxed(as_text(row.field("solution", "answer", setting="data.solution_key"), row, "solution"))
    if boxed is None:
        raise DataError(f"{row.where}: 'solution' has no \\boxed{{…}} with the answer")
    return boxed


def all_final_answers(row: Row) -> str:
    """OlympiadBench lists the answers of a problem; all of them are asked for."""
    found = row.field("final_answer", "answers", "answer", setting="data.solution_key")
    answers = found if isinstance(found, list) else [found]
    return ", ".join(as_text(answer, row, "final_answer").replace("$", "").strip() for answer in answers)


def listed_choices(row: Row, seed: int, key: str | None = None, answer: str = "answer") -> Choices:
    """MMLU and similar: a list of choices, or one column for each letter; the answer as a letter or a number from 0."""
    names = (key,) if key else ("choices", "options")
    listed = next((row.get(name) for name in names if row.get(name) is not None), None)
    if listed is None and key is None and row.get("A") is not None:
        listed = [row.get(letter) for letter in LETTERS if row.get(letter) is not None]
    if not isinstance(listed, list | tuple) or len(listed) < 2:
        shown = "there is none" if listed is None else f"found {listed!r:.80}"
        raise DataError(f"{row.where}: a list of at least two choices is needed under {' or '.join(names)}; {shown}")
    value = row.field(answer, answer.capitalize(), setting="data.solution_key")
    letter = LETTERS[value] if isinstance(value, int) and 0 <= value < len(listed) else str(value).strip().upper()
    if letter.isdecimal() and int(letter) < len(listed):
        letter = LETTERS[int(letter)]
    if letter not in LETTERS[: len(listed)] or len(letter) != 1:
        raise DataError(
            f"{row.where}: {answer!r} is {value!r}; expected a letter from A to {LETTERS[len(listed) - 1]}, "
            "or the number of the choice from 0"
        )
    return Choices(tuple(as_text(option, row, "choices") for option in listed), letter)


def shuffled_choices(row: Row, seed: int) -> Choices:
    """GPQA gives the right answer first. The order is keyed by the seed and the number of the row."""
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    options = [as_text(row.field(name), row, name).strip() for name in names]
    order = [int(place) for place in keyed_order(len(options), seed, row.number)]
    return Choices(tuple(options[place] for place in order), LETTERS[order.index(0)])


def _of_spec(spec: ResponseSpec) -> Benchmark:
    names = (item.name for item in fields(NamedDataset))
    return Benchmark(question=spec.question, answer=spec.answer, **{name: getattr(spec, name) for name in names})


def _of_row(row: JsonMapping) -> Benchmark:
    values = dict(row)
    spec = find_spec(values.pop("like", ""), RESPONSE_DATASETS)
    shared = vars(_of_spec(spec)) if spec is not None else {}
    return spec_of(Benchmark, {**shared, **values}, globals())


BENCHMARKS = tuple(map(_of_row, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))))
MULTILINGUAL_MMLU = (
    *("AR_XY", "BN_BD", "DE_DE", "ES_LA", "FR_FR", "HI_IN", "ID_ID"),
    *("IT_IT", "JA_JP", "KO_KR", "PT_BR", "SW_KE", "YO_NG", "ZH_CN"),
)
GENERIC = Benchmark(
    "rows of your own",
    split="test",
    question=("problem", "question", "input", "prompt", "Problem", "Question"),
    answer=("answer", "expected_answer", "final_answer", "solution", "output", "Answer"),
)


def find_benchmark(name: str) -> Benchmark | None:
    """The benchmark of that name, alias or hub name; also `mmlu_ZH-CN` and the other languages of MMMLU."""
    if (benchmark := find_spec(name, BENCHMARKS)) is not None:
        return benchmark
    for language in MULTILINGUAL_MMLU:
        if folded(name) == folded(f"mmlu_{language}"):
            return Benchmark(
                f"mmlu_{language.replace('_', '-')}",
                hub="openai/MMMLU",
                subsets=(language,),
                question=("Question",),
                choices=listed_choices,
                judge="multilingual_multichoice",
            )
    spec = find_spec(name, RESPONSE_DATASETS)
    return _of_spec(spec) if spec is not None and spec.hub is not None else None


def unknown_benchmark(name: str) -> DataError:
    if (reason := unreadable(name)) is not None:
        return DataError(f"data.dataset_name: {name!r}: {reason}")
    names = [benchmark.name for benchmark in BENCHMARKS]
    hint = nearest(name, [*names, *(alias for benchmark in BENCHMARKS for alias in benchmark.aliases)])
    return DataError(
        f"data.dataset_name: unknown benchmark {name!r}{hint}. Known: {', '.join(names)}, mmlu_<LANGUAGE>; or give a "
        "hub name such as 'org/name', or a path or URL of a .jsonl, .json, .csv or .parquet file"
    )


def lines_for_people() -> list[str]:
    width = max(len(benchmark.name) for benchmark in BENCHMARKS)
    lines = [f"  {b.name:<{width}}  {b.about}  ({b.hub}, {b.split})" for b in BENCHMARKS]
    languages = ", ".join(MULTILINGUAL_MMLU).replace("_", "-")
    return [*lines, f"  {'mmlu_ZH-CN':<{width}}  and the other languages of MMMLU: {languages}"]
