"""The log of one rank or engine, in the run folder: a line for each operation with its seconds, errors with their tracebacks.

The line of an operation begins when it does. So the last line says what a rank was doing when it died or hung; of one that
hangs, the stacks of its threads follow shortly before the driver's deadline.
"""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from posttrain.orchestration.workers import deadline_s
from posttrain.redaction import redact

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
            return  # this machine does not have the run folder
        faulthandler.enable(self._file)  # for a signal that ends the process

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        if self._file is None:
            yield
            return
        begin = time.monotonic()
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name} …")
        self._file.flush()
        faulthandler.dump_traceback_later(_SHARE_OF_DEADLINE * deadline_s(name), file=self._file)
        try:
            yield
        except BaseException:
            self._file.write(f" failed after {time.monotonic() - begin:.1f} s\n{redact(traceback.format_exc())}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._file.write(f" {time.monotonic() - begin:.3f} s\n")
