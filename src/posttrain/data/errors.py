"""Errors in data, and the hint for a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from posttrain.errors import InputError


class DataError(InputError):
    """Data that cannot be used. The message names the file and row, or the key, and what would be accepted."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to put behind `name` in a message: what is known and looks like it, or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""
