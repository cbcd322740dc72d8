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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AllowInfNan, ConfigDict, Field, StrictFloat, StrictInt

from posttrain.config.base import parse_as
from posttrain.data.reward_values import MAX_REWARD
from posttrain.errors import InputError
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json, read_json
from posttrain.types import Task

PROBLEMS_FILE = "problems.jsonl"
SUMMARY_FILE = "summary.json"
IDENTITY_FILE = "identity.json"
CONFIG_FILE = "config.yaml"
FORMAT_VERSION = 1
FiniteNumber = Annotated[StrictFloat, AllowInfNan(False)]
NO_OTHER_FIELDS = ConfigDict(extra="forbid")
Reward = Annotated[FiniteNumber, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class EvaluationError(InputError):
    """An evaluation folder that cannot be read, or evaluations that cannot be compared."""


@dataclass(frozen=True)
class SampleResult:
    """One answer. `reward` None means unscored, for the reason in `error`; it is never counted as wrong."""

    text: str
    num_tokens: StrictInt | None  # None: a server that does not report it
    finish_reason: str | None  # "stop" or "length"; None where no answer came (a request that failed)
    reward: Reward | None
    answer: str | None = None  # what was read out of the text; equal answers vote together in cons@k
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward
    turns: tuple[Mapping[str, str], ...] = ()  # role and text, where an environment took turns with the model
    __pydantic_config__ = NO_OTHER_FIELDS

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class ProblemResult:
    """One problem with its samples, in sample order."""

    id: str
    index: StrictInt  # place in the dataset, from 0
    dataset: str
    prompt: str  # the problem as the dataset words it, before prompt file and chat template
    expected: object  # the answer as the dataset gives it
    samples: Annotated[tuple[SampleResult, ...], Field(min_length=1)]
    __pydantic_config__ = NO_OTHER_FIELDS

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
    metrics: Mapping[str, FiniteNumber]
    intervals: Mapping[str, Interval]
    counts: Counts
    num_tests_per_prompt: StrictInt
    pass_threshold: FiniteNumber  # a sample passes if its reward is at least this
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
    __pydantic_config__ = NO_OTHER_FIELDS

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
                f"{path.parent}: not finished (no {SUMMARY_FILE}); the same `posttrain eval` resumes it"
            )
        raise EvaluationError(
            f"{path.parent}: no {SUMMARY_FILE}; expected the save_path of a finished `posttrain eval`"
        )
    row = read_json(path, EvaluationError)
    if (version := row.pop("format", None)) != FORMAT_VERSION:
        raise EvaluationError(f"{path}: format {version!r}; this version of posttrain reads format {FORMAT_VERSION}")
    return parse_as(EvaluationSummary, row, str(path), EvaluationError)


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
    problem = parse_as(ProblemResult, row, where, EvaluationError)
    for place, sample in enumerate(problem.samples):
        if sample.reward is None and not sample.error:
            raise EvaluationError(f"{where}: samples.{place}: reward is null without an error that gives the reason")
    return problem
