"""`checksums.json`: the list of a checkpoint's files with their sizes and SHA-256, and the comparison against it.

Files are hashed in pieces of 64 MiB on all cores, because one optimizer file can have tens of gigabytes: `sha256` is
the list of the digests of the pieces, in order. A file of up to 64 MiB has one, which is what `sha256sum` prints.

The list has a checksum of its own, `own_sha256`, and must name every file that is loaded: those below `policy/`
and `critic/`, and the files of `_LOADED`. Other files are ignored: people put notes and converted models into a
checkpoint's folder. Checkpoints of earlier versions have no `own_sha256`; everything else is checked.

Checksums detect accidental damage. They are not a signature: anyone with write access can write new checksums.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.files import durable
from posttrain.files.digests import running_sha256, sha256_of
from posttrain.files.json_files import MAX_FILE_BYTES, parse_json, read_at_most

CHECKSUMS = "checksums.json"
OWN = "own_sha256"
_PIECE_BYTES = 64 * 2**20
_READ_BYTES = 4 * 2**20
_MAX_THREADS = 16
_LOADED_FOLDERS = ("policy", "critic")
_LOADED = ("config.yaml", "train_dataloader.pt", "training_info.json")
_SYSTEM_FILES = re.compile(r"\.DS_Store|\.nfs.*|\._.*|Thumbs\.db")  # of systems and network mounts; never loaded


@dataclass(frozen=True)
class _Recorded:
    """The entry of one file in `checksums.json`."""

    size: int
    digests: tuple[str, ...]


def seal(folder: Path) -> None:
    """Flush every file below `folder` and write `checksums.json`; afterwards no file may change."""
    checksums = folder / CHECKSUMS
    checksums.unlink(missing_ok=True)
    folders, paths = [], []
    for root, _, names in os.walk(folder):
        folders.append(Path(root))
        paths += [Path(root) / name for name in names]
    paths.sort()

    with _threads() as pool:
        # Hashing uses the CPU and syncing the disk, so both run concurrently.
        syncing = [pool.submit(durable.sync_file, path) for path in paths]
        hashing = {path: (size := path.stat().st_size, _submit(pool, path, size, _PIECE_BYTES)) for path in paths}
        files = {
            path.relative_to(folder).as_posix(): {"size": size, "sha256": [digest.result() for digest in digests]}
            for path, (size, digests) in hashing.items()
        }
        for done in syncing:
            done.result()

    content = {"algorithm": "sha256", "piece_bytes": _PIECE_BYTES, "files": files}
    content[OWN] = _own_digest(content)
    checksums.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    durable.sync_file(checksums)
    for path in reversed(folders):
        durable.sync_folder(path)


def find_damage(folder: Path, *, contents: bool = True, below: str | tuple[str, ...] = ()) -> list[str]:
    """What is wrong with a sealed folder, one line each; empty if nothing is.

    `contents` False looks at sizes only; `below` looks only at these files, and at those under these subfolders.
    """
    places = (below,) if isinstance(below, str) else below
    try:
        piece_bytes, recorded = _read_checksums(folder / CHECKSUMS)
    except FileNotFoundError:
        return [f"{CHECKSUMS} is missing: the checkpoint was never completed"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"{CHECKSUMS} cannot be read ({type(error).__name__}: {error})"]
    if unlisted := _unlisted(folder, recorded, places):
        return [f"{name} is not in {CHECKSUMS}" for name in unlisted]
    if places:
        inside = tuple(f"{place}/" for place in places)
        recorded = {name: file for name, file in recorded.items() if name in places or name.startswith(inside)}

    problems = [
        problem for name, file in recorded.items() if (problem := _size_problem(folder / name, name, file.size))
    ]
    if problems or not contents:
        return problems
    with _threads() as pool:
        hashing = {name: _submit(pool, folder / name, file.size, piece_bytes) for name, file in recorded.items()}
        for name, digests in hashing.items():
            try:
                found = [digest.result() for digest in digests]
            except OSError as error:
                problems.append(f"{name} cannot be read ({error})")
                continue
            if problem := _content_problem(name, recorded[name], found, piece_bytes):
                problems.append(problem)
    return problems


def total_bytes(folder: Path) -> int:
    """The size of the files that `checksums.json` names; 0 if it cannot be read."""
    try:
        return sum(file.size for file in _read_checksums(folder / CHECKSUMS)[1].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0


def _read_checksums(path: Path) -> tuple[int, Mapping[str, _Recorded]]:
    content: Any = parse_json(read_at_most(path, MAX_FILE_BYTES))
    piece_bytes = int(content["piece_bytes"])
    if content["algorithm"] != "sha256" or piece_bytes <= 0:
        raise ValueError(f"algorithm {content['algorithm']!r} with pieces of {piece_bytes} bytes is not known")
    files = content["files"]
    if OWN in content and content[OWN] != _own_digest(content):
        raise ValueError(f"it is not what was saved: its {OWN} differs")
    if not files:
        raise ValueError("it lists no files")
    if outside := [name for name in files if name.startswith("/") or ".." in PurePosixPath(name).parts]:
        raise ValueError(f"it lists {outside[0]}, which is outside of the folder")
    return piece_bytes, {name: _Recorded(int(file["size"]), tuple(file["sha256"])) for name, file in files.items()}


def _own_digest(content: Mapping[str, object]) -> str:
    """Of the whole list without this digest, as JSON with sorted keys and without spaces."""
    rest = {key: value for key, value in content.items() if key != OWN}
    return sha256_of(json.dumps(rest, sort_keys=True, separators=(",", ":")))


def _unlisted(folder: Path, recorded: Collection[str], places: tuple[str, ...]) -> list[str]:
    """Files that would be loaded but have no checksum."""
    places = places or (*_LOADED, *_LOADED_FOLDERS)
    found = [name for name in places if (folder / name).exists() and not (folder / name).is_dir()]
    for root, _, names in (entry for place in places for entry in os.walk(folder / place)):
        found += [
            (Path(root) / name).relative_to(folder).as_posix() for name in names if not _SYSTEM_FILES.fullmatch(name)
        ]
    return sorted(name for name in found if name not in recorded)


def _size_problem(path: Path, name: str, size: int) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a regular file"
    return None if status.st_size == size else f"{name} has {status.st_size} bytes instead of {size}"


def _content_problem(name: str, recorded: _Recorded, found: list[str], piece_bytes: int) -> str | None:
    if tuple(found) == recorded.digests:
        return None
    differing = [index for index, pair in enumerate(zip(found, recorded.digests, strict=False)) if pair[0] != pair[1]]
    first = (differing or [0])[0] * piece_bytes
    last = min(first + piece_bytes, recorded.size)
    return f"{name} is not what was saved: its SHA-256 differs, first in bytes {first} to {last}"


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """A pool that drops queued work on an error, so that the error does not wait for gigabytes of hashing."""
    # Cores this process may use, where the system reports it: a container has often fewer than the machine.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(_MAX_THREADS, num_cores))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ThreadPoolExecutor, path: Path, size: int, piece_bytes: int) -> list[Any]:
    starts: Iterable[int] = range(0, max(size, 1), piece_bytes)  # an empty file has one piece, too
    return [pool.submit(_digest_of_piece, path, start, piece_bytes) for start in starts]


def _digest_of_piece(path: Path, start: int, piece_bytes: int) -> str:
    digest = running_sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, piece_bytes)))
    left = piece_bytes
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
