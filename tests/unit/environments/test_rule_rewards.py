"""Rewards by rule: text, format, length, repetition. What each key changes, and against TRL where it has the same
thing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config.rewards import parse_reward
from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.environments.reward_types import worker_scorer
from posttrain.environments.text_rewards import choice_finder, choice_scorer


def setup_of(kind: str, base_folder: Path | str = ".", **keys: Any) -> dict[str, Any]:
    config = parse_reward({"type": kind, **keys})
    return {**config.model_dump(mode="json", by_alias=True), "base_folder": str(base_folder)}


def reward(kind: str, response: str, reference: Any = None, *, tokens: list[int] | None = None, **keys: Any) -> Any:
    token_ids = None if tokens is None else tuple(tokens)
    return worker_scorer(setup_of(kind, **keys))(ScoringItem("", response, reference, token_ids=token_ids))


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "reference", "keys", "expected"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "Straße", {"ignore_case": True}, 1.0),
        (" new \n york ", "new york", {}, 1.0),
        (" new \n york ", "new york", {"collapse_whitespace": False}, 0.0),
        ("Paris!", "Paris", {}, 0.0),
        ("«Paris»!", "Paris", {"ignore_punctuation": True}, 1.0),
        ("$3,000.", "3000", {"ignore_punctuation": True}, 1.0),
        ("-1", "1", {"ignore_punctuation": True}, 0.0),
        ("1.4", "14", {"ignore_punctuation": True}, 0.0),
        ("well-known", "wellknown", {"ignore_punctuation": True}, 1.0),
        ("the cat", "cat", {}, 0.0),
        ("The cat", "a cat", {"ignore_articles": True}, 1.0),
        ("１２", "12", {}, 1.0),
        ("１２", "12", {"normalise_unicode": False}, 0.0),
        ("so <a>4</a>, no, <a>5</a>", "5", {"extract": "<a>(.*?)</a>"}, 1.0),
        ("so <a>4</a>, no, <a>5</a>", "4", {"extract": "<a>(.*?)</a>"}, 0.0),
        ("it is 17 or 18", "18", {"extract": r"\d+"}, 1.0),
        ("nothing here", "18", {"extract": r"\d+"}, 0.0),
        ("B", ["A", "B"], {}, 1.0),
        ("C", ["A", "B"], {}, 0.0),
        ("42", 42, {}, 1.0),
        ("", "", {}, 1.0),
        ("answer is 7", "7", {"extract": r"box (\d+)|answer is (\d+)"}, 1.0),  # the first group that took part
    ],
)
def test_exact(response: str, reference: Any, keys: dict[str, Any], expected: float) -> None:
    assert reward("exact", response, reference, **keys) == expected


@pytest.mark.parametrize("reference", [None, [], [None]])
def test_exact_without_a_reference_is_unscored(reference: Any) -> None:
    with pytest.raises(Unscored, match="no reference answer"):
        reward("exact", "x", reference)


# -- regex -------------------------------------------------------------------------------------------------------------

THINK = r"<think>(?!.*<think>).*?</think>.*"


@pytest.mark.parametrize(
    ("response", "keys", "expected"),
    [
        ("a <b> c", {"pattern": "<b>"}, 1.0),
        ("a <b> c", {"pattern": "<b>", "match": "full"}, 0.0),
        ("<b>", {"pattern": "<b>", "match": "full"}, 1.0),
        ("A", {"pattern": "a"}, 0.0),
        ("A", {"pattern": "a", "ignore_case": True}, 1.0),
        ("x\ny", {"pattern": "^y"}, 0.0),
        ("x\ny", {"pattern": "^y", "multiline": True}, 1.0),
        ("x\ny", {"pattern": "x.y"}, 0.0),
        ("x\ny", {"pattern": "x.y", "dotall": True}, 1.0),
        ("<think>one\ntwo</think> 5", {"pattern": THINK, "match": "full", "dotall": True}, 1.0),
        ("<think>one</think><think>two</think> 5", {"pattern": THINK, "match": "full", "dotall": True}, 0.0),
        ("no tags", {"pattern": THINK, "match": "full", "dotall": True}, 0.0),
    ],
)
def test_regex(response: str, keys: dict[str, Any], expected: float) -> None:
    assert reward("regex", response, **keys) == expected


# -- JSON --------------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' \n{"name": "Ada"}\n', 1.0),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1.0),
        ('```\n[]\n```\nbetter:\n```json\n{"name": "Ada"}\n```', 1.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "extra": 1}', 0.0),
        ('Here: {"name": "Ada"}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": "Ada"', 0.0),
        ('{"name": "Ada", "name": "Bob"}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(response: str, expected: float) -> None:
    assert reward("json_schema", response, schema=PERSON) == expected


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('{"name": "Ada"}', (1.0, 0.0, 1.0)),
        ('See:\n```json\n{"name": "Ada"}\n```', (0.0, 1.0, 1.0)),
        ('{"name": "Ada"', (0.0, 0.0, 0.0)),
    ],
)
def test_where_selects_the_part_of_the_answer_that_is_json(text: str, scores: tuple[float, ...]) -> None:
    """Without a schema it only has to be JSON."""
    assert tuple(reward("json_schema", text, where=where) for where in ("whole", "fenced", "auto")) == scores


def test_a_schema_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    score = worker_scorer(setup_of("json_schema", tmp_path, schema_file="person.json"))
    assert score(ScoringItem("", '{"name": "Ada"}', None)) == 1.0
    assert score(ScoringItem("", "{}", None)) == 0.0


@pytest.mark.parametrize(
    ("keys", "text", "message"),
    [
        ({"schema": {"type": "objekt"}}, None, "not a JSON schema: at type: 'objekt' is not valid"),
        ({"schema": {"properties": {"a": {"minimum": "3"}}}}, None, "at properties/a/minimum"),
        ({"schema_file": "s.json"}, None, "s.json cannot be read: No such file"),
        ({"schema_file": "s.json"}, "{", "s.json is not JSON"),
    ],
)
def test_a_bad_schema_is_refused_when_the_scorer_is_built(
    tmp_path: Path, keys: dict[str, Any], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "s.json").write_text(text)
    with pytest.raises(BadSetup, match=message):
        worker_scorer(setup_of("json_schema", tmp_path, **keys))


def test_a_reference_to_another_document_is_not_fetched_and_leaves_the_answer_unscored() -> None:
    with pytest.raises(Unscored, match="which is not in it"):
        reward("json_schema", "{}", schema={"$ref": "https://example.invalid/person.json"})


# -- length ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "keys", "expected"),
    [
        (10, {"limit": 10}, 1.0),
        (11, {"limit": 10}, 0.0),
        (12, {"limit": 10, "tolerance": 4}, 0.5),
        (14, {"limit": 10, "tolerance": 4}, 0.0),
        (20, {"limit": 10, "tolerance": 4}, 0.0),
        (10, {"target": 10}, 1.0),
        (9, {"target": 10}, 0.0),
        (7, {"target": 10, "tolerance": 4}, 0.25),
        (13, {"target": 10, "tolerance": 4}, 0.25),
        (0, {"limit": 10, "shape": "cosine"}, 1.0),
        (5, {"limit": 10, "shape": "cosine"}, 0.5),
        (10, {"limit": 10, "shape": "cosine"}, 0.0),
        (25, {"limit": 10, "shape": "cosine"}, 0.0),
    ],
)
def test_length(length: int, keys: dict[str, Any], expected: float) -> None:
    assert reward("length", "x", tokens=list(range(length)), **keys) == pytest.approx(expected)


@pytest.mark.parametrize(("unit", "length"), [("words", 4), ("characters", 21)])
def test_length_may_be_counted_in_words_or_characters(unit: str, length: int) -> None:
    text = "four words stand here"
    assert [reward("length", text, limit=limit, unit=unit) for limit in (length, length - 1)] == [1.0, 0.0]


def test_a_length_in_tokens_of_a_sample_without_tokens_is_unscored() -> None:
    with pytest.raises(Unscored, match="does not say what its tokens are"):
        reward("length", "x", limit=3)


# -- repetition --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_repetition_is_one_minus_the_penalty_of_trl(tokens: list[int], size: int) -> None:
    from trl.rewards import get_repetition_penalty_reward

    (penalty,) = get_repetition_penalty_reward(ngram_size=size, max_penalty=-1.0)(completion_ids=[tokens])
    assert reward("repetition", "x", tokens=tokens, ngram_size=size) == pytest.approx(1.0 + penalty)


def test_repetition_in_words_and_characters() -> None:
    assert reward("repetition", "a b a b", unit="words", ngram_size=2) == pytest.approx(2 / 3)
    assert reward("repetition", "no word here twice", unit="words", ngram_size=1) == 1.0
    assert reward("repetition", "aaa", unit="characters", ngram_size=1) == pytest.approx(1 / 3)


# -- the cosine of mathematics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 50, 100, 250])
@pytest.mark.parametrize(("answer", "is_right"), [(r"\boxed{4}", True), (r"\boxed{5}", False)])
def test_the_cosine_of_mathematics_is_trls(length: int, answer: str, is_right: bool) -> None:
    from trl.rewards import get_cosine_scaled_reward

    values = {"min_value_wrong": -0.9, "max_value_wrong": -0.3, "min_value_correct": 0.4, "max_value_correct": 1.5}
    (expected,) = get_cosine_scaled_reward(max_len=100, **values)(
        completions=[[{"role": "assistant", "content": answer}]], solution=["$4$"], completion_ids=[[0] * length]
    )
    found = reward("math_cosine", answer, "4", tokens=[0] * length, max_length=100, **values)
    assert found["reward"] == pytest.approx(expected, abs=1e-12)
    assert found["correct"] == float(is_right)
    assert math.isfinite(found["reward"])


# -- multiple choice ---------------------------------------------------------------------------------------------------


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
