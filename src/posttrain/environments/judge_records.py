"""Cache of verdicts by request content, and the accumulated cost of judging. Shared by processes.

Neither may fail a verdict: if the disk is full or the file is damaged, judging continues without it, with one warning.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject, parse_json
from posttrain.files.locks import locked

_WAIT_FOR_LOCK_S = 30.0


def request_key(url: str, body: JsonObject) -> str:
    """A hash of all that the verdict depends on."""
    return digest([url, body])


class VerdictCache:
    """An SQLite file that maps the hash of a request to the judge's text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        with self._or_without():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=_WAIT_FOR_LOCK_S, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, text TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        with self._or_without():
            if self._connection is not None:
                row = self._connection.execute("SELECT text FROM verdicts WHERE key = ?", (key,)).fetchone()
                return None if row is None else str(row[0])
        return None

    def put(self, key: str, text: str) -> str:
        """Store a verdict unless there is one already. Returns the stored verdict."""
        with self._or_without():
            if self._connection is not None:
                self._connection.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (key, text))
                return self.get(key) or text
        return text

    def replace(self, key: str, text: str) -> None:
        """Replace a verdict that can no longer be read."""
        with self._or_without():
            if self._connection is not None:
                self._connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, text))

    @contextlib.contextmanager
    def _or_without(self) -> Any:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._connection = None
            print(f"warning: going on without the cache of verdicts {self.path}: {error}", file=sys.stderr)


@dataclass
class Usage:
    """What judging some completions took."""

    completions: int = 0
    cached: int = 0  # of these, answered from the cache
    unscored: int = 0  # of these, left without a verdict
    requests: int = 0  # retries included
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UsageFile:
    """A JSON file with the usage of all processes. It is replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_reported = False

    def add(self, usage: Usage, cost: float) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock")):
                total = self._read()
                for name, value in (*asdict(usage).items(), ("cost", cost)):
                    total[name] = total.get(name, 0) + value
                durable.write_text(self.path, json.dumps(total, indent=2) + "\n")
        except OSError as error:
            if not self._is_reported:
                print(f"warning: usage is not being counted in {self.path}: {error}", file=sys.stderr)
            self._is_reported = True

    def _read(self) -> JsonObject:
        try:
            return dict(parse_json(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            return {}
