"""bench/simulated_steps.py: reads stages and lengths out of a run's rows as they are meant."""

from typing import Any

import pytest
import simulated_steps
from simulated_steps import HANDOVER, Row, fitted_speed, from_own_stages, stages


def answer(*parts: tuple[int, int]) -> dict[str, Any]:
    """Sampled in parts, each a version and so many tokens."""
    starts = [sum(count for _, count in parts[:index]) for index in range(len(parts))]
    versions = [[start, version] for start, (version, _) in zip(starts, parts, strict=True)]
    return {"num_tokens": sum(count for _, count in parts), "versions": versions}


def row(step: int, total: float, answers: list[Any] | None = None, **timings: float) -> Row:
    timings = {"total_step_time": total, "reward_calculation": 1.0, **timings}
    return {
        "step": step,
        "answers": [answers or []],
        **{f"timing/train/{key}": value for key, value in timings.items()},
    }


def test_the_wait_for_the_round_ahead_is_no_part_of_the_handover() -> None:
    """Training takes 5 s, the rounds 8 s, rewards 1 s and the handover half a second."""
    ahead = {"generation_ahead": 8.0, "generation_ahead_wait": 3.0}
    rows = [row(1, 17.5, generation=8.0, **{HANDOVER: 3.5})]
    rows += [row(step, 9.5, **ahead, **{HANDOVER: 3.5}) for step in (2, 3)]
    rows.append(row(4, 6.5, **ahead, **{HANDOVER: 0.5}))
    rounds, parts = stages(rows)
    assert rounds == [8.0] * 4
    assert {(part.rewards_s, part.train_s, part.handover_s) for part in parts} == {(1.0, 5.0, 0.5)}
    assert from_own_stages(rows, ahead=True) == pytest.approx(9.5)


def test_the_speed_of_decoding_is_fitted_to_the_rounds_of_each_version() -> None:
    """Two seconds for each step and a tenth for each token; one answer of every round goes on in the next."""
    rows = []
    for step in range(1, 8):
        short, long = 3 + step % 4, 10 + step % 3
        rows.append(row(step, 50.0, [answer((step - 1, short)), answer((step - 2, 5), (step - 1, long))]))
    tokens = simulated_steps.tokens_by_version(rows)
    for at, one in enumerate(rows):
        one["timing/train/generation"] = 2.0 * max(tokens[at]) + 0.1 * sum(tokens[at])
    speed = fitted_speed(rows, 1, ahead=False)
    assert speed.decode_s(3, 0.0) == pytest.approx(2.3)
