"""Where the settings of runs differ."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.json_files import JsonObject
from posttrain.ui.run_view import RunView

_MISSING = object()


def config_differences(runs: Sequence[RunView]) -> JsonObject:
    """The keys whose values are not the same in all runs, and how many are."""
    settings = [run.settings() for run in runs]
    keys = sorted({key for one in settings for key in one})
    rows = []
    for key in keys:
        values = [one.get(key, _MISSING) for one in settings]
        if any(value != values[0] for value in values[1:]):
            shown = [None if value is _MISSING else _text(value) for value in values]
            rows.append({"key": key, "values": shown})
    return {"differences": rows, "num_equal": len(keys) - len(rows), "known": [bool(one) for one in settings]}


def _text(value: object) -> str:
    return "null" if value is None else str(value)
