"""Stores objects passed by a Python program as files: rows of data and reward functions, in `inputs/` of the run
folder.

The name of a file contains a digest of its content. So `config.yaml` records which data and which reward a run was
trained with, another one counts as another setting, and the command line can resume the run from its config.

A function that can be imported is recorded by its name, `package.module:name`. Any other (of a script, a notebook, a
lambda, a closure) is pickled by value. Its digest covers the source of the function and of the functions it calls, its
defaults, and the values it refers to: equal digests mean the same reward. What it imports is not covered.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import shutil
import sys
import tempfile
import textwrap
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import running_sha256
from posttrain.files.redaction import redact

INPUTS_FOLDER = "inputs"
DIGEST_LENGTH = 16


class Inputs:
    """The files of one run, in a temporary folder until the run's own is known. Close it to remove that."""

    def __init__(self, folder: str) -> None:
        self._folder = folder  # of the run, as an expression of the config
        self._names: dict[str, str] = {}  # of files whose name follows from their content
        self._written: list[Path] = []
        self._staged = tempfile.TemporaryDirectory(prefix="posttrain-")

    def add_rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> str:
        """The path of a file with these rows."""
        digest = running_sha256()
        staged = Path(self._staged.name, name)
        with staged.open("wb") as file:
            for number, row in enumerate(rows, start=1):
                line = _line(name, number, row)
                digest.update(line)
                file.write(line)
        if not staged.stat().st_size:
            raise InputError(f"{name}: there are no rows")
        self._names[name] = f"{name}-{digest.hexdigest()[:DIGEST_LENGTH]}.jsonl"
        return f"{self._folder}/{INPUTS_FOLDER}/{self._names[name]}"

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
            path = folder / INPUTS_FOLDER / self._names.get(staged.name, staged.name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with durable.replacing(path) as aside:
                    shutil.copyfile(staged, aside)
                self._written.append(path)

    def withdraw(self) -> None:
        """Remove what `write` has added: the run did not begin."""
        with suppress(OSError):  # other files are in the folder
            for path in self._written:
                path.unlink()
            if self._written:
                self._written[0].parent.rmdir()

    def close(self) -> None:
        self._staged.cleanup()


def _line(name: str, number: int, row: object) -> bytes:
    if not isinstance(row, Mapping):
        raise InputError(
            f"{name}, row {number}: a mapping of columns is needed, not {type(row).__name__} ({row!r:.80})"
        )
    try:
        text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_as_url)
        return text.encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}, row {number}: {_culprit(row)} ({error})") from error


def _as_url(value: object) -> str:
    """Bytes, and images of Pillow as PNG, as `data:` URLs, which are read as images."""
    if type(value).__module__.startswith("PIL."):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")  # type: ignore[attr-defined]
        value = buffer.getvalue()
    if not isinstance(value, bytes):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return f"data:application/octet-stream;base64,{b64encode(value).decode()}"


def _culprit(row: Mapping[str, object]) -> str:
    for column, value in row.items():
        try:
            json.dumps(value, allow_nan=False, default=_as_url)
        except (TypeError, ValueError):
            return f"column {column!r} is {value!r:.80}, which JSON cannot hold"
    return "it cannot be written as JSON"


# -- reward functions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PickledFunction:
    name: str
    digest: str
    content: bytes
    source: str  # human-readable; empty if there is none

    @property
    def stem(self) -> str:
        """Of the names of its files."""
        return f"{self.name}-{self.digest}"


def name_of(function: Callable[..., object]) -> str:
    """A name of letters, digits and underscores."""
    name = str(getattr(function, "__name__", "") or type(function).__name__)
    return re.sub(r"\W", "_", name).strip("_") or "function"


def importable_name(function: Callable[..., object]) -> str | None:
    """`package.module:name` if another process can import the function under this name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or module not in sys.modules:
        return None
    if getattr(sys.modules[module], "__file__", None) is None:
        return None
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def pickled(function: Callable[..., object]) -> PickledFunction:
    import cloudpickle

    name = name_of(function)
    try:
        content = cloudpickle.dumps(function)
        digest = running_sha256()
        for part in _parts(function, set()):
            digest.update(len(part).to_bytes(8, "big") + part)
    except Exception as error:
        raise InputError(
            f"the reward function {name} cannot be sent to worker processes ({type(error).__name__}: {error}): it "
            "refers to something that cannot be pickled. Create that inside the function, or put the function into a "
            "file of its own and give reward='file.py:name'"
        ) from error
    return PickledFunction(name, digest.hexdigest()[:DIGEST_LENGTH], content, _source(function) or "")


def _parts(value: object, seen: set[int]) -> Iterator[bytes]:
    """What determines the behaviour of a value, in an order that does not change from process to process."""
    if id(value) in seen:
        return
    if isinstance(value, ModuleType):
        yield f"module {value.__name__}".encode()
    elif callable(value) and (importable := importable_name(value)) is not None:
        yield f"import {importable}".encode()
    elif isinstance(value, FunctionType):
        seen.add(id(value))
        source = _source(value)
        yield source.encode() if source is not None else b"".join(_code(value.__code__))
        found = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        captured = {**inspect.getclosurevars(value).nonlocals, **found}
        captured |= {"defaults": value.__defaults__, "keyword defaults": value.__kwdefaults__}
        for name, inner in sorted(captured.items()):
            yield name.encode()
            yield from _parts(inner, seen)
    else:
        yield _content(value)


def _content(value: object) -> bytes:
    try:
        return json.dumps(value, sort_keys=True).encode()
    except (TypeError, ValueError):
        import cloudpickle

        return bytes(cloudpickle.dumps(value))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _code(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield " ".join((*code.co_names, *code.co_varnames)).encode()
    for constant in code.co_consts:
        yield from _code(constant) if isinstance(constant, CodeType) else (repr(constant).encode(),)


def _source(function: object) -> str | None:
    try:
        return textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
