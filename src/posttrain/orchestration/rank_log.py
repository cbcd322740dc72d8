"""The log of a rank or engine in the run folder: a line for each operation with its seconds, and tracebacks.

A line is started when its operation starts, so the last line shows what a rank was doing when it died or hung. For a
hung rank, the stacks of its threads follow shortly before the driver's deadline.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from posttrain.files.redaction import redact
from posttrain.orchestration.deadlines import deadline_s

FOLDER = "logs"
_SHARE_OF_DEADLINE = 0.9


class RankLog:
    def __init__(self, folder: Path | None, name: str) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        try:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            self._file = (folder / FOLDER / f"{name}.log").open("a", buffering=1, encoding="utf-8")
        except OSError:
            return  # the run folder is not on this machine
        faulthandler.enable(self._file)  # for a signal that kills the process

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        if self._file is None:
            yield
            return
        begin = time.monotonic()
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name} …")
        self._file.flush()
        timer = threading.Timer(_SHARE_OF_DEADLINE * deadline_s(name), self._write_stacks)
        timer.daemon = True
        timer.start()
        try:
            yield
        except BaseException:
            self._file.write(f" failed after {time.monotonic() - begin:.1f} s\n{redact(traceback.format_exc())}")
            raise
        finally:
            timer.cancel()
        self._file.write(f" {time.monotonic() - begin:.3f} s\n")

    def _write_stacks(self) -> None:
        """Dumps stacks under the GIL: faulthandler's timer reads running frames and can crash the process."""
        assert self._file is not None
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame))
            self._file.write(redact(f"\nthread {names.get(ident, ident)}\n{stack}"))
