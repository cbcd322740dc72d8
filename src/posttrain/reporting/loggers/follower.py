"""Replays `metrics.jsonl` to a tracker, in a thread: it never delays the run and never ends it.

There is no position to be saved. Whenever a connection is opened, the tracker is asked for the last step that it has,
and the rows after it are sent. So after a kill of the run, an outage of the tracker, or both, every step arrives once.
A step that was sent and is trained again after a kill is not sent again; its losses and rewards are the same, its times
may differ.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from posttrain.errors import reason_of
from posttrain.files.json_files import parse_json
from posttrain.files.redaction import redact
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers.sink import TABLE_COLUMNS, LoggedStep, LoggerProblem, RecordedRun, Sink
from posttrain.reporting.run_data import groups_of
from posttrain.reporting.run_files import (
    FINDINGS_FILE,
    LOGGERS_FOLDER,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    Row,
    read_rows,
    write_text,
)

STEPS_AT_ONCE = 100
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # between attempts to reach a tracker
MAX_TEXT = 2000  # characters of a prompt or answer in a table


class Follower:
    """Sends the rows of one run to one tracker."""

    def __init__(
        self,
        name: str,
        make_sink: Callable[[], Sink],
        run: RecordedRun,
        *,
        num_answers: int = 0,
    ) -> None:
        self.name = name
        self.problem = ""  # why the tracker could not be reached; empty while it can
        self.num_sent = 0  # steps
        self._make_sink = make_sink
        self._run = run
        self._num_answers = num_answers
        self._warnings: SimpleQueue[str] = SimpleQueue()
        self._sink: Sink | None = None
        self._reported: list[str] = []  # findings
        self._last: int | None = None  # step that the tracker has
        self._last_keys: frozenset[str] = frozenset()  # of that step, as far as it was seen
        self._file = 0  # the inode of metrics.jsonl
        self._offset = 0  # of its first byte that was not looked at
        self._pause_s = FIRST_PAUSE_S
        self._news = threading.Event()
        self._ending = threading.Event()
        self._is_finished = False
        self._thread = threading.Thread(target=self._follow, name=f"logger {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is a new row."""
        self._news.set()

    def end(self, *, is_finished: bool) -> None:
        """Send what is left, and close."""
        self._is_finished = is_finished
        self._ending.set()
        self._news.set()

    def has_ended(self, limit_s: float) -> bool:
        """Wait for the end. Whether everything was sent."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self.problem = self.problem or "it is still sending"
        return not self.problem

    def send_all(self, *, is_finished: bool) -> None:
        """Without a thread: one attempt to send everything, and close."""
        self._is_finished = is_finished
        if self.deliver():
            self._close(is_finished=self._is_finished, note=self._note_problem)

    def warnings(self) -> Iterator[str]:
        """Warnings about the tracker since the last call: one line for each time that it could not be reached."""
        while not self._warnings.empty():
            yield self._warnings.get()

    # ------------------------------------------------------------------ in the thread

    def _follow(self) -> None:
        while True:
            is_last = self._ending.is_set()  # before looking: rows that were written before the end are seen
            is_sent = self.deliver()
            if is_last:
                break
            if is_sent:
                self._news.wait()
            else:
                self._ending.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._news.clear()
        self._close(is_finished=self._is_finished, note=self._note_problem)

    def deliver(self) -> bool:
        """One attempt to send everything that the tracker does not have. Whether it succeeded."""
        try:
            sink = self._opened()
            while steps := self._next_steps():
                sink.send(steps)
                self._last = steps[-1].step
                self.num_sent += len(steps)
            self._tell_findings(sink)
        except (Exception, SystemExit) as error:  # errors of a tracker's client must not stop the run
            self._note_problem(error)
            self._close(is_finished=False, note=lambda error: None)
            return False
        self._pause_s = FIRST_PAUSE_S
        self.problem = ""
        return True

    def _opened(self) -> Sink:
        if self._sink is None:
            sink = self._make_sink()
            self._last = sink.open(self._run)
            self._sink, self._offset, self._last_keys = sink, 0, frozenset()
            # A tracker without steps is filled from the start, with all findings.
            self._reported = [] if self._last is None else _reported(self._reported_file, self._run.id)
        return self._sink

    def _note_problem(self, error: BaseException) -> None:
        kind = "" if isinstance(error, LoggerProblem) else f"{type(error).__name__}: "
        reason = redact(f"{kind}{reason_of(error)}")[:500]
        if not self.problem:
            goes_on = "the run continues, and the tracker gets all steps when it can be reached"
            self._warnings.put(f"logger {self.name}: {reason}; {goes_on}")
        self.problem = reason

    def _close(self, *, is_finished: bool, note: Callable[[BaseException], None]) -> None:
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close(is_finished=is_finished)
        except (Exception, SystemExit) as error:
            note(error)

    # ------------------------------------------------------------------ what is sent

    def _next_steps(self) -> list[LoggedStep]:
        """The next rows that the tracker does not have, at most STEPS_AT_ONCE."""
        found: list[LoggedStep] = []
        last = self._last
        for row, end in self._rows():
            self._offset = end
            if last is None or row["step"] > last:
                found.append(self._logged(row))
            elif row["step"] == last and self._last_keys and (added := row.keys() - self._last_keys):
                # its validation came later
                found.append(self._logged({"step": last, **{key: row[key] for key in added}}))
            if last is None or row["step"] >= last:
                last, self._last_keys = row["step"], frozenset(row)
            if len(found) == STEPS_AT_ONCE:
                break
        return found

    def _rows(self) -> Iterator[tuple[Row, int]]:
        """Whole lines that were not looked at, each with the offset of its end."""
        path = self._run.folder / METRICS_FILE
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        with file:
            state = os.fstat(file.fileno())
            # A row was completed, or the folder was deleted and made again by the run.
            if state.st_ino != self._file or state.st_size < self._offset:
                self._file, self._offset = state.st_ino, 0
            file.seek(self._offset)
            end = self._offset
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                end += len(line)
                with suppress(ValueError):
                    row = parse_json(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        yield row, end

    def _logged(self, row: Row) -> LoggedStep:
        values = {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
        return LoggedStep(row["step"], values, self._answers(row["step"]) if self._num_answers else ())

    def _answers(self, step: int) -> list[list[object]]:
        every = [
            [step, group["prompt"][-MAX_TEXT:], answer["text"][:MAX_TEXT], *(answer[key] for key in TABLE_COLUMNS[3:])]
            for group in groups_of(self._run.folder / ROLLOUTS_FOLDER / f"step_{step}.jsonl.gz")
            for answer in group["completions"]
        ]
        return every[: self._num_answers]

    # ------------------------------------------------------------------ findings

    @property
    def _reported_file(self) -> Path:
        return self._run.folder / LOGGERS_FOLDER / f"{self.name}.json"

    def _tell_findings(self, sink: Sink) -> None:
        """Each once: which ones were sent is in a file."""
        for row in read_rows(self._run.folder / FINDINGS_FILE):
            finding = Finding.from_json(row)
            key = f"{finding.rule} {finding.severity}"
            if key not in self._reported:
                sink.alert(finding)
                self._reported.append(key)
                self._reported_file.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._reported_file, json.dumps({"run": self._run.id, "told": self._reported}) + "\n")


def _reported(path: Path, run_id: str) -> list[str]:
    try:
        state = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return []
    return list(state["told"]) if isinstance(state, dict) and state.get("run") == run_id else []
