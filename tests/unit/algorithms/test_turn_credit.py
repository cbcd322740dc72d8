"""Credit by turn, against the formula in docs/multi-turn.md, computed in float64 from its definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from posttrain.algorithms.advantages import GroupAdvantages, NoBaseline, Spread, has_signal
from posttrain.algorithms.batches import rollout_batch, scored_places
from posttrain.algorithms.credit import Credit, CutOffPenalty, TurnCredit
from posttrain.config import load_config
from posttrain.errors import InputError
from posttrain.types import Completion, Conversation, Group, Rollout, Score, Task, Utterance

MEAN = GroupAdvantages(normalize_rewards=False, use_leave_one_out_baseline=False)


def talk(rewards: Sequence[float], lengths: Sequence[int], judged: float = 0.0, scored: bool = True) -> Rollout:
    """Turns of `lengths` tokens, with two tokens of the environment after each but the last."""
    utterances = []
    for place, length in enumerate(lengths):
        utterances += [Utterance("assistant", "", length)] + [Utterance("tool", "", 2)] * (place < len(lengths) - 1)
    mask = tuple(each.role == "assistant" for each in utterances for _ in range(each.num_tokens))
    completion = Completion(
        tuple(range(len(mask))), (-1.0,) * len(mask), "", "stop", mask,
        Conversation(tuple(utterances), rewards=tuple(rewards)),
    )  # fmt: skip
    return Rollout(completion, Score(sum(rewards) + judged if scored else None))


def group_of(*rollouts: Rollout, draw: int = 0) -> Group:
    return Group(Task(draw, "t", "", (1, 2)), rollouts)


def advantages(credit: Credit, groups: Sequence[Group]) -> list[list[float]]:
    batch = credit(groups, rollout_batch(groups), scored_places(groups))[1]
    assert len(batch.columns["advantages"]) == len(batch.columns["mask"])
    return [part.tolist() for part in batch.column_parts("advantages")]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_the_tokens_of_a_turn_get_the_normalised_return_from_that_turn_on(discount: float, leave_one_out: bool) -> None:
    rng = random.Random(f"{discount} {leave_one_out}")
    groups = []
    for draw in range(3):
        rollouts = []
        for _ in range(5):
            num_turns = rng.randrange(1, 5)
            rewards = [rng.uniform(-1, 1) for _ in range(num_turns)]
            lengths = [rng.randrange(1, 4) for _ in range(num_turns)]
            rollouts.append(talk(rewards, lengths, judged=rng.choice([0.0, 1.0]), scored=rng.random() < 0.9))
        groups.append(group_of(*rollouts, draw=draw))
    expected = []
    for group in groups:
        returns: list[np.ndarray] = []
        for one in group.rollouts:
            if one.score.reward is None or one.completion.conversation is None:
                continue
            own = np.array(one.completion.conversation.rewards, dtype=np.float64)
            own[-1] += one.score.reward - own.sum()
            powers = discount ** (np.arange(len(own))[None, :] - np.arange(len(own))[:, None]).clip(0)
            returns.append(np.triu(powers) @ own)
        for i, own in enumerate(returns):
            of_turns = []
            for turn, value in enumerate(own):
                peers = np.array([one[turn] for one in returns if len(one) > turn])
                if len(peers) == 1:
                    of_turns.append(0.0)
                    continue
                others = np.array([one[turn] for j, one in enumerate(returns) if len(one) > turn and j != i])
                baseline = others.mean() if leave_one_out else peers.mean()
                of_turns.append((value - baseline) / (peers.std(ddof=1) + 1e-6))
            expected.append(of_turns)
    credit = Credit(GroupAdvantages(True, leave_one_out, spread=Spread(1, 1e-6)), turns=TurnCredit(discount))
    assert credit.turns is not None
    exact = [own for group in credit.turns.advantages(groups, credit.estimator) for own in group if own]
    for found, of_turns in zip(exact, expected, strict=True):
        assert found == pytest.approx(of_turns, rel=1e-12, abs=1e-12), "in float64"
    rows = [one for group in groups for one in group.rollouts if one.score.scored]
    for found, of_turns, one in zip(advantages(credit, groups), expected, rows, strict=True):
        assert one.completion.conversation is not None
        turn, wanted = -1, list[float]()
        for utterance in one.completion.conversation.utterances:
            turn += utterance.role == "assistant"
            wanted += [of_turns[turn]] * utterance.num_tokens
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_one_turn_is_credited_as_without() -> None:
    plain = Completion((1, 2, 3), (-1.0,) * 3, "", "stop")
    group = group_of(talk([1.0], [3]), talk([0.25], [2], judged=0.5), Rollout(plain, Score(0.0)))
    assert advantages(Credit(MEAN, turns=TurnCredit(0.5)), [group]) == advantages(Credit(MEAN), [group])


def test_rewards_of_later_turns_are_discounted_and_earlier_ones_are_gone() -> None:
    assert TurnCredit(0.5).returns(talk([1.0, 2.0, 4.0], [1, 1, 1])) == [3.0, 4.0, 4.0]
    assert TurnCredit(0.5).returns(talk([1.0, 2.0], [1, 1], judged=8.0)) == [6.0, 10.0], "the judge's is the last"
    assert TurnCredit(1.0).returns(talk([1.0, 2.0], [1, 1], scored=False)) == []


def test_shaping_is_charged_to_the_last_turn() -> None:
    cut = talk([1.0, 2.0], [1, 1])
    cut = replace(cut, completion=replace(cut.completion, finish_reason="length"))
    credit = Credit(NoBaseline(), reward_steps=(CutOffPenalty(0.0),), turns=TurnCredit(0.0))
    assert advantages(credit, [group_of(cut)]) == [[1.0, 1.0, 1.0, -1.0]]


def test_equal_sums_of_different_turns_are_a_signal() -> None:
    group = group_of(talk([1.0, 0.0], [1, 1]), talk([0.0, 1.0], [1, 1]))
    assert not has_signal(group)
    assert has_signal(group, in_turns=True)
    assert not has_signal(group_of(talk([1.0, 0.0], [1, 1]), talk([1.0, 0.0], [2, 2])), in_turns=True)


TURNS = ["grpo.turn_credit.enabled=true", "env.math.turns=calculator", "grpo.max_rollout_turns=3"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (TURNS[:1], "no environment in use has `turns`"),
        ([*TURNS, "grpo.adv_estimator.whiten_advantages=rollouts"], "whiten_advantages = rollouts"),
        ([*TURNS, "grpo.reward_scaling.enabled=true"], "reward_scaling maps the sum"),
        ([*TURNS, "grpo.adv_estimator.name=gdpo"], "gdpo credits the parts"),
        ([*TURNS, "grpo.turn_credit.discount=1.5"], "grpo.turn_credit.discount"),
        ([*TURNS, "grpo.turn_credit.gamma=0.5"], "grpo.turn_credit.gamma"),
    ],
)
def test_settings_that_contradict_it_are_refused(overrides: list[str], named: str) -> None:
    load_config("grpo", overrides=TURNS)
    with pytest.raises(InputError, match=named):
        load_config("grpo", overrides=overrides)
