r"""The answer in a text, so that equal answers can vote together in cons@k. Independent of rewards.

Mathematics: the last `\boxed{}`, else a last line `#### …`, else what follows the last "answer is", else the last
formula between dollars, else the last number; written in one way, so that `1/2`, `\frac{1}{2}` and `0.5` are one
answer. Equality beyond that (sympy's) is left to the verifier: two spellings that it accepts as equal may vote apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from posttrain.environments.math_answers import last_boxed, normalised
from posttrain.environments.text_rewards import choice_finder

_LAST_LINE = re.compile(r"^####[ \t]*([^\n]+?)\s*\Z", re.MULTILINE)
_STATED = re.compile(r"(?i)\banswer\s*(?:is\s*:?|:|=)\s*\**\s*([^\n]+)")
_FORMULA = re.compile(r"\$([^$\n]+)\$")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}")

AnswerReader = Callable[[str], str | None]


def answer_reader(kind: str) -> AnswerReader:
    """`math`, `english_multichoice`, `multilingual_multichoice`, or `text`: the whole text."""
    if kind == "math":
        return math_answer
    if kind.endswith("multichoice"):
        return choice_finder(multilingual=kind.startswith("multilingual"))
    assert kind == "text"
    return lambda text: " ".join(text.split()) or None


def math_answer(text: str) -> str | None:
    found = last_boxed(text)
    if found is None and (line := _LAST_LINE.search(text)):
        found = line[1]
    if found is None and (stated := _STATED.findall(text)):
        found = _first_value(stated[-1])
    if found is None and (formulas := _FORMULA.findall(text)):
        found = formulas[-1]
    if found is None and (numbers := _NUMBER.findall(text)):
        found = numbers[-1]
    return canonical(found) if found is not None and found.strip() else None


def _first_value(statement: str) -> str:
    """The 18 of "$18 per day.": a sentence may continue after its answer."""
    if formula := _FORMULA.search(statement):
        return formula[1]
    number = _NUMBER.search(statement)
    return number[0] if number else statement


def canonical(answer: str) -> str:
    plain = normalised(answer)
    if fraction := _FRACTION.fullmatch(plain):
        sign, top, bottom = fraction.groups()
        plain = f"{sign}{top}/{bottom}".replace("--", "")
    try:
        return str(Fraction(plain.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", plain) else plain))
    except (ValueError, ZeroDivisionError):
        return plain
