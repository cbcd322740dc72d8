"""Recorded groups: which answers are handed out, with which rewards, and how fresh ones join them."""

from __future__ import annotations

from fakes import ScriptedEngine, ScriptedEnvironment, ScriptedTasks, completion

from posttrain.rollouts.fresh import FreshRollouts, RecordedRollouts
from posttrain.types import Completion, NoiseKey, Rollout, Sampling, Score, TakenGroups, Task


def recorded(text: str, reward: float) -> Rollout:
    return Rollout(Completion((1, 2), (), text, "stop"), Score(reward))


def task(draw: int, count: int = 3) -> Task:
    rollouts = tuple(recorded(f"answer {i} to {draw}", i / 10) for i in range(count))
    return Task(draw, f"t:{draw}", "?", (5, 6), recorded=rollouts)


def new_answer(task: Task, sample: int, key: NoiseKey) -> Completion:
    return completion(f"new {sample} to {task.draw} in step {key.step}")


def texts(taken: TakenGroups) -> list[list[str]]:
    return [[rollout.completion.text for rollout in group.rollouts] for group in taken.groups]


def test_recorded_answers_keep_their_rewards_and_have_no_logprobs() -> None:
    source = RecordedRollouts(ScriptedTasks([task(0), task(1)]), num_recorded=8, seed=0)
    taken = source.take(2, step=1)
    assert texts(taken) == [[f"answer {i} to {d}" for i in range(3)] for d in range(2)]
    assert [group.rewards for group in taken.groups] == [[0.0, 0.1, 0.2]] * 2
    assert all(rollout.completion.logprobs == () for group in taken.groups for rollout in group.rollouts)
    assert taken.sampled == taken.groups
    assert list(taken.timings_s) == ["data_processing", "generation", "reward_calculation"]


def test_choice_among_many_recorded_answers_varies_by_draw_and_is_reproducible() -> None:
    first = RecordedRollouts(ScriptedTasks([task(d, 20) for d in range(6)]), num_recorded=4, seed=3)
    again = RecordedRollouts(ScriptedTasks([task(d, 20) for d in range(6)]), num_recorded=4, seed=3)
    picked = [texts(first.take(1, step))[0] for step in range(6)]
    assert picked == [texts(again.take(1, step))[0] for step in range(6)]
    places = {tuple(int(text.split()[1]) for text in texts_) for texts_ in picked}
    assert len(places) > 1
    assert all(len(set(chosen)) == 4 and list(chosen) == sorted(chosen) for chosen in places)


def test_fresh_answers_follow_the_recorded_ones_and_only_they_are_judged() -> None:
    judge = ScriptedEnvironment()
    fresh = FreshRollouts(ScriptedTasks([]), ScriptedEngine(new_answer), judge, 2, Sampling(max_new_tokens=4), seed=0)
    source = RecordedRollouts(ScriptedTasks([task(0), task(1, 2)]), num_recorded=3, seed=0, fresh=fresh)
    taken = source.take(2, step=7)
    assert texts(taken)[1] == ["answer 0 to 1", "answer 1 to 1", "new 0 to 1 in step 7", "new 1 to 1 in step 7"]
    assert [group.rewards for group in taken.groups] == [[0.0, 0.1, 0.2, 1.0, 1.0], [0.0, 0.1, 1.0, 1.0]]
    assert [group.task.draw for group in taken.groups] == [0, 1]
    assert judge.seen == [f"new {s} to {d} in step 7" for d in range(2) for s in range(2)]
    versions = [rollout.completion.versions for rollout in taken.groups[1].rollouts]
    assert versions == [(), (), ((0, 6),), ((0, 6),)], "step 7 samples with the weights after 6 steps"
    assert list(taken.timings_s) == ["data_processing", "generation", "reward_calculation"]
