"""The files of a model version: sizes and SHA-256, a copy in the registry, and verification of the files against both.

Sizes and hashes are stored in the registry's database and not beside the files, so changing a file does not change what
it is verified against.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from posttrain.errors import RegistryError
from posttrain.files import durable
from posttrain.files.digests import sha256_of, sha256_of_file
from posttrain.files.locks import try_lock

_MAX_THREADS = 8
_PREFIX = ".partial-"
CHECKPOINT_FILES = ("config.yaml", "training_info.json", "policy/model.json")
CHECKPOINT_FOLDERS = (("policy", "weights"), ("policy", "tokenizer"))


@dataclass(frozen=True)
class FileRecord:
    size: int
    sha256: str


Progress = Callable[[int], None]  # called with the number of bytes processed
Files = Mapping[str, FileRecord]  # path relative to the version's folder, with forward slashes


def no_progress(num_bytes: int) -> None:
    pass


def measure(folder: Path, progress: Progress = no_progress) -> dict[str, FileRecord]:
    """Every file below `folder`, hashed in threads. Links are followed, as hub caches consist of them.

    Of a checkpoint step_N only the model counts: what a run needs to resume (optimizer, data position) is not listed.
    """
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "no such folder"
        raise RegistryError(f"{folder}: {kind}; expected a folder with a model, an adapter or a checkpoint step_N")
    names = [path.relative_to(folder) for path in _walk(folder)]
    if (folder / "policy" / "weights").is_dir():
        names = [name for name in names if str(name) in CHECKPOINT_FILES or name.parts[:2] in CHECKPOINT_FOLDERS]
    if not names:
        raise RegistryError(f"{folder}: the folder is empty; expected a model, an adapter or a checkpoint step_N")
    found = {}
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        try:
            for name, record in zip(names, pool.map(lambda name: _record(folder / name), names), strict=True):
                found[name.as_posix()] = record
                progress(record.size)
        except OSError as error:
            raise RegistryError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return found


def content_digest(files: Files) -> str:
    """One SHA-256 for all names and contents."""
    lines = (f"{record.sha256}  {name}\n" for name, record in sorted(files.items()))
    return sha256_of("".join(lines))


def find_damage(folder: Path, files: Files, *, extra_files: bool, contents: bool = True) -> list[str]:
    """What differs from `files`, one line each. `extra_files`: files that are not in the list count, too."""
    if not folder.is_dir():
        return [f"the folder {folder} is missing"]
    sizes = (_problem(folder, name, record, contents=False) for name, record in files.items())
    problems = [problem for problem in sizes if problem]
    if extra_files:
        found = (path.relative_to(folder).as_posix() for path in _walk(folder))
        problems += [f"{name} does not belong to the version" for name in found if name not in files]
    if problems or not contents:
        return problems
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        checks = pool.map(lambda item: _problem(folder, *item, contents=True), files.items())
        return [problem for problem in checks if problem]


class Copy:
    """A copy of a folder for the registry, named by its content: equal content is stored once.

    Files are copied under a temporary name, which may take long. `keep` and `withdraw` are quick and are called by the
    registry's only writer, so no other version can refer to what `withdraw` removes. Leaving the block removes what was
    not kept.
    """

    def __init__(self, folder: Path, files: Files, root: Path, progress: Progress = no_progress) -> None:
        self.target = root / content_digest(files)[:24]
        self._folder, self._files, self._root, self._progress = folder, files, root, progress
        self._partial: PartialFolder | None = None
        self._is_new = False

    def __enter__(self) -> Copy:
        clear_abandoned(self._root)
        if not self.target.exists() or find_damage(self.target, self._files, extra_files=True):
            try:
                self._copy()
            except BaseException:
                self._tidy()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._tidy()

    def keep(self) -> None:
        """Rename the copy to its final name, atomically."""
        if self._partial is None:
            if self.target.exists():
                return
            self._copy()  # another writer had the same content there and has withdrawn it since
        assert self._partial is not None
        try:
            self._is_new = put_in_place(self._partial.path, self.target, self._files)
        except OSError as error:
            raise self._failed(error) from error

    def withdraw(self) -> None:
        """Remove what `keep` put there; files that were there before, or replaced damaged ones, stay."""
        if self._is_new:
            shutil.rmtree(self.target, ignore_errors=True)

    def _copy(self) -> None:
        try:
            durable.make_folder(self._root)
            self._partial = PartialFolder(self._root)
            for name, record in self._files.items():
                copy = self._partial.path / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._folder / name, copy)
                durable.sync_file(copy)
                self._progress(record.size)
        except OSError as error:
            raise self._failed(error) from error
        if damage := find_damage(self._partial.path, self._files, extra_files=True):
            raise RegistryError(
                f"{self._folder} changed while it was copied: {damage[0]}; is something still writing to it?"
            )

    def _failed(self, error: OSError) -> RegistryError:
        return RegistryError(f"{self._folder} cannot be copied to {self.target}: {error.strerror or error}")

    def _tidy(self) -> None:
        if self._partial is not None:
            self._partial.remove()
            self._partial = None
        with suppress(OSError):  # usually they hold other versions
            self._root.rmdir()
            self._root.parent.rmdir()


def put_in_place(folder: Path, target: Path, files: Files) -> bool:
    """Rename `folder` to `target`, unless the same files are there; damaged ones go. True: none were there."""
    is_empty = not target.exists()
    while not target.exists() or find_damage(target, files, extra_files=True):
        damaged = target.with_name(f".replaced-{uuid4().hex}")
        try:
            durable.put_folder(folder, target, damaged)
            return is_empty
        except OSError as error:  # another process puts the same content there
            if not folder.exists() or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
    return False


def _walk(folder: Path) -> list[Path]:
    found = (Path(root) / name for root, _, names in os.walk(folder, followlinks=True) for name in names)
    return sorted(found)


def _record(path: Path) -> FileRecord:
    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
    return FileRecord(path.stat().st_size, sha256_of_file(path))


def _problem(folder: Path, name: str, record: FileRecord, *, contents: bool) -> str | None:
    try:
        size = (folder / name).stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
        is_same = not contents or _record(folder / name) == record
        return None if is_same else f"{name} is not what was registered: its SHA-256 differs"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


class PartialFolder:
    """An empty folder below `root`. The caller renames it, or files in it; `remove` deletes the rest.

    It has a hidden name and is locked as long as its writer runs. The operating system releases the locks of a killed
    process, so the next writer can distinguish leftovers from files being written. On a network file system this
    depends on its `flock`; without locks, leftovers are kept.
    """

    def __init__(self, root: Path) -> None:
        while True:  # retried if another process removed it as abandoned before it was locked
            self.path = root / f"{_PREFIX}{uuid4().hex}"
            self.path.mkdir(parents=True)
            try:
                self._lock = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            is_locked = True
            with suppress(OSError):
                is_locked = try_lock(self._lock)
            if is_locked and self.path.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_abandoned(root: Path) -> None:
    """Remove what killed processes were writing below `root`."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is gone
            lock = os.open(folder, os.O_RDONLY)
            try:
                if try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
