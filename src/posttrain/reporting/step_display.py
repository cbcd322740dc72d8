"""What a run shows of its steps: stages, the block or line of a step, an answer, validations, what could not be scored.

The log file gets the long form, a console one line per step; with `verbose` it gets the long form instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.reporting import wording
from posttrain.reporting.console import Console
from posttrain.reporting.presentation import RecorderSettings
from posttrain.reporting.rows import TOTAL_STEP
from posttrain.reporting.run_files import UNSCORED_FILE, Row
from posttrain.reporting.wording import Line

if TYPE_CHECKING:
    from posttrain.types import Group, StepReport

ANSWER_PERIOD_S = 10.0  # a terminal shows one answer this often
TREND_STEPS = 20


class StepDisplay:
    def __init__(self, console: Console, run: RecorderSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._run, self._clock = console, run, clock
        self._marks: deque[float] = deque(maxlen=20)  # when the latest steps ended
        self._headed = 0  # the step whose header was shown last
        self._stage_shown = ""
        self._is_validating = False
        self._last_answer: float | None = None  # when a terminal got one
        self._headlines: deque[float | None] = deque(maxlen=TREND_STEPS)
        self._unscored_shown = False
        self._traceback_shown = False
        self._step_s: tuple[int, float] = (0, 0.0)  # the latest step, and its seconds

    def long_form(self, lines: Sequence[Line]) -> None:
        (self._console.show if self._run.verbose else self._console.log)(lines)

    def header(self, step: int) -> None:
        self._is_validating = False
        if self._headed != step:
            self._headed = step
            title = f"{'=' * 25} Step {step}/{self._run.max_steps} {'=' * 25}"
            self.long_form([Line(""), Line(title, "header")])

    def stage(self, text: str) -> None:
        """One line when a stage begins. A stage that comes several times in a row, such as updates, is shown once;
        those of a validation, which have the names of the step's, are not."""
        if self._is_validating:
            return
        self._is_validating = text.startswith(wording.VALIDATION_STAGE)
        shown = f"▶ {text}{'' if text.endswith(('.', '!', '…')) else '...'}"
        if shown != self._stage_shown:
            self._stage_shown = shown
            self.long_form([Line(shown, "muted")])

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        if text := wording.stage_of(label, total):
            self.stage(text)
        return self._console.progress(label, total)

    def step(self, row: Row, report: StepReport, validation: StepReport | None, rollouts: Path) -> None:
        """The results of a step. `rollouts` is the file of its groups, if it has any."""
        self._marks.append(self._clock())
        self._stage_shown, self._is_validating = "", False
        self._step_s = (row["step"], row[f"timing/train/{TOTAL_STEP}"] or 0.0)
        eta_s = self._eta_s(row)
        self.header(row["step"])
        if validation is not None:
            self.validation(row, validation)
        summary = wording.step_summary(self._run.presentation.results, row, report.groups)
        block = wording.step_block(self._run, row, report.groups, eta_s)
        if report.groups:
            summary.append(Line(f"Logged data to {rollouts}"))
        self.long_form([*summary, *block])
        if not self._run.verbose:
            self._short_step(row, report.groups, eta_s)

    def save(self, step: int, seconds: float, tokenizer: str) -> None:
        """A save follows the results of its step. Its time is shown below them, and not in the block of the next."""
        shown, step_s = self._step_s
        share = f" ({100 * seconds / step_s:.1f}%)" if shown == step and step_s > 0 else ""
        taken = [
            f"[Time]     ckpt={wording.duration(seconds)}",
            f"  • checkpointing: {wording.duration(seconds)}{share}",
        ]
        self.long_form([Line(text) for text in (f"Saving tokenizer (or processor) to {tokenizer}", *taken)])

    def _short_step(self, row: Row, groups: Sequence[Group], eta_s: float | None) -> None:
        """One line with the trend of the headline; every few seconds an answer below it."""
        self._headlines.append(row.get(self._run.presentation.headline.metric))
        trend = wording.trend(list(self._headlines))
        line = wording.step_line(self._run.presentation.results, row, self._run.max_steps, eta_s, trend)
        if not self._console.is_terminal:  # as `grep "Step "` and `grep "Reward"` look for it in a pod's output
            plain = line.text.replace("step ", "Step ", 1).replace("  reward ", "  Reward ", 1)
            self._console.show_short_form([Line(plain, line.style)])
            return
        lines = [line]
        is_due = self._last_answer is None or self._clock() - self._last_answer >= ANSWER_PERIOD_S
        if groups and is_due:
            self._last_answer = self._clock()
            lines += wording.answer_lines(groups)
        self._console.show_short_form(lines)

    def validation(self, row: Row, validation: StepReport) -> None:
        self._is_validating = False
        self._console.show(wording.validation_block(row, validation.num_samples))
        self._console.show(wording.sample_lines(validation.groups, self._run.num_val_samples_to_print))

    def unscored(self, reason: str, traceback: str | None, *, is_taught: bool) -> None:
        """Show the first rollout that could not be scored and the first traceback; the others are counted."""
        if self._traceback_shown or (self._unscored_shown and not traceback):
            return
        self._unscored_shown = True
        lines = [Line(f"warning: a rollout could not be scored: {reason}", "warning")]
        if traceback:
            self._traceback_shown = True
            lines += [Line(f"  {line}", "muted") for line in traceback.rstrip("\n").split("\n")]
        part = "Only its teacher judges it" if is_taught else "It takes no part in training"
        lines.append(Line(f"  {part}. All reasons are counted in {UNSCORED_FILE}.", "warning"))
        self._console.show(lines, even_if_quiet=True)

    def _eta_s(self, row: Row) -> float | None:
        """Remaining time at the pace of the latest steps, validation and checkpoints included."""
        steps_left = self._run.max_steps - row["step"]
        if steps_left <= 0:
            return None
        intervals = len(self._marks) - 1
        step_s = row[f"timing/train/{TOTAL_STEP}"] or 0.0
        pace_s = (self._marks[-1] - self._marks[0]) / intervals if intervals else step_s
        return float(steps_left * pace_s)
