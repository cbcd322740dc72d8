"""SIGTERM and Ctrl-C as requests: the loop looks at `signal` where the state is whole, saves, and leaves.

Knows nothing of checkpoints or loops.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_EXIT_CODES = {signal.SIGTERM: 85, signal.SIGINT: 130}


class Interruption:
    """While it is entered, the first SIGTERM or SIGINT is remembered and answered with a line on stderr.

    A second SIGINT raises KeyboardInterrupt at once; further SIGTERMs change nothing. Python delivers signals to the main
    thread only, so in any other thread entering does nothing and `active` stays False.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first that arrived
        self.active = False
        self._num_sigints = 0
        self._owner = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """What the process should exit with once it has saved: 85 after SIGTERM, 130 after SIGINT, 0 after neither."""
        return 0 if self.signal is None else _EXIT_CODES[self.signal]

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._owner = os.getpid()
            self._previous = {number: signal.signal(number, self._receive) for number in _EXIT_CODES}
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
            # A forked child inherits this handler, but not the loop that would act on it. It must die when it is told to.
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
        os.write(2, line.encode())
