"""Runs an evaluation: problems in batches through a model and a judge, each batch saved before the next begins.

Batches are cut by the place of a problem in its dataset, never by what happens to be left, and a batch of which only a part
was saved is done again as a whole. So a problem always meets the same neighbours in the engine, and an evaluation that was
interrupted gives the same answers as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.evaluation.answering import Answer, AnswerSource
from posttrain.evaluation.answers import AnswerReader
from posttrain.evaluation.folder import EvaluationFolder
from posttrain.evaluation.problems import EvalProblem, ProblemSet
from posttrain.evaluation.results import ProblemResult, SampleResult
from posttrain.roles import Environment, Progress
from posttrain.types import Completion, Score, Task


@dataclass(frozen=True)
class EvaluationRunner:
    problem_set: ProblemSet
    source: AnswerSource
    environment: Environment
    read_answer: AnswerReader
    num_samples: int
    problems_per_step: int
    folder: EvaluationFolder

    def run(self, progress: Progress) -> None:
        """Answer and save every problem that is not finished. `progress` hears of samples that are answered."""
        problems = self.problem_set.problems
        for start in range(0, len(problems), self.problems_per_step):
            batch = problems[start : start + self.problems_per_step]
            if all(problem.id in self.folder.finished for problem in batch):
                continue
            began = time.perf_counter()
            answers = self.source.answer(batch, self.num_samples, progress)
            answered = time.perf_counter()
            scored = self._scored(batch, answers)
            self.folder.append(
                scored,
                {
                    "generation_s": answered - began,
                    "wall_s": time.perf_counter() - began,
                    "num_tokens": float(sum(answer.num_tokens or 0 for row in answers for answer in row)),
                },
            )

    def _scored(self, problems: Sequence[EvalProblem], answers: Sequence[Sequence[Answer]]) -> list[ProblemResult]:
        judged: list[tuple[Task, Completion]] = [
            (self.source.task(problem), answer.completion)
            for problem, row in zip(problems, answers, strict=True)
            for answer in row
            if answer.completion is not None
        ]
        tasks, completions = [task for task, _ in judged], [completion for _, completion in judged]
        scores = iter(self.environment.score(tasks, completions) if judged else [])
        return [
            ProblemResult(
                id=problem.id,
                index=problem.index,
                dataset=self.problem_set.name,
                prompt=problem.prompt,
                expected=problem.expected,
                samples=tuple(self._sample(answer, next(scores) if answer.completion else None) for answer in row),
            )
            for problem, row in zip(problems, answers, strict=True)
        ]

    def _sample(self, answer: Answer, score: Score | None) -> SampleResult:
        if answer.completion is None or score is None:
            return SampleResult("", 0, None, None, error=answer.error or "no answer came")
        completion = answer.completion
        return SampleResult(
            text=completion.text,
            num_tokens=answer.num_tokens,
            finish_reason=completion.finish_reason,
            reward=score.reward,
            answer=self.read_answer(completion.text),
            error=(score.error or "no reason given") if score.reward is None else None,
            parts=dict(score.parts),
        )
