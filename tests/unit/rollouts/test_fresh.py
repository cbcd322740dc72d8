"""Fresh rollouts: what is scored, what is not, and what the completions carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fakes import ScriptedEngine, ScriptedEnvironment, ScriptedTasks, completion

from posttrain.roles import Progress
from posttrain.rollouts.fresh import FixedTasks, FreshRollouts, UnscoredRollout
from posttrain.types import Completion, NoiseKey, Sampling, Score, Task

TASKS = [Task(draw, f"t:{draw}", "?", (5,)) for draw in range(4)]


def answer(task: Task, sample: int, key: NoiseKey) -> Completion:
    if task.draw == 1 and sample == 0:
        return Completion((), (), "", "stop", error="request failed: HTTP 503")
    return completion(f"answer {sample} to {task.draw} with {key.seed}")


def test_failed_request_is_an_unscored_rollout_that_is_not_judged() -> None:
    environment = ScriptedEnvironment()
    source = FreshRollouts(ScriptedTasks(TASKS), ScriptedEngine(answer), environment, 2, Sampling(4), seed=7)
    taken = source.take(2, step=1)
    assert [group.rewards for group in taken.groups] == [[1.0, 1.0], [None, 1.0]]
    assert taken.groups[1].rollouts[0].score.error == "request failed: HTTP 503"
    assert environment.seen == ["answer 0 to 0 with 7", "answer 1 to 0 with 7", "answer 1 to 1 with 7"]


def test_validation_samples_with_the_weights_that_the_step_left() -> None:
    source = FreshRollouts(
        FixedTasks(TASKS), ScriptedEngine(answer), ScriptedEnvironment(), 1, Sampling(4), seed=7, after_step=True
    )
    first, again = source.take(2, step=3), source.take(2, step=3)
    assert first.groups == again.groups, "the same tasks in every call"
    assert first.groups[0].rollouts[0].completion.versions == ((0, 3),)


def test_progress_counts_samples_and_then_scores() -> None:
    shown: list[tuple[str, int, int]] = []

    @contextmanager
    def show(label: str, total: int) -> Iterator[Progress]:
        done: list[int] = []
        yield done.append
        shown.append((label, total, sum(done)))

    engine, environment = ScriptedEngine(answer), ScriptedEnvironment()
    FreshRollouts(ScriptedTasks(TASKS), engine, environment, 2, Sampling(4), 7, show).take(2, step=1)
    assert shown == [("generation", 4, 4), ("scoring", 4, 4)]


def test_score_of_the_turns_is_added_to_the_judges() -> None:
    judged = completion("x")
    rollout = UnscoredRollout(judged, judged, Score(0.25, {"tool": 0.25}))
    total = rollout.with_verdict(Score(1.0, {"right": 1.0}))
    assert total == Score(1.25, {"tool": 0.25, "right": 1.0, "turns": 0.25, "answer": 1.0})
    assert rollout.with_verdict(Score(None, error="timeout")) == Score(None, error="timeout")
    assert UnscoredRollout.of(judged).with_verdict(Score(1.0)) == Score(1.0)
