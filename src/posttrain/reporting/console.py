"""What a run prints, and the same in `logs/train.log` of its folder.

A console gets short forms, a terminal with colours and live progress bars; the log gets plain lines in the long form.
Plain lines have no control characters: no colours, no carriage returns, progress as a line every half
minute. Text from models and tracebacks is sanitised here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from posttrain.files.redaction import redact
from posttrain.reporting.wording import Line, Style, duration, printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress as RichProgress

RICH_STYLES: dict[Style, str] = {
    "header": "bold cyan",
    "title": "bold",
    "plain": "",
    "muted": "dim",
    "good": "green",
    "warning": "yellow",
    "bad": "bold red",
}
# For streams whose encoding lacks them.
ASCII_FORMS = str.maketrans({"▶": ">", "•": "-", "│": "|", "→": "->", "…": "...", "×": "x"})
PLAIN_PROGRESS_PERIOD_S = 30.0
MAX_UNLOGGED = 10_000  # lines


class Console:
    def __init__(self, stream: TextIO, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self.is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._bars: _LiveBars | None = None
        self._log: Path | None = None
        self._may_log: Callable[[], bool] = lambda: True
        self._unlogged: list[str] = []  # until there is a log that can be written
        if self.is_terminal:
            from rich.console import Console as RichConsole  # not needed for a log file

            # No interpretation: an answer of a model may contain markup or emoji codes.
            self._rich = RichConsole(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True)
            self._bars = None if quiet else _LiveBars(self._rich)

    def log_to(self, path: Path, may_write: Callable[[], bool] = lambda: True) -> None:
        """Append all that is shown from here on to a file as well, quiet or not, and what was shown so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._log, self._may_log = path, may_write
            self._append_to_log([])

    def log(self, lines: Sequence[Line]) -> None:
        """To the log alone: what is printed to the console another way."""
        self._put(lines, to_log=True, to_stream=False)

    def show(self, lines: Sequence[Line], *, even_if_quiet: bool = False) -> None:
        self._put(lines, to_log=True, to_stream=even_if_quiet or not self.quiet)

    def note(self, text: str) -> None:
        self.show([Line(text, "muted")])

    def show_short_form(self, lines: Sequence[Line]) -> None:
        """Lines of which the log has a long form."""
        self._put(lines, to_log=False, to_stream=not self.quiet)

    def _put(self, lines: Sequence[Line], *, to_log: bool, to_stream: bool) -> None:
        if not lines or not (to_log or to_stream):
            return
        plain = [redact(printable(line.text)) for line in lines]
        with self._lock:
            if to_log:
                self._append_to_log(plain)
            if not to_stream:
                return
            for line, text in zip(lines, plain, strict=True):
                if self.is_terminal:
                    self._rich.print(self._encodable(text), style=RICH_STYLES[line.style])
                else:
                    self._stream.write(self._encodable(text) + "\n")
            self._stream.flush()

    def _append_to_log(self, plain: Sequence[str]) -> None:
        self._unlogged = [*self._unlogged, *plain][-MAX_UNLOGGED:]
        if self._log is None or not self._unlogged:
            return
        with suppress(OSError):  # a full disk, or a folder that was deleted; the log must not end a run
            if self._may_log():
                with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write("".join(f"{line}\n" for line in self._unlogged))
            self._unlogged = []

    def _encodable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            return text.translate(ASCII_FORMS).encode(encoding, "replace").decode(encoding)
        return text

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields a thread-safe function to call with the number of finished units."""
        if self.quiet:
            yield lambda _count: None
        elif self._bars is not None:
            with self._bars.bar(label, total) as advance:
                yield advance
        else:
            yield _PlainProgress(self, label, total, self._clock).advance


class _PlainProgress:
    """Progress for a log file: a line every PLAIN_PROGRESS_PERIOD_S."""

    def __init__(self, console: Console, label: str, total: int, clock: Callable[[], float]) -> None:
        self._console, self._label, self._total, self._clock = console, label, total, clock
        self._started = self._last_line = clock()
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._last_line < PLAIN_PROGRESS_PERIOD_S or self._done >= self._total:
                return
            self._last_line = now
            left_s = (now - self._started) * (self._total - self._done) / max(self._done, 1)
            percent = 100 * self._done / self._total
            text = f"  {self._label}: {self._done}/{self._total} ({percent:.0f}%), about {duration(left_s)} left"
        self._console.show([Line(text, "muted")])


class _LiveBars:
    """The bars at the bottom of a terminal, all in one display: rich allows only one at a time."""

    def __init__(self, rich_console: RichConsole) -> None:
        self._rich = rich_console
        self._display: RichProgress | None = None
        self._num_open = 0
        self._lock = threading.Lock()

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        from rich import progress

        with self._lock:
            if self._display is None:
                self._display = progress.Progress(
                    progress.TextColumn("  {task.description}", markup=False),
                    progress.BarColumn(bar_width=32),
                    progress.MofNCompleteColumn(),
                    progress.TimeElapsedColumn(),
                    progress.TextColumn("left", style="dim"),
                    progress.TimeRemainingColumn(compact=True),
                    console=self._rich,
                    transient=True,
                    refresh_per_second=8,
                )
                self._display.start()
            display = self._display
            self._num_open += 1
            task = display.add_task(label, total=total)
        try:
            yield lambda count: display.advance(task, count)
        finally:
            with self._lock:
                self._num_open -= 1
                display.remove_task(task)
                if self._num_open == 0:
                    display.stop()
                    self._display = None
