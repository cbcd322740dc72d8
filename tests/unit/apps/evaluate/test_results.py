"""The format on disk: read back as it was written, and refused where it is torn or contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.apps.evaluate.results import (
    Counts,
    EvaluationError,
    EvaluationSummary,
    Interval,
    ProblemResult,
    SampleResult,
    hash_of,
    problem_row,
    read_evaluation,
    summary_text,
)


def problem(index: int, reward: float | None = 1.0) -> ProblemResult:
    sample = SampleResult("text", 3, "stop", reward, answer="4", error=None if reward is not None else "timeout")
    return ProblemResult(f"p{index}", index, "sums", "2 + 2?", "4", (sample,))


def write(folder: Path, problems: list[ProblemResult], *, edit: dict[str, object] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem_row(p)) + "\n" for p in problems))
    summary = EvaluationSummary(
        model="m",
        dataset="sums",
        metric="pass@1",
        metrics={"pass@1": 1.0},
        intervals={"pass@1": Interval(0.5, 1.0, 0.95)},
        counts=Counts(len(problems), len(problems), 0, 0),
        num_tests_per_prompt=1,
        pass_threshold=1.0,
        seed=42,
        problem_set_hash=hash_of(problems),
        config={"eval": {"k_value": 1}},
        code_version="0",
    )
    row = json.loads(summary_text(summary)) | (edit or {})
    (folder / "summary.json").write_text(json.dumps(row))
    return folder


def test_results_are_read_back_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    problems = [problem(1), problem(0), problem(2, None)]
    found = read_evaluation(write(tmp_path, problems))
    assert [p.index for p in found.problems] == [0, 1, 2]
    assert found.problems[1] == problems[0]
    assert found.problems[2].rewards == [None]
    assert found.summary.score == 1.0
    assert found.summary.intervals["pass@1"].low == 0.5


def test_the_hash_is_of_the_set_and_its_content() -> None:
    assert hash_of([problem(0), problem(1)]) == hash_of([problem(1), problem(0)])
    assert hash_of([problem(0)]) != hash_of([problem(1)])
    assert hash_of([problem(0)]) == hash_of([problem(0, 0.0)]), "what the model answered is no part of the problem"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            {"counts": {"problems": 3, "samples": 1, "unscored": 0, "truncated": 0}},
            "1 problems, but summary.json has 3",
        ),
        ({"problem_set_hash": "0"}, "other content hash"),
        ({"format": 9}, "format 9; this version of posttrain reads format 1"),
        ({"metrics": {"pass@1": "high"}}, "metrics.pass@1 is 'high'"),
        ({"pass_threshold": "high"}, "pass_threshold is 'high': must be a valid number"),
        ({"num_tests_per_prompt": "1"}, "num_tests_per_prompt is '1': must be a valid integer"),
        ({"config": "x"}, "config is 'x'"),
        ({"nonsense": 1}, "nonsense is 1: Unexpected keyword argument"),
        ({"intervals": {"pass@1": {"low": 0}}}, "intervals.pass@1.high is missing"),
    ],
)
def test_a_summary_that_does_not_fit_is_refused(tmp_path: Path, edit: dict[str, object], said: str) -> None:
    with pytest.raises(EvaluationError) as caught:
        read_evaluation(write(tmp_path, [problem(0)], edit=edit))
    assert said in str(caught.value)


def test_rows_that_are_torn_or_doubled_are_named(tmp_path: Path) -> None:
    write(tmp_path, [problem(0), problem(0)])
    with pytest.raises(EvaluationError, match=r"problems.jsonl:2: problem 'p0' again \(first in row 1\)"):
        read_evaluation(tmp_path)
    write(tmp_path, [problem(0)])
    with (tmp_path / "problems.jsonl").open("a") as file:
        file.write('{"id": "p1"')
    with pytest.raises(EvaluationError, match=r"problems.jsonl:2: not a JSON object"):
        read_evaluation(tmp_path)
    (tmp_path / "problems.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(EvaluationError, match=r"problems.jsonl:1: not a JSON object"):
        read_evaluation(tmp_path)


def test_a_null_reward_needs_its_reason(tmp_path: Path) -> None:
    write(tmp_path, [problem(0, None)])
    row = json.loads((tmp_path / "problems.jsonl").read_text())
    row["samples"][0]["error"] = None
    (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(EvaluationError, match=r"samples.0: reward is null without an error"):
        read_evaluation(tmp_path)


def test_unfinished_or_missing_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no such folder"):
        read_evaluation(tmp_path / "nowhere")
    with pytest.raises(EvaluationError, match=r"no summary.json; expected the save_path"):
        read_evaluation(tmp_path)
    write(tmp_path, [problem(0)])
    (tmp_path / "summary.json").unlink()
    with pytest.raises(EvaluationError, match=r"not finished.*resumes it"):
        read_evaluation(tmp_path)
