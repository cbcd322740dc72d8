"""How ranks in other processes tell the driver that their part of a checkpoint is written: a file for each in its folder.

The folder is shared anyway, and a rank that is busy with the next step cannot answer calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from posttrain.checkpointing import durable

_PERIOD_S = 0.05
_GRACE_S = 60.0  # for ranks that may be gone


def leave_mark(folder: Path, rank: int, problem: str) -> None:
    """`problem` is empty if all went well."""
    try:
        durable.write_text(_mark(folder, rank), problem)
    except FileNotFoundError:
        return  # the driver has given up on this checkpoint and removed it
    except OSError:  # the disk may be full; the name of an empty file takes next to nothing
        _bare_mark(folder, rank).touch()


def wait_for_marks(folder: Path, num_ranks: int, is_given_up: Callable[[], bool]) -> None:
    """Return when every rank has left its mark, and take the marks away. RuntimeError with the problem of the first that failed.

    Once `is_given_up`, the run has failed, and ranks have a minute left: they may have failed with it.
    """
    limit: float | None = None
    # All are looked at in turn: a rank may wait for another one that has failed.
    while missing := [rank for rank in range(num_ranks) if not _has_written(folder, rank)]:
        if limit is None and is_given_up():
            limit = time.monotonic() + _GRACE_S
        if limit is not None and time.monotonic() > limit:
            raise RuntimeError(f"rank {missing[0]} has not written its part of {folder.name}")
        time.sleep(_PERIOD_S)
    for rank in range(num_ranks):
        _mark(folder, rank).unlink()


def _has_written(folder: Path, rank: int) -> bool:
    mark = _mark(folder, rank)
    if _bare_mark(folder, rank).exists():
        problem = "it could not even say why; is the disk full?"
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
