"""Runs an evaluation: problems in batches through a rollout source, each batch saved before the next begins.

Batches are cut by the place of a problem in its dataset, whatever is finished already, and a batch of which only a part
was saved is repeated as a whole. So a problem always shares a batch with the same others, and an interrupted evaluation
gives the same answers as an uninterrupted one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass

from posttrain.apps.evaluate.answers import AnswerReader
from posttrain.apps.evaluate.folder import EvaluationFolder
from posttrain.apps.evaluate.problems import ProblemSet
from posttrain.apps.evaluate.results import ProblemResult, SampleResult
from posttrain.apps.evaluate.server import ServedCompletion
from posttrain.checkpointing import Interruption
from posttrain.errors import Terminated
from posttrain.roles import RolloutSource
from posttrain.types import Group, Rollout, Task

_STOPPING = frozenset({signal.SIGTERM, signal.SIGHUP})


def unfinished_batches(tasks: Sequence[Task], size: int, finished: Container[str]) -> list[Sequence[Task]]:
    """The batches in which a problem is missing, whole and in order."""
    batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    return [batch for batch in batches if not all(task.id in finished for task in batch)]


class TaskQueue:
    """Tasks one after another: the stream of an evaluation."""

    def __init__(self, batches: Sequence[Sequence[Task]]) -> None:
        self._tasks = [task for batch in batches for task in batch]

    def take(self, count: int) -> Sequence[Task]:
        taken, self._tasks = self._tasks[:count], self._tasks[count:]
        return taken


@dataclass(frozen=True)
class EvaluationRunner:
    problem_set: ProblemSet
    source: RolloutSource
    read_answer: AnswerReader
    folder: EvaluationFolder

    def run(self, batch_sizes: Sequence[int]) -> None:
        """Take and save batch after batch. After SIGTERM or SIGHUP: Terminated when the batch under way is saved."""
        with Interruption(_STOPPING, "stopping when the batch under way is saved") as interruption:
            for num_left, size in zip(reversed(range(len(batch_sizes))), batch_sizes, strict=True):
                began = time.perf_counter()
                taken = self.source.take(size, step=0)
                results = [self._result(group) for group in taken.groups]
                counts = [sample.num_tokens or 0 for result in results for sample in result.samples]
                timing = {"generation_s": taken.timings_s["generation"], "wall_s": time.perf_counter() - began}
                self.folder.append(results, {**timing, "num_tokens": float(sum(counts))})
                if interruption.signal is not None and num_left:
                    raise Terminated(interruption.signal, saved=True)

    def _result(self, group: Group) -> ProblemResult:
        problem = self.problem_set.problems[group.task.draw]
        return ProblemResult(
            id=problem.id,
            index=problem.draw,
            dataset=self.problem_set.name,
            prompt=problem.prompt,
            expected=problem.reference,
            samples=tuple(self._sample(rollout) for rollout in group.rollouts),
        )

    def _sample(self, rollout: Rollout) -> SampleResult:
        completion, score = rollout.completion, rollout.score
        if completion.error is not None:
            return SampleResult("", 0, None, None, error=completion.error)
        talk, answer = completion.conversation, completion.text
        turns = talk.utterances if talk is not None else ()
        if talk is not None:
            last = next((turn.text for turn in reversed(turns) if turn.role == "assistant"), "")
            answer = last if talk.answer is None else talk.answer
        return SampleResult(
            text=completion.text,
            num_tokens=completion.num_tokens if isinstance(completion, ServedCompletion) else completion.num_sampled,
            finish_reason=completion.finish_reason,
            reward=score.reward,
            answer=self.read_answer(answer),
            error=(score.error or "no reason given") if score.reward is None else None,
            parts=dict(score.parts),
            turns=tuple({"role": turn.role, "text": turn.text} for turn in turns),
        )
