"""What makes two evaluations the same: model, problems, prompts, sampling and judge. Metrics are not part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.config.named_files import files_named_in
from posttrain.hashing import digest, hash_files
from posttrain.types import Task


def prompts_hash(problems: Sequence[Task]) -> str:
    """Of what the model is asked, and in which order."""
    return digest([[dict(message) for message in problem.messages] for problem in problems])


def files_digest(values: Any) -> dict[str, str]:
    """SHA-256 of every file that settings name: a judge is the content of its file, not the name of it."""
    files = files_named_in(values)
    return {str(file): found for file, found in zip(files, hash_files(files), strict=True)}
