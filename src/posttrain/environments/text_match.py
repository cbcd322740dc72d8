"""Rewards by the text of a completion alone: equal to the reference, or matched by a regular expression.

Runs in a worker process, whose time limit stops catastrophic backtracking of regular expressions.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.files.json_files import JsonMapping

_ASCII_PUNCTUATION = frozenset(string.punctuation)
_PART_OF_A_NUMBER = re.compile(r"(?<!\w)-(?=\.?\d)|\.(?=\d)")


def exact_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """1.0 when the completion, or the part of it that `extract` finds, is the reference or one of several."""
    pattern = re.compile(setup["extract"]) if setup.get("extract") is not None else None

    def score(item: ScoringItem) -> float:
        accepted = {normalised_text(text, setup) for text in references(item)}
        answer = item.response if pattern is None else last_match(pattern, item.response)
        return 1.0 if answer is not None and normalised_text(answer, setup) in accepted else 0.0

    return score


def references(item: ScoringItem) -> list[str]:
    """The reference as texts; a list means that any of them matches."""
    given = item.reference if isinstance(item.reference, list | tuple) else [item.reference]
    texts = [str(reference) for reference in given if reference is not None]
    if not texts:
        raise Unscored("the task has no reference answer")
    return texts


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match: its first matched group, or the whole match if the pattern has no groups."""
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    if found is None:
        return None
    if pattern.groups == 0:
        return found.group()
    return next((group for group in found.groups() if group is not None), None)


def normalised_text(text: str, options: JsonMapping) -> str:
    """The text normalised by the options."""
    if options["normalise_unicode"]:
        text = unicodedata.normalize("NFKC", text)
    if options["ignore_case"]:
        text = text.casefold()
    if options["ignore_punctuation"]:
        text = _without_punctuation(text)
    if options["ignore_articles"]:
        text = re.sub(r"\b(?:a|an|the)\b", " ", text, flags=re.IGNORECASE)
    if options["collapse_whitespace"] or options["ignore_articles"]:
        text = " ".join(text.split())
    return text


def _without_punctuation(text: str) -> str:
    """Signs and decimal points of numbers are not punctuation: -1.5 is not 15."""
    kept = {match.start() for match in _PART_OF_A_NUMBER.finditer(text)}
    return "".join(c for place, c in enumerate(text) if place in kept or not _is_punctuation(c))


def _is_punctuation(character: str) -> bool:
    return character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")


def regex_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """1.0 when the pattern matches the completion."""
    flags = re.RegexFlag(0)
    for key, flag in (("ignore_case", re.IGNORECASE), ("multiline", re.MULTILINE), ("dotall", re.DOTALL)):
        flags |= flag if setup[key] else 0
    pattern = re.compile(setup["pattern"], flags)
    matches = pattern.fullmatch if setup["match"] == "full" else pattern.search

    def score(item: ScoringItem) -> float:
        return 1.0 if matches(item.response) else 0.0

    return score
