"""The loss of a reward model against a slow reference, and what its metrics mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from posttrain.policy.objectives import BradleyTerry
from posttrain.types import TokenBatch

LENGTHS = [3, 1, 2, 4, 1, 1]
SCORES = [1.5, -0.5, 0.25, 0.75, -2.0, -2.0]  # right, wrong, tied


def batch_of(mask: Sequence[float] | None = None, margins: Sequence[float] | None = None) -> TokenBatch:
    columns = {"mask": torch.tensor(mask) if mask else torch.ones(sum(LENGTHS))}
    if margins is not None:
        rewards = torch.tensor([reward for margin in margins for reward in (margin + 1.0, 1.0)])
        columns["given_rewards"] = rewards.repeat_interleave(torch.tensor(LENGTHS))
    return TokenBatch.build([[1], [1], [1]], [[1] * n for n in LENGTHS], [0, 0, 1, 1, 2, 2], columns)


def at_last_tokens(scores: Sequence[float] = SCORES) -> Tensor:
    return torch.cat([torch.tensor([0.0] * (n - 1) + [score]) for n, score in zip(LENGTHS, scores, strict=True)])


def measure(objective: BradleyTerry, batch: TokenBatch) -> dict[str, float]:
    loss, metrics = objective(at_last_tokens(), batch)
    assert float(loss) == pytest.approx(float(metrics["loss"]))
    return {name: float(value) for name, value in metrics.items()}


def test_loss_is_the_mean_over_pairs_of_the_surprise_that_the_better_answer_wins() -> None:
    expected = [math.log1p(math.exp(-(c - r))) for c, r in zip(SCORES[0::2], SCORES[1::2], strict=True)]
    metrics = measure(BradleyTerry(), batch_of())
    assert metrics["loss"] == pytest.approx(sum(expected) / 3)
    assert metrics["preference_loss"] == metrics["loss"]
    assert metrics["num_ranked_right"] == 1, "a tie is not right"
    assert metrics["rewards_chosen_mean"] == pytest.approx((1.5 + 0.25 - 2.0) / 3)
    assert metrics["rewards_rejected_mean"] == pytest.approx((-0.5 + 0.75 - 2.0) / 3)
    assert metrics["rewards_margin_mean"] == pytest.approx((2.0 - 0.5 + 0.0) / 3)
    assert metrics["rewards_square_mean"] == pytest.approx(sum(score**2 for score in SCORES) / 6)
    assert (metrics["rewards_min"], metrics["rewards_max"]) == (-2.0, 1.5)


def test_equal_scores_give_ln_2() -> None:
    loss, _ = BradleyTerry()(at_last_tokens([0.0] * 6), batch_of())
    assert float(loss) == pytest.approx(math.log(2))


def test_centring_adds_the_squared_sum_of_each_pair() -> None:
    plain, centred = measure(BradleyTerry(), batch_of()), measure(BradleyTerry(0.1), batch_of())
    sums = [1.0, 1.0, -4.0]
    assert centred["loss"] == pytest.approx(plain["loss"] + 0.1 * sum(total**2 for total in sums) / 3)
    assert centred["preference_loss"] == pytest.approx(plain["loss"])


def test_a_margin_requires_a_larger_difference() -> None:
    wanted = [0.5, 2.0, 0.0]
    expected = [
        math.log1p(math.exp(-(c - r - margin))) for c, r, margin in zip(SCORES[0::2], SCORES[1::2], wanted, strict=True)
    ]
    metrics = measure(BradleyTerry(margin_from_rewards=True), batch_of(margins=wanted))
    assert metrics["loss"] == pytest.approx(sum(expected) / 3)
    assert metrics["rewards_margin_mean"] == pytest.approx(0.5), "the difference of the scores themselves"


def test_a_pair_that_is_masked_altogether_takes_no_part() -> None:
    mask = [1.0] * 10 + [0.0, 0.0]
    mask[5] = 0.0  # one token of an answer that counts: its score is that of the whole answer
    metrics = measure(BradleyTerry(0.1), batch_of(mask))
    expected = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(0.5))]
    assert metrics["preference_loss"] == pytest.approx(sum(expected) / 2)
    assert metrics["loss"] == pytest.approx(sum(expected) / 2 + 0.1 * (1.0 + 1.0) / 2)
    assert metrics["num_ranked_right"] == 1
    assert metrics["rewards_min"] == -0.5
