"""Stores objects passed by a Python program as files: rows of data and reward functions, in `inputs/` of the run
folder.

The name of a file contains a digest of its content. So `config.yaml` records which data and which reward a run was trained with,
another one counts as another setting, and the command line can resume the run from its config.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from posttrain.apps.api.functions import DIGEST_LENGTH, importable_name, pickled
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.redaction import redact

INPUTS_FOLDER = "inputs"


class Inputs:
    """The files of one run, in a temporary folder until the run's own is known. Close it to remove that."""

    def __init__(self, folder: str) -> None:
        self._folder = folder  # of the run, as an expression of the config
        self._staged = tempfile.TemporaryDirectory(prefix="posttrain-")

    def add_rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> str:
        """The path of a file with these rows."""
        digest = hashlib.sha256()
        staged = Path(self._staged.name, name)
        with staged.open("wb") as file:
            for number, row in enumerate(rows, start=1):
                line = _line(name, number, row)
                digest.update(line)
                file.write(line)
        if not staged.stat().st_size:
            raise InputError(f"{name}: there are no rows")
        final = f"{name}-{digest.hexdigest()[:DIGEST_LENGTH]}.jsonl"
        staged.rename(staged.with_name(final))
        return f"{self._folder}/{INPUTS_FOLDER}/{final}"

    def add_function(self, function: Callable[..., object]) -> str:
        """What `env.<name>.function` is to be: the name of a function that can be imported, or a file that holds it."""
        if (importable := importable_name(function)) is not None:
            return importable
        found = pickled(function)
        Path(self._staged.name, f"{found.stem}.pkl").write_bytes(found.content)
        if found.source:
            Path(self._staged.name, f"{found.stem}.py").write_text(redact(found.source), encoding="utf-8")
        return f"{self._folder}/{INPUTS_FOLDER}/{found.stem}.pkl:{found.name}"

    def write(self, folder: Path) -> None:
        """Copy them to the folder of the run. A file that exists already stays: an equal name means equal content."""
        for staged in Path(self._staged.name).iterdir():
            path = folder / INPUTS_FOLDER / staged.name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with durable.replacing(path) as aside:
                    shutil.copyfile(staged, aside)

    def close(self) -> None:
        self._staged.cleanup()


def _line(name: str, number: int, row: object) -> bytes:
    if not isinstance(row, Mapping):
        raise InputError(
            f"{name}, row {number}: a mapping of columns is needed, not {type(row).__name__} ({row!r:.80})"
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}, row {number}: {_culprit(row)} ({error})") from error


def _culprit(row: Mapping[str, object]) -> str:
    for column, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"column {column!r} is {value!r:.80}, which JSON cannot hold"
    return "it cannot be written as JSON"
