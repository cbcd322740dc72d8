"""Errors in data, the hint for a misspelt name, and texts that no file can hold."""

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


def refuse_half_pairs(text: str, where: str = "") -> None:
    """JSON can contain lone surrogates, which are no valid text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 30) : error.end + 30]
        raise DataError(f"{where}a text is not valid Unicode: half of a surrogate pair in {near!r}") from error
