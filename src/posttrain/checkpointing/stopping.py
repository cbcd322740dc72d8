"""Reasons to save and stop before the last step: a signal, or a time limit such as that of a queue.

SIGTERM, SIGHUP (the terminal was closed) and Ctrl-C are requests: the loop looks at `Interruption.signal` where the state is
complete, saves, and ends. The clock of `checkpointing.checkpoint_must_save_by` starts with the training loop; loading the
model does not count.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

_EXIT_CODES = {signal.SIGTERM: 85, signal.SIGHUP: 85, signal.SIGINT: 130}
_FIELD = "checkpointing.checkpoint_must_save_by"
_FORM = re.compile(r"(\d+):(\d+):(\d+):(\d+)")


class Interruption:
    """While it is entered, the first SIGTERM, SIGHUP or SIGINT is stored and answered with a line on stderr.

    A second SIGINT raises KeyboardInterrupt at once; further SIGTERMs change nothing. A SIGHUP that is ignored, as under
    `nohup`, stays ignored. Python delivers signals to the main
    thread only, so in any other thread entering does nothing and `active` stays False.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first that arrived
        self.active = False
        self._num_sigints = 0
        self._owner = 0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def exit_code(self) -> int:
        """What the process should exit with once it has saved: 85 after SIGTERM and SIGHUP, 130 after SIGINT, 0 after none."""
        return 0 if self.signal is None else _EXIT_CODES[self.signal]

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._owner = os.getpid()
            numbers = set(_EXIT_CODES) - (
                {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
            )
            self._previous = {number: signal.signal(number, self._receive) for number in numbers}
            self.active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        self.active = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked child inherits this handler, but not the loop that would act on it. It must end at the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            self._num_sigints += 1
            if self._num_sigints > 1:
                raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
        again = "; Ctrl-C again stops at once, without saving" if number == signal.SIGINT else ""
        # Not print(): the main thread may be inside print() right now, and buffered files refuse to be entered twice.
        line = f"\n{signal.Signals(number).name} received: saving at the next safe point, then stopping{again}\n"
        with suppress(OSError):  # the terminal may be gone
            os.write(2, line.encode())


class SaveDeadline:
    """When one more step might not fit: elapsed time plus the mean time of a step reaches the limit.

    The time of saving is not included: choose a limit that leaves room for it.
    """

    def __init__(self, limit: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = None if limit is None else _seconds(limit)
        self._clock = clock
        self._started: float | None = None
        self._last_mark = 0.0
        self._num_steps = 0

    def start(self) -> None:
        """The training loop begins."""
        self._started = self._last_mark = self._clock()
        self._num_steps = 0

    def mark_step(self) -> None:
        """A step is over, with what belongs to it: validation, saving."""
        assert self._started is not None, "start() comes first"
        self._last_mark = self._clock()
        self._num_steps += 1

    def must_save_now(self) -> bool:
        if self.limit_s is None:
            return False
        assert self._started is not None, "start() comes first"
        mean_step_s = (self._last_mark - self._started) / self._num_steps if self._num_steps else 0.0
        return self._clock() - self._started + mean_step_s >= self.limit_s


def _seconds(limit: str) -> int:
    form = "DD:HH:MM:SS in quotes, for example '00:03:45:00' for 3 hours and 45 minutes"
    if not isinstance(limit, str):
        # YAML reads 1:03:45:00 without quotes as a number in base 60.
        raise ValueError(f"{_FIELD} is {limit!r}, a {type(limit).__name__}; accepted: {form}")
    match = _FORM.fullmatch(limit.strip())
    if match is None:
        raise ValueError(f"{_FIELD} is {limit!r}; accepted: {form}")
    days, hours, minutes, seconds = map(int, match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
