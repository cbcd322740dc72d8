"""The reward of `learn.py`, for both sides and for the evaluation: the number after `####` is the right one."""

from __future__ import annotations

import re

_LAST = re.compile(r"####\s*([^\n]+)\s*$")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right_answer(prompt: str, response: str, reference: object) -> float:
    written = _LAST.search(response.strip())
    if written is None or (found := _NUMBER.search(written[1])) is None:
        return 0.0
    return float(_value(found[0]) == _value(str(reference)))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
