"""The problems of an evaluation: rows of a benchmark as conversations with an expected answer, not yet tokenised.

Nothing is dropped: a row without a problem or without an answer is an error that names the file and the row, because a
score over the readable rows alone is not a score of the benchmark.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from posttrain.apps.evaluate.benchmarks import (
    GENERIC,
    LETTERS,
    Benchmark,
    Choices,
    find_benchmark,
    listed_choices,
    unknown_benchmark,
)
from posttrain.config.evaluation import EvalDataConfig
from posttrain.data.chat import images_of, without_images
from posttrain.data.conversations import PromptFiles, as_prompt
from posttrain.data.entries import Entry
from posttrain.data.errors import DataError
from posttrain.data.image_rows import placed, with_images, without_marks
from posttrain.data.sources import FORMATS, Row, filesystem_of, read_file, read_local
from posttrain.types import Message, Task

CHOICE_PROMPT = (
    "Answer the multiple-choice question below. Think it through first if that helps, then end with a line of the form "
    '"Answer: X", where X is the letter of the right choice.\n\n{}'
)
_FORMATS = ("csv", "json", "jsonl", "parquet")
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # files of `datasets`
_ID_COLUMNS = ("id", "unique_id", "problem_id")
_OF_AN_ENTRY = (
    *("dataset_name", "data_path", "subset", "split", "download_dir"),
    *("image_key", "image_dir", "allow_image_urls"),
)


@dataclass(frozen=True)
class ProblemSet:
    """The problems are tasks whose `draw` is their place in the dataset and whose `prompt` is the dataset's own
    wording, choices included, before prompt file and chat template. They have no tokens yet."""

    name: str  # as results call it
    benchmark: Benchmark
    problems: tuple[Task, ...]
    where: tuple[str, ...]  # file and row of each, for messages
    is_choice: bool


def load_problems(data: EvalDataConfig, *, seed: int, limit: int | None = None) -> ProblemSet:
    """The benchmark that the config names, or its first `limit` problems. Raises DataError."""
    benchmark = benchmark_of(data)
    choices = _choices_of(benchmark, data)
    try:
        rows = list(_rows(data, benchmark, limit))
    except DataError as error:
        if not benchmark.is_gated or data.data_path is not None:
            raise
        page = f"https://huggingface.co/datasets/{benchmark.hub}"
        raise DataError(
            f"data.dataset_name: {benchmark.name} is a gated dataset. Accept its terms at {page} and log in (`hf auth "
            f"login`, or set HF_TOKEN); or fetch {benchmark.name}.csv from there and set "
            f"data.data_path={benchmark.name}.csv. The hub said: {error}"
        ) from error
    if not rows:
        raise DataError(f"{data.data_path or data.dataset_name}: there are no rows")
    label = data.dataset_name if benchmark is not GENERIC else _short_name(data)
    ids = _ids(rows, data.id_key, label)
    asks_choices = [choices(row, seed) for row in rows]
    is_choice = any(choice is not None for choice in asks_choices)
    prompts = _prompt_files(data, is_choice)
    asks_by_key = () if callable(benchmark.question) else benchmark.question
    used = {*asks_by_key, data.problem_key, data.solution_key}
    problems = []
    for index, (row, name, choice) in enumerate(zip(rows, ids, asks_choices, strict=True)):
        if callable(benchmark.question) and not data.problem_key:
            asked: str | list[Message] = benchmark.question(row)
        else:
            names = (data.problem_key,) if data.problem_key else asks_by_key
            asked = as_prompt(row.field(*names, setting="data.problem_key"), row, names[0])
        if not asked or (isinstance(asked, str) and not asked.strip()):
            raise DataError(f"{row.where}: the problem is empty")
        if choice is not None:
            if not isinstance(asked, str):
                raise DataError(f"{row.where}: a multiple-choice problem must be text, found a conversation")
            options = [f"{letter}) {option}" for letter, option in zip(LETTERS, choice.options, strict=False)]
            asked = "\n".join([asked.strip(), "", *options])
        messages = placed(prompts.messages(asked), row)
        text = asked if isinstance(asked, str) else "\n\n".join(turn["content"] for turn in asked)
        problems.append(
            Task(
                draw=index,
                id=name,
                prompt=without_marks(text),
                prompt_ids=(),
                reference=_expected(row, benchmark, data) if choice is None else choice.letter,
                messages=tuple(without_images(messages)),
                images=tuple(images_of(messages)),
                metadata={key: value for key, value in row.values.items() if key not in used},
            )
        )
    return ProblemSet(label, benchmark, tuple(problems), tuple(row.where for row in rows), is_choice)


def benchmark_of(data: EvalDataConfig) -> Benchmark:
    found = find_benchmark(data.dataset_name)
    if found is not None:
        return found
    entry = Entry(dataset_name=data.dataset_name, data_path=data.data_path)
    if data.data_path is None and entry.local_path is None and "/" not in data.dataset_name:
        raise unknown_benchmark(data.dataset_name)
    return GENERIC


def _rows(data: EvalDataConfig, benchmark: Benchmark, limit: int | None) -> Iterator[Row]:
    known = None if benchmark is GENERIC else benchmark
    entry = Entry(**{name: getattr(data, name) for name in _OF_AN_ENTRY})
    path = data.data_path or (entry.local_path if known is None else None)
    of_subset = _files_of_subset(path, known, data) if path is not None and known is not None else []
    if of_subset:
        found = chain.from_iterable(read_local(file) for file in of_subset)
        rows = with_images(found, entry, benchmark)
    elif path is not None and (data.file_format is not None or path.startswith(("http://", "https://"))):
        rows = with_images(_rows_of_file(path, data.file_format), entry, benchmark)
    else:
        # Another hub dataset is tested on its test split, unless `data.split` is set.
        split = data.split or ("test" if known is None and path is None else None)
        rows = entry.model_copy(update={"split": split}).rows(known)
    return islice(rows, limit)


def _files_of_subset(path: str, benchmark: Benchmark, data: EvalDataConfig) -> list[str]:
    """In a folder that was fetched from the hub: the files of the benchmark's subset. It may hold those of others,
    too."""
    folder = Path(path).expanduser()
    subsets = (data.subset,) if data.subset else tuple(name for name in benchmark.subsets if name is not None)
    if not subsets or not folder.is_dir():
        return []
    files = sorted(file for file in folder.rglob("*") if str(file).endswith(FORMATS) and file.name not in _ABOUT_DATA)
    words = {str(file): _as_words(str(file.relative_to(folder))) for file in files}
    chosen = [file for file in words if any(f" {_as_words(name)} " in f" {words[file]} " for name in subsets)]
    split = f" {data.split or benchmark.split} "
    return [file for file in chosen if split in f" {words[file]} "] or chosen


def _as_words(name: str) -> str:
    return " ".join(re.split(r"[^a-z0-9]+", name.lower()))


def _rows_of_file(path: str, file_format: str | None) -> Iterator[Row]:
    """One file, local or remote. Its name may end in nothing that names a format, but not in another one."""
    filesystem, location = filesystem_of(path)
    plain = path.partition("?")[0]
    ending = os.path.splitext(plain.removesuffix(".gz"))[1].removeprefix(".")
    fits = ending == file_format or ending not in _FORMATS or {ending, file_format} == {"json", "jsonl"}
    if file_format is not None and not fits:
        raise DataError(
            f"data.file_format: {file_format} does not fit {path}, a .{ending} file; set data.file_format=null, or "
            f"name a {file_format} file"
        )
    try:
        yield from read_file(filesystem, location, plain, file_format)
    except FileNotFoundError:
        raise DataError(f"data.dataset_name: nothing to read at {path}") from None
    except OSError as error:  # of any kind that a network raises
        raise DataError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def _expected(row: Row, benchmark: Benchmark, data: EvalDataConfig) -> object:
    if data.solution_key is None and callable(benchmark.answer):
        value: object = benchmark.answer(row)
    else:
        names = (data.solution_key,) if data.solution_key else benchmark.answer
        assert not callable(names)
        value = row.field(*names, setting="data.solution_key")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not value.strip() if isinstance(value, str) else isinstance(value, list | dict | None) and not value:
        raise DataError(f"{row.where}: the expected answer is empty; a benchmark needs one for every problem")
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:  # NaN: a missing value in a table
        raise DataError(
            f"{row.where}: the expected answer {value!r} is not a number; a benchmark needs one for every problem"
        ) from None
    return value


def _choices_of(benchmark: Benchmark, data: EvalDataConfig) -> Callable[[Row, int], Choices | None]:
    if benchmark.choices is not None and data.choices_key is None:
        return benchmark.choices
    if data.choices_key is None and benchmark is not GENERIC:
        return lambda row, seed: None
    key, answer = data.choices_key, data.solution_key or "answer"

    def of_own_rows(row: Row, seed: int) -> Choices | None:
        has_list = any(isinstance(row.get(name), list) for name in ("choices", "options"))
        return listed_choices(row, seed, key, answer) if key is not None or has_list else None

    return of_own_rows


def _prompt_files(data: EvalDataConfig, is_choice: bool) -> PromptFiles:
    if data.prompt_file is not None and is_choice and Path(data.prompt_file).is_file():
        text = Path(data.prompt_file).read_text(encoding="utf-8").removesuffix("\n")
        if "{" not in text:  # NeMo RL's prompts for multiple choice have no place for the question: it follows them
            return replace(PromptFiles.read(None, data.system_prompt_file), template=text + "\n\n{}")
    files = PromptFiles.read(data.prompt_file, data.system_prompt_file)
    return replace(files, template=CHOICE_PROMPT) if is_choice and data.prompt_file is None else files


def _ids(rows: Sequence[Row], key: str | None, label: str) -> list[str]:
    """The ids of the problems: from their column if it has another value in every row, otherwise their number."""
    for name in (key,) if key else _ID_COLUMNS:
        values = [row.get(name) for row in rows]
        if all(isinstance(value, str | int) and str(value) for value in values):
            texts = [str(value) for value in values]
            if len(set(texts)) == len(texts):
                return texts
        if key is not None:
            seen: set[str] = set()
            for row, value in zip(rows, values, strict=True):
                if not isinstance(value, str | int) or not str(value) or str(value) in seen:
                    fault = "is there already" if str(value) in seen else "is not a name"
                    raise DataError(f"{row.where}: data.id_key {key!r} is {value!r}, which {fault}")
                seen.add(str(value))
    return [f"{label}:{index}" for index in range(len(rows))]


def _short_name(data: EvalDataConfig) -> str:
    """The file's own name for rows from a file; the dataset's otherwise."""
    path = data.data_path or data.dataset_name
    if "/" not in data.dataset_name and not Path(data.dataset_name).exists():
        return data.dataset_name
    if data.data_path is None and not Path(path).exists() and "://" not in path:
        return data.dataset_name  # on the hub
    return path.partition("?")[0].rstrip("/").rpartition("/")[2].split(".")[0] or path
