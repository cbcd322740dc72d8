"""Rounds that sample while the step before trains: order, ages, exact resumption, and failures of the round."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
from fakes import ScriptedTasks
from test_multi_turn import Echo, going_on
from test_multi_turn import rollouts as multi_turn
from test_multi_turn import tasks as conversations
from test_rounds import PROMPTS, TokenByToken, draws, rounds

from posttrain.errors import HardwareError
from posttrain.rollouts.pipelined import PipelinedRollouts
from posttrain.rollouts.rounds import RoundRollouts, StreamAndOpenGroups
from posttrain.types import NoiseKey, OpenGroup, Sampling, TakenGroups, Task

MAX_STEPS = 20


@dataclass
class PublishedVersions:
    log: list[str] = field(default_factory=list)

    def publish(self, version: int) -> None:
        self.log.append(f"version {version}")


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pipelined(cleanup: ExitStack, max_age: int, num_in_flight: int, limit_s: float = 60.0) -> PipelinedRollouts:
    source = rounds(max_age=max_age, max_steps=MAX_STEPS, num_in_flight=num_in_flight)
    return PipelinedRollouts.start(source, PublishedVersions(), limit_s, cleanup)


def train(source: PipelinedRollouts, first: int, last: int) -> list[TakenGroups]:
    taken = []
    for step in range(first, last + 1):
        taken.append(source.take(PROMPTS, step))
        source.publish(step)
    return taken


@pytest.mark.parametrize(("max_age", "num_in_flight"), [(1, 4), (2, 4), (2, 6), (2, 8), (4, 16)])
def test_every_draw_is_trained_once_and_none_becomes_too_old(
    cleanup: ExitStack, max_age: int, num_in_flight: int
) -> None:
    source = pipelined(cleanup, max_age, num_in_flight)
    for step, taken in enumerate(train(source, 1, MAX_STEPS), start=1):
        assert len(taken.groups) == PROMPTS
        assert taken.metrics["trajectory_age_max"] <= max_age
        versions = [v for g in taken.groups for r in g.rollouts for _, v in r.completion.versions]
        newest = max(step - 2, 0)  # the weights that the engines had when the round began
        assert all(step - 1 - max_age <= version <= newest for version in versions)
    assert source.rounds.position.open == []


def test_each_round_is_begun_before_the_step_trains_and_ends_before_weights_change(cleanup: ExitStack) -> None:
    source = pipelined(cleanup, max_age=1, num_in_flight=PROMPTS)
    log = source.weights.log
    inner = source.rounds.engine

    class Logged(TokenByToken):
        def sample_round(self, groups, sampling, seed, quota=None, progress=None) -> list[OpenGroup]:
            sampled = inner.sample_round(groups, sampling, seed, quota, progress)
            log.append(f"round {quota.step}")
            return sampled

    source.rounds = replace(source.rounds, engine=Logged())
    train(source, 1, 3)
    assert log == ["version 0", "round 1", "round 2", "version 1", "round 3", "version 2", "round 4", "version 3"]


def test_weights_are_published_before_the_first_round_samples_beside_training(cleanup: ExitStack) -> None:
    """A resumed run has sampled this step's round: the next one's thread must not ask busy ranks for weights."""
    stopped, resumed = pipelined(cleanup, 2, 6), pipelined(cleanup, 2, 6)
    train(stopped, 1, 3)
    resumed.rounds.position.load_state_dict(stopped.rounds.position.state_dict())
    published_before: list[list[str]] = []

    class Watched(TokenByToken):
        def sample_round(self, *args: object, **kwargs: object) -> list[OpenGroup]:
            published_before.append(list(resumed.weights.log))
            return super().sample_round(*args, **kwargs)  # type: ignore[arg-type]

    resumed.rounds = replace(resumed.rounds, engine=Watched())
    train(resumed, 4, 5)
    assert published_before == [["version 3"], ["version 3", "version 4"]]


@pytest.mark.parametrize("last", [1, 2, 7])
def test_a_resumed_source_hands_out_what_the_uninterrupted_one_does(cleanup: ExitStack, last: int) -> None:
    whole = train(pipelined(cleanup, 2, 6), 1, MAX_STEPS)
    stopped = pipelined(cleanup, 2, 6)
    before = train(stopped, 1, last)
    resumed = pipelined(cleanup, 2, 6)
    resumed.rounds.position.load_state_dict(stopped.rounds.position.state_dict())
    found = [*before, *train(resumed, last + 1, MAX_STEPS)]
    assert [taken.groups for taken in found] == [taken.groups for taken in whole]
    assert [taken.metrics for taken in found] == [taken.metrics for taken in whole]


def test_a_checkpoint_without_rounds_ahead_goes_on_with_them(cleanup: ExitStack) -> None:
    colocated = rounds(max_age=2, max_steps=MAX_STEPS, num_in_flight=6)
    trained = [draws(colocated.take(PROMPTS, step)) for step in range(1, 4)]
    source = pipelined(cleanup, 2, 6)
    source.rounds.position.load_state_dict(colocated.position.state_dict())
    trained += [draws(taken) for taken in train(source, 4, MAX_STEPS)]
    assert sorted(draw for step in trained for draw in step) == list(range(MAX_STEPS * PROMPTS))


def test_the_error_of_a_round_ends_the_step(cleanup: ExitStack) -> None:
    source = pipelined(cleanup, 1, PROMPTS)
    train(source, 1, 2)

    class Broken(TokenByToken):
        def sample_round(self, *args: object, **kwargs: object) -> list[OpenGroup]:
            raise HardwareError("engine 0 died")

    source.rounds = replace(source.rounds, engine=Broken())
    source.take(PROMPTS, 3)
    with pytest.raises(HardwareError, match="engine 0 died"):
        source.publish(3)
    assert source.weights.log[-1] == "version 2", "weights are not handed over"


def test_a_round_that_hangs_ends_the_step_at_its_deadline(cleanup: ExitStack) -> None:
    source = pipelined(cleanup, 1, PROMPTS, limit_s=0.05)
    train(source, 1, 1)
    is_over = threading.Event()
    cleanup.callback(is_over.set)

    class Hung(TokenByToken):
        def sample_round(self, *args: object, **kwargs: object) -> list[OpenGroup]:
            is_over.wait(60)
            return []

    source.rounds = replace(source.rounds, engine=Hung())
    source.take(PROMPTS, 2)
    with pytest.raises(HardwareError, match="the round for step 3 has not ended within 0 s"):
        source.publish(2)


def test_conversations_that_are_sampled_ahead_resume_exactly(cleanup: ExitStack) -> None:
    num_steps = 5

    def source() -> PipelinedRollouts:
        stream = ScriptedTasks([replace(task, draw=draw) for draw, task in enumerate(conversations(2 * num_steps))])
        fresh = replace(multi_turn(Echo(going_on), num_samples=2), stream=stream)
        ahead = RoundRollouts(fresh, fresh.engine, StreamAndOpenGroups(stream), 2, num_in_flight=3, max_steps=num_steps)
        return PipelinedRollouts.start(ahead, PublishedVersions(), 60.0, cleanup)

    def steps(of: PipelinedRollouts, first: int, last: int) -> list[TakenGroups]:
        taken = []
        for step in range(first, last + 1):
            taken.append(of.take(2, step))
            of.publish(step)
        return taken

    whole, stopped, resumed = steps(source(), 1, num_steps), source(), source()
    before = steps(stopped, 1, 2)
    resumed.rounds.position.load_state_dict(stopped.rounds.position.state_dict())
    found = [*before, *steps(resumed, 3, num_steps)]
    assert [taken.groups for taken in found] == [taken.groups for taken in whole]
    assert [taken.metrics for taken in found] == [taken.metrics for taken in whole]
    assert found[2].metrics["prefill_tokens_computed"] > 0  # of the round before the checkpoint
    assert sorted(draw for taken in found for draw in draws(taken)) == list(range(2 * num_steps))
    assert any(r.completion.conversation.num_turns > 1 for t in found for g in t.groups for r in g.rollouts)


def test_the_engine_is_compared_in_every_step_while_no_round_runs(cleanup: ExitStack) -> None:
    compared: list[tuple[int, int, bool]] = []

    def compare(tasks: Sequence[Task], sampling: Sampling, key: NoiseKey) -> None:
        is_idle = source._running is None and threading.current_thread() is threading.main_thread()
        compared.append((key.step, len(tasks), is_idle))

    source = pipelined(cleanup, max_age=1, num_in_flight=4)
    source.compare = compare
    train(source, 1, 3)
    assert compared == [(step, PROMPTS, True) for step in (1, 2, 3)]
