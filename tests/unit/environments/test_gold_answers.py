"""The gold answer scores 1: each built-in reward on the references of real datasets, or on an answer made to please
it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.rewards import REWARD_TYPES, parse_reward
from posttrain.environments.item import ScoringItem
from posttrain.environments.math_answers import normalised
from posttrain.environments.reward_types import IN_PROCESS, WORKER_SCORERS, worker_scorer

SHARED_DATA = Path(__file__).parents[3].parent / "shared" / "data"
Scorer = Callable[[ScoringItem], Any]


def read_jsonl(name: str) -> list[dict[str, Any]]:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"the shared data file {name} is not here")
    text = gzip.decompress(path.read_bytes()).decode() if name.endswith(".gz") else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def scorer(kind: str, **keys: Any) -> Scorer:
    config = parse_reward({"type": kind, **keys})
    return worker_scorer({**config.model_dump(mode="json", by_alias=True), "base_folder": "."})


def wrong_of(score: Scorer, pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The (response, reference) that do not score 1."""
    return [pair for pair in pairs if score(ScoringItem("", *pair)) != 1.0]


@pytest.fixture(scope="module")
def by_mathematics() -> Scorer:
    return scorer("math")


@pytest.fixture(scope="module")
def as_text() -> Scorer:
    return scorer("math", math_verify_impl="dapo_math_verify")


def test_gsm8k_worked_solutions_score_one(by_mathematics: Scorer) -> None:
    rows = read_jsonl("gsm8k/test.jsonl")
    assert wrong_of(by_mathematics, [(row["answer"], row["final_answer"]) for row in rows]) == []


def test_gsm8k_answers_score_one_as_text_and_when_they_are_extracted(as_text: Scorer) -> None:
    rows = read_jsonl("gsm8k/test.jsonl")
    assert len(rows) == 1055
    assert wrong_of(as_text, [(f"Answer: {row['final_answer']}", row["final_answer"]) for row in rows]) == []
    assert wrong_of(as_text, [(f"Answer: ${int(row['final_answer']):,}$.", row["final_answer"]) for row in rows]) == []
    pairs = [(row["answer"].replace(",", ""), row["final_answer"]) for row in rows]
    assert wrong_of(scorer("exact", extract=r"#### (\S+)"), pairs) == []


def test_math500_solutions_score_one(by_mathematics: Scorer) -> None:
    rows = read_jsonl("math/math500_test.jsonl")
    assert len(rows) == 400
    assert wrong_of(by_mathematics, [(row["solution"], row["answer"]) for row in rows[200:]]) == []


def test_math500_answers_score_one_as_text(as_text: Scorer) -> None:
    rows = read_jsonl("math/math500_test.jsonl")
    assert wrong_of(as_text, [(f"so \\boxed{{{row['answer']}}}", row["answer"]) for row in rows]) == []
    assert wrong_of(as_text, [(f"Answer: ${row['answer']}$", row["answer"]) for row in rows]) == []
    # Another problem's answer is wrong, unless it reads the same.
    pairs = [(f"Answer: {one['answer']}", two["answer"]) for one, two in pairwise(rows)]
    alike = [pair for pair in pairs if normalised(pair[0].removeprefix("Answer: ")) == normalised(pair[1])]
    assert len(wrong_of(as_text, pairs)) == len(pairs) - len(alike)


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23"])
def test_competition_answers_score_one(by_mathematics: Scorer, as_text: Scorer, name: str) -> None:
    rows = read_jsonl(f"competition/{name}.jsonl")
    pairs = [(f"The final answer is \\boxed{{{row['answer']}}}.", row["answer"]) for row in rows]
    assert len(pairs) >= 30
    assert wrong_of(by_mathematics, pairs) == []
    assert wrong_of(as_text, pairs) == []


@pytest.mark.parametrize("form", ["Answer: {}", "The answer is ({}).", "so \\boxed{{{}}}", "{}"])
@pytest.mark.parametrize("language", ["english", "multilingual"])
def test_mmlu_letters_score_one_and_other_letters_zero(language: str, form: str) -> None:
    rows = [*read_jsonl("mmlu/dev.jsonl"), *read_jsonl("mmlu/test_sample.jsonl")]
    score = scorer("multiple_choice", language=language)
    assert len(rows) == 1425
    assert wrong_of(score, [(form.format(row["answer"]), row["answer"]) for row in rows]) == []
    others = [(form.format("ABCD"[(row["answer_index"] + 1) % 4]), row["answer"]) for row in rows]
    assert {score(ScoringItem("", *pair)) for pair in others} == {0.0}


def test_mmlu_letters_with_the_text_of_the_choice_score_one() -> None:
    rows = read_jsonl("mmlu/dev.jsonl")
    pairs = [(f"Answer: {row['answer']}. {row['choices'][row['answer_index']]}", row["answer"]) for row in rows]
    assert wrong_of(scorer("multiple_choice"), pairs) == []


GOLD: dict[str, tuple[dict[str, Any], str, Any]] = {
    "math": ({}, r"\boxed{\frac{1}{2}}", "0.5"),
    "math_cosine": ({"max_length": 10}, r"\boxed{5}", "5"),
    "multiple_choice": ({}, "Answer: B", "B"),
    "exact": ({}, "Paris", "Paris"),
    "regex": ({"pattern": "^<answer>.*</answer>$"}, "<answer>5</answer>", None),
    "box": ({}, "[10, 20, 30, 40]", [10, 20, 30, 40]),
    "json_schema": ({"schema": {"type": "array", "items": {"type": "integer"}}}, "[1, 2]", None),
    "length": ({"limit": 5, "unit": "words"}, "three words here", None),
    "repetition": ({"unit": "words"}, "nothing is said twice here", None),
}
TESTED_ELSEWHERE = {"python", "code", "judge", "none"}  # the user's function; a sandbox; an endpoint; never 1


@pytest.mark.parametrize("kind", GOLD)
def test_every_rule_gives_one_to_its_gold_answer(kind: str) -> None:
    keys, response, reference = GOLD[kind]
    found = scorer(kind, **keys)(ScoringItem("", response, reference, token_ids=()))
    assert (found["reward"] if isinstance(found, dict) else found) == 1.0


def test_every_reward_type_has_a_scorer_and_a_gold_answer() -> None:
    assert set(REWARD_TYPES) == (set(WORKER_SCORERS) | set(IN_PROCESS)) - {"turns", "agent"}
    assert set(REWARD_TYPES) == set(GOLD) | TESTED_ELSEWHERE | set(IN_PROCESS)
    for kind, section in REWARD_TYPES.items():
        assert section.model_fields["type"].annotation.__args__ == (kind,)  # type: ignore[union-attr]
