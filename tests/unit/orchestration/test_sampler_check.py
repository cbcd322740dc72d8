"""The comparison of an engine with the trainer: when it is made, what it lets pass, and what ends the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.errors import HardwareError
from posttrain.orchestration.sampler_check import CheckedEngine
from posttrain.types import Completion, NoiseKey, OpenGroup, Sampling, Task, TokenBatch, Unfinished

TASKS = [Task(draw, f"t:{draw}", "", (1, 2)) for draw in range(12)]
SAMPLING = Sampling(4, temperature=0.7)


class Scripted:
    """An engine whose answers have two tokens, and a trainer that finds their log-probabilities `apart` higher."""

    def __init__(self, apart: float = 0.0) -> None:
        self.apart = apart
        self.compared: list[int] = []  # answers in each comparison

    def generate(self, tasks: Sequence[Task], num_samples: int, *rest: Any) -> list[list[Completion]]:
        return [[Completion((3, 4), (-1.0, -2.0), "", "stop")] * num_samples for _ in tasks]

    def sample_round(self, groups: Sequence[OpenGroup], *rest: Any) -> list[OpenGroup]:
        done = Completion((3, 4), (-1.0, -2.0), "", "stop")
        return [OpenGroup(group.task, group.born, (done,) * len(group.answers)) for group in groups]

    def release(self) -> None: ...

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self.compared.append(len(batch.responses))
        return torch.tensor([-1.0, -2.0] * len(batch.responses)) + self.apart


def checked(scripted: Scripted) -> CheckedEngine:
    trainer: Any = scripted
    return CheckedEngine(scripted, trainer, period=10, max_error=1.05, temperature=0.7)


def test_the_first_answers_and_those_of_every_tenth_step_are_compared() -> None:
    scripted = Scripted()
    engine = checked(scripted)
    for step in range(31, 56):  # a resumed run begins in the middle
        engine.generate(TASKS, 2, SAMPLING, NoiseKey(0, step))
    assert scripted.compared == [8, 8, 8]  # steps 31, 41, 51; eight answers each


def test_a_difference_above_the_limit_ends_the_run() -> None:
    checked(Scripted(0.04)).generate(TASKS, 1, SAMPLING, NoiseKey(0, 1))  # exp(0.04) is 1.041
    with pytest.raises(HardwareError, match=r"step 1: .*mean of exp\(\|difference\|\) is 1.062, more than .* = 1.05"):
        checked(Scripted(0.06)).generate(TASKS, 1, SAMPLING, NoiseKey(0, 1))
    with pytest.raises(HardwareError, match="is nan"):
        checked(Scripted(float("nan"))).generate(TASKS, 1, SAMPLING, NoiseKey(0, 1))


@pytest.mark.parametrize("other", [Sampling(4), Sampling(4, temperature=0.7, top_k=5), Sampling(4, 0.7, top_p=0.9)])
def test_answers_under_other_settings_than_training_are_not_compared(other: Sampling) -> None:
    scripted = Scripted(1.0)
    engine = checked(scripted)
    engine.generate(TASKS, 1, other, NoiseKey(0, 0))
    assert scripted.compared == []
    with pytest.raises(HardwareError):
        engine.generate(TASKS, 1, SAMPLING, NoiseKey(0, 1))


def test_of_a_round_only_answers_that_it_began_are_compared() -> None:
    scripted = Scripted()
    groups = [
        OpenGroup(TASKS[0], 1, (Unfinished((3,), (-9.0,)), Unfinished())),
        OpenGroup(TASKS[1], 2, (Unfinished(),)),
    ]
    checked(scripted).sample_round(groups, SAMPLING, 0)
    assert scripted.compared == [2]


def test_short_answers_are_sampled_only_for_a_comparison_that_is_due() -> None:
    scripted = Scripted()
    engine = checked(scripted)
    for step in range(1, 22):
        engine.compare_short_answers(TASKS, SAMPLING, NoiseKey(0, step))
    assert scripted.compared == [8, 8, 8]  # steps 1, 11, 21
    scripted.apart = 1.0
    with pytest.raises(HardwareError, match="step 31"):
        engine.compare_short_answers(TASKS, SAMPLING, NoiseKey(0, 31))
