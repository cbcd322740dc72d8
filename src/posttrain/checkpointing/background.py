"""Writing a checkpoint while training continues: one thread, at most one write at a time, and every error is reported.

Ranks in other processes report completion by a marker file in the checkpoint's folder. The folder is shared anyway, and
a rank that is busy with the next step cannot answer calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from posttrain.files import durable

Write = Callable[[Callable[[], bool]], None]  # its argument returns True once the run has failed
CHECKPOINT_THREAD = "checkpoint"
_PERIOD_S = 0.05
_GRACE_S = 60.0  # for ranks that may have ended
_LONGEST_WRITE_S = 3 * 3600.0  # of a checkpoint; ranks have an hour for their parts


class BackgroundWrite:
    def __init__(self) -> None:
        self._over = threading.Event()
        self._over.set()
        self._given_up = threading.Event()
        self._error: BaseException | None = None
        self._write_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def start(self, write: Write) -> None:
        """Run `write` in a thread. The previous write must have ended."""
        assert self.is_over, "one write at a time"
        self._over.clear()
        self._given_up.clear()
        # A daemon: a process that exits at once does not wait for it, and leaves a folder without its final name.
        threading.Thread(target=self._run, args=(write,), name=CHECKPOINT_THREAD, daemon=True).start()

    def _run(self, write: Write) -> None:
        start = time.perf_counter()
        try:
            write(self._given_up.is_set)
            self._write_s = time.perf_counter() - start
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    @property
    def has_failed(self) -> bool:
        """Whether there is an error that `wait` would return at once."""
        return self.is_over and self._error is not None

    def wait(self) -> BaseException | None:
        """Wait for the write to end. Returns its error, once, or None."""
        if not self._over.wait(_LONGEST_WRITE_S):
            return TimeoutError(f"it was not written within {_LONGEST_WRITE_S:.0f} s; does its disk hang?")
        error, self._error = self._error, None
        return error

    def give_up(self) -> None:
        """The run has failed: its write may complete, but no longer waits for ranks that may be dead."""
        self._given_up.set()

    def take_write_s(self) -> float | None:
        """Seconds that the latest complete write took, once."""
        seconds, self._write_s = self._write_s, None
        return seconds


def leave_mark(folder: Path, rank: int, problem: str) -> None:
    """`problem` is empty if all went well."""
    try:
        durable.write_text(_mark(folder, rank), problem)
    except FileNotFoundError:
        return  # the driver has abandoned this checkpoint and removed it
    except OSError:  # the disk may be full; an empty file needs almost no space
        _bare_mark(folder, rank).touch()


def wait_for_marks(folder: Path, num_ranks: int, is_given_up: Callable[[], bool], deadline_s: float) -> None:
    """Wait until every rank has written its marker, and remove the markers. RuntimeError with the problem of the first
    failed rank, or with the first rank without a marker after `deadline_s`.

    Once `is_given_up`, the run has failed and ranks get one more minute: they may have failed too.
    """
    start = time.monotonic()
    limit, gives_up = start + deadline_s, False
    # Check all ranks in turn: a rank may wait for another one that has failed.
    while missing := [rank for rank in range(num_ranks) if not _has_written(folder, rank)]:
        if not gives_up and is_given_up():
            limit, gives_up = min(limit, time.monotonic() + _GRACE_S), True
        if time.monotonic() > limit:
            waited = f"after {time.monotonic() - start:.0f} s"
            raise RuntimeError(f"rank {missing[0]} has not written its part of {folder.name} {waited}")
        time.sleep(_PERIOD_S)
    for rank in range(num_ranks):
        _mark(folder, rank).unlink()


def _has_written(folder: Path, rank: int) -> bool:
    mark = _mark(folder, rank)
    if _bare_mark(folder, rank).exists():
        problem = "it could not write the reason; is the disk full?"
    elif mark.exists():
        problem = mark.read_text(encoding="utf-8")
    else:
        return False
    if problem:
        raise RuntimeError(f"rank {rank} could not write its part of {folder.name}:\n{problem}")
    return True


def _bare_mark(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.failed"


def _mark(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.written"
