"""The runner over a fake model: batches, what is saved when, going on after a kill, and what a folder refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.evaluation.answering import Answer
from posttrain.evaluation.answers import answer_reader
from posttrain.evaluation.benchmarks import GENERIC
from posttrain.evaluation.folder import EvaluationFolder
from posttrain.evaluation.problems import EvalProblem, ProblemSet
from posttrain.evaluation.results import EvaluationError, ProblemResult
from posttrain.evaluation.runner import EvaluationRunner
from posttrain.roles import Progress
from posttrain.types import Completion, Score, Task

PROBLEMS = ProblemSet(
    "sums", GENERIC, tuple(EvalProblem(f"p{i}", i, f"{i}?", (), str(i), {}, f"row {i}") for i in range(7)), False
)
IDENTITY = {"model": "m", "seed": 1}


class Killed(BaseException):
    pass


class Source:
    """Answers with the problem's number and that of its neighbours in the batch; the third answer never comes."""

    def __init__(self, dies_at_batch: int | None = None) -> None:
        self.batches: list[list[str]] = []
        self.dies_at_batch = dies_at_batch

    def answer(
        self, problems: Sequence[EvalProblem], num_samples: int, progress: Progress | None = None
    ) -> list[list[Answer]]:
        if len(self.batches) == self.dies_at_batch:
            raise Killed
        self.batches.append([problem.id for problem in problems])
        neighbours = ",".join(problem.id for problem in problems)
        return [
            [
                Answer(None, 0, error="request failed: HTTP 503")
                if problem.index == 3 and sample == 1
                else Answer(Completion((1, 2), (0.0, 0.0), f"{neighbours} #{sample} is {problem.index}", "stop"), 2)
                for sample in range(num_samples)
            ]
            for problem in problems
        ]

    def task(self, problem: EvalProblem) -> Task:
        return Task(problem.index, problem.id, "", (), problem.expected)

    def close(self) -> None:
        pass


class Judge:
    def score(self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Any = None) -> list[Score]:
        return [
            Score(None, error="timeout")
            if task.id == "p5"
            else Score(float(completion.text.endswith(str(task.reference))))
            for task, completion in zip(tasks, completions, strict=True)
        ]

    def close(self) -> None:
        pass


def run(path: Path, source: Source, num_samples: int = 2) -> list[ProblemResult]:
    folder = EvaluationFolder.open(path, IDENTITY, "")
    try:
        runner = EvaluationRunner(PROBLEMS, source, Judge(), answer_reader("math"), num_samples, 3, folder)
        runner.run(lambda _: None)
        return list(folder.finished.values())
    finally:
        folder.close()


def test_every_problem_is_answered_scored_and_saved_in_batches(tmp_path: Path) -> None:
    source = Source()
    found = run(tmp_path, source)
    assert source.batches == [["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p6"]]
    assert [p.rewards for p in found] == [[1.0, 1.0]] * 3 + [[1.0, None], [1.0, 1.0], [None, None], [1.0, 1.0]]
    assert found[0].samples[0].answer == "0"
    assert found[3].samples[1].error == "request failed: HTTP 503"
    assert found[3].samples[1].finish_reason is None
    assert found[5].samples[0].error == "timeout"


@pytest.mark.parametrize("batches_before", [0, 1, 2])
def test_what_was_interrupted_goes_on_and_gives_the_same(tmp_path: Path, batches_before: int) -> None:
    whole = run(tmp_path / "whole", Source())
    with pytest.raises(Killed):
        run(tmp_path / "cut", Source(dies_at_batch=batches_before))
    again = Source()
    assert run(tmp_path / "cut", again) == whole
    assert len(again.batches) == 3 - batches_before, "what is finished is not asked again"
    assert (tmp_path / "cut" / "problems.jsonl").read_bytes() == (tmp_path / "whole" / "problems.jsonl").read_bytes()


@pytest.mark.parametrize("kept_bytes", [10, 400, 700])
def test_a_torn_file_is_mended_and_the_torn_batch_meets_the_same_neighbours(tmp_path: Path, kept_bytes: int) -> None:
    whole = run(tmp_path, Source())
    file = tmp_path / "problems.jsonl"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    again = Source()
    assert sorted(run(tmp_path, again), key=lambda p: p.index) == whole
    assert again.batches[0][0] == "p0" or kept_bytes > 600, "a batch is done again as a whole"


def test_a_finished_evaluation_asks_nothing(tmp_path: Path) -> None:
    run(tmp_path, Source())
    again = Source()
    run(tmp_path, again)
    assert again.batches == []


def test_unscored_problems_can_be_tried_again(tmp_path: Path) -> None:
    run(tmp_path, Source())
    folder = EvaluationFolder.open(tmp_path, IDENTITY, "")
    assert folder.forget_unscored() == 2
    assert set(folder.finished) == {"p0", "p1", "p2", "p4", "p6"}
    folder.close()
    again = Source()
    run(tmp_path, again)
    assert again.batches == [["p3", "p4", "p5"]]


def test_an_attempt_that_finished_nothing_does_not_keep_the_folder(tmp_path: Path) -> None:
    EvaluationFolder.open(tmp_path, {**IDENTITY, "seed": 99}, "").close()
    run(tmp_path, Source())
    folder = EvaluationFolder.open(tmp_path, IDENTITY, "")
    assert folder.finished
    folder.close()


def test_another_evaluation_in_the_folder_is_refused_by_what_differs(tmp_path: Path) -> None:
    run(tmp_path, Source())
    with pytest.raises(EvaluationError, match=r"holds another evaluation: seed was 1 and is 2\. Choose another"):
        EvaluationFolder.open(tmp_path, {**IDENTITY, "seed": 2}, "")
    EvaluationFolder.open(tmp_path, IDENTITY, "").close()


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    folder = EvaluationFolder.open(tmp_path, IDENTITY, "")
    with pytest.raises(EvaluationError, match="another process is evaluating into this folder"):
        EvaluationFolder.open(tmp_path, IDENTITY, "")
    folder.close()
    EvaluationFolder.open(tmp_path, IDENTITY, "").close()


def test_times_add_up_over_all_attempts(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, Source(dies_at_batch=1))
    run(tmp_path, Source())
    rows = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert sum(row["num_tokens"] for row in rows) == 2 * 2 * 7 - 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match=r"eval\.save_path: .*file/e cannot be written"):
        EvaluationFolder.open(tmp_path / "file" / "e", {}, "")
