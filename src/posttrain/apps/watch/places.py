"""Folders that are only read: on this machine, or wherever fsspec reaches (s3://, gs://, …).

A missing file has no stamp and is empty: runs are looked at while they are written, moved and deleted. On this machine,
only regular files are read, and no link below the folder that the user named is followed: whoever may write into a
run folder could otherwise show any file of the account that runs the dashboard, or stop it with a pipe.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

MAX_ENTRIES = 200_000  # of a folder on this machine that are looked at
LISTING_LIFE_S = 1.5  # of a folder elsewhere
LARGE_LISTING = 1000  # entries; such a folder is listed less often
LARGE_LISTING_LIFE_S = 10.0
FOLDER = "folder"  # in place of the time of a change


class Unreadable(InputError):
    """A file of a run that cannot be shown. The text names it within the run, with the reason."""


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

    def linked_runs(self, files: Collection[str]) -> list[str]: ...

    def stamp(self, name: str) -> Stamp | None: ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes: ...

    def inside(self, name: str) -> Place: ...

    def folder_stamp(self, folder: str) -> object:
        """Changes when an entry is added to or removed from the folder."""
        ...


class LocalPlace:
    """`root`: the folder that the user named, if this is a folder in it."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self.url = str(path)
        self._root = root or path

    @property
    def name(self) -> str:
        return self.path.name

    def names(self, folder: str = "") -> list[str]:
        return [name for name, _, _ in self._entries(folder)]

    def folders(self) -> list[str]:
        return [name for name, is_folder, _ in self._entries() if is_folder]

    def linked_runs(self, files: Collection[str]) -> list[str]:
        """Links to folders elsewhere that have one of these files."""
        links = [self.path / name for name, _, is_link in self._entries() if is_link]
        runs = [link for link in links if any(os.path.isfile(link / name) for name in files)]
        return [link.name for link in runs if not link.resolve().is_relative_to(self._root)]

    def stamp(self, name: str) -> Stamp | None:
        try:
            found = os.lstat(self.path / name)
        except OSError:
            return None
        return Stamp(found.st_size, (found.st_mtime_ns, found.st_ino))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Unreadable for what is not a regular file, or may not be read."""
        try:
            descriptor = self._open(name)
            if descriptor is None:
                return b""
            with open(descriptor, "rb") as file:
                size = os.fstat(descriptor).st_size  # a larger read would reserve its memory first
                file.seek(start)
                return file.read(max(0, min(size, size if end is None else end) - start))
        except OSError as error:
            raise Unreadable(f"{name}: {error.strerror or error}") from error

    def is_file(self, name: str) -> bool:
        """Whether it is a regular file that is reached without a link."""
        try:
            descriptor = self._open(name)
        except (OSError, Unreadable):
            return False
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None

    def inside(self, name: str) -> LocalPlace:
        return LocalPlace(self.path / name, self._root)

    def folder_stamp(self, folder: str) -> object:
        stamp = self.stamp(folder)
        return stamp and stamp.changed

    def _entries(self, folder: str = "") -> list[tuple[str, bool, bool]]:
        """Names, which of them are folders, and which are links. Of a folder that holds too many, some."""
        descriptor = None
        try:
            descriptor = self._open(folder, stat.S_IFDIR)
            if descriptor is None:
                return []
            with os.scandir(descriptor) as entries:
                some = islice(entries, MAX_ENTRIES)
                return [(one.name, one.is_dir(follow_symlinks=False), one.is_symlink()) for one in some]
        except (OSError, Unreadable):
            return []
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self, name: str, wanted: int = stat.S_IFREG) -> int | None:
        """A descriptor of a regular file or of a folder, reached from the root without a link; None if there is no such
        file."""
        parts = (self.path / name).relative_to(self._root).parts
        place = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for left, part in enumerate(parts, start=1 - len(parts)):
                mode = os.lstat(part, dir_fd=place).st_mode
                if stat.S_ISLNK(mode):
                    raise Unreadable(f"{name}: {_LINKED_FOLDER if left else 'a link, which is not followed'}")
                if not left and stat.S_IFMT(mode) != wanted:
                    raise Unreadable(f"{name}: {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file")
                kind = os.O_DIRECTORY if left else os.O_NONBLOCK | os.O_NOCTTY
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=place)
                os.close(place)
                place = inner
            if stat.S_IFMT(os.fstat(place).st_mode) != wanted:  # replaced since
                raise Unreadable(f"{name}: not a file")
            found, place = place, -1
            return found
        except (FileNotFoundError, NotADirectoryError):
            return None
        finally:
            if place >= 0:
                os.close(place)


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
_LINKED_FOLDER = "its folder is a link, which is not followed; give posttrain watch the folder that it leads to"


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

    def linked_runs(self, files: Collection[str]) -> list[str]:
        return []

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


def read_whole(place: Place, name: str, max_bytes: int) -> bytes:
    content = place.read(name, 0, max_bytes + 1)
    if len(content) > max_bytes:
        raise Unreadable(f"{name}: more than {max_bytes / 2**20:g} MiB")
    return content


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
