"""Ends a run that is started again and again and gets nowhere: three attempts in a row without a new checkpoint."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from posttrain.attempts import ATTEMPTS_FOLDER, read_attempts
from posttrain.errors import reason_of

MAX_FRUITLESS = 3
_GIVEN_UP = "given_up.json"  # up to which attempt this was said already: a run that is launched anew may try again


def why_no_progress(folder: Path) -> str | None:
    """Why the run in `folder` should not be started again; None: it may. Said once for the same attempts."""
    marker = folder / ATTEMPTS_FOLDER / _GIVEN_UP
    counted = _counted_from(marker)
    last = [attempt for attempt in read_attempts(folder) if attempt.number > counted][-MAX_FRUITLESS:]
    if len(last) < MAX_FRUITLESS or any(a.first_checkpoint is not None or a.exit_code == 0 for a in last):
        return None
    numbers = ", ".join(str(attempt.number) for attempt in last)
    left = ""
    try:
        marker.write_text(json.dumps({"attempt": last[-1].number}) + "\n", encoding="utf-8")
    except OSError as error:
        left = f" ({marker} could not be written: {reason_of(error)})"
    return (
        f"attempts {numbers} of the run in {folder} made no new checkpoint, so it is not started again{left}. Their logs say "
        "why; if steps are longer than the machines live, make them shorter (fewer prompts per step), or take on-demand "
        "machines. Launch it again to try three more times"
    )


def _counted_from(marker: Path) -> int:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(marker.read_text("utf-8"))["attempt"])
    return 0
