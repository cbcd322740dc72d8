"""From scores to advantages: estimators, whitening, KL in the reward, shaping; each against plain arithmetic."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from made_groups import Reward, group, rollout

from posttrain.algorithms.advantages import (
    AdvantagesPerReward,
    GroupAdvantages,
    NoBaseline,
    Spread,
    Whitening,
    has_signal,
)
from posttrain.algorithms.batches import rollout_batch, scored_places
from posttrain.algorithms.credit import Credit, CutOffPenalty, KlInReward, OverlongPenalty, RewardScaling, shaped
from posttrain.errors import InputError
from posttrain.types import Group

PLAIN = GroupAdvantages(normalize_rewards=False, use_leave_one_out_baseline=False)


def scores(*groups: Sequence[Reward]) -> list[list]:
    return [[rollout(reward).score for reward in rewards] for rewards in groups]


def credited(credit: Credit, groups: list[Group], **columns: torch.Tensor) -> tuple[list[Group], list[list[float]]]:
    batch = rollout_batch(groups).with_columns(**columns)
    told, batch, _ = credit(groups, batch, scored_places(groups))
    return told, [part.tolist() for part in batch.column_parts("advantages")]


# -- estimators --------------------------------------------------------------------------------------------------------


def test_the_deviation_of_the_batch_is_over_all_scored_rewards() -> None:
    estimator = GroupAdvantages(True, False, std_over="batch", spread=Spread(1, 1e-4))
    deviation = statistics.stdev([1, 0, 0.5, 3, 1]) + 1e-4
    assert estimator(scores([1, 0, None, 0.5], [3, 1])) == [
        pytest.approx([0.5 / deviation, -0.5 / deviation, 0, 0]),
        pytest.approx([1 / deviation, -1 / deviation]),
    ]


@pytest.mark.parametrize(
    ("spread", "divisor"),
    [
        (Spread(1, 0.3, "std_plus"), statistics.stdev([1, 0, 0]) + 0.3),
        (Spread(0, 0.3, "std_plus"), statistics.pstdev([1, 0, 0]) + 0.3),
        (Spread(1, 0.3, "variance_plus"), math.sqrt(statistics.variance([1, 0, 0]) + 0.3)),
        (Spread(0, 0.3, "variance_floor"), math.sqrt(0.3)),
        (Spread(1, 0.3, "variance_floor"), math.sqrt(1 / 3)),
    ],
)
def test_each_form_of_the_divisor(spread: Spread, divisor: float) -> None:
    (advantages,) = GroupAdvantages(True, False, spread=spread)(scores([1, 0, 0]))
    assert advantages == pytest.approx([2 / 3 / divisor, -1 / 3 / divisor, -1 / 3 / divisor])


def test_group_of_one_gets_zero_or_its_reward() -> None:
    assert GroupAdvantages()(scores([None, 0.7], [1, 0])) == [[0, 0], pytest.approx([2**0.5, -(2**0.5)], rel=1e-5)]
    kept = GroupAdvantages(True, False, group_of_one="reward")
    assert kept(scores([None, 0.7], [0.5, 0.5])) == [pytest.approx([0, 0.7 / (1 + 1e-6)]), [0, 0]]
    assert GroupAdvantages(False, False, group_of_one="reward")(scores([0.7])) == [[0.7]]


def test_without_a_baseline_the_reward_is_the_advantage_and_an_unscored_one_is_0() -> None:
    assert NoBaseline()(scores([1, None], [0.2])) == [[1, 0], [0.2]]


def test_gdpo_credits_each_part_on_its_own() -> None:
    """Totals are equal in the second group; its parts are not."""
    a, b = {"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}
    estimator = AdvantagesPerReward(PLAIN, (2.0, 0.5))
    assert estimator(scores([a, b, b], [a, None, b])) == [
        pytest.approx([2 * 2 / 3 - 0.5 * 2 / 3, -2 / 3 + 0.5 / 3, -2 / 3 + 0.5 / 3]),
        pytest.approx([2 / 2 - 0.5 / 2, 0, -2 / 2 + 0.5 / 2]),
    ]
    assert AdvantagesPerReward(PLAIN)(scores([None, None])) == [[0, 0]]
    assert has_signal(group(0, [a, b]), in_parts=True)
    assert not has_signal(group(0, [a, b]))


def test_gdpo_error_names_the_reward_parts() -> None:
    two = {"b": 1.0, "a": 0.0}
    with pytest.raises(InputError, match="3 weights for the 2 parts a, b"):
        AdvantagesPerReward(PLAIN, (1.0, 1.0, 1.0))(scores([two, two]))
    with pytest.raises(InputError, match="at least two parts, but these have a"):
        AdvantagesPerReward(PLAIN)(scores([{"a": 1.0}]))
    with pytest.raises(InputError, match="a and a, b"):
        AdvantagesPerReward(PLAIN)(scores([{"a": 1.0}, two]))


# -- whitening ---------------------------------------------------------------------------------------------------------


def test_whitening_over_rollouts_counts_each_once() -> None:
    credit = Credit(NoBaseline(), whitening=Whitening("rollouts", Spread(1, 0.0)))
    told, columns = credited(credit, [group(0, [1.0, 0.0, None]), group(1, [3.0])])
    deviation = statistics.stdev([1, 0, 3])
    expected = [(1 - 4 / 3) / deviation, -4 / 3 / deviation, (3 - 4 / 3) / deviation]
    assert columns == [pytest.approx([a] * n) for a, n in zip(expected, (1, 2, 1), strict=True)]
    assert [r.advantage for g in told for r in g.rollouts] == pytest.approx([*expected[:2], 0, expected[2]])


def test_whitening_over_tokens_counts_trained_tokens() -> None:
    groups = [group(0, [1.0, 0.0, 2.0])]
    values = [1, 0, 0, 2, 2]
    masked = torch.tensor([1.0, 1, 1, 1, 1, 0])
    mean, deviation = statistics.fmean(values), math.sqrt(statistics.pvariance(values))
    credit = Credit(NoBaseline(), whitening=Whitening("tokens", Spread(0, 1e-8, "variance_floor")))
    _, columns = credited(credit, groups, mask=masked)
    for column, reward in zip(columns, (1, 0, 2), strict=True):
        assert column == pytest.approx([(reward - mean) / deviation] * len(column))


def test_equal_advantages_are_whitened_to_0_whatever_rounding_leaves() -> None:
    for over in ("rollouts", "tokens"):
        credit = Credit(NoBaseline(), whitening=Whitening(over, Spread(1, 0.0)))
        _, columns = credited(credit, [group(0, [0.1, 0.1, 0.1]), group(1, [0.3 - 0.2, 0.1])])
        assert all(value == 0 for column in columns for value in column)


def test_bounds_come_last() -> None:
    credit = Credit(GroupAdvantages(True, False), clip_low=-0.2, clip_high=1.0)
    told, columns = credited(credit, [group(0, [1.0, 0.0, 0.0, 0.0])])
    assert [r.advantage for r in told[0].rollouts] == pytest.approx([1.0, -0.2, -0.2, -0.2])
    assert columns[3] == pytest.approx([-0.2] * 4)
    _, low = credited(Credit(GroupAdvantages(True, False), clip_low=-0.2), [group(0, [1.0, 0.0, 0.0, 0.0])])
    assert low[0] == pytest.approx([1.5], rel=1e-5)


# -- KL in the reward --------------------------------------------------------------------------------------------------

NOW = torch.tensor([-1.0, -2.0, -0.5, -1.0, -3.0, -2.0])
REFERENCE = torch.tensor([-1.5, -1.0, -0.5, -3.0, -2.0, -2.5])
K1 = (NOW - REFERENCE).tolist()  # 0.5 | -1, 0 | 2, -1, 0.5


def charge(charged_to: str, **options: object) -> list[list[float]]:
    kl = KlInReward(0.1, charged_to, "k1", None, None)  # type: ignore[arg-type]
    columns: Any = {"current_logprobs": NOW, "reference_logprobs": REFERENCE, **options}
    return credited(Credit(PLAIN, kl=kl), [group(0, [1.0, 0.0, 0.5])], **columns)[1]


@pytest.mark.parametrize(
    ("charged_to", "last"),
    [("token", [-0.2, 0.1, -0.05]), ("return", [-0.15, 0.05, -0.05])],  # its own, and what it led to
)
def test_kl_is_charged_to_each_token_or_to_those_that_led_to_it(charged_to: str, last: list[float]) -> None:
    expected = [[0.5 - 0.05], [-0.5 + 0.1, -0.5], last]
    assert charge(charged_to) == [pytest.approx(values) for values in expected]


def test_kl_of_an_answer_is_part_of_its_reward_before_the_baseline() -> None:
    rewards = [1 - 0.05, 0.1, 0.5 - 0.15]
    mean = sum(rewards) / 3
    assert charge("sequence") == [pytest.approx([r - mean] * n) for r, n in zip(rewards, (1, 2, 3), strict=True)]


def test_masked_tokens_cost_nothing() -> None:
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1])
    assert charge("return", mask=mask)[2] == pytest.approx([0.05, 0.05, -0.05])
    assert charge("token", mask=mask)[2] == pytest.approx([0, 0.1, -0.05])


def test_kl_estimators_and_clamps_are_those_of_the_loss() -> None:
    batch = rollout_batch([group(0, [1.0, 0.0, 0.5])]).with_columns(current_logprobs=NOW, reference_logprobs=REFERENCE)
    for kind, expected in (
        ("k2", [d * d / 2 for d in K1]),
        ("k3", [math.exp(-d) - 1 + d for d in K1]),
        ("k1", K1),
    ):
        assert KlInReward(1, "token", kind, None, None).of_tokens(batch).tolist() == pytest.approx(expected)
    assert KlInReward(1, "token", "k1", 0.7, None).of_tokens(batch).tolist() == pytest.approx(
        [min(max(d, -0.7), 0.7) for d in K1]
    )
    assert KlInReward(1, "token", "k3", None, 0.4).of_tokens(batch).tolist() == pytest.approx(
        [min(math.exp(-d) - 1 + d, 0.4) for d in K1]
    )


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_scaling_clamps_and_maps_rewards_and_their_parts() -> None:
    scaling = RewardScaling(source_min=-1, source_max=1, target_min=0, target_max=10)
    (scaled,) = shaped([group(0, [{"a": 0.5, "b": -3.0}, None])], [scaling])
    assert scaled.rollouts[0].score.reward == 0.0  # -2.5 is below the range
    assert scaled.rollouts[0].score.parts == {"a": 7.5, "b": 0.0}
    assert scaled.rollouts[1].score.reward is None


def test_the_length_penalty_grows_over_the_buffer_and_beyond() -> None:
    penalty = OverlongPenalty(max_response_length=10, overlong_buffer_length=4, overlong_buffer_penalty=2.0)
    (long,) = shaped([group(0, [1.0] * 5, lengths=[1, 6, 7, 10, 12])], [penalty])
    assert long.rewards == pytest.approx([1, 1, 0.5, -1, -2])


def test_answers_that_were_cut_off_keep_a_share_of_their_reward() -> None:
    assert CutOffPenalty(0.25)(rollout(0.8, cut_off=True)).score.reward == pytest.approx(0.2)
    assert CutOffPenalty(0.25)(rollout(0.8)).score.reward == 0.8
    assert CutOffPenalty(0.25)(rollout(None, cut_off=True)).score.reward is None


def test_advantages_come_from_shaped_rewards_and_the_environments_own_stay() -> None:
    steps = (RewardScaling(target_max=4.0), OverlongPenalty(2, 1, 1.0))
    groups = [group(0, [1.0, 0.0, None, 1.0])]
    batch = rollout_batch(groups)
    told, _, metrics = Credit(PLAIN, reward_steps=steps)(groups, batch, scored_places(groups))
    rewards = [4.0, -1.0, 4.0 - 3.0]  # lengths 1, 2 and 4
    assert [r.shaped_reward for r in told[0].rollouts] == [4.0, -1.0, None, 1.0]
    assert told[0].rewards == [1.0, 0.0, None, 1.0]
    mean = sum(rewards) / 3
    assert [r.advantage for r in told[0].rollouts] == pytest.approx([4 - mean, -1 - mean, 0, 1 - mean])
    assert metrics == {"shaped_reward": pytest.approx(mean), "advantage_max": pytest.approx(4 - mean)}


def test_a_step_without_scores_has_no_advantages() -> None:
    groups = [group(0, [None, None])]
    kl = KlInReward(0.1, "sequence")
    told, batch, metrics = Credit(PLAIN, kl=kl, whitening=Whitening("tokens", Spread()))(
        groups, rollout_batch(groups), []
    )
    assert len(batch.columns["advantages"]) == 0
    assert metrics == {}
    assert [r.advantage for r in told[0].rollouts] == [0.0, 0.0]
