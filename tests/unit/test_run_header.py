"""The header of a run states the learning rate that the run reaches."""

from __future__ import annotations

import pytest

from posttrain.config import load_config
from posttrain.recipes.header import _learning_rate


@pytest.mark.parametrize(
    ("kind", "max_steps", "expected"),
    [
        ("dpo", 21, "lr 0.0001 after a warm-up of 20 steps"),
        ("dpo", 3, "lr at most 1.9e-05, as the warm-up to 0.0001 takes 20 steps (policy.scheduler=null: none)"),
        ("sft", 3, "lr 0.0001"),
    ],
)
def test_a_run_shorter_than_its_warm_up_says_which_learning_rate_it_reaches(
    kind: str, max_steps: int, expected: str
) -> None:
    scheduler = load_config(kind).config.policy.scheduler
    assert _learning_rate(1e-4, scheduler, max_steps) == expected
