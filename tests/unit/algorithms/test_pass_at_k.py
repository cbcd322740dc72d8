"""pass@k, cons@k and avg@k against slow references that list every subset, and the keyed bootstrap."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algorithms.pass_at_k import (
    ANY_POSITIVE_REWARD,
    cons_at_k,
    parse_metric,
    pass_at_k,
    problem_value,
    reward_metrics,
)
from posttrain.apps.evaluate.metrics import bootstrap_interval, per_problem
from posttrain.apps.evaluate.results import ProblemResult, SampleResult
from posttrain.errors import InputError

TABLES = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8)


@given(table=TABLES, data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(
    table: list[tuple[str | None, bool]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(table)))
    passed = [is_right for _, is_right in table]
    subsets = list(itertools.combinations(passed, k))
    slow = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(slow, abs=1e-12)


@given(table=TABLES, data=st.data())
def test_cons_at_k_is_the_share_of_subsets_whose_majority_passes(
    table: list[tuple[str | None, bool]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(table)))
    answers, passed = [answer for answer, _ in table], [is_right for _, is_right in table]
    won, total = 0, 0
    for subset in itertools.combinations(range(len(table)), k):
        total += 1
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        if votes:
            winner = votes.most_common(1)[0][0]  # the first of equals
            won += passed[next(i for i in subset if answers[i] == winner)]
    assert cons_at_k(answers, passed, k) == pytest.approx(won / total, abs=1e-12)


def test_cons_at_k_of_many_samples_does_not_list_subsets() -> None:
    rng = random.Random(0)
    answers = [rng.choice("abcdefgh") for _ in range(64)]  # C(64, 32) is 1.8e18
    value = cons_at_k(answers, [answer in "abc" for answer in answers], 32)
    drawn = []
    for _ in range(4000):
        subset = sorted(rng.sample(range(64), 32))
        winner = Counter(answers[i] for i in subset).most_common(1)[0][0]
        drawn.append(winner in "abc")
    assert value == pytest.approx(np.mean(drawn), abs=0.04)


def test_unscored_samples_lower_n_and_are_never_wrong() -> None:
    rewards, answers = [1.0, None, 0.0, None], ["a", None, "b", None]
    assert problem_value(parse_metric("pass@1"), rewards, answers, 1.0) == 0.5
    assert problem_value(parse_metric("avg@4"), rewards, answers, 1.0) == 0.5
    assert problem_value(parse_metric("pass@4"), rewards, answers, 1.0) == 1.0
    assert problem_value(parse_metric("pass@1"), [None, None], [None, None], 1.0) is None


def test_a_sample_passes_from_the_threshold_on() -> None:
    rewards = [0.4, 0.6]
    assert problem_value(parse_metric("pass@1"), rewards, [None, None], 0.5) == 0.5
    assert problem_value(parse_metric("pass@1"), rewards, [None, None], 1.0) == 0.0
    assert problem_value(parse_metric("pass@1"), [-1.0, 0.0, 1e-9], [None] * 3, ANY_POSITIVE_REWARD) == pytest.approx(
        1 / 3
    )


def test_equal_answers_vote_together_whatever_their_place() -> None:
    assert problem_value(parse_metric("cons@3"), [1.0, 0.0, 1.0], ["7", "5", "7"], 1.0) == 1.0
    assert problem_value(parse_metric("cons@3"), [0.0, 1.0, 0.0], ["5", "7", "5"], 1.0) == 0.0


@pytest.mark.parametrize("name", ["pass@0", "pass@", "pass", "mean@1", "pass@1.5"])
def test_unknown_metric_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match="expected pass@k, cons@k or avg@k"):
        parse_metric(name)


def test_validation_reports_the_same_numbers_under_its_names() -> None:
    found = reward_metrics([[0.0, 1.0], [0.0, 0.0], [None, None]], ANY_POSITIVE_REWARD)
    assert found == {"avg@2": 0.25, "pass@2": 0.5}
    assert reward_metrics([[0.5], [None]], ANY_POSITIVE_REWARD) == {"avg@1": 0.5}
    assert reward_metrics([[None]], ANY_POSITIVE_REWARD) == {}


def test_the_interval_is_keyed_and_covers_what_plain_resampling_gives() -> None:
    rng = np.random.default_rng(0)
    values = [float(v) for v in rng.random(200) < 0.3]
    interval = bootstrap_interval(values, seed=7, resamples=4000)
    assert interval == bootstrap_interval([*values, None], seed=7, resamples=4000), "what is not measured has no part"
    spread = [float(v) for v in rng.random(20)]
    assert bootstrap_interval(spread, seed=7, resamples=500) != bootstrap_interval(spread, seed=8, resamples=500)
    plain = np.quantile([np.mean(rng.choice(values, 200)) for _ in range(4000)], [0.025, 0.975])
    assert interval is not None
    assert [interval.low, interval.high] == pytest.approx(list(plain), abs=0.015)
    assert bootstrap_interval([None], seed=1) is None


def test_lengths_and_rates_are_metrics_too() -> None:
    samples = (
        SampleResult("x", 10, "stop", 1.0),
        SampleResult("y", 30, "length", None, error="timeout"),
        SampleResult("", 0, None, None, error="request failed"),
    )
    problems = [ProblemResult("p", 0, "d", "q", "a", samples)]
    assert per_problem(problems, "mean_length_tokens") == [20.0], "an answer that never came has no length"
    assert per_problem(problems, "truncation_rate") == [0.5], "nor was it cut off or not"
    assert per_problem(problems, "unscored_rate") == [pytest.approx(2 / 3)]
