"""The runner over a fake model: batches, what is saved when, going on after a kill, and what a folder refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ScriptedEngine, ScriptedEnvironment, completion

from posttrain.apps.evaluate.answers import answer_reader
from posttrain.apps.evaluate.benchmarks import GENERIC
from posttrain.apps.evaluate.folder import EvaluationFolder
from posttrain.apps.evaluate.problems import ProblemSet
from posttrain.apps.evaluate.results import EvaluationError, ProblemResult
from posttrain.apps.evaluate.runner import EvaluationRunner, TaskQueue, unfinished_batches
from posttrain.errors import FolderHeld, Terminated
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.types import Completion, Conversation, NoiseKey, Sampling, Score, Task, Utterance

PROBLEMS = ProblemSet(
    "sums",
    GENERIC,
    tuple(Task(i, f"p{i}", f"{i}?", (), str(i)) for i in range(7)),
    tuple(f"row {i}" for i in range(7)),
    is_choice=False,
)
IDENTITY = {"model": "m", "seed": 1}


class Killed(BaseException):
    pass


class Model(ScriptedEngine):
    """Answers with the problem's number and that of its neighbours in the batch; one answer never comes."""

    def __init__(self, dies_at_batch: int | None = None, during: Callable[[int], None] = lambda batch: None) -> None:
        super().__init__(self._answer)
        self.dies_at_batch = dies_at_batch
        self.during = during  # called with the number of the batch

    @property
    def batches(self) -> list[list[str]]:
        return [[f"p{draw}" for draw in call] for call in self.calls]

    def _answer(self, task: Task, sample: int, key: NoiseKey) -> Completion:
        if len(self.calls) - 1 == self.dies_at_batch:
            raise Killed
        self.during(len(self.calls) - 1)
        if task.draw == 3 and sample == 1:
            return Completion((), (), "", "stop", error="request failed: HTTP 503")
        return completion(f"{','.join(self.batches[-1])} #{sample} is {task.draw}", num_tokens=2)


def judge(task: Task, answer: Completion) -> Score:
    if task.id == "p5":
        return Score(None, error="timeout")
    return Score(float(answer.text.endswith(str(task.reference))))


def run(path: Path, model: Model, num_samples: int = 2) -> list[ProblemResult]:
    folder = EvaluationFolder.open(path, IDENTITY, "")
    try:
        batches = unfinished_batches(PROBLEMS.problems, 3, folder.finished)
        source = FreshRollouts(
            TaskQueue(batches), model, ScriptedEnvironment(judge), num_samples, Sampling(max_new_tokens=4), seed=1
        )
        EvaluationRunner(PROBLEMS, source, answer_reader("math"), folder).run([len(batch) for batch in batches])
        return list(folder.finished.values())
    finally:
        folder.close()


def test_every_problem_is_answered_scored_and_saved_in_batches(tmp_path: Path) -> None:
    source = Model()
    found = run(tmp_path, source)
    assert source.batches == [["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p6"]]
    assert [p.rewards for p in found] == [[1.0, 1.0]] * 3 + [[1.0, None], [1.0, 1.0], [None, None], [1.0, 1.0]]
    assert found[0].samples[0].answer == "0"
    assert found[3].samples[1].error == "request failed: HTTP 503"
    assert found[3].samples[1].finish_reason is None
    assert found[5].samples[0].error == "timeout"


@pytest.mark.parametrize(("returned", "answer"), [(None, "7"), ("it is 5", "5")])
def test_the_answer_of_an_agent_is_what_it_returned(returned: str | None, answer: str, tmp_path: Path) -> None:
    said = (Utterance("user", "?", 1), Utterance("assistant", "it is 7", 1), Utterance("user", "thanks", 1))
    model = Model()
    model.answer = lambda *given: replace(completion("it is 3"), conversation=Conversation(said, answer=returned))
    assert {sample.answer for problem in run(tmp_path, model) for sample in problem.samples} == {answer}


@pytest.mark.parametrize("batches_before", [0, 1, 2])
def test_interrupted_evaluation_continues_with_the_same_answers(tmp_path: Path, batches_before: int) -> None:
    whole = run(tmp_path / "whole", Model())
    with pytest.raises(Killed):
        run(tmp_path / "cut", Model(dies_at_batch=batches_before))
    again = Model()
    assert run(tmp_path / "cut", again) == whole
    assert len(again.batches) == 3 - batches_before, "what is finished is not asked again"
    assert (tmp_path / "cut" / "problems.jsonl").read_bytes() == (tmp_path / "whole" / "problems.jsonl").read_bytes()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_after_the_batch_with_its_problems_saved(tmp_path: Path, sent: signal.Signals) -> None:
    whole = run(tmp_path / "whole", Model())
    stopped = Model(during=lambda batch: os.kill(os.getpid(), sent) if batch == 1 else None)
    with pytest.raises(Terminated) as raised:
        run(tmp_path / "cut", stopped)
    assert raised.value.exit_code == 85
    assert len(stopped.batches) == 2
    assert len((tmp_path / "cut" / "problems.jsonl").read_text().splitlines()) == 6
    assert run(tmp_path / "cut", Model()) == whole


def test_a_signal_in_the_last_batch_changes_nothing(tmp_path: Path) -> None:
    model = Model(during=lambda batch: os.kill(os.getpid(), signal.SIGTERM) if batch == 2 else None)
    assert len(run(tmp_path, model)) == 7


def test_a_file_system_without_flock_is_named_with_the_mount_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    with pytest.raises(EvaluationError, match=r"has no flock: No locks available; .* without `nolock`"):
        EvaluationFolder.open(tmp_path, IDENTITY, "")


@pytest.mark.parametrize("kept_bytes", [10, 400, 700])
def test_torn_file_is_repaired_and_its_batch_repeated_as_a_whole(tmp_path: Path, kept_bytes: int) -> None:
    whole = run(tmp_path, Model())
    file = tmp_path / "problems.jsonl"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    again = Model()
    assert sorted(run(tmp_path, again), key=lambda p: p.index) == whole
    assert again.batches[0][0] == "p0" or kept_bytes > 600, "a batch is done again as a whole"


def test_finished_evaluation_samples_nothing(tmp_path: Path) -> None:
    run(tmp_path, Model())
    again = Model()
    run(tmp_path, again)
    assert again.batches == []


def test_unscored_problems_can_be_tried_again(tmp_path: Path) -> None:
    run(tmp_path, Model())
    folder = EvaluationFolder.open(tmp_path, IDENTITY, "")
    assert folder.forget_unscored() == 2
    assert set(folder.finished) == {"p0", "p1", "p2", "p4", "p6"}
    folder.close()
    again = Model()
    run(tmp_path, again)
    assert again.batches == [["p3", "p4", "p5"]]


def test_an_attempt_that_finished_nothing_does_not_keep_the_folder(tmp_path: Path) -> None:
    EvaluationFolder.open(tmp_path, {**IDENTITY, "seed": 99}, "").close()
    run(tmp_path, Model())
    folder = EvaluationFolder.open(tmp_path, IDENTITY, "")
    assert folder.finished
    folder.close()


def test_another_evaluation_in_the_folder_is_refused_by_what_differs(tmp_path: Path) -> None:
    run(tmp_path, Model())
    with pytest.raises(EvaluationError, match=r"holds another evaluation: seed was 1 and is 2\. Choose another"):
        EvaluationFolder.open(tmp_path, {**IDENTITY, "seed": 2}, "")
    EvaluationFolder.open(tmp_path, IDENTITY, "").close()


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    folder = EvaluationFolder.open(tmp_path, IDENTITY, "")
    with pytest.raises(FolderHeld, match=rf"process {os.getpid()} on .* is evaluating into this folder"):
        EvaluationFolder.open(tmp_path, IDENTITY, "")
    folder.close()
    EvaluationFolder.open(tmp_path, IDENTITY, "").close()


def test_times_add_up_over_all_attempts(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, Model(dies_at_batch=1))
    run(tmp_path, Model())
    rows = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert sum(row["num_tokens"] for row in rows) == 2 * 2 * 7 - 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match=r"eval\.save_path: .*file/e cannot be written"):
        EvaluationFolder.open(tmp_path / "file" / "e", {}, "")
