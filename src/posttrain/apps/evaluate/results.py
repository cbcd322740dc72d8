"""An evaluation on disk, and reading it back strictly.

    problems.jsonl   one row per problem, appended and fsynced as soon as all of its samples are scored
    summary.json     the results; written last and atomically, so that its presence means "finished"
    identity.json    what is measured; written first: a resumed evaluation must match it
    config.yaml      every setting in effect

Rows of `problems.jsonl` are in the order in which problems finished; `index` is the problem's place in its dataset, and
`read_evaluation` returns them in that order. `metrics.py` computes metrics from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from posttrain.data.reward_values import NEEDED, is_reward
from posttrain.errors import InputError
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json
from posttrain.types import Task

PROBLEMS_FILE = "problems.jsonl"
SUMMARY_FILE = "summary.json"
IDENTITY_FILE = "identity.json"
CONFIG_FILE = "config.yaml"
FORMAT_VERSION = 1


class EvaluationError(InputError):
    """An evaluation folder that cannot be read, or evaluations that cannot be compared."""


@dataclass(frozen=True)
class SampleResult:
    """One answer. `reward` None means unscored, for the reason in `error`; it is never counted as wrong."""

    text: str
    num_tokens: int | None  # None: a server that does not report it
    finish_reason: str | None  # "stop" or "length"; None where no answer came (a request that failed)
    reward: float | None
    answer: str | None = None  # what was read out of the text; equal answers vote together in cons@k
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward
    turns: tuple[Mapping[str, str], ...] = ()  # role and text, where an environment took turns with the model

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class ProblemResult:
    """One problem with its samples, in sample order."""

    id: str
    index: int  # place in the dataset, from 0
    dataset: str
    prompt: str  # the problem as the dataset words it, before prompt file and chat template
    expected: object  # the answer as the dataset gives it
    samples: tuple[SampleResult, ...]

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    confidence: float  # e.g. 0.95


@dataclass(frozen=True)
class Counts:
    problems: int
    samples: int
    unscored: int  # samples without a reward
    truncated: int  # samples cut off at the token limit


@dataclass(frozen=True)
class EvaluationSummary:
    """The result of an evaluation. `metrics` holds the scores ("pass@1", "avg@16", "cons@16", …) and, beside them,
    "mean_length_tokens", "truncation_rate" and "unscored_rate"; `intervals` has the same names where one was computed.
    A metric that could not be measured (nothing was scored) is absent, never 0."""

    model: str
    dataset: str
    metric: str  # the main one, a key of `metrics`
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]
    counts: Counts
    num_tests_per_prompt: int
    pass_threshold: float  # a sample passes if its reward is at least this
    seed: int
    problem_set_hash: str
    config: JsonMapping
    code_version: str
    model_fingerprint: str | None = None  # of the weights, where they are local
    generated_tokens: int | None = 0  # None where an answer's length is unknown
    generation_s: float = 0.0
    wall_s: float = 0.0  # over all attempts, if it was interrupted
    tokens_per_second: float | None = None
    cost: float | None = None  # in the currency of the price per GPU hour; None without a price
    cost_per_answer: float | None = None

    @property
    def score(self) -> float | None:
        return self.metrics.get(self.metric)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """A finished evaluation: `problems` in the order of the dataset."""

    folder: Path
    summary: EvaluationSummary
    problems: tuple[ProblemResult, ...]

    def __repr__(self) -> str:
        """One line, for notebooks: all answers would be megabytes."""
        score = "nothing scored" if self.summary.score is None else f"{self.summary.metric} {self.summary.score:.4f}"
        return f"<Evaluation {self.folder}: {score}, {len(self.problems):,} problems of {self.summary.dataset}>"


def hash_of(problems: Sequence[ProblemResult]) -> str:
    """One hash for a set of problems, whatever their order: equal hashes can be compared problem by problem."""
    return _problem_set_hash([(problem.id, problem.prompt, problem.expected) for problem in problems])


def hash_of_tasks(tasks: Sequence[Task]) -> str:
    """The same of problems that have no results yet."""
    return _problem_set_hash([(task.id, task.prompt, task.reference) for task in tasks])


def _problem_set_hash(problems: Sequence[tuple[str, str, object]]) -> str:
    rows = [json.dumps(problem, sort_keys=True, default=str) for problem in problems]
    digests = sorted(sha256_of(row) for row in rows)
    return sha256_of("\n".join(digests))


# -- writing ---------------------------------------------------------------------------------------------------------


def problem_row(problem: ProblemResult) -> JsonObject:
    row = asdict(problem)
    for sample in row["samples"]:
        if not sample["turns"]:
            del sample["turns"]
    return row


def summary_text(summary: EvaluationSummary) -> str:
    row = {"format": FORMAT_VERSION, **asdict(summary)}
    return json.dumps(row, indent=2, allow_nan=False, default=str) + "\n"


# -- reading ---------------------------------------------------------------------------------------------------------


def read_evaluation(folder: str | Path) -> Evaluation:
    """A finished evaluation. Anything missing, torn or contradictory is an error that names the file and the row."""
    folder = Path(folder)
    if not folder.is_dir():
        raise EvaluationError(f"{folder}: no such folder; expected the save_path of a finished `posttrain eval`")
    summary = read_summary(folder)
    problems = read_problems(folder)
    path = folder / PROBLEMS_FILE
    if len(problems) != summary.counts.problems:
        raise EvaluationError(
            f"{path}: {len(problems)} problems, but {SUMMARY_FILE} has {summary.counts.problems}; "
            "one of the two files was changed"
        )
    if hash_of(problems) != summary.problem_set_hash:
        raise EvaluationError(
            f"{path}: its problems are not those that {SUMMARY_FILE} was made of (other content hash)"
        )
    return Evaluation(folder, summary, tuple(sorted(problems, key=lambda problem: problem.index)))


def read_summary(folder: str | Path) -> EvaluationSummary:
    path = Path(folder) / SUMMARY_FILE
    if not path.exists():
        if (path.parent / PROBLEMS_FILE).exists():
            raise EvaluationError(
                f"{path.parent}: not finished (no {SUMMARY_FILE}); the same `posttrain eval` goes on with it"
            )
        raise EvaluationError(
            f"{path.parent}: no {SUMMARY_FILE}; expected the save_path of a finished `posttrain eval`"
        )
    try:
        row = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EvaluationError(f"{path}: not JSON ({error})") from None
    if not isinstance(row, dict) or row.get("format") != FORMAT_VERSION:
        found = row.get("format") if isinstance(row, dict) else type(row).__name__
        raise EvaluationError(f"{path}: format {found!r}; this version of posttrain reads format {FORMAT_VERSION}")
    row.pop("format")
    where = str(path)
    row["counts"] = _build(Counts, row.get("counts"), f"{where}: counts")
    intervals = _mapping(row.get("intervals"), f"{where}: intervals")
    row["intervals"] = {
        name: _build(Interval, value, f"{where}: intervals.{name}") for name, value in intervals.items()
    }
    summary = _build(EvaluationSummary, row, where)
    for name, value in _mapping(summary.metrics, f"{where}: metrics").items():
        if not _is_finite(value):
            raise EvaluationError(f"{where}: metrics.{name} is {value!r}; expected a finite number")
    for name in ("num_tests_per_prompt", "pass_threshold"):
        if not _is_finite(value := getattr(summary, name)):
            raise EvaluationError(f"{where}: {name} is {value!r}; expected a finite number")
    _mapping(summary.config, f"{where}: config")
    return summary


def read_problems(folder: str | Path) -> list[ProblemResult]:
    """The rows of `problems.jsonl`, in file order."""
    path = Path(folder) / PROBLEMS_FILE
    if not path.exists():
        raise EvaluationError(f"{folder}: no {PROBLEMS_FILE}; expected the save_path of a `posttrain eval`")
    problems: list[ProblemResult] = []
    first_line: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            problem = parse_problem(line, f"{path}:{number}")
            if problem.id in first_line:
                raise EvaluationError(
                    f"{path}:{number}: problem {problem.id!r} again (first in row {first_line[problem.id]}); "
                    "each problem has one row"
                )
            first_line[problem.id] = number
            problems.append(problem)
    return problems


def parse_problem(line: str | bytes, where: str) -> ProblemResult:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise EvaluationError(f"{where}: not a JSON object ({error})") from None
    row = dict(_mapping(row, where))
    samples = row.get("samples")
    if not isinstance(samples, list) or not samples:
        raise EvaluationError(f"{where}: samples is {samples!r}; expected a list with at least one sample")
    row["samples"] = tuple(_sample(sample, f"{where}: samples[{place}]") for place, sample in enumerate(samples))
    problem = _build(ProblemResult, row, where)
    if not isinstance(problem.id, str) or not isinstance(problem.index, int):
        raise EvaluationError(
            f"{where}: id {problem.id!r} and index {problem.index!r}; expected a string and an integer"
        )
    return problem


def _sample(value: object, where: str) -> SampleResult:
    sample: SampleResult = _build(SampleResult, value, where)
    if not isinstance(sample.turns, list | tuple):
        raise EvaluationError(f"{where}: turns is {sample.turns!r}; expected a list of role and text")
    sample = replace(sample, turns=tuple(sample.turns))
    if sample.num_tokens is not None and not isinstance(sample.num_tokens, int):
        raise EvaluationError(f"{where}: num_tokens is {sample.num_tokens!r}; expected an integer, or null if unknown")
    if sample.reward is not None and not (_is_finite(sample.reward) and is_reward(sample.reward)):
        raise EvaluationError(f"{where}: reward is {sample.reward!r:.80}; {NEEDED}, or null if unscored")
    if sample.reward is None and not sample.error:
        raise EvaluationError(f"{where}: reward is null without an error that gives the reason")
    return sample


def _build(target: type, value: object, where: str) -> Any:
    """The dataclass from a mapping of exactly its fields; those with a default may be absent."""
    row = _mapping(value, where)
    known = {f.name: f for f in fields(target)}
    if unknown := sorted(set(row) - set(known)):
        raise EvaluationError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(known)}")
    try:
        return target(**row)
    except TypeError:
        missing = [name for name in known if name not in row]
        raise EvaluationError(f"{where}: missing one of the fields {', '.join(missing)}") from None


def _mapping(value: object, where: str) -> JsonMapping:
    if not isinstance(value, Mapping):
        raise EvaluationError(f"{where}: {type(value).__name__}; expected a JSON object")
    return value


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
