"""Routing to the canary, and the rules of a rollback."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from posttrain.apps.serve.canary import CANARY, PRODUCTION, AnswerLog, Canary, CanaryRules, Scores, place_of
from posttrain.errors import InputError

RULES = CanaryRules(share=0.3, max_error_rate=0.1, min_requests=20, window=50, max_kpi_drop=0.05, min_feedback=30)


def test_key_decides_and_a_larger_share_keeps_its_users() -> None:
    keys = [f"user{number}" for number in range(4000)]
    small, large = Canary(RULES), Canary(replace(RULES, share=0.5))
    first = {key for key in keys if small.takes(key)}
    assert len(first) / len(keys) == pytest.approx(0.3, abs=0.03)
    assert first == {key for key in keys if small.takes(key)}
    assert first < {key for key in keys if large.takes(key)}
    assert not any(Canary(replace(RULES, share=0.0)).takes(key) for key in keys)
    assert all(Canary(replace(RULES, share=1.0)).takes(key) for key in keys)


def test_routing_is_the_same_in_every_process() -> None:
    assert place_of("anna") == pytest.approx(0.8135, abs=1e-4)


def test_too_many_errors_roll_back_once_and_for_good() -> None:
    reasons: list[str] = []
    canary = Canary(RULES, reasons.append)
    for number in range(19):
        canary.answered(CANARY, ok=number % 2 == 0)
    assert canary.share == 0.3, "too few answers to judge"
    canary.answered(CANARY, ok=True)
    assert canary.share == 0.0
    assert "9 of its last 20" in reasons[0]
    canary.answered(CANARY, ok=False)
    assert len(reasons) == 1
    assert not any(canary.takes(str(number)) for number in range(100))


def test_errors_of_production_and_old_errors_do_not_count() -> None:
    canary = Canary(RULES)
    for _ in range(100):
        canary.answered(PRODUCTION, ok=False)
    for _ in range(30):
        canary.answered(CANARY, ok=True)
    for number in range(500):
        canary.answered(CANARY, ok=number % 10 != 0)  # 10 % is allowed
    assert canary.rollback_reason is None


def rate(canary: Canary, production: float, new: float, count: int, seed: int = 0) -> None:
    """Thumbs up with the given probabilities."""
    rng = random.Random(seed)
    for _ in range(count):
        canary.rated(PRODUCTION, float(rng.random() < production))
        canary.rated(CANARY, float(rng.random() < new))


def test_significant_kpi_drop_rolls_back() -> None:
    canary = Canary(RULES)
    rate(canary, 0.8, 0.5, 29)
    assert canary.rollback_reason is None, "too few scores to judge"
    rate(canary, 0.8, 0.5, 100, seed=1)
    assert canary.rollback_reason is not None
    assert "mean score" in canary.rollback_reason


def test_no_rollback_without_a_drop_or_without_a_rule() -> None:
    better, off = Canary(RULES), Canary(replace(RULES, max_kpi_drop=None))
    rate(better, 0.6, 0.7, 300)
    rate(off, 0.9, 0.1, 300)
    assert better.rollback_reason is None
    assert off.rollback_reason is None


def test_insignificant_kpi_drop_does_not_roll_back() -> None:
    canary = Canary(RULES)
    for number in range(30):
        canary.rated(PRODUCTION, float(number % 2))
        canary.rated(CANARY, float(number % 10 < 4))  # 0.4 against 0.5: less than 1.65 standard errors
    assert canary.rollback_reason is None


def test_scores_are_mean_and_variance() -> None:
    rng, scores = random.Random(3), Scores()
    values = [rng.gauss(5, 2) for _ in range(200)]
    for value in values:
        scores.add(value)
    mean = sum(values) / 200
    assert scores.mean == pytest.approx(mean)
    assert scores.variance == pytest.approx(sum((value - mean) ** 2 for value in values) / 199)
    assert math.isfinite(Scores(1, 3.0).variance)


def test_answer_is_rated_once_and_old_answers_expire() -> None:
    answers = AnswerLog(limit=3)
    for number in range(5):
        answers.remember(f"a{number}", CANARY)
    assert [answers.take(f"a{number}") for number in range(5)] == [None, None, CANARY, CANARY, CANARY]
    assert answers.take("a4") is None


@pytest.mark.parametrize(
    "wrong", [{"share": 1.5}, {"share": -0.1}, {"max_error_rate": 2.0}, {"min_requests": 0}, {"min_requests": 51},
              {"max_kpi_drop": -1.0}, {"min_feedback": 1}],
)  # fmt: skip
def test_impossible_rules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="accepted"):
        replace(RULES, **wrong)
