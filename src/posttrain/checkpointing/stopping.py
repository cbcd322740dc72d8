"""Reasons to save and stop before the last step: a signal, or a time limit such as that of a queue.

From the start of a command SIGTERM and SIGHUP (the terminal was closed) raise Terminated (`StopAtOnce`). For PID 1 of a
container, the kernel drops signals without a handler, so a handler is always installed. Inside the training loop they
and Ctrl-C are requests (`Interruption`): a step that has not changed the model is abandoned, any other is finished; the
loop saves and ends. The sender of SIGTERM may say how much time is left (`POSTTRAIN_STOP_FILE`). The clock of
`checkpointing.checkpoint_must_save_by` starts with the training loop; loading the model does not count.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import ClassVar

from posttrain.errors import ExitCode, StopRequested, Terminated

_EXIT_CODES = {
    signal.SIGTERM: ExitCode.SAVED,
    signal.SIGHUP: ExitCode.SAVED,
    signal.SIGINT: ExitCode.INTERRUPTED,
}
STOP_FILE = "POSTTRAIN_STOP_FILE"  # variable: a file {"deadline": seconds since 1970}, written before SIGTERM is sent


class StopAtOnce:
    """While it is entered, the first SIGTERM or SIGHUP raises Terminated; later ones are ignored during shutdown.

    A SIGHUP that is ignored, as under `nohup`, stays ignored. Outside of the main thread entering does nothing.
    """

    _current: ClassVar[StopAtOnce | None] = None

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first that arrived
        self._owner = 0
        self._outer: StopAtOnce | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopAtOnce:
        if threading.current_thread() is threading.main_thread():
            self._owner = os.getpid()
            self._previous = _install(_heard({signal.SIGTERM, signal.SIGHUP}), self._receive)
            self._outer, StopAtOnce._current = StopAtOnce._current, self
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous:
            StopAtOnce._current = self._outer
        _put_back(self._previous)
        self._previous = {}

    def ignore_from_now_on(self) -> None:
        """For a program whose exit code is known: a signal while Python ends would replace it."""
        self._previous = dict.fromkeys(self._previous, signal.SIG_IGN)
        _put_back(self._previous)

    @classmethod
    def install_again(cls) -> None:
        """Reinstall the handler after a library such as Ray has replaced it."""
        if (current := cls._current) is not None and threading.current_thread() is threading.main_thread():
            _install(set(current._previous), current._receive)

    @classmethod
    def is_asked(cls) -> bool:
        """Whether a signal has come, also to an `Interruption` inside that was left."""
        return cls._current is not None and cls._current.signal is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            _die_of(number)
        elif self.signal is None:
            self.signal = signal.Signals(number)
            raise Terminated(number)


class Interruption:
    """While it is entered, the first of `signals` is stored and answered with a line on stderr.

    A second SIGINT raises KeyboardInterrupt at once; further SIGTERMs change nothing, also after it was left. A SIGHUP
    that is ignored, as under `nohup`, stays ignored. Python delivers signals to the main thread only, so in any other
    thread entering does nothing and `active` stays False.

    SIGUSR1 asks for a checkpoint after the present step, and stops nothing.
    """

    def __init__(
        self,
        signals: frozenset[signal.Signals] = frozenset(_EXIT_CODES),
        answer: str = "saving at the next safe point, then stopping",
    ) -> None:
        self.signal: signal.Signals | None = None  # the first that arrived
        self.active = False
        self._signals = signals
        self._answer = answer
        self._num_sigints = 0
        self._owner = 0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._outer: StopAtOnce | None = None
        self._wants_save = False
        self._is_committed = False
        self._listeners: list[Callable[[], None]] = []
        self._happened: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put, but take no lock

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in a separate thread, when a stop is requested and the step can be abandoned."""
        self._listeners.append(listener)

    def is_asked(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raises StopRequested if a stop is requested and the step can be abandoned."""
        if self.is_asked() and not self._is_committed:
            raise StopRequested

    def commit(self) -> None:
        """Call before the step changes the model: from then on it is finished. Raises StopRequested like `check`."""
        was_committed, self._is_committed = self._is_committed, True  # first: `_tell` must not miss it
        if self.is_asked() and not was_committed:
            self._is_committed = False
            raise StopRequested

    def end_step(self) -> None:
        """From here on, work can be abandoned again."""
        self._is_committed = False

    def take_save_request(self) -> bool:
        """Whether SIGUSR1 has come since the last call."""
        wanted, self._wants_save = self._wants_save, False
        return wanted

    @staticmethod
    def seconds_left() -> float | None:
        """Seconds until the process is killed; None if unknown."""
        try:
            content = json.loads(Path(os.environ[STOP_FILE]).read_text("utf-8"))
            return float(content["deadline"]) - time.time()
        except (KeyError, OSError, ValueError, TypeError):
            return None

    @property
    def exit_code(self) -> int:
        """After saving; without a signal that of success."""
        return 0 if self.signal is None else _EXIT_CODES[self.signal]

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._owner = os.getpid()
            self._previous = _install(_heard(self._signals), self._receive)
            self._previous |= _install({signal.SIGUSR1}, self._receive_save_request)
            self.active = True
            outer = getattr(self._previous.get(signal.SIGTERM), "__self__", None)
            if isinstance(outer, StopAtOnce):
                self._outer = outer
                # A Terminated that was raised in a destructor was lost.
                self.signal = self.signal or outer.signal
        if self._listeners:
            threading.Thread(target=self._tell, name="stopping", daemon=True).start()
        if self.is_asked():
            self._happened.put(True)
        return self

    def _tell(self) -> None:
        if self._happened.get() and not self._is_committed:
            for listener in self._listeners:
                listener()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is not None and self.signal is not None:
            self._outer.signal = self.signal  # it is answered
        self._happened.put(False)
        _put_back(self._previous)
        self._previous = {}
        self.active = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked child inherits this handler, but not the loop that would act on it. It must exit on the signal.
            _die_of(number)
            return
        if number == signal.SIGINT:
            self._num_sigints += 1
            if self._num_sigints > 1:
                raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._happened.put(True)
        again = "; Ctrl-C again stops at once, without saving" if number == signal.SIGINT else ""
        # Not print(): the main thread may be inside print() right now, and buffered files refuse to be entered twice.
        line = f"\n{signal.Signals(number).name} received: {self._answer}{again}\n"
        with suppress(OSError):  # the terminal may be closed
            os.write(2, line.encode())

    def _receive_save_request(self, number: int, frame: FrameType | None) -> None:
        self._wants_save = True


def _heard(numbers: AbstractSet[signal.Signals]) -> AbstractSet[signal.Signals]:
    return numbers - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())


def _install(
    numbers: AbstractSet[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, signal._HANDLER]:
    """Returns the handlers that were there."""
    return {number: signal.signal(number, handler) for number in numbers}


def _put_back(handlers: Mapping[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in handlers.items():
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class SaveDeadline:
    """When one more step might not fit: elapsed time plus the mean time of a step reaches the limit.

    The time of saving is not included: choose a limit that leaves time for it.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._started: float | None = None
        self._last_mark = 0.0
        self._num_steps = 0

    def start(self) -> None:
        """The training loop begins."""
        self._started = self._last_mark = self._clock()
        self._num_steps = 0

    def mark_step(self) -> None:
        """A step is over, including validation and saving."""
        assert self._started is not None, "start() comes first"
        self._last_mark = self._clock()
        self._num_steps += 1

    def must_save_now(self) -> bool:
        if self.limit_s is None:
            return False
        assert self._started is not None, "start() comes first"
        mean_step_s = (self._last_mark - self._started) / self._num_steps if self._num_steps else 0.0
        return self._clock() - self._started + mean_step_s >= self.limit_s
