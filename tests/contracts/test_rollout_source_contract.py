"""What every `roles.RolloutSource` promises: fresh, recorded, mixed, several turns, dynamic sampling, fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fakes import ScriptedEngine, ScriptedEnvironment, ScriptedRollouts, ScriptedTasks, completion
from made_groups import group
from tiny_models import byte_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.environments.turns.interface import TurnItem
from posttrain.environments.turns.pool import TurnOutcome
from posttrain.roles import Progress, RolloutSource
from posttrain.rollouts.dynamic_sampling import DynamicSampling, StreamAndSurplus
from posttrain.rollouts.fresh import FreshRollouts, RecordedRollouts
from posttrain.rollouts.multi_turn import MultiTurnRollouts
from posttrain.rollouts.rounds import RoundRollouts, StreamAndOpenGroups
from posttrain.rollouts.turn_prompts import NextTurn
from posttrain.types import Completion, NoiseKey, OpenGroup, Quota, Rollout, Sampling, Score, Task

NUM_SAMPLES, STEP = 2, 5


def tasks(environment: str = "", *, num_recorded: int = 0) -> ScriptedTasks:
    recorded = tuple(Rollout(Completion((1, 2), (), f"old {i}", "stop"), Score(float(i))) for i in range(num_recorded))
    asked = ({"role": "user", "content": "?"},)
    return ScriptedTasks(
        [Task(draw, f"t:{draw}", "?", (5, 6), None, environment, asked, recorded=recorded) for draw in range(20)]
    )


def answer(task: Task, sample: int, key: NoiseKey) -> Completion:
    return completion(f"{task.draw} {sample} {key.step}", num_tokens=3)


def verdict(task: Task, answer: Completion) -> Score:
    """Samples differ; every fifth task cannot be scored."""
    return Score(None, error="timeout") if task.draw % 5 == 4 else Score(float(answer.text.split()[1]))


class TwoTurns:
    """Answers once, then ends the conversation with the number of turns as the reward."""

    names = frozenset({"talk"})

    def tools(self, name: str) -> tuple[()]:
        return ()

    def ask(self, calls: Sequence[tuple[str, TurnItem]]) -> list[Score]:
        return [self._answer(item) for _, item in calls]

    def _answer(self, item: TurnItem) -> Score:
        if item.request == "reset":
            return TurnOutcome(None, state=b"1")
        if item.state == b"2":
            return TurnOutcome(2.0, done=True)
        return TurnOutcome(None, state=b"2", observation=({"role": "", "content": "go on"},))


def fresh(stream: ScriptedTasks) -> FreshRollouts:
    engine, environment = ScriptedEngine(answer), ScriptedEnvironment(verdict)
    return FreshRollouts(stream, engine, environment, NUM_SAMPLES, Sampling(max_new_tokens=4), seed=1)


def multi_turn() -> RolloutSource:
    return MultiTurnRollouts(
        tasks("talk"),
        ScriptedEngine(answer),
        ScriptedEnvironment(verdict),
        NUM_SAMPLES,
        Sampling(max_new_tokens=4),
        seed=1,
        turns=TwoTurns(),  # type: ignore[arg-type]
        renderer=NextTurn(ChatFormat(byte_tokenizer())),
        max_turns=3,
        max_total_tokens=200,
        judged=frozenset(),
    )


def dynamic() -> RolloutSource:
    stream = tasks()
    return DynamicSampling(fresh(stream), StreamAndSurplus(stream), num_per_batch=2, max_batches=5)


class WholeAnswers(ScriptedEngine):
    """Finishes every answer, whatever the quota."""

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        return [
            replace(g, answers=tuple(answer(g.task, i, NoiseKey(seed, g.born)) for i in range(NUM_SAMPLES)))
            if not g.is_whole
            else g
            for g in groups
        ]


def rounds() -> RolloutSource:
    stream = tasks()
    position = StreamAndOpenGroups(stream)
    return RoundRollouts(fresh(stream), WholeAnswers(answer), position, max_age=1, num_in_flight=5, max_steps=100)


SOURCES: dict[str, Callable[[], RolloutSource]] = {
    "fresh": lambda: fresh(tasks()),
    "recorded": lambda: RecordedRollouts(tasks(num_recorded=4), num_recorded=2, seed=1),
    "mixed": lambda: RecordedRollouts(tasks(num_recorded=4), num_recorded=2, seed=1, fresh=fresh(tasks())),
    "several turns": multi_turn,
    "dynamic sampling": dynamic,
    "rounds": rounds,
    "scripted": lambda: ScriptedRollouts([group(draw, [0.0, 1.0]) for draw in range(20)]),
}


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest) -> Callable[[], RolloutSource]:
    return SOURCES[request.param]


def test_take_returns_the_number_of_groups_asked_for(make: Callable[[], RolloutSource]) -> None:
    source = make()
    first, second = source.take(3, STEP), source.take(2, STEP + 1)
    assert (len(first.groups), len(second.groups)) == (3, 2)
    draws = [g.task.draw for taken in (first, second) for g in taken.groups]
    assert len(set(draws)) == 5, "a task is handed out once"


def test_every_rollout_is_scored_or_has_the_reason(make: Callable[[], RolloutSource]) -> None:
    for rollout in [rollout for g in make().take(5, STEP).sampled for rollout in g.rollouts]:
        assert (rollout.score.reward is None) is (rollout.score.error is not None)


def test_sampled_completions_have_the_version_of_the_weights(make: Callable[[], RolloutSource]) -> None:
    taken = make().take(4, STEP)
    for rollout in [rollout for g in taken.groups for rollout in g.rollouts]:
        expected = ((0, STEP - 1),) if rollout.completion.logprobs else ()
        assert rollout.completion.versions == expected


def test_stages_are_timed_and_groups_are_among_the_sampled(make: Callable[[], RolloutSource]) -> None:
    taken = make().take(4, STEP)
    assert [stage for stage in taken.timings_s if stage != "data_processing"] == ["generation", "reward_calculation"]
    assert all(seconds >= 0 for seconds in taken.timings_s.values())
    assert {g.task.draw for g in taken.groups} <= {g.task.draw for g in taken.sampled}


def test_two_sources_with_the_same_settings_give_the_same_groups(make: Callable[[], RolloutSource]) -> None:
    one, other = make(), make()
    for step in (STEP, STEP + 1):
        assert one.take(3, step).groups == other.take(3, step).groups
