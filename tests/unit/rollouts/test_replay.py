"""Recorded groups: which answers are handed out, with which rewards, and how fresh ones join them."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.roles import Progress
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.recorded import RecordedRollouts
from posttrain.types import Completion, NoiseKey, Rollout, Sampling, Score, Task


def recorded(text: str, reward: float) -> Rollout:
    return Rollout(Completion((1, 2), (), text, "stop"), Score(reward))


def task(draw: int, count: int = 3) -> Task:
    rollouts = tuple(recorded(f"answer {i} to {draw}", i / 10) for i in range(count))
    return Task(draw, f"t:{draw}", "?", (5, 6), recorded=rollouts)


class Tasks:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.left = list(tasks)

    def take(self, count: int) -> list[Task]:
        taken, self.left = self.left[:count], self.left[count:]
        return taken


class NewAnswers:
    """A generator that says what it was asked for."""

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        return [
            [Completion((7,), (-0.5,), f"new {s} to {t.draw} in step {key.step}", "stop") for s in range(num_samples)]
            for t in tasks
        ]


class AlwaysOne:
    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        assert all(completion.logprobs for completion in completions), "recorded answers are not judged again"
        return [Score(1.0) for _ in completions]

    def close(self) -> None: ...


def texts(completions: Sequence[Sequence[Completion]]) -> list[list[str]]:
    return [[completion.text for completion in samples] for samples in completions]


def test_recorded_answers_come_with_their_own_rewards_and_without_logprobs() -> None:
    source = RecordedRollouts(Tasks([task(0), task(1)]), num_recorded=8, seed=0)
    tasks, completions = source.sample(2, step=1)
    assert texts(completions) == [[f"answer {i} to {d}" for i in range(3)] for d in range(2)]
    groups = source.score(tasks, completions)
    assert [group.rewards for group in groups] == [[0.0, 0.1, 0.2]] * 2
    assert all(rollout.completion.logprobs == () for group in groups for rollout in group.rollouts)


def test_a_long_record_gives_other_answers_at_each_visit_and_the_same_ones_again_after_a_restart() -> None:
    first = RecordedRollouts(Tasks([task(d, 20) for d in range(6)]), num_recorded=4, seed=3)
    again = RecordedRollouts(Tasks([task(d, 20) for d in range(6)]), num_recorded=4, seed=3)
    picked = [texts(first.sample(1, step)[1])[0] for step in range(6)]
    assert picked == [texts(again.sample(1, step)[1])[0] for step in range(6)]
    places = {tuple(int(text.split()[1]) for text in texts_) for texts_ in picked}
    assert len(places) > 1
    assert all(len(set(chosen)) == 4 and list(chosen) == sorted(chosen) for chosen in places)


def test_fresh_answers_follow_the_recorded_ones_and_only_they_are_judged() -> None:
    fresh = FreshRollouts(Tasks([]), NewAnswers(), AlwaysOne(), 2, Sampling(max_new_tokens=4), seed=0)
    source = RecordedRollouts(Tasks([task(0), task(1, 2)]), num_recorded=3, seed=0, fresh=fresh)
    tasks, completions = source.sample(2, step=7)
    assert texts(completions)[1] == ["answer 0 to 1", "answer 1 to 1", "new 0 to 1 in step 7", "new 1 to 1 in step 7"]
    groups = source.score(tasks, completions)
    assert [group.rewards for group in groups] == [[0.0, 0.1, 0.2, 1.0, 1.0], [0.0, 0.1, 1.0, 1.0]]
    assert [group.task.draw for group in groups] == [0, 1]
