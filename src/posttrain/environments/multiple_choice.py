"""Multiple choice: finds the letter that a completion chose. Runs in a worker process.

The last clear statement counts: `Answer: B`, `the answer is (B)`, `\\boxed{B}`; or the completion is nothing but a letter.
A completion that states none scores 0.0. The multilingual form also accepts the word for "answer" in other languages, and
Arabic, Bengali, Devanagari and full-width letters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.files.json_files import JsonMapping

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
