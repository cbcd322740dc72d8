"""Folders that are only read: on this machine, or wherever fsspec reaches (s3://, gs://, …).

A file that is missing or cannot be read has no stamp and is empty: runs are looked at while they are written, moved and
deleted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

LISTING_LIFE_S = 1.5  # of a folder elsewhere
LARGE_LISTING = 1000  # entries; such a folder is listed less often
LARGE_LISTING_LIFE_S = 10.0
FOLDER = "folder"  # in place of the time of a change


class Stamp(NamedTuple):
    """Changes when the file changes."""

    size: int
    changed: object


class Place(Protocol):
    """A folder. Names may have a subfolder in front: `rollouts/step_3.jsonl.gz`."""

    url: str

    @property
    def name(self) -> str: ...

    def names(self, folder: str = "") -> list[str]: ...

    def folders(self) -> list[str]: ...

    def stamp(self, name: str) -> Stamp | None: ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes: ...

    def inside(self, name: str) -> Place: ...

    def folder_stamp(self, folder: str) -> object:
        """Changes when an entry is added to or removed from the folder."""
        ...


class LocalPlace:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    @property
    def name(self) -> str:
        return self.path.name

    def names(self, folder: str = "") -> list[str]:
        try:
            return os.listdir(self.path / folder)
        except OSError:
            return []

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except OSError:
            return []

    def stamp(self, name: str) -> Stamp | None:
        try:
            found = os.stat(self.path / name)
        except OSError:
            return None
        return Stamp(found.st_size, (found.st_mtime_ns, found.st_ino))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(max(0, end - start))
        except OSError:
            return b""

    def inside(self, name: str) -> LocalPlace:
        return LocalPlace(self.path / name)

    def folder_stamp(self, folder: str) -> object:
        stamp = self.stamp(folder)
        return stamp and stamp.changed


class RemotePlace:
    """Sizes and times come from listings, which are kept for a moment: one request serves all files of a folder."""

    def __init__(
        self, filesystem: AbstractFileSystem, root: str, url: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self.url = url.rstrip("/")
        self._clock = clock
        self._listings: dict[str, tuple[float, dict[str, Stamp]]] = {}
        self._listing = threading.Lock()

    @property
    def name(self) -> str:
        return self._root.rsplit("/", 1)[-1]

    def names(self, folder: str = "") -> list[str]:
        return list(self._entries(folder))

    def folders(self) -> list[str]:
        return [name for name, stamp in self._entries("").items() if stamp.changed == FOLDER]

    def stamp(self, name: str) -> Stamp | None:
        folder, _, base = name.rpartition("/")
        return self._entries(folder).get(base)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        stamp = self.stamp(name)
        if stamp is None or start >= stamp.size:
            return b""
        try:
            return bytes(self._filesystem.cat_file(f"{self._root}/{name}", start=start, end=end or stamp.size))
        except (OSError, ValueError):
            return b""

    def inside(self, name: str) -> RemotePlace:
        return RemotePlace(self._filesystem, f"{self._root}/{name}", f"{self.url}/{name}", self._clock)

    def folder_stamp(self, folder: str) -> object:
        self._entries(folder)
        return self._listings[folder][0]

    def _entries(self, folder: str) -> dict[str, Stamp]:
        with self._listing:
            listed_at, found = self._listings.get(folder, (-1e9, {}))
            life_s = LARGE_LISTING_LIFE_S if len(found) > LARGE_LISTING else LISTING_LIFE_S
            if self._clock() - listed_at > life_s:
                path = f"{self._root}/{folder}".rstrip("/")
                try:
                    rows = self._filesystem.ls(path, detail=True, refresh=True)
                except (OSError, ValueError):
                    rows = []
                found = {str(row["name"]).rstrip("/").rsplit("/", 1)[-1]: _remote_stamp(row) for row in rows}
                self._listings[folder] = (self._clock(), found)
            return found


def _remote_stamp(row: JsonMapping) -> Stamp:
    if row.get("type") == "directory":
        return Stamp(0, FOLDER)
    changed = next((row[key] for key in ("ETag", "LastModified", "mtime", "created") if row.get(key)), None)
    return Stamp(int(row.get("size") or 0), str(changed))


def place_of(text: str) -> Place:
    """The folder that a user names; InputError if there is none."""
    if "://" in text:
        from posttrain.data.sources import filesystem_of

        filesystem, root = filesystem_of(text)
        place = RemotePlace(filesystem, root, text)
        if not place.names():
            raise InputError(f"{text}: there is no such folder, or nothing is in it")
        return place
    path = Path(text).expanduser()
    if not path.is_dir():
        what = "a file; give the folder of a run, or one that holds runs" if path.exists() else "not found"
        raise InputError(f"{text}: {what}")
    return LocalPlace(path.resolve())
