"""Which letter did a completion choose?"""

from __future__ import annotations

import pytest

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.environments.text_rewards import choice_finder, choice_scorer


@pytest.mark.parametrize("multilingual", [False, True])
@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("answer: b", "B"),
        ("**Answer:** (C)", "C"),
        ("Answer: $D$", "D"),
        ("The answer is A.", "A"),
        ("The answer is (A) because it is", "A"),
        ("The correct option is J", "J"),
        ("The answer is option B, since option C is wrong", "B"),
        ("Answer: A\nOn reflection\nAnswer: B", "B"),
        (r"so \boxed{C}", "C"),
        (r"so $\boxed{\text{(C)}}$", "C"),
        (r"\boxed{B. Paris}", "B"),
        ("B", "B"),
        ("(b)", "B"),
        ("The answer is (b).", "B"),
        (" D. ", "D"),
        ("answer: a good question", None),
        ("The answer is Better", None),
        (r"\boxed{Because}", None),
        (r"\boxed{12}", None),
        ("A cat sat", None),
        ("", None),
    ],
)
def test_the_last_clear_statement_counts(text: str, letter: str | None, multilingual: bool) -> None:
    assert choice_finder(multilingual=multilingual)(text) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Antwort: B", "B"),
        ("La respuesta es C", "C"),
        ("Réponse : D", "D"),
        ("答案：Ｂ", "B"),
        ("答案是C", "C"),
        ("答え: A", "A"),
        ("정답: D", "D"),
        ("الإجابة: ب", "B"),
        ("উত্তর: গ", "C"),
        ("उत्तर: क", "A"),
        ("उत्तर: कमल", None),
        ("Jawaban: A", "A"),
    ],
)
def test_other_languages(text: str, letter: str | None) -> None:
    assert choice_finder(multilingual=True)(text) == letter


def test_scores_are_one_zero_or_unscored_when_the_reference_is_no_letter() -> None:
    score = choice_scorer(multilingual=False)
    assert score(ScoringItem("", "Answer: B", "B")) == 1.0
    assert score(ScoringItem("", "Answer: B", "(b)")) == 1.0
    assert score(ScoringItem("", "Answer: A", "B")) == 0.0
    assert score(ScoringItem("", "no idea", "B")) == 0.0
    for reference in (None, "", "Paris", 2):
        with pytest.raises(Unscored, match="not the letter of a choice"):
            score(ScoringItem("", "Answer: B", reference))
