"""Metrics of rollouts that say whether answers differ, from each other and within themselves."""

from __future__ import annotations

import pytest

from posttrain.algorithms.step_reports import rollout_metrics
from posttrain.types import Completion, Group, Rollout, Score, Task


def group(*answers: tuple[int, ...]) -> Group:
    completions = [Completion(ids, (-0.1,) * len(ids), "", "stop") for ids in answers]
    return Group(Task(0, "set:0", "prompt", (1,)), tuple(Rollout(one, Score(1.0)) for one in completions))


def test_distinct_answers_is_the_mean_share_of_a_group() -> None:
    metrics = rollout_metrics([group((1, 2), (1, 2), (1, 2), (1, 2)), group((1,), (2,), (3,), (3,))])
    assert metrics["distinct_answers"] == pytest.approx((0.25 + 0.75) / 2)


def test_repetition_counts_runs_of_four_tokens_that_were_there_before() -> None:
    assert rollout_metrics([group(tuple(range(20)))])["repetition"] == 0.0
    assert rollout_metrics([group((7,) * 20)])["repetition"] == pytest.approx(1 - 1 / 17)
    assert rollout_metrics([group((1, 2, 3)), group((7,) * 5)])["repetition"] == pytest.approx((0 + 1 / 2) / 2)
