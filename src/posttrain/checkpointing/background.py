"""Writing a checkpoint while training goes on: one thread, at most one write at a time, and no error that nobody hears of.

Knows nothing of what is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Write = Callable[[Callable[[], bool]], None]  # is given a function that says whether to give up


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
        """Run `write` in a thread. The one before must be over."""
        assert self.is_over, "one write at a time"
        self._over.clear()
        self._given_up.clear()
        # A process that is told to end at once does not wait for it: what it leaves behind is not called a checkpoint.
        threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()

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
        """Return when the write is over: what it failed with, once, or None."""
        self._over.wait()
        error, self._error = self._error, None
        return error

    def give_up(self) -> None:
        """The run has failed: its write may end well, but does not wait for others that may be gone."""
        self._given_up.set()

    def take_write_s(self) -> float | None:
        """Seconds that the latest complete write took, once."""
        seconds, self._write_s = self._write_s, None
        return seconds
