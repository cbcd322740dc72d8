"""Rewards by a completion's text: equal to the reference, a pattern, a choice, JSON, length, repetition.

All run in worker processes, whose time limit stops catastrophic backtracking of regular expressions.
"""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.files.json_files import JsonMapping, without_repeats

# -- equal to the reference, or matched by a regular expression --------------------------------------------------------


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
    return "".join(
        c
        for place, c in enumerate(text)
        if place in kept or not (c in _ASCII_PUNCTUATION or unicodedata.category(c).startswith("P"))
    )


Box = tuple[float, float, float, float]
_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BOX = re.compile(rf"[\[(]{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}[\])]")


def box_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """The IoU of the box that the completion states last with the reference; its least value if it states none.

    Deviation from NeMo RL's `bbox_giou`: an answer without a box is the worst (-1) where GIoU is given, not better than
    a wrong box; a box without an area is none.
    """
    pattern = re.compile(setup["extract"]) if setup.get("extract") is not None else None
    threshold, giou_below = setup["threshold"], setup["giou_below"]

    def score(item: ScoringItem) -> float:
        expected = _last_box(str(list(item.reference) if isinstance(item.reference, tuple) else item.reference))
        if expected is None:
            raise Unscored(f"the reference {item.reference!r:.80} is not a box [x1, y1, x2, y2]")
        answer = item.response if pattern is None else last_match(pattern, item.response) or ""
        stated = _last_box(answer)
        if stated is None:
            return -1.0 if giou_below else 0.0
        iou, giou = overlap(stated, expected)
        if threshold is not None:
            return 1.0 if iou >= threshold else 0.0
        return giou if iou < giou_below else iou

    return score


def _last_box(text: str) -> Box | None:
    for found in reversed(_BOX.findall(text)):
        left, top, right, bottom = map(float, found)
        if left < right and top < bottom:
            return left, top, right, bottom
    return None


def overlap(one: Box, other: Box) -> tuple[float, float]:
    """Intersection over union of two boxes, and the generalised IoU (arXiv 1902.09630)."""

    def area(left: float, top: float, right: float, bottom: float) -> float:
        return max(right - left, 0.0) * max(bottom - top, 0.0)

    shared = area(max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3]))
    hull = area(min(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), max(one[3], other[3]))
    union = area(*one) + area(*other) - shared
    return shared / union, shared / union - (hull - union) / hull


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


# -- multiple choice ---------------------------------------------------------------------------------------------------


_ENGLISH_WORDS = ("answer", "correct option", "correct choice")
_OTHER_WORDS = (
    *("antwort", "respuesta", "réponse", "risposta", "resposta", "ответ", "odpowiedź", "cevap", "svar", "antwoord"),
    *("jawaban", "jibu", "jawabu", "idahun", "ìdáhùn", "đáp án", "câu trả lời"),
    *("الإجابة", "الاجابة", "الجواب", "উত্তর", "उत्तर", "जवाब", "விடை"),
    *("答案", "回答", "答え", "解答", "選択", "정답", "답변", "답"),
)
_ENGLISH_LINKS = ("is",)
_OTHER_LINKS = (
    *("es", "ist", "est", "è", "é", "adalah", "ni", "là"),
    *("هي", "هو", "হল", "है", "是", "为", "為", "は", "은", "는"),
)
_OTHER_LETTERS = ("أبجد", "ابجد", "অবডঢ", "কখগঘ", "कखगघ")  # A, B, C, D of each script


def multiple_choice_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """Finds the letter that a completion chose. A completion that states none scores 0.0.

    The last clear statement counts: `Answer: B`, `the answer is (B)`, `\\boxed{B}`; or the completion is nothing but a
    letter. The multilingual form also accepts the word for "answer" in other languages, and Arabic, Bengali, Devanagari
    and full-width letters.
    """
    return choice_scorer(multilingual=setup["language"] == "multilingual")


def choice_scorer(*, multilingual: bool) -> Callable[[ScoringItem], float]:
    """1.0 when the completion chose the letter of the reference, else 0.0."""
    find = choice_finder(multilingual=multilingual)

    def score(item: ScoringItem) -> float:
        expected = find(str(item.reference)) if item.reference is not None else None
        if expected is None:
            raise Unscored(f"the reference answer {item.reference!r:.80} is not the letter of a choice")
        return 1.0 if find(item.response) == expected else 0.0

    return score


def choice_finder(*, multilingual: bool) -> Callable[[str], str | None]:
    """A function from text to the letter it chose, `A` to `Z`, or None."""
    words = _ENGLISH_WORDS + (_OTHER_WORDS if multilingual else ())
    links = _ENGLISH_LINKS + (_OTHER_LINKS if multilingual else ())
    word = "|".join(map(re.escape, words))
    link = "|".join(map(re.escape, links))
    # A small letter counts only at the end of its line: "answer: a good one" chooses nothing.
    letter = r"\(?\s*(?P<letter>[A-Z](?![\w'’])|[a-z](?=\s*[).]*\s*$))"
    statement = re.compile(
        rf"(?im:(?:{word})\s*(?:{link})?\s*:?\s*(?:(?:option|choice)\s)?)\s*(?-i:{letter})", re.MULTILINE
    )
    alone = re.compile(r"\s*\(?(?P<letter>[A-Za-z])\s*[).:]?\s*")

    def find(text: str) -> str | None:
        plain = _undecorated(text, multilingual=multilingual)
        statements = list(statement.finditer(plain))
        match = statements[-1] if statements else alone.fullmatch(plain)
        return match["letter"].upper() if match else None

    return find


def _undecorated(text: str, *, multilingual: bool) -> str:
    # A box is a statement of its own, so it is rewritten as one; bold, dollars and text commands are dropped.
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\boxed\s*\{\s*\(?\s*([^\s{}()])(?!\w)[^{}]{0,200}\}", r" answer: \1 ", text)
    text = re.sub(r"\\[()\[\]]|[*$`_\"“”]", "", text)
    if multilingual:
        text = unicodedata.normalize("NFKC", text)  # full-width letters and colons
        for theirs in _OTHER_LETTERS:
            # Only a letter that stands alone is a choice; the same letters, with vowel signs after them, spell words.
            for their_letter, our_letter in zip(theirs, "ABCD", strict=True):
                text = re.sub(rf"(?<!\w){their_letter}(?![\w\u0900-\u09ff])", our_letter, text)
    return text


# -- JSON that matches a schema ----------------------------------------------------------------------------------------


_FENCED = re.compile(r"^[ \t]*(```+|~~~+)[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)


def json_schema_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """1.0 if the completion is JSON of RFC 8259 (no `NaN`, no duplicate keys) that matches the schema, else 0.0.

    The schema is checked against its own dialect when the worker starts. A `$ref` to another document is not followed:
    nothing is ever fetched.
    """
    fits = _validator(_schema(setup))
    where = setup["where"]

    def score(item: ScoringItem) -> float:
        text = json_text(item.response, where)
        try:
            value = json.loads(text or "", parse_constant=_refuse, object_pairs_hook=without_repeats)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0 if fits(value) else 0.0

    return score


def json_text(response: str, where: str) -> str | None:
    """The part of the response that should be JSON: all of it, or its last fenced block."""
    if where != "whole":
        blocks = _FENCED.findall(response)
        if blocks:
            return str(blocks[-1][1])
    return None if where == "fenced" else response


def _schema(setup: JsonMapping) -> object:
    if setup.get("schema_file") is None:
        return setup.get("schema")
    path = Path(setup["base_folder"]) / Path(setup["schema_file"]).expanduser()
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetup(f"schema_file {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadSetup(f"schema_file {path} is not JSON: {error}") from None


def _validator(schema: object) -> Callable[[object], bool]:
    if schema is None:
        return lambda value: True
    try:
        import jsonschema
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise BadSetup("a schema needs the package jsonschema: pip install 'posttrain[rewards]'") from None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise BadSetup(f"the schema is not a JSON schema: at {place}: {error.message}") from None
    validator = kind(schema, registry=Registry())

    def fits(value: object) -> bool:
        try:
            return bool(validator.is_valid(value))
        except Unresolvable as error:
            raise Unscored(f"the schema refers to {error.ref!r}, which is not in it") from None
        except RecursionError:
            raise Unscored("the schema refers to itself without end") from None

    return fits


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# -- length and repetition ---------------------------------------------------------------------------------------------


def length_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """1.0 up to the limit or at the target, falling to 0.0 over the tolerance; as a cosine from 0 to the limit."""
    unit, tolerance = setup["unit"], setup["tolerance"]

    def score(item: ScoringItem) -> float:
        length = len(units(item, unit))
        if setup["shape"] == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(length / setup["limit"], 1.0)))
        excess = abs(length - setup["target"]) if setup["target"] is not None else length - setup["limit"]
        if excess <= 0:
            return 1.0
        return max(0.0, 1.0 - excess / tolerance) if tolerance else 0.0

    return score


def repetition_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """The number of different n-grams over the number of n-grams; 1.0 for a completion too short to have any.

    The measure of arXiv 2502.03373, appendix C, as TRL has it. Deviation: it is 1 minus the repeated share, not a
    negative penalty, so that it is between 0 and 1 like every other rule; with a suitable weight both give the same
    advantages.
    """
    size, unit = setup["ngram_size"], setup["unit"]

    def score(item: ScoringItem) -> float:
        pieces = units(item, unit)
        if len(pieces) < size:
            return 1.0
        ngrams = [tuple(pieces[start : start + size]) for start in range(len(pieces) - size + 1)]
        return len(set(ngrams)) / len(ngrams)

    return score


def no_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    return lambda item: 0.0


def units(item: ScoringItem, unit: str) -> Sequence[object]:
    """The completion in pieces: tokens, words, characters."""
    if unit == "words":
        return item.response.split()
    if unit == "characters":
        return item.response
    if item.token_ids is None:
        raise Unscored("the sample does not say what its tokens are; count words or characters, or name a tokenizer")
    return item.token_ids
