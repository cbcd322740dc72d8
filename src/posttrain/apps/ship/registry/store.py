"""Stores versions and changes in MLflow's model registry. Stages and checksums are computed elsewhere.

A model NAME is a registered model, its versions are model versions, and the record of each is a tag, written with it in
one transaction. The log of changes is a second registered model, `NAME.history`, with one version per change: the
database numbers them under a primary key, so that appending is atomic and ordered on every backend, with a local file
and with a tracking server. Nothing is updated or deleted, except for the aliases `production` and `canary`, which are
for users of MLflow's own pages.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from posttrain.errors import RegistryBusy, RegistryError
from posttrain.files import durable
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json
from posttrain.files.locks import LockHeld, locked
from posttrain.files.redaction import redact

DATABASE = "registry.db"
ARTIFACTS = "artifacts"
LOCK = "registry.lock"
HISTORY_SUFFIX = ".history"
EXPERIMENT = "posttrain-registry"
_MARK = "posttrain.kind"
_RECORD = "posttrain.record"
_MAX_TAG_CHARACTERS = 90_000  # MLflow accepts 100,000
_PAGE = 1000
_RETRY_S = 0.1
_MLFLOW_SETTINGS = {  # environment variables, unless the user has set them
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a registry in a folder needs no network
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is for results
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # with its default of 7, a missing server is reported after minutes
}
_NO_DATABASE = ("file is not a database", "disk image is malformed")  # messages of SQLite
_LOCKED = "database is locked"

T = TypeVar("T")


@dataclass(frozen=True)
class Location:
    """Where a registry is: a folder, or anything that MLflow understands (`sqlite:///…`, `postgresql://…`,
    `http://…`).
    """

    text: str

    @property
    def folder(self) -> Path | None:
        return None if "://" in self.text else Path(self.text).expanduser().absolute()

    @property
    def is_server(self) -> bool:
        return self.text.startswith(("http://", "https://"))

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder / DATABASE}" if self.folder else self.text

    def beside(self, name: str) -> Path | None:
        """A file of the registry: in its folder, or next to the file of an SQLite database; None elsewhere."""
        if self.folder:
            return self.folder / name
        database = self.text.removeprefix("sqlite:///")
        return None if database == self.text else Path(f"{database}.{name.removeprefix('registry.')}")


class MlflowStore:
    """`wait_s`: how long to wait for another writer, or for a database that is locked."""

    def __init__(self, location: Location, *, wait_s: float) -> None:
        self.location = location
        self.wait_s = wait_s
        self._client: Any = None

    # -- opening -------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclusive write access inside the block, where the registry is a local file."""
        if self.location.folder:
            try:
                durable.make_folder(self.location.folder)
            except OSError as error:
                raise RegistryError(f"{self.location.text}: cannot be created ({error.strerror or error})") from error
        lock = self.location.beside(LOCK)
        with ExitStack() as held:
            try:
                if lock is not None:
                    held.enter_context(locked(lock, wait_s=self.wait_s))
            except LockHeld as busy:
                raise RegistryBusy(
                    f"{self.location.text}: the registry is being written by {busy.holder or 'another process'}; "
                    f"waited {self.wait_s:g} s, nothing was changed. Try again, or wait longer (--wait-s)"
                ) from None
            except OSError as error:
                raise RegistryError(
                    f"{lock}: cannot be opened for writing ({error.strerror}); do you have write access to the folder?"
                ) from error
            self._create_database()
            yield

    def _create_database(self) -> None:
        """Created under a temporary name, so that a database without all of its tables is never visible."""
        folder = self.location.folder
        if folder is None or (folder / DATABASE).exists():
            return
        with durable.replacing(folder / DATABASE) as unfinished:
            unfinished.unlink(missing_ok=True)
            self._call(lambda: _client(f"sqlite:///{unfinished}").search_registered_models(max_results=1))

    @property
    def client(self) -> Any:
        if self._client is None:
            folder = self.location.folder
            if folder and not (folder / DATABASE).exists():
                raise RegistryError(
                    f"{self.location.text}: there is no registry here yet; `posttrain registry add` makes one "
                    "(another place: the variable POSTTRAIN_REGISTRY, or --registry where a command has it)"
                )
            self._client = self._call(lambda: _client(self.location.uri))
        return self._client

    # -- reading -------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        models = self._pages(lambda token: self.client.search_registered_models(max_results=_PAGE, page_token=token))
        return sorted(model.name for model in models if model.tags.get(_MARK) == "model")

    def changes(self, name: str) -> dict[int, JsonObject]:
        """The changes by their position in the log."""
        return self.versions(name + HISTORY_SUFFIX)

    def versions(self, name: str) -> dict[int, JsonObject]:
        """The record of each version."""
        found = self._pages(
            lambda token: self.client.search_model_versions(f"name='{name}'", max_results=_PAGE, page_token=token)
        )
        # A version that was registered by other means has no record of ours and is ignored.
        records = {
            int(one.version): _from_tags(one.tags, f"{name} {one.version}")
            for one in found
            if f"{_RECORD}.0" in one.tags
        }
        return dict(sorted(records.items()))

    # -- writing; inside `writing()` -----------------------------------------------------------------------------------

    def add_version(self, name: str, source: str, record: JsonMapping, run_id: str | None = None) -> int:
        self._ensure_model(name, "model", "")
        lineage = record["lineage"]
        shown = {key: lineage.get(key) for key in ("base_model", "code_version")}  # in MLflow's own pages
        shown["gate"] = (lineage.get("gate") or {}).get("verdict")
        readable = {f"posttrain.{key}": str(value) for key, value in shown.items() if value}
        return self._append(name, source, {**_to_tags(record), **readable}, run_id)

    def add_change(self, name: str, change: JsonMapping) -> int:
        """The position of the change in the log."""
        log = name + HISTORY_SUFFIX
        self._ensure_model(log, "history", f"Stage changes of {name}, one version each. Written by posttrain.")
        return self._append(log, f"posttrain-change://history/{name}", _to_tags(change))

    def set_aliases(self, name: str, places: Mapping[str, int]) -> None:
        """Bring MLflow's aliases in line with the log; version 0 removes an alias."""
        present = self._call(lambda: self.client.get_registered_model(name)).aliases
        for alias, version in places.items():
            if version and str(present.get(alias)) != str(version):
                self._call(partial(self.client.set_registered_model_alias, name, alias, str(version)))
            elif not version and alias in present:
                self._call(partial(self.client.delete_registered_model_alias, name, alias))

    def _append(self, name: str, source: str, tags: Mapping[str, str], run_id: str | None = None) -> int:
        made = self._call(lambda: self.client.create_model_version(name, source, run_id=run_id, tags=dict(tags)))
        return int(made.version)

    def _ensure_model(self, name: str, kind: str, description: str) -> None:
        def find() -> Any:
            models = self._call(lambda: self.client.search_registered_models(f"name='{name}'"))
            return models[0] if models else None

        if (found := find()) is None:
            try:
                self._call(lambda: self.client.create_registered_model(name, {_MARK: kind}, description))
            except RegistryError:
                if find() is None:  # otherwise another writer created it first
                    raise
        elif found.tags.get(_MARK) != kind:  # created by other means; from now on it has versions of ours
            self._call(lambda: self.client.set_registered_model_tag(name, _MARK, kind))

    # -- files on a tracking server ------------------------------------------------------------------------------------

    def upload(self, name: str, folder: Path, files: Iterable[str]) -> tuple[str, str]:
        """Put the files of a version where the tracking server keeps artifacts: (source, run id)."""
        experiment = self._call(lambda: self.client.get_experiment_by_name(EXPERIMENT))
        experiment_id = (
            experiment.experiment_id if experiment else self._call(lambda: self.client.create_experiment(EXPERIMENT))
        )
        run = self._call(lambda: self.client.create_run(experiment_id, run_name=name))
        for file in files:
            inside = (Path("model") / file).parent.as_posix()
            self._call(partial(self.client.log_artifact, run.info.run_id, str(folder / file), inside))
        self._call(lambda: self.client.set_terminated(run.info.run_id))
        return f"{run.info.artifact_uri}/model", run.info.run_id

    def download(self, source: str, target: Path) -> None:
        import mlflow.artifacts

        durable.make_folder(target)
        self._call(
            lambda: mlflow.artifacts.download_artifacts(
                artifact_uri=source, dst_path=str(target), tracking_uri=self.location.uri
            )
        )

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _pages(self, fetch: Callable[[str | None], Any]) -> list[Any]:
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self._call(partial(fetch, token))
            found += page
            token = page.token
            if not token:
                return found

    def _call(self, call: Callable[[], T]) -> T:
        """`call`, retried for `wait_s` while the database is locked or another writer took the number."""
        _require_mlflow()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import DatabaseError

        start = time.monotonic()
        while True:
            try:
                return call()
            except (MlflowException, DatabaseError) as error:
                if any(text in str(error) for text in _NO_DATABASE):
                    raise RegistryError(
                        f"{self.location.beside(DATABASE) if self.location.folder else self.location.text}: this is "
                        "not a registry database, or a damaged one; restore it from a backup, or name another registry "
                        "(--registry)"
                    ) from error
                message = str(error).split("\n")[0]
                is_busy = _LOCKED in str(error) or "Giving up after" in message
                if "failed with exception" in message:
                    raise RegistryError(f"{self.location.text}: no answer; is the tracking server running?") from error
                if not is_busy:
                    raise RegistryError(f"{self.location.text}: MLflow: {message}") from error
                waited_s = time.monotonic() - start  # SQLite and MLflow wait as well, some seconds at a time
                if waited_s >= self.wait_s:
                    raise RegistryBusy(
                        f"{self.location.text}: another process is writing to the registry; waited {waited_s:.0f} s"
                    ) from error
            time.sleep(_RETRY_S)


class DatabaseCopy(MlflowStore):
    """The content of a database, for readers: the file is not opened, and MLflow is not loaded. Somebody else may have
    written it: what reading it may take is limited."""

    def __init__(self, location: Location, content: bytes) -> None:
        super().__init__(location, wait_s=0)
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        deadline = time.monotonic() + _READ_S
        self._database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        self._database.deserialize(content or bytes(512))  # an empty one is refused with a MemoryError
        self._rows("PRAGMA trusted_schema = OFF")

    def names(self) -> list[str]:
        return sorted({name for (name,) in self._rows(_NAMES, _MARK) if isinstance(name, str)})

    def versions(self, name: str) -> dict[int, JsonObject]:
        tags: dict[int, dict[str, str]] = {}
        for version, key, value in self._rows(_TAGS, name, f"{_RECORD}.*"):
            tags.setdefault(int(version), {})[str(key)] = str(value)
        return {version: _from_tags(tags[version], f"{name} {version}") for version in sorted(tags)}

    def _rows(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        rows, num_bytes = [], 0
        try:
            for row in self._database.execute(statement, values):
                rows.append(row)
                num_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
                if num_bytes > _MAX_READ_BYTES:
                    raise RegistryError(f"{DATABASE}: more than {_MAX_READ_BYTES >> 20} MiB of records")
        except sqlite3.Error as error:
            raise RegistryError(f"{DATABASE}: this is not a registry database, or a damaged one ({error})") from error
        return rows


_NAMES = "SELECT name FROM registered_model_tags WHERE key = ? AND value = 'model'"
_TAGS = """SELECT version, key, value FROM model_version_tags JOIN model_versions USING (name, version)
WHERE name = ? AND key GLOB ? AND current_stage <> 'Deleted_Internal'"""
_MAX_VALUE_BYTES = 2**20
_MAX_READ_BYTES = 128 * 2**20
_READ_S = 10.0  # in all


def _require_mlflow() -> None:
    for name, value in _MLFLOW_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import alembic  # noqa: F401
        import mlflow.tracking  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise RegistryError(
            f"the registry needs packages that are not installed ({error.name}): pip install 'posttrain[registry]'"
        ) from error
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)  # errors are raised and printed in one line


def _client(uri: str) -> Any:
    _require_mlflow()
    from mlflow.tracking import MlflowClient

    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:
        if any(text in str(error) for text in (*_NO_DATABASE, _LOCKED)):
            raise  # the caller reports it in one line with the name of the file
        first_line = str(error).split("\n")[0]
        raise RegistryError(f"{uri}: not a registry that MLflow can open ({first_line})") from error


def _to_tags(record: JsonMapping) -> dict[str, str]:
    text = redact(json.dumps(record, ensure_ascii=False, allow_nan=False))
    pieces = [text[start : start + _MAX_TAG_CHARACTERS] for start in range(0, len(text), _MAX_TAG_CHARACTERS)]
    return {f"{_RECORD}.{place}": piece for place, piece in enumerate(pieces)}


def _from_tags(tags: Mapping[str, str], what: str) -> JsonObject:
    places = sorted(int(key.removeprefix(f"{_RECORD}.")) for key in tags if key.startswith(f"{_RECORD}."))
    try:
        record = parse_json("".join(tags[f"{_RECORD}.{place}"] for place in places))
        if not isinstance(record, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise RegistryError(
            f"{what}: its record in the registry was changed and is no longer JSON ({error})"
        ) from error
    return record
