"""Two evaluations side by side: the paired tests against slow references, the table, the page, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.apps.evaluate.comparison import (
    compare,
    comparison_json,
    comparison_lines,
    comparison_page,
    exact_sign_test,
    sign_flip_test,
)
from posttrain.apps.evaluate.results import (
    Counts,
    Evaluation,
    EvaluationError,
    EvaluationSummary,
    ProblemResult,
    SampleResult,
    hash_of,
)


def evaluation(name: str, rewards: Sequence[Sequence[float | None]], **config: object) -> Evaluation:
    problems = tuple(
        ProblemResult(f"p{i}", i, "sums", f"What is <b>{i}</b>?", str(i), tuple(_sample(reward) for reward in row))
        for i, row in enumerate(rewards)
    )
    num_samples = len(rewards[0])
    summary = EvaluationSummary(
        model=name,
        dataset="sums",
        metric="pass@1",
        metrics={"pass@1": 0.5, "mean_length_tokens": 3.0},
        intervals={},
        counts=Counts(len(problems), len(problems) * num_samples, sum(None in row for row in rewards), 0),
        num_tests_per_prompt=num_samples,
        pass_threshold=1.0,
        seed=42,
        problem_set_hash=hash_of(problems),
        config={"generation": {"temperature": 0.0, **config}},
        code_version="0",
    )
    return Evaluation(Path(name), summary, problems)


def test_an_evaluation_shows_as_one_line() -> None:
    assert repr(evaluation("a", [[1], [0]])).startswith("<Evaluation a: pass@1 0.5000, 2 problems of ")


def _sample(reward: float | None) -> SampleResult:
    text = "<script>alert(1)</script>"
    return SampleResult(text, 3, "stop", reward, answer=str(reward), error=None if reward is not None else "timeout")


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 0), (6, 1), (8, 8), (3, 9)])
def test_the_sign_test_counts_every_way_the_changes_could_have_gone(wins: int, losses: int) -> None:
    total = wins + losses
    splits = [sum(signs) for signs in itertools.product((0, 1), repeat=total)]
    uneven = abs(wins - losses)
    slow = sum(abs(2 * ups - total) >= uneven for ups in splits) / len(splits)
    assert exact_sign_test(wins, losses) == pytest.approx(slow)


def test_the_permutation_test_is_near_the_one_that_lists_all_signs() -> None:
    differences = [0.25, -0.125, 0.5, 0.375, 0.25, -0.0625, 0.125, 0.3125]
    observed = abs(sum(differences))
    sums = [
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=8)
    ]
    slow = sum(total >= observed - 1e-12 for total in sums) / len(sums)
    assert sign_flip_test(differences, seed=3) == pytest.approx(slow, abs=0.015)
    assert sign_flip_test(differences, seed=3) == sign_flip_test(differences, seed=3)
    assert sign_flip_test([], seed=3) == 1.0


def test_clear_improvement_is_reported_with_its_changes() -> None:
    a = evaluation("a", [[0.0]] * 20 + [[1.0]] * 10)
    b = evaluation("b", [[1.0]] * 15 + [[0.0]] * 5 + [[1.0]] * 9 + [[0.0]])
    found = compare(a, b)
    assert (found.wins, found.losses, found.ties, found.left_out) == (15, 1, 14, 0)
    assert found.test == "exact McNemar"
    assert found.p_value == pytest.approx(exact_sign_test(15, 1))
    assert found.difference == pytest.approx(14 / 30)
    assert found.interval.low < found.difference < found.interval.high
    assert found.verdict.startswith("B is better")
    assert found.changed[0].first.id == "p29", "what got worse comes first"
    text = "\n".join(comparison_lines(found, show=2))
    assert "B better    15" in text
    assert "… and 14 more" in text
    assert json.loads(comparison_json(found))["wins"] == 15
    backwards = compare(b, a)
    assert backwards.verdict.startswith("B is worse")
    assert backwards.difference == -found.difference


def test_noise_is_not_reported_as_a_difference() -> None:
    found = compare(evaluation("a", [[1.0], [0.0], [0.0]]), evaluation("b", [[0.0], [1.0], [1.0]]))
    assert found.verdict.startswith("no difference can be told from noise")


def test_shares_are_compared_by_their_mean() -> None:
    found = compare(evaluation("a", [[1.0, 0.0], [0.0, 0.0]]), evaluation("b", [[1.0, 1.0], [0.0, 1.0]]))
    assert found.test.startswith("sign-flip")
    assert (found.first_mean, found.second_mean) == (0.25, 0.75)


def test_problems_that_one_side_could_not_score_are_left_out() -> None:
    found = compare(evaluation("a", [[None], [1.0]]), evaluation("b", [[1.0], [1.0]]))
    assert (found.left_out, found.ties) == (1, 1)
    assert any("unscored" in caution for caution in found.cautions)


def test_other_problems_are_refused_and_named() -> None:
    a, b = evaluation("a", [[1.0], [1.0]]), evaluation("b", [[1.0], [1.0], [1.0]])
    with pytest.raises(EvaluationError, match=r"1 only in B \(b\): p2"):
        compare(a, b)
    changed = (a.problems[0], replace(a.problems[1], expected="other"))
    other = replace(a, problems=changed, summary=replace(a.summary, problem_set_hash=hash_of(changed)))
    with pytest.raises(EvaluationError, match="1 with another text or answer: p1"):
        compare(a, other)


def test_a_metric_that_needs_more_samples_is_refused() -> None:
    a = evaluation("a", [[1.0]])
    with pytest.raises(EvaluationError, match="pass@4 needs 4 samples of each problem; one of the evaluations has 1"):
        compare(a, a, "pass@4")


def test_settings_that_differ_are_mentioned() -> None:
    found = compare(evaluation("a", [[1.0]]), evaluation("b", [[1.0]], temperature=0.6))
    assert found.cautions == ("generation.temperature is 0.0 in A and 0.6 in B",)


def test_the_page_stands_alone_and_shows_answers_as_text() -> None:
    page = comparison_page(compare(evaluation("a", [[1.0], [0.0]]), evaluation("b", [[0.0], [0.0]])))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('<details class="problem">') == 1
