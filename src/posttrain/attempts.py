"""Attempts: each start of a run takes the next number in its folder, and with it the right to write there.

    attempts/0001.json    the first start: host, process, when it began, its heartbeat and its checkpoints

The files are lease, fence and record at once.

- Lease. An attempt holds the folder while its process lives. On the same machine that is looked up; a process on another
  machine, or in another container, lives as long as its heartbeat is younger than `STALE_S`. A number can be taken only once,
  because the file is created exclusively, which works on network file systems, too.
- Fence. An attempt that finds a newer number raises Superseded before it writes. It is one whose heartbeat stopped (a
  machine that hung, a network that was cut) and that goes on after another one took its place.
- Record. `read_attempts` is the history: how often a run was started, and which attempts got to a new checkpoint.

Only the driver of a run has an attempt; ranks write where it tells them to.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from posttrain.errors import FolderHeld, InputError, Superseded
from posttrain.json_files import JsonObject
from posttrain.locks import Holder, now_text

ATTEMPTS_FOLDER = "attempts"
BEAT_S = 5.0
STALE_S = 30.0
_NAME = re.compile(r"(\d{4,})\.json")
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class AttemptRecord:
    number: int
    token: str  # two runs, one after the other in a folder of the same name, may have the same number
    holder: Holder
    heartbeat: float  # seconds since 1970, by the clock of the holder
    first_checkpoint: int | None = None  # step
    last_checkpoint: int | None = None
    ended: str | None = None  # when
    exit_code: int | None = None

    @property
    def started(self) -> str:
        return self.holder.since

    def is_held(self, now: float) -> bool:
        if self.ended is not None:
            return False
        return self.holder.is_alive if self.holder.is_on_this_machine else now - self.heartbeat < STALE_S


def read_attempts(folder: Path) -> list[AttemptRecord]:
    """The attempts of the run in `folder`, the oldest first. Files that cannot be read are left out."""
    return [record for number in _numbers(folder) if (record := _read(folder, number)) is not None]


def holder_of(folder: Path, clock: Callable[[], float] = time.time) -> AttemptRecord | None:
    """The attempt that may be writing to `folder` now."""
    return next((record for record in reversed(read_attempts(folder)) if record.is_held(clock())), None)


class Attempt:
    """The right of this process to write to `folder`, until `end`. FolderHeld if another process has it."""

    def __init__(
        self, folder: Path, *, beat_s: float = BEAT_S, clock: Callable[[], float] = time.time, setting: str = ""
    ) -> None:
        self.folder = Path(os.path.abspath(folder))  # the working directory may change
        self.num_losses = 0  # how often the folder was found deleted or replaced
        self.has_begun = False  # the run writes to its folder
        self._beat_s = beat_s
        self._clock = clock
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._created = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.record = self._take()
        except InputError:
            raise
        except (OSError, ValueError) as error:
            self._remove_created()
            raise InputError(
                f"{setting}: {folder} cannot be written ({getattr(error, 'strerror', None) or error})"
            ) from error
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def number(self) -> int:
        return self.record.number

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def _take(self) -> AttemptRecord:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before the holders: one that comes later takes this very number, or finds it taken.
            number = max(_numbers(self.folder), default=0) + 1
            if (held := holder_of(self.folder, self._clock)) is not None:
                raise FolderHeld(_refusal(self.folder, held, self._clock()))
            record = AttemptRecord(number, uuid4().hex, Holder.this(), self._clock())
            if self._create(record):
                return record

    def _create(self, record: AttemptRecord) -> bool:
        """Write the file of a new attempt, whole; False if another process was faster."""
        path = _path(self.folder, record.number)
        aside = path.with_name(f".{record.token}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(aside, record)
            try:
                os.link(aside, path)  # unlike a rename, it fails where the name is taken
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with path.open("x"):
                    os.replace(aside, path)
            return True
        except (FileExistsError, FileNotFoundError):  # FileNotFoundError: the folder was removed by one that withdrew
            return False
        finally:
            aside.unlink(missing_ok=True)

    def end(self, exit_code: int | None = None) -> None:
        """Give the folder back. An attempt that has not begun leaves nothing behind if it ended without a crash."""
        self._over.set()
        if not self.has_begun and exit_code is not None:
            with self._changing, suppress(OSError):
                if self._is_mine():
                    _path(self.folder, self.number).unlink()
                _path(self.folder, 0).parent.rmdir()
            self._remove_created()
            return
        with suppress(OSError):  # the end of a run must not fail for this; its process is no longer there
            self._change(ended=now_text(self._clock()), exit_code=exit_code)

    def _remove_created(self) -> None:
        with suppress(OSError):  # other files are in it
            for path in self._created:
                path.rmdir()

    # -- while it runs -------------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """Call before writing. Superseded if a newer attempt has begun. A folder that was deleted or replaced is created
        again, with the record of this attempt, and counted in `num_losses`."""
        with self._changing:
            newest = max(_numbers(self.folder), default=0)
            if newest > self.number:
                raise Superseded(_superseded(self.folder, self.record, _read(self.folder, newest)))
            if self._is_mine():
                return
            self.num_losses += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._create(self.record) and (other := _read(self.folder, self.number)) is not None:
                raise Superseded(_superseded(self.folder, self.record, other))

    @property
    def is_superseded(self) -> bool:
        return max(_numbers(self.folder), default=0) > self.number

    def note_checkpoint(self, step: int) -> None:
        first = self.record.first_checkpoint
        self._change(first_checkpoint=step if first is None else first, last_checkpoint=step)

    def beat(self) -> None:
        """Show that this process lives. The rename also refreshes what a network file system remembers of the folder, so
        that `confirm` sees a newer attempt."""
        self._change(heartbeat=self._clock())

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            with suppress(OSError):  # a full disk or a server that is away; the next beat may succeed
                self.beat()

    def _change(self, **values: object) -> None:
        with self._changing:
            self.record = replace(self.record, **values)  # type: ignore[arg-type]
            if self._is_mine():
                path = _path(self.folder, self.number)
                aside = path.with_name(f".{self.record.token}")
                _write(aside, self.record)
                os.replace(aside, path)

    def _is_mine(self) -> bool:
        found = _read(self.folder, self.number)
        return found is not None and found.token == self.record.token


def _path(folder: Path, number: int) -> Path:
    return folder / ATTEMPTS_FOLDER / f"{number:04d}.json"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder / ATTEMPTS_FOLDER)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _read(folder: Path, number: int) -> AttemptRecord | None:
    try:
        content: JsonObject = json.loads(_path(folder, number).read_bytes())
        return AttemptRecord(**{**content, "holder": Holder.read(content["holder"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, record: AttemptRecord) -> None:
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def _refusal(folder: Path, held: AttemptRecord, now: float) -> str:
    if held.holder.is_on_this_machine:
        remedy = "wait for it or stop it (SIGTERM: it saves first)"
    else:
        age = max(0.0, now - held.heartbeat)
        remedy = f"its heartbeat is {age:.0f} s old; if it is dead, the folder is free when that is {STALE_S:.0f} s"
    return (
        f"{folder} is in use by {held.holder}, attempt {held.number} of this run: {remedy}. For another run name another "
        "folder (checkpointing.checkpoint_dir=...). Nothing was written"
    )


def _superseded(folder: Path, mine: AttemptRecord, newer: AttemptRecord | None) -> str:
    by = f"attempt {newer.number}: {newer.holder}" if newer is not None else "a newer attempt"
    return (
        f"{folder} was taken over by {by}. This attempt, number {mine.number}, stops and writes nothing more: its heartbeat "
        f"had stopped for over {STALE_S:.0f} s, or the folder was replaced. What it saved before is kept"
    )
