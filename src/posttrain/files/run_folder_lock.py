"""Attempts: each start of a run takes the next number in its folder, and with it the right to write there.

    attempts/0001.json    the first start: host, process, when it began, its heartbeat and its checkpoints

The files are lease, fence and record at once.

- Lease. An attempt holds the folder while its process lives. On the same machine that is looked up; a process on
  another machine, or in another container, lives as long as its heartbeat is younger than `STALE_S`. An older one is
  watched for `WATCH_S` first: if it changes, the process lives and one of the clocks is wrong. A number can be taken
  only once, because the file is created exclusively, which works on network file systems, too.
- Takeover. A run that `posttrain node` starts has a name in its cluster. When the scheduler starts it again, what is
  left of the attempt before must stop, alive or not: the new one takes the next number at once, and the fence stops the
  old one.
- Fence. An attempt that finds a newer number raises Superseded before it writes. It is one whose heartbeat stopped (a
  machine that hung, a network that was cut) and that goes on after another one took its place.
- Record. `read_attempts` is the history: how often a run was started, which attempts got to a new checkpoint, and why
  they ended. The first and the last `KEPT` are kept.

Only the driver of a run has an attempt; ranks write where it tells them to.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from posttrain.errors import STORAGE_FAULTS, FolderHeld, InputError, StorageError, Superseded, place_and_reason
from posttrain.files import durable
from posttrain.files.json_files import MAX_FILE_BYTES, JsonObject, parse_json, read_at_most
from posttrain.files.locks import Holder, now_text

_Result = TypeVar("_Result")
ATTEMPTS_FOLDER = "attempts"
BEAT_S = 5.0
STALE_S = 30.0
WATCH_S = 12.0  # more than two beats
KEPT = 100
_ASIDE_S = 600.0  # a file that is written aside and is older was left by a kill
_SKEW_S = 2.0  # smaller clock differences are not reported
_PAUSES_S = (0.05, 0.2, 1.0)  # between tries, when storage answers with an error that may pass
_MAY_PASS = {errno.ESTALE, errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
_ASIDE = re.compile(r"\.[0-9a-f]{32}")
_UNFINISHED = re.compile(r"tmp_(?:old_)?step_\d+\.(\d+)")  # a checkpoint that an attempt was writing
_NAME = re.compile(r"(\d{4,})\.json")
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR}


@dataclass(frozen=True)
class AttemptRecord:
    number: int
    token: str  # two runs, one after the other in a folder of the same name, may have the same number
    holder: Holder
    heartbeat: float  # seconds since 1970, by the clock of the holder
    first_checkpoint: int | None = None  # step
    last_checkpoint: int | None = None
    ended: str | None = None  # when
    exit_code: int | None = None  # None: a crash, or it has not ended
    error: str | None = None  # why it ended, if that was an error
    run: str | None = None  # its name in a cluster

    @property
    def started(self) -> str:
        return self.holder.since

    def is_held(self, now: float) -> bool:
        if self.ended is not None:
            return False
        is_alive = self._looked_up
        return now - self.heartbeat < STALE_S if is_alive is None else is_alive

    @property
    def is_judged_by_heartbeat(self) -> bool:
        return self.ended is None and self._looked_up is None

    @property
    def _looked_up(self) -> bool | None:
        return self.holder.is_alive if self.holder.is_on_this_machine else None


class _Unreadable(Exception):
    """A record that is there, and no record."""


def read_attempts(folder: Path) -> list[AttemptRecord]:
    """The attempts of the run in `folder`, the oldest first. Files that cannot be read are left out, except for the
    newest: its process may live, and the file's time stands for its heartbeat."""
    numbers = _numbers(folder)
    records = []
    for number in numbers:
        try:
            record = _read(folder, number)
        except (OSError, _Unreadable):
            record = _stand_in(folder, number) if number == numbers[-1] else None
        if record is not None:
            records.append(record)
    return records


def holder_of(folder: Path, clock: Callable[[], float] = time.time) -> AttemptRecord | None:
    """The attempt that may be writing to `folder` now."""
    return next((record for record in reversed(read_attempts(folder)) if record.is_held(clock())), None)


class Attempt:
    """The right of this process to write to `folder`, until `end`. FolderHeld if another process has it."""

    def __init__(
        self,
        folder: Path,
        *,
        beat_s: float = BEAT_S,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        setting: str = "",
        run: str | None = None,
    ) -> None:
        self._run = run  # name in a cluster: an earlier attempt of the same run elsewhere is taken over
        self.folder = Path(os.path.abspath(folder))  # the working directory may change
        self.num_losses = 0  # how often the folder was found deleted or replaced
        self.has_begun = False  # the run writes to its folder
        self._beat_s = beat_s
        self._clock = clock
        self._sleep = sleep
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._created = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.record = self._take()
            self._identity = _identity(self.folder)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            self.remove_created()
            reason = str(error) if isinstance(error, ValueError) else place_and_reason(error)
            reason = reason.removeprefix(f"{self.folder}: ")
            raise self._kind_of(error)(f"{setting}: {folder} cannot be written ({reason})") from error
        with suppress(OSError):  # of another user, say
            self._tidy()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _kind_of(self, error: OSError | ValueError) -> type[StorageError | InputError]:
        """A storage that wrote for earlier attempts, and is read-only now, has a fault. Other paths are wrong in the
        config."""
        number = getattr(error, "errno", None)
        has_written = number == errno.EROFS and bool(_numbers(self.folder))
        is_fault = number in STORAGE_FAULTS | {errno.ENOTCONN, errno.ETIMEDOUT}
        return StorageError if has_written or is_fault else InputError

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def heading(self) -> str:
        """Above what this attempt adds to a log."""
        return f"==== attempt {self.number}: {self.record.holder} ===="

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def _take(self) -> AttemptRecord:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before the holders: one that comes later takes this very number, or finds it taken.
            number = max([*_numbers(self.folder), *_unfinished(self.folder)], default=0) + 1
            if (held := holder_of(self.folder, self._clock)) is not None and not self._takes_over(held):
                raise FolderHeld(_refusal(self.folder, held, self._clock()))
            last = next(reversed(read_attempts(self.folder)), None)
            if last is not None and last.is_judged_by_heartbeat and not self._takes_over(last):
                self._watch(last)
            record = AttemptRecord(number, uuid4().hex, Holder.this(), self._clock(), run=self._run)
            if self._create(record):
                return record

    def _takes_over(self, other: AttemptRecord) -> bool:
        return self._run is not None and other.run == self._run and not other.holder.is_on_this_machine

    def _watch(self, last: AttemptRecord) -> None:
        """Return if the heartbeat of `last`, which is old by our clock, stands still; FolderHeld if it does not."""
        print(
            f"{self.folder}: is {last.holder} still alive? Watching its heartbeat for {WATCH_S:.0f} s", file=sys.stderr
        )
        for _ in range(int(WATCH_S)):
            self._sleep(1.0)
            now = next((record for record in read_attempts(self.folder) if record.number == last.number), last)
            if now.ended is not None:
                return
            if now.heartbeat != last.heartbeat:
                raise FolderHeld(_refusal(self.folder, now, self._clock(), is_beating=True))

    def _tidy(self) -> None:
        """Remove the records between the first and the last `KEPT`, and what killed processes were writing."""
        for number in _numbers(self.folder)[1:-KEPT]:
            _path(self.folder, number).unlink(missing_ok=True)
        for entry in _path(self.folder, 0).parent.iterdir():
            if _ASIDE.fullmatch(entry.name) and self._clock() - entry.stat().st_mtime > _ASIDE_S:
                entry.unlink(missing_ok=True)

    def _create(self, record: AttemptRecord) -> bool:
        """Write the file of a new attempt, whole; False if another process was faster."""
        path = _path(self.folder, record.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            durable.create(path, _text(record), path.with_name(f".{record.token}"))
            return True
        except (FileExistsError, FileNotFoundError):  # FileNotFoundError: the folder was removed by one that withdrew
            return False

    def end(self, exit_code: int | None = None, error: str | None = None) -> None:
        """Give the folder back, once. An attempt that has not begun leaves nothing behind if it ended without a
        crash."""
        if self._over.is_set():
            return
        self._over.set()
        if not self.has_begun and exit_code is not None:
            with self._changing, suppress(OSError):
                if self._is_mine():
                    _path(self.folder, self.number).unlink()
                _path(self.folder, 0).parent.rmdir()
            self.remove_created()
            return
        with suppress(OSError):  # the end of a run must not fail for this; its process is no longer there
            self._change(ended=now_text(self._clock()), exit_code=exit_code, error=error)

    def remove_created(self) -> None:
        """The folders that this attempt made, if nothing is in them."""
        with suppress(OSError):  # other files are in it
            for path in self._created:
                path.rmdir()

    # -- while it runs -------------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """Call before writing. Superseded if a newer attempt has begun. A record that was deleted is created again;
        if the folder was deleted or replaced with it, that is counted in `num_losses`. OSError if the record stays
        unreadable."""
        with self._changing:
            newest = max(_numbers(self.folder), default=0)
            if newest > self.number:
                raise Superseded(_superseded(self.folder, self.record, newest))
            if self._is_mine():
                return
            is_lost = _identity(self.folder) != self._identity or os.listdir(self.folder) in ([], [ATTEMPTS_FOLDER])
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._create(self.record):
                self.num_losses += is_lost
                self._identity = _identity(self.folder)
            elif not self._is_mine():
                raise Superseded(_superseded(self.folder, self.record, self.number))

    @property
    def is_superseded(self) -> bool:
        return max(_numbers(self.folder), default=0) > self.number

    def note_checkpoint(self, step: int) -> None:
        first = self.record.first_checkpoint
        self._change(first_checkpoint=step if first is None else first, last_checkpoint=step)

    def beat(self) -> None:
        """Show that this process lives. The rename also refreshes what a network file system remembers of the
        folder, so that `confirm` sees a newer attempt."""
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
                with durable.replacing(path, sync=False, partial=aside):
                    aside.write_text(_text(self.record), encoding="utf-8")

    def _is_mine(self) -> bool:
        """Whether the record of this number is there, and not that of another run's attempt."""
        try:
            found = _read(self.folder, self.number)
        except _Unreadable:
            return True  # a new one would have another number, or be whole; the next beat replaces it
        return found is not None and found.token == self.record.token


def _path(folder: Path, number: int) -> Path:
    return folder / ATTEMPTS_FOLDER / f"{number:04d}.json"


def _numbers(folder: Path) -> list[int]:
    try:
        names = _tried(lambda: os.listdir(folder / ATTEMPTS_FOLDER))
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _unfinished(folder: Path) -> list[int]:
    """Of attempts whose records may have been deleted; their numbers are not used again."""
    try:
        names = _tried(lambda: os.listdir(folder))
    except FileNotFoundError:  # removed by one that withdrew
        return []
    return [int(match[1]) for name in names if (match := _UNFINISHED.fullmatch(name))]


def _identity(folder: Path) -> int | None:
    """Which folder of this name it is; None if there is none."""
    try:
        return _tried(lambda: os.stat(folder)).st_ino
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return None


def _read(folder: Path, number: int) -> AttemptRecord | None:
    """None if there is no such record; OSError or _Unreadable if there is, and it cannot be read."""
    try:
        content: JsonObject = parse_json(_tried(lambda: read_at_most(_path(folder, number), MAX_FILE_BYTES)))
        known = {field.name: content[field.name] for field in fields(AttemptRecord) if field.name in content}
        return AttemptRecord(**{**known, "holder": Holder.read(content["holder"])})
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unreadable from error


def _stand_in(folder: Path, number: int) -> AttemptRecord | None:
    """For a record that cannot be read."""
    try:
        changed = _tried(_path(folder, number).stat).st_mtime
    except FileNotFoundError:
        return None
    holder = Holder("a host that is not known", 0, "", 0.0, "its record cannot be read", now_text(changed))
    return AttemptRecord(number, "", holder, changed)


def _tried(call: Callable[[], _Result]) -> _Result:
    """The result of `call`, tried again where the storage answers with an error that may pass."""
    for pause_s in _PAUSES_S:
        try:
            return call()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise
            time.sleep(pause_s)
    return call()


def _text(record: AttemptRecord) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"


def _refusal(folder: Path, held: AttemptRecord, now: float, *, is_beating: bool = False) -> str:
    age = now - held.heartbeat
    if not held.is_judged_by_heartbeat:
        remedy = "wait for it or stop it (SIGTERM: it saves first)"
    elif is_beating:
        remedy = (
            f"its heartbeat moves on, and is {age:.0f} s old by the clock of this machine: it is alive, and the two "
            "clocks differ by about that; set them"
        )
    elif age < -_SKEW_S:
        remedy = (
            f"its heartbeat is {-age:.0f} s in the future, so its clock is ahead of this machine's by at least that; "
            f"set the clocks. If it is dead, the folder is free in {STALE_S - age:.0f} s"
        )
    else:
        free = f"if it is dead, the folder is free when that is {STALE_S:.0f} s"
        remedy = f"its heartbeat is {max(0.0, age):.0f} s old; {free}"
    return (
        f"{folder} is in use by {held.holder}, attempt {held.number} of this run: {remedy}. For another run name "
        "another folder (checkpointing.checkpoint_dir=...). Nothing was written"
    )


def _superseded(folder: Path, mine: AttemptRecord, number: int) -> str:
    try:
        newer = _read(folder, number)
    except (OSError, _Unreadable):
        newer = None
    by = f"attempt {newer.number}: {newer.holder}" if newer is not None else "a newer attempt"
    return (
        f"{folder} was taken over by {by}. This attempt, number {mine.number}, stops and writes nothing more: the run "
        f"was started again in its cluster, its heartbeat had stopped for over {STALE_S:.0f} s, or the folder was "
        "replaced. What it saved before is kept"
    )
