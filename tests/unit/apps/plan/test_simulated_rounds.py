"""The simulated rounds and steps, by hand and beside a slow model that goes token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from posttrain.apps.plan.simulation import EngineSpeed, SimulatedEngine, Training, simulate, step_seconds
from posttrain.types import Quota

SECOND = EngineSpeed(max_rows=8, prompt_tokens=10, decode_s=lambda rows, written: 1.0, prefill_s=lambda tokens: 0.0)
PREFILL = EngineSpeed(8, 10, lambda rows, written: 1.0, lambda tokens: tokens / 100)


def engine(
    lengths: Sequence[Sequence[int]], speed: EngineSpeed = SECOND, *, groups: int, in_flight: int, age: int
) -> SimulatedEngine:
    return SimulatedEngine(speed, iter(lengths), groups, in_flight, age)


def test_a_synchronous_round_lasts_as_long_as_its_longest_answer() -> None:
    """The first token comes with the prompt: five tokens are four steps."""
    assert engine([[3], [5]], groups=2, in_flight=2, age=0).sample(1, 1) == 4


def test_answers_wait_for_rows() -> None:
    one_row = EngineSpeed(1, 10, lambda rows, written: 1.0, lambda tokens: 0.0)
    assert engine([[3], [5]], one_row, groups=2, in_flight=2, age=0).sample(1, 1) == 2 + 4


def test_an_unfinished_answer_continues_and_is_prefilled_again() -> None:
    sampler = engine([[3], [5], [2], [9]], PREFILL, groups=1, in_flight=2, age=1)
    assert sampler.sample(1, 1) == pytest.approx(0.20 + 2), "two prompts, and the first group is whole after two steps"
    # The second group has three of its five tokens; one more comes with the prefill of prompt and tokens.
    assert sampler.sample(2, 2) == pytest.approx(0.23 + 1)
    assert sampler.sample(3, 3) == 0, "its group was whole already"


def test_a_round_waits_for_a_group_that_would_become_too_old() -> None:
    lengths = [[2], [100], [2], [2], [2]]
    patient = engine(lengths, groups=1, in_flight=2, age=2)
    assert [patient.sample(step, step) for step in (1, 2, 3)] == [1, 1, 95]
    bound = engine(lengths, groups=1, in_flight=2, age=1)
    assert [bound.sample(step, step) for step in (1, 2)] == [1, 97]


def test_the_step_without_rounds_ahead_is_the_sum_of_its_stages() -> None:
    parts = [Training(1.0, 5.0, 0.5)] * 3
    assert step_seconds([4.0, 9.0, 2.0], parts, ahead=False) == [10.5, 15.5, 8.5]


def test_a_step_ahead_waits_for_the_slower_of_training_and_the_next_round() -> None:
    parts = [Training(1.0, 5.0, 0.5)] * 3
    assert step_seconds([4.0, 9.0, 2.0], parts, ahead=True) == [4 + 1 + 9 + 0.5, 1 + 5 + 0.5, 1 + 5 + 0.5]


def test_a_step_needs_the_rounds_of_all_engines() -> None:
    engines = [engine([[length]] * 9, groups=1, in_flight=1, age=0) for length in (3, 8)]
    assert simulate(engines, Training(0, 2, 0), 3, ahead=False) == [9, 9, 9]


def test_rounds_ahead_hide_the_shorter_side() -> None:
    engines = [engine([[8]] * 9, groups=1, in_flight=1, age=1)]
    assert simulate(engines, Training(1, 4, 0.5), 3, ahead=True) == [7 + 8.5, 8.5, 8.5]


class TokenByToken:
    """The same rounds, one token of every active answer at a time."""

    def __init__(self, speed: EngineSpeed, lengths: Iterator[Sequence[int]], groups: int, in_flight: int, age: int):
        self.speed, self.lengths, self.groups, self.in_flight, self.age = speed, lengths, groups, in_flight, age
        self.open: list[tuple[int, list[list[int]]]] = []  # born, and [length, written] of each answer

    def sample(self, step: int, born: int) -> float:
        while len(self.open) < self.in_flight:
            self.open.append((born, [[length, 0] for length in next(self.lengths)]))
        quota = Quota(self.groups, step, self.age)
        seconds, active, seen = 0.0, [], set()
        waiting = [
            (place, answer) for place, (_, group) in enumerate(self.open) for answer in group if answer[0] > answer[1]
        ]

        def whole() -> list[bool]:
            return [all(length == written for length, written in group) for _, group in self.open]

        while not quota.is_met([born for born, _ in self.open], whole()):
            tokens = 0
            while waiting and len(active) < self.speed.max_rows:
                place, answer = waiting.pop(0)
                tokens += answer[1] + self.speed.prompt_tokens * (place not in seen)
                seen.add(place)
                answer[1] += 1
                active.append(answer)
            seconds += self.speed.prefill_s(tokens) if tokens else 0.0
            if all(length > written for length, written in active):
                seconds += self.speed.decode_s(len(active), sum(written for _, written in active) / len(active))
                for answer in active:
                    answer[1] += 1
            active = [answer for answer in active if answer[0] > answer[1]]
        taken = [index for index, is_whole in enumerate(whole()) if is_whole][: self.groups]
        self.open = [group for index, group in enumerate(self.open) if index not in taken]
        return seconds


@pytest.mark.parametrize("seed", range(12))
def test_rounds_take_as_long_as_token_by_token(seed: int) -> None:
    chance = random.Random(seed)
    speed = EngineSpeed(
        chance.choice([2, 5, 64]), 7, lambda rows, written: 0.3 + 0.1 * rows + 0.01 * rows * written, lambda n: 0.02 * n
    )
    age, groups, size = chance.choice([0, 1, 2, 3]), chance.randrange(1, 4), chance.randrange(1, 4)
    in_flight = groups if age == 0 else chance.randrange(groups, (age + 1) * groups + 1)
    lengths = [[chance.randrange(1, 30) for _ in range(size)] for _ in range(60)]
    fast = SimulatedEngine(speed, iter(lengths), groups, in_flight, age)
    slow = TokenByToken(speed, iter(lengths), groups, in_flight, age)
    for step in range(1, 9):
        assert fast.sample(step, step) == pytest.approx(slow.sample(step, step), rel=1e-12)
