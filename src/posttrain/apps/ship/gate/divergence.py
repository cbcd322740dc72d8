"""`kl.json` in the folder of an evaluation: the divergence of the model from its base on the answers.

`measure_divergence.py` measures it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.apps.evaluate.results import PROBLEMS_FILE, Evaluation, EvaluationError
from posttrain.config.base import parse_as
from posttrain.files import durable
from posttrain.files.digests import sha256_of_file
from posttrain.files.json_files import read_json

KL_FILE = "kl.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Divergence:
    """KL(model || base) in nats per token, by the id of the problem; null where a problem has no answer."""

    model: str
    base: str
    answers_sha256: str  # of problems.jsonl: it does not hold for other answers
    values: Mapping[str, float | None]

    @property
    def mean(self) -> float:
        measured = [value for value in self.values.values() if value is not None]
        return math.fsum(measured) / len(measured) if measured else math.nan


def answers_digest(folder: Path) -> str:
    return sha256_of_file(folder / PROBLEMS_FILE)


def write_divergence(folder: Path, found: Divergence) -> Path:
    path = folder / KL_FILE
    durable.write_text(path, json.dumps({"format": FORMAT_VERSION, **asdict(found)}, indent=1) + "\n")
    return path


def read_divergence(evaluation: Evaluation) -> list[float | None]:
    """One value per problem, in the order of the evaluation."""
    path = evaluation.folder / KL_FILE
    row = read_json(path, EvaluationError)
    if (version := row.pop("format", None)) != FORMAT_VERSION:
        raise EvaluationError(f"{path}: format {version!r}; this version of posttrain reads {FORMAT_VERSION}")
    found = parse_as(Divergence, row, f"{path}: cannot be read, measure it again", EvaluationError)
    if found.answers_sha256 != answers_digest(evaluation.folder):
        raise EvaluationError(f"{path}: was measured on other answers than {PROBLEMS_FILE} holds now; measure it again")
    return [found.values.get(problem.id) for problem in evaluation.problems]
