"""Writing in the background: one at a time, errors are heard, and ranks elsewhere say when they are done."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from posttrain.checkpointing import BackgroundWrite
from posttrain.checkpointing import background as background_module
from posttrain.checkpointing.background import leave_mark, wait_for_marks


def test_a_write_runs_in_the_background() -> None:
    background, may_end, written = BackgroundWrite(), threading.Event(), []

    def write(_: Callable[[], bool]) -> None:
        assert may_end.wait(10)
        written.append(threading.current_thread() is threading.main_thread())

    background.start(write)
    assert not background.is_over
    assert background.take_write_s() is None
    may_end.set()
    background.wait()
    assert written == [False]
    assert background.is_over
    seconds = background.take_write_s()
    assert seconds is not None
    assert seconds >= 0
    assert background.take_write_s() is None, "it is reported once"


def test_wait_returns_at_once_without_a_write() -> None:
    assert BackgroundWrite().wait() is None
    assert not BackgroundWrite().has_failed


def test_an_error_is_returned_once_by_the_next_wait() -> None:
    background = BackgroundWrite()
    background.start(Mock(side_effect=OSError("no space left on device")))
    while not background.is_over:
        pass
    assert background.has_failed
    assert "no space left" in str(background.wait())
    assert not background.has_failed
    assert background.wait() is None
    assert background.take_write_s() is None, "a failed write is no write"


def test_has_failed_does_not_wait() -> None:
    background, may_end = BackgroundWrite(), threading.Event()
    background.start(lambda _: may_end.wait(10) and None)
    assert not background.has_failed
    assert not background.is_over
    may_end.set()
    assert background.wait() is None


def test_a_write_may_finish_when_the_run_has_failed() -> None:
    background, begun, written = BackgroundWrite(), threading.Event(), []

    def write(is_given_up: Callable[[], bool]) -> None:
        begun.set()
        while not is_given_up():
            pass
        written.append(True)
        raise RuntimeError("hidden by the error of the run")

    background.start(write)
    assert begun.wait(10)
    background.give_up()
    assert "hidden by" in str(background.wait()), "for whoever tells both"
    assert written == [True]
    assert background.is_over


# -- marks of ranks ----------------------------------------------------------------------------------------------------


def never() -> bool:
    return False


def test_the_driver_waits_for_the_marks_of_all_ranks_and_removes_them(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    leave_mark(tmp_path, 1, "")
    late = threading.Timer(0.2, leave_mark, (tmp_path, 0, ""))
    late.start()
    wait_for_marks(tmp_path, 2, never, 60.0)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"], "nothing of it gets into the checkpoint"
    late.join()


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all have written", "rank 0 waits for rank 1"])
def test_the_error_of_a_rank_is_reported(ranks: tuple[int, ...], tmp_path: Path) -> None:
    for rank in ranks:
        leave_mark(tmp_path, rank, "OSError: disk full" if rank else "")
    with pytest.raises(RuntimeError, match=r"rank 1 could not write its part(?s:.*)disk full"):
        wait_for_marks(tmp_path, 2, never, 60.0)


def test_a_rank_that_cannot_write_its_mark_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_space = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(background_module.durable, "write_text", Mock(side_effect=no_space))
    leave_mark(tmp_path, 0, "OSError: No space left on device")
    with pytest.raises(RuntimeError, match="rank 0 could not write its part"):
        wait_for_marks(tmp_path, 1, never, 60.0)


@pytest.mark.parametrize(("is_given_up", "limit_s"), [(True, 60.0), (False, 0.0)], ids=["it died", "deadline"])
def test_a_rank_that_never_writes_is_named(
    is_given_up: bool, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_module, "_GRACE_S", 0.1)
    leave_mark(tmp_path, 0, "")
    with pytest.raises(RuntimeError, match="rank 1 has not written"):
        wait_for_marks(tmp_path, 2, lambda: is_given_up, limit_s)


@pytest.mark.parametrize("problem", ["", "OSError: disk full"])
def test_leave_mark_does_not_recreate_a_removed_folder(problem: str, tmp_path: Path) -> None:
    leave_mark(tmp_path / "gone", 0, problem)
    assert list(tmp_path.iterdir()) == []
