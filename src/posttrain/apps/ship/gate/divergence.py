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
from posttrain.files import durable
from posttrain.files.digests import sha256_of_file
from posttrain.files.json_files import parse_json

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
    try:
        row = parse_json(path.read_text(encoding="utf-8"))
        if row["format"] != FORMAT_VERSION:
            raise EvaluationError(f"{path}: format {row['format']!r}; this version of posttrain reads {FORMAT_VERSION}")
        values = {str(name): None if value is None else float(value) for name, value in row["values"].items()}
        measured_on = row["answers_sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{path}: cannot be read ({type(error).__name__}: {error}); measure it again") from error
    if measured_on != answers_digest(evaluation.folder):
        raise EvaluationError(f"{path}: was measured on other answers than {PROBLEMS_FILE} holds now; measure it again")
    return [values.get(problem.id) for problem in evaluation.problems]
