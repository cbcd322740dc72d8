"""Signals as requests to save and stop, and `checkpoint_must_save_by`: when it is time to."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import Mock

import pytest

from posttrain.checkpointing import Interruption, SaveDeadline, StopAtOnce
from posttrain.errors import Terminated


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def exit_code_of_a_child_that_is_sent(number: signal.Signals) -> int:
    child = os.fork()
    if child == 0:
        try:
            send(number)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGHUP, 85), (signal.SIGINT, 130)])
def test_the_first_signal_is_a_request(number: signal.Signals, code: int) -> None:
    with Interruption() as interruption:
        assert interruption.active
        assert interruption.signal is None
        assert interruption.exit_code == 0
        send(number)
        assert interruption.signal is number
    assert interruption.exit_code == code
    assert interruption.signal is not None, "the loop may look after it has left the block"


def test_a_second_ctrl_c_stops_at_once() -> None:
    with Interruption() as interruption:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert interruption.exit_code == 130


def test_further_sigterms_change_nothing_and_the_first_signal_decides_the_exit_code() -> None:
    with Interruption() as interruption:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)  # the first of its kind is a request, too
        assert interruption.signal is signal.SIGTERM
        assert interruption.exit_code == 85
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_handlers_that_were_there_come_back_even_after_an_exception() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    interruption = Interruption()

    def fail_inside() -> None:
        with interruption:
            assert signal.getsignal(signal.SIGTERM) != before[0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert not interruption.active


@pytest.mark.parametrize("listener", [Interruption, StopAtOnce])
def test_an_ignored_sighup_stays_ignored(listener: Callable[[], AbstractContextManager[object]]) -> None:
    """`nohup` starts a command that way."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listener() as listening:
            send(signal.SIGHUP)
            assert getattr(listening, "signal", None) is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_it_is_inactive() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    def run() -> None:
        with Interruption() as interruption:
            seen.append(interruption.active)
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_forked_child_dies_of_the_signal_instead_of_waiting_for_a_safe_point(number: signal.Signals) -> None:
    with Interruption() as interruption:
        assert exit_code_of_a_child_that_is_sent(number) == -number
        assert interruption.signal is None
    with StopAtOnce():
        assert exit_code_of_a_child_that_is_sent(signal.SIGTERM) == -signal.SIGTERM


def test_a_request_may_arrive_in_the_middle_of_a_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's buffered files refuse to be entered twice, and the interrupted code may be inside one."""
    busy = Mock()
    busy.write.side_effect = RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")
    monkeypatch.setattr(sys, "stderr", busy)
    monkeypatch.setattr(sys, "stdout", busy)
    with Interruption() as interruption:
        send(signal.SIGTERM)
        assert interruption.signal is not None


# -- before the loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_at_once_and_later_ones_do_not_disturb_its_end(
    number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)
    with StopAtOnce():
        with pytest.raises(Terminated) as stopped:
            send(number)
        send(number)
    assert stopped.value.exit_code == code
    assert signal.getsignal(number) == before


def test_a_signal_after_a_request_does_not_disturb_the_end() -> None:
    with StopAtOnce():
        with Interruption() as interruption:
            send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert interruption.exit_code == 85


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_was_raised_in_a_destructor_is_seen_by_the_loop() -> None:
    class Dropped:
        def __del__(self) -> None:
            send(signal.SIGTERM)

    with StopAtOnce():
        Dropped()  # Python prints what is raised here, and goes on
        with Interruption() as interruption:
            assert interruption.signal is signal.SIGTERM


def test_the_handler_comes_back_after_a_library_replaced_it() -> None:
    before = signal.getsignal(signal.SIGTERM)  # Ray in an earlier test of this process may have left one
    with StopAtOnce():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        StopAtOnce.install_again()
        with pytest.raises(Terminated):
            send(signal.SIGTERM)
    StopAtOnce.install_again()
    assert signal.getsignal(signal.SIGTERM) == before


# -- checkpoint_must_save_by -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_s", "steps"),
    [
        # (duration, whether a step ends then, whether it is time to save): elapsed time plus the mean of a step counts
        (100, [(20, True, False), (40, True, False), (10, True, False), (5, True, False), (9, True, True)]),
        (100, [(20, True, False), (20, True, False), (20, True, False), (20, True, True)]),  # exactly the limit
        (100, [(20, True, False), (59, False, False), (1, False, True)]),  # time since the last step
        (10, [(9.9, False, False), (0.1, False, True)]),  # before any step has ended
        (None, [(0, False, False), (1e9, True, False)]),
    ],
)
def test_the_deadline_is_reached_when_one_more_mean_step_would_not_fit(
    limit_s: float | None, steps: list[tuple[float, bool, bool]]
) -> None:
    now = 1000.0
    deadline = SaveDeadline(limit_s, lambda: now)
    now += 500  # loading a model before the loop does not count
    deadline.start()
    for duration, ends, expected in steps:
        now += duration
        if ends:
            deadline.mark_step()
        assert deadline.must_save_now() is expected
