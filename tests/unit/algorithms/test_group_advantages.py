"""Group advantages against their definition, written out slowly, and against worked examples."""

import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algorithms.advantages import GroupAdvantages
from posttrain.data.reward_values import MAX_REWARD

OneGroup = Callable[[list[float | None]], list[float]]


def of_one_group(
    normalize_rewards: bool, use_leave_one_out_baseline: bool, std_over: Literal["group", "others"] = "group"
) -> OneGroup:
    estimator = GroupAdvantages(normalize_rewards, use_leave_one_out_baseline, std_over)
    return lambda rewards: estimator.of_rewards([rewards])[0]


LEAVE_ONE_OUT = of_one_group(normalize_rewards=True, use_leave_one_out_baseline=True)
OTHERS = of_one_group(normalize_rewards=True, use_leave_one_out_baseline=True, std_over="others")
MEAN = of_one_group(normalize_rewards=True, use_leave_one_out_baseline=False)
PLAIN_LEAVE_ONE_OUT = of_one_group(normalize_rewards=False, use_leave_one_out_baseline=True)
PLAIN_MEAN = of_one_group(normalize_rewards=False, use_leave_one_out_baseline=False)
ALL = {
    "normalised, leave one out": LEAVE_ONE_OUT,
    "deviation of the others": OTHERS,
    "normalised, mean": MEAN,
    "plain, leave one out": PLAIN_LEAVE_ONE_OUT,
    "plain, mean": PLAIN_MEAN,
}
every_estimator = pytest.mark.parametrize("estimator", ALL.values(), ids=ALL.keys())

rewards_of_a_group = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.95, 1.0, -1.0, 3.0]), min_size=2, max_size=9)


def reference(rewards: list[float | None], normalise: bool, leave_one_out: bool, std_over: str) -> list[float]:
    """The definition in exact arithmetic: who is in the baseline, its mean, its Bessel-corrected deviation."""
    scored = [i for i, reward in enumerate(rewards) if reward is not None]
    advantages = [0.0] * len(rewards)
    if len(scored) < 2:
        return advantages
    for i in scored:
        peers = [Fraction(rewards[j]) for j in scored if not (leave_one_out and j == i)]
        advantage = float(Fraction(rewards[i]) - sum(peers) / len(peers))
        spread = peers if std_over == "others" else [Fraction(rewards[j]) for j in scored]
        deviation = float(statistics.stdev(spread)) if len(spread) > 1 else 0.0
        if normalise and deviation > 0:
            advantage /= deviation + 1e-6
        advantages[i] = advantage
    return advantages


THIRD = 1 / math.sqrt(3)  # the deviation of [1, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        (LEAVE_ONE_OUT, [1, 0, 0, 0], [1 / (0.5 + 1e-6), *[-(1 / 3) / (0.5 + 1e-6)] * 3]),
        (OTHERS, [1, 0, 0, 0], [1.0, *[-(1 / 3) / (THIRD + 1e-6)] * 3]),
        (MEAN, [1, 0, 0, 0], [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
        (PLAIN_LEAVE_ONE_OUT, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        (PLAIN_MEAN, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        (OTHERS, [1.0, 0.25], [0.75, -0.75]),  # of one other there is no deviation
        (PLAIN_MEAN, [None, 1.0, 0.5], [0.0, 0.25, -0.25]),  # unscored is not a reward of zero
    ],
)
def test_worked_examples(estimator: OneGroup, rewards: list[float | None], expected: list[float]) -> None:
    assert estimator(rewards) == pytest.approx(expected, abs=1e-12)


@every_estimator
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.95, -0.3])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_teach_nothing(estimator: OneGroup, reward: float, size: int) -> None:
    assert estimator([reward] * size) == [0.0] * size


def test_the_only_different_reward_is_left_unnormalised_not_blown_up() -> None:
    """The others are all equal, so their deviation is 0; rounding must not turn it into a tiny divisor."""
    advantages = OTHERS([0.0, *[0.95] * 7])
    assert advantages[0] == pytest.approx(-0.95)
    assert all(0 < a < 1 for a in advantages[1:])


@pytest.mark.parametrize("others", [0.1, 0.2, 0.3, 0.7, 0.95, 1 / 3, 1e-3, 12.34])
@pytest.mark.parametrize("size", [3, 4, 6, 7, 8, 16])
def test_no_singleton_explodes_whatever_its_peers_share(others: float, size: int) -> None:
    assert OTHERS([0.0, *[others] * (size - 1)])[0] == pytest.approx(-others)


def test_peers_that_differ_by_rounding_alone_count_as_equal() -> None:
    """0.1 + 0.2 is not 0.3 in floating point: a reward with parts reaches the same total by different roundings."""
    advantages = OTHERS([0.0, 0.3, 0.1 + 0.2, 0.3])
    assert advantages[0] == pytest.approx(-0.3)
    assert all(abs(a) < 2 for a in advantages)


@every_estimator
@pytest.mark.parametrize("rewards", [[], [None], [None, None], [1.0], [None, 1.0], [None, 0.95, None]])
def test_groups_with_fewer_than_two_scores_teach_nothing(estimator: OneGroup, rewards: list[float | None]) -> None:
    assert estimator(rewards) == [0.0] * len(rewards)


@every_estimator
def test_unscored_rollouts_are_in_no_baseline(estimator: OneGroup) -> None:
    with_gaps = estimator([None, 1.0, 0.0, None, 0.5, 0.0, None])
    scored = estimator([1.0, 0.0, 0.5, 0.0])
    assert [with_gaps[i] for i in (1, 2, 4, 5)] == scored
    assert [with_gaps[i] for i in (0, 3, 6)] == [0.0, 0.0, 0.0]


@given(
    rewards=st.lists(st.none() | st.sampled_from([0.0, 0.1, 0.3, 0.95, 1.0, -2.0]), max_size=9),
    normalise=st.booleans(),
    leave_one_out=st.booleans(),
    std_over=st.sampled_from(["group", "others"]),
)
def test_equals_the_definition_in_exact_arithmetic(
    rewards: list[float | None], normalise: bool, leave_one_out: bool, std_over: Literal["group", "others"]
) -> None:
    advantages = of_one_group(normalise, leave_one_out, std_over)(rewards)
    assert advantages == pytest.approx(reference(rewards, normalise, leave_one_out, std_over), rel=1e-9, abs=1e-9)


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_no_advantage_is_larger_than_the_square_root_of_the_group(rewards: list[float]) -> None:
    bound = math.sqrt(len(rewards)) * (1 + 1e-6)
    assert all(abs(a) <= bound for a in LEAVE_ONE_OUT(rewards))


def test_the_deviation_of_the_others_can_make_an_advantage_explode() -> None:
    rewards = [0.087, 0.042, 0.949, 0.024]
    assert OTHERS(rewards)[2] == pytest.approx(27.67, abs=0.01)
    assert LEAVE_ONE_OUT(rewards)[2] == pytest.approx(2.0, abs=0.01)


@given(rewards=rewards_of_a_group, shift=st.sampled_from([-7.0, 0.5, 1.0, 128.0]))
def test_adding_a_constant_to_every_reward_changes_nothing(rewards: list[float], shift: float) -> None:
    for estimator in ALL.values():
        shifted = estimator([reward + shift for reward in rewards])
        assert shifted == pytest.approx(estimator(rewards), rel=1e-6, abs=1e-6)


@given(rewards=rewards_of_a_group)
def test_centred_advantages_sum_to_zero(rewards: list[float]) -> None:
    assert sum(PLAIN_MEAN(rewards)) == pytest.approx(0, abs=1e-12)
    assert sum(MEAN(rewards)) == pytest.approx(0, abs=1e-9)
    assert sum(LEAVE_ONE_OUT(rewards)) == pytest.approx(0, abs=1e-9)
    assert sum(PLAIN_LEAVE_ONE_OUT(rewards)) == pytest.approx(0, abs=1e-12)


@given(rewards=rewards_of_a_group)
def test_leave_one_out_is_the_centred_reward_scaled_by_the_group_size(rewards: list[float]) -> None:
    factor = len(rewards) / (len(rewards) - 1)
    assert PLAIN_LEAVE_ONE_OUT(rewards) == pytest.approx([factor * a for a in PLAIN_MEAN(rewards)], abs=1e-12)


@given(rewards=rewards_of_a_group, chance=st.randoms(use_true_random=False))
def test_an_advantage_does_not_depend_on_the_order_of_the_group(rewards: list[float], chance: Random) -> None:
    order = list(range(len(rewards)))
    chance.shuffle(order)
    for estimator in ALL.values():
        moved = estimator([rewards[i] for i in order])
        original = estimator(rewards)
        assert moved == pytest.approx([original[i] for i in order], rel=1e-9, abs=1e-12)


@given(rewards=rewards_of_a_group)
def test_a_better_reward_never_gets_a_worse_advantage_in_its_group(rewards: list[float]) -> None:
    for estimator in (LEAVE_ONE_OUT, MEAN, PLAIN_MEAN, PLAIN_LEAVE_ONE_OUT):
        ranked = [a for _, a in sorted(zip(rewards, estimator(rewards), strict=True))]
        assert all(b >= a - 1e-12 for a, b in pairwise(ranked))


@pytest.mark.parametrize("rewards", [[1e308, 1e308, -1e308], [1e200, -1e200, 0.0], [math.inf, -math.inf, 1.0]])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_rewards_whose_sums_overflow_do_not_raise(rewards: list[float | None], leave_one_out: bool) -> None:
    assert len(of_one_group(True, leave_one_out)(rewards)) == 3


@given(st.lists(st.floats(-MAX_REWARD, MAX_REWARD), min_size=2, max_size=6))
def test_every_reward_that_is_accepted_has_finite_advantages(rewards: list[float | None]) -> None:
    for estimate in (LEAVE_ONE_OUT, MEAN, PLAIN_LEAVE_ONE_OUT):
        assert all(map(math.isfinite, estimate(rewards)))
