"""Rounds: quotas, ages, versions of tokens, each draw trained once, and a state that survives a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import ScriptedEngine, ScriptedEnvironment, ScriptedTasks
from test_multi_turn import Echo, going_on
from test_multi_turn import rollouts as multi_turn
from test_multi_turn import tasks as talks

from posttrain.environments.turns.interface import TurnItem
from posttrain.errors import InputError
from posttrain.roles import Progress
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.rounds import RoundRollouts, StreamAndOpenGroups
from posttrain.types import Completion, OpenGroup, Quota, Sampling, Score, TakenGroups, Task, Unfinished

NUM_SAMPLES = 2
SAMPLING = Sampling(max_new_tokens=1000)


def length_of(draw: int, sample: int) -> int:
    """Mostly short answers, some long ones."""
    chance = random.Random(draw * 7919 + sample)
    return chance.choice([1, 2, 3, 3, 4, 5, 30])


class TokenByToken(ScriptedEngine):
    """One token for every unfinished answer at a time, until the quota is met."""

    def __init__(self) -> None:
        super().__init__(lambda task, sample, key: Completion((1,), (-1.0,), "", "stop"))
        self.num_tokens = 0

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        assert quota is not None
        groups = list(groups)
        while not quota.is_met([g.born for g in groups], [g.is_whole for g in groups]):
            groups = [self._grown(group) for group in groups]
        return groups

    def _grown(self, group: OpenGroup) -> OpenGroup:
        answers = [
            self._next(answer, length_of(group.task.draw, sample)) if isinstance(answer, Unfinished) else answer
            for sample, answer in enumerate(group.answers)
        ]
        return replace(group, answers=tuple(answers))

    def _next(self, answer: Unfinished, length: int) -> Completion | Unfinished:
        self.num_tokens += 1
        ids, logprobs = (*answer.token_ids, 7), (*answer.logprobs, -0.5)
        if len(ids) == length:
            return Completion(ids, logprobs, "x", "stop", versions=answer.versions)
        return Unfinished(ids, logprobs, answer.versions)


def stream_of(count: int) -> ScriptedTasks:
    return ScriptedTasks([Task(draw, f"t:{draw}", "?", (5, 6), reference={draw}) for draw in range(count)])


PROMPTS = 4


def rounds(
    *, max_age: int, max_steps: int = 1000, num_rows: int = 500, num_in_flight: int | None = None
) -> RoundRollouts:
    stream = stream_of(num_rows)
    position = StreamAndOpenGroups(stream)
    engine = TokenByToken()
    environment = ScriptedEnvironment(lambda task, answer: Score(float(task.draw)))
    fresh = FreshRollouts(stream, engine, environment, NUM_SAMPLES, SAMPLING, seed=1)
    return RoundRollouts(fresh, engine, position, max_age, num_in_flight or (max_age + 1) * PROMPTS, max_steps)


def draws(taken: TakenGroups) -> list[int]:
    return [group.task.draw for group in taken.groups]


@pytest.mark.parametrize(("max_age", "num_in_flight"), [(0, 4), (1, 6), (1, 8), (2, 8), (2, 12), (5, 24)])
def test_every_draw_is_trained_once_and_none_becomes_too_old(max_age: int, num_in_flight: int) -> None:
    num_groups, max_steps = PROMPTS, 30
    source = rounds(max_age=max_age, max_steps=max_steps, num_in_flight=num_in_flight)
    engine = source.engine
    assert isinstance(engine, TokenByToken)
    trained: list[int] = []
    for step in range(1, max_steps + 1):
        before = engine.num_tokens
        taken = source.take(num_groups, step)
        assert taken.metrics["num_generated_tokens"] == engine.num_tokens - before
        assert len(taken.groups) == num_groups
        assert taken.metrics["trajectory_age_max"] <= max_age
        for group in taken.groups:
            for sample, rollout in enumerate(group.rollouts):
                answer = rollout.completion
                assert len(answer.token_ids) == length_of(group.task.draw, sample), "no token is lost or drawn twice"
                assert all(step - 1 - max_age <= version <= step - 1 for _, version in answer.versions)
                starts, numbers = zip(*answer.versions, strict=True)
                assert starts[0] == 0
                assert list(starts) == sorted(set(starts))
                assert list(numbers) == sorted(set(numbers))
        trained += draws(taken)
    assert sorted(trained) == list(range(num_groups * max_steps))
    assert source.position.open == []


def test_a_step_does_not_wait_for_long_answers() -> None:
    synchronous, carried = rounds(max_age=0), rounds(max_age=2)
    for step in range(1, 10):
        assert draws(synchronous.take(4, step)) == list(range(4 * step - 4, 4 * step)), "age 0 is the order of the data"
        carried.take(4, step)
    assert carried.position.open, "unfinished answers are carried over"
    assert [g.born for g in carried.position.open] == sorted(g.born for g in carried.position.open)
    ages = [carried.take(4, step).metrics["trajectory_age_max"] for step in range(10, 20)]
    assert 0 < max(ages) <= 2


def test_a_resumed_source_continues_with_the_same_groups() -> None:
    whole = rounds(max_age=2)
    for step in range(1, 6):
        whole.take(4, step)
    resumed = rounds(max_age=2)
    resumed.position.load_state_dict(whole.position.state_dict())
    assert resumed.position.open == whole.position.open
    assert resumed.position.open[0].task.reference == whole.position.open[0].task.reference, "not its text"
    for step in range(6, 12):
        ours, theirs = resumed.take(4, step), whole.take(4, step)
        assert ours.groups == theirs.groups
        assert ours.metrics == theirs.metrics


def test_a_run_that_began_without_rounds_has_no_open_group() -> None:
    source = rounds(max_age=1)
    plain = stream_of(50)
    plain.take(8)
    source.position.load_state_dict(plain.state_dict())
    assert source.position.open == []
    assert 8 in draws(source.take(4, 3))


def test_a_lower_bound_on_the_age_holds_for_groups_that_begin_after_the_resume() -> None:
    before, max_steps = rounds(max_age=3, max_steps=30), 30
    trained = [draw for step in range(1, 4) for draw in draws(before.take(PROMPTS, step))]
    resumed = rounds(max_age=1, max_steps=max_steps)
    resumed.position.load_state_dict(before.position.state_dict())
    carried = {group.task.draw for group in resumed.position.open}
    for step in range(4, max_steps + 1):
        born = {group.task.draw: group.born for group in resumed.position.open}
        taken = draws(resumed.take(PROMPTS, step))
        assert all(step - born.get(draw, step) <= 1 for draw in taken if draw not in carried)
        trained += taken
    assert sorted(trained) == list(range(PROMPTS * max_steps))


def test_a_resumed_run_with_a_lower_limit_than_its_unfinished_answers_names_the_field() -> None:
    whole, resumed = rounds(max_age=2), rounds(max_age=2)
    whole.take(4, 1)
    begun = max(len(answer.token_ids) for group in whole.position.open for answer in group.answers)
    resumed.position.load_state_dict(whole.position.state_dict())
    resumed.fresh.sampling = Sampling(max_new_tokens=begun)
    with pytest.raises(
        InputError, match=rf"max_new_tokens = {begun}: .* unfinished answer of {begun} tokens; set it to"
    ):
        resumed.take(4, 2)


def conversations(environment: Echo, num_steps: int) -> RoundRollouts:
    stream = ScriptedTasks([replace(task, draw=draw) for draw, task in enumerate(talks(2 * num_steps))])
    fresh = replace(multi_turn(environment, num_samples=2), stream=stream)
    return RoundRollouts(fresh, fresh.engine, StreamAndOpenGroups(stream), 1, num_in_flight=3, max_steps=num_steps)


def test_conversations_that_could_not_begin_stay_unscored() -> None:
    class Refusing(Echo):
        def _answer(self, item: TurnItem) -> Score:
            return Score(None, error="no") if item.request == "reset" else super()._answer(item)

    taken = conversations(Refusing(going_on), 1).take(2, 1)
    assert [rollout.score.error for group in taken.groups for rollout in group.rollouts] == ["no"] * 4
    assert taken.metrics["stale_token_fraction"] == taken.metrics["num_generated_tokens"] == 0


def test_tokens_of_the_environment_do_not_count_as_generated() -> None:
    source = conversations(Echo(going_on), 3)
    taken = [source.take(2, step) for step in range(1, 4)]
    written = [rollout.completion for step in taken for group in step.groups for rollout in group.rollouts]
    assert any(not all(completion.trained) for completion in written)
    generated = sum(step.metrics["num_generated_tokens"] for step in taken)
    assert generated == sum(completion.num_sampled for completion in written)


@pytest.mark.parametrize("seed", range(20))
def test_a_quota_that_is_met_leaves_no_group_that_must_become_too_old(seed: int) -> None:
    """However long the answers take, all groups can be trained in time after a round that has ended."""
    chance = random.Random(seed)
    num_groups, max_age = chance.choice([1, 2, 3]), chance.choice([1, 2, 3])
    born: list[int] = []
    whole: list[bool] = []
    for step in range(1, 40):
        new = (max_age + 1) * num_groups - len(born)
        born, whole = born + [step] * new, whole + [False] * new
        quota = Quota(num_groups, step, max_age)
        while not quota.is_met(born, whole):
            whole[chance.choice([place for place, done in enumerate(whole) if not done])] = True
        chosen = [place for place, done in enumerate(whole) if done][:num_groups]
        assert len(chosen) == num_groups
        assert all(step - born[place] <= max_age for place in chosen)
        born = [b for place, b in enumerate(born) if place not in chosen]
        whole = [w for place, w in enumerate(whole) if place not in chosen]
        assert all(b + max_age > step for b in born), "what is left can still be trained in time"


def test_the_key_of_a_group_is_the_step_in_which_it_was_born() -> None:
    seen: list[tuple[int, int]] = []

    class Watched(TokenByToken):
        def sample_round(self, groups: Sequence[OpenGroup], *args: object, **kwargs: object) -> list[OpenGroup]:
            seen.extend((group.task.draw, group.born) for group in groups)
            return super().sample_round(groups, *args, **kwargs)  # type: ignore[arg-type]

    source = rounds(max_age=2)
    source.engine = Watched()
    for step in range(1, 8):
        source.take(4, step)
    assert len({draw for draw, _ in seen}) == len(set(seen)), "one key for each draw"


def test_more_groups_in_flight_make_older_groups() -> None:
    """By Little's law the mean age is the number in flight divided by the groups of a step, minus 1."""

    def mean_age(num_in_flight: int) -> float:
        source = rounds(max_age=2, num_in_flight=num_in_flight)
        ages = [source.take(PROMPTS, step).metrics["trajectory_age_mean"] for step in range(1, 61)]
        return sum(ages[10:]) / len(ages[10:])

    assert mean_age(6) == pytest.approx(0.5, abs=0.05)
    assert mean_age(8) == pytest.approx(1.0, abs=0.05)
