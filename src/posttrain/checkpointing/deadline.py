"""`checkpointing.checkpoint_must_save_by`: save and stop before a time limit that the run knows of, e.g. its queue's.

The clock starts with the training loop; loading the model does not count.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_FIELD = "checkpointing.checkpoint_must_save_by"
_FORM = re.compile(r"(\d+):(\d+):(\d+):(\d+)")


class SaveDeadline:
    """Says when one more step might not fit: elapsed time plus the mean time of a step reaches the limit.

    The time that saving takes is not foreseen: choose a limit that leaves room for it.
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
