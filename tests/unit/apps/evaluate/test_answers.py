"""Which answer a text gives, and that equal answers are written in one way."""

from __future__ import annotations

import pytest

from posttrain.apps.evaluate.answers import answer_reader


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "1/2"),
        ("The answer is 0.5.", "1/2"),
        (r"\boxed{\dfrac{2}{4}} ", "1/2"),
        ("She earns 9 * 2 = 18.\n#### 1,234", "1234"),
        ("The answer is $18 per day.", "18"),
        ("We find $x = 3$ and so $x^2 = 9$", "9"),
        ("First 12, then 5 apples.", "5"),
        (r"\boxed{3} no, \boxed{4}", "4"),
        ("", None),
        ("I do not know", None),
    ],
)
def test_mathematics(text: str, answer: str | None) -> None:
    assert answer_reader("math")(text) == answer


def test_multiple_choice_reads_the_letter() -> None:
    assert answer_reader("english_multichoice")("It could be A.\nAnswer: c") == "C"
    assert answer_reader("multilingual_multichoice")("答案是 B") == "B"
    assert answer_reader("english_multichoice")("no idea") is None


def test_other_answers_are_their_text() -> None:
    assert answer_reader("text")(" a  b\n") == "a b"
