"""Evaluation folders written by hand: rewards in, a folder as `posttrain eval` leaves it out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.apps.evaluate.results import (
    IDENTITY_FILE,
    PROBLEMS_FILE,
    SUMMARY_FILE,
    Counts,
    Evaluation,
    EvaluationSummary,
    ProblemResult,
    SampleResult,
    hash_of,
    problem_row,
    read_evaluation,
    summary_text,
)

Rewards = Sequence[Sequence[float | None]]


def write_evaluation(
    folder: Path,
    rewards: Rewards,
    *,
    first_id: int = 0,
    text: Callable[[int, float | None], str] = lambda index, reward: f"the answer is {reward}",
    num_tokens: Callable[[int], int | None] = lambda index: 10,
    parts: Callable[[float], Mapping[str, float]] = lambda reward: {},
    cost: float | None = None,
    model: str = "model",
    fingerprint: str | None = None,
    config: Mapping[str, Any] | None = None,
    pass_threshold: float = 1.0,
    identity: Mapping[str, Any] | None = None,
) -> Evaluation:
    problems = [
        ProblemResult(
            id=f"set:{first_id + index}",
            index=index,
            dataset="set",
            prompt=f"question {first_id + index}",
            expected="42",
            samples=tuple(
                SampleResult(
                    text=text(index, reward),
                    num_tokens=num_tokens(index),
                    finish_reason="stop",
                    reward=reward,
                    answer=str(reward),
                    error="no score" if reward is None else None,
                    parts={} if reward is None else parts(reward),
                )
                for reward in row
            ),
        )
        for index, row in enumerate(rewards)
    ]
    samples = [sample for problem in problems for sample in problem.samples]
    summary = EvaluationSummary(
        model=model,
        dataset="set",
        metric="pass@1",
        metrics={},
        intervals={},
        counts=Counts(len(problems), len(samples), sum(sample.reward is None for sample in samples), 0),
        num_tests_per_prompt=len(rewards[0]),
        pass_threshold=pass_threshold,
        seed=0,
        problem_set_hash=hash_of(problems),
        config=config or {},
        code_version="1",
        model_fingerprint=fingerprint,
        cost=cost,
        cost_per_answer=None if cost is None else cost / len(samples),
    )
    folder.mkdir(parents=True)
    (folder / PROBLEMS_FILE).write_text("".join(json.dumps(problem_row(problem)) + "\n" for problem in problems))
    (folder / SUMMARY_FILE).write_text(summary_text(summary))
    if identity is not None:
        (folder / IDENTITY_FILE).write_text(json.dumps(identity))
    return read_evaluation(folder)
