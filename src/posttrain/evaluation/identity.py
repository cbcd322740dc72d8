"""What makes two evaluations the same: model, problems, prompts, sampling and judge. Metrics are not part of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config.named_files import files_named_in
from posttrain.evaluation.problems import EvalProblem

_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")
_READ_BYTES = 1 << 20


def prompts_hash(problems: Sequence[EvalProblem]) -> str:
    """Of what the model is asked, and in which order."""
    return digest([[dict(message) for message in problem.messages] for problem in problems])


def files_digest(values: Any) -> dict[str, str]:
    """SHA-256 of every file that settings name: a judge is the content of its file, not the name of it."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files_named_in(values)}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def folder_fingerprint(*folders: Path) -> str:
    """Of the files of a model: names, sizes, and of each the first, the middle and the last MiB.

    Other weights give another fingerprint without reading every byte of a large model; a copy gives the same one.
    """
    summary = hashlib.sha256()
    for folder in folders:
        for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern) if file.is_file()}):
            size = file.stat().st_size
            summary.update(f"{file.name}:{size};".encode())
            with file.open("rb") as stream:
                for start in sorted({0, max(0, size // 2 - _READ_BYTES // 2), max(0, size - _READ_BYTES)}):
                    stream.seek(start)
                    summary.update(stream.read(_READ_BYTES))
    return summary.hexdigest()
