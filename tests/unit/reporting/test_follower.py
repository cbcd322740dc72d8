"""Rows reach a tracker once each, whatever happens to the tracker or to the run, and the run never waits for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import LoggerConfig
from posttrain.reporting import loggers as loggers_module
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers import Loggers, recorded_run
from posttrain.reporting.loggers.follower import STEPS_AT_ONCE, Follower
from posttrain.reporting.loggers.sink import LoggedStep, LoggerProblem, RecordedRun
from posttrain.reporting.rows import write_rollouts
from posttrain.reporting.run_files import append_rows, complete_row


class Tracker:
    """A server. `before` is called before each request and may raise."""

    def __init__(self) -> None:
        self.steps: list[LoggedStep] = []
        self.alerts: list[str] = []
        self.endings: list[bool] = []
        self.before: Callable[[str], None] = lambda request: None


class Connection:
    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def open(self, run: RecordedRun) -> int | None:
        self.tracker.before("open")
        return self.tracker.steps[-1].step if self.tracker.steps else None

    def send(self, steps: Sequence[LoggedStep]) -> None:
        for step in steps:
            self.tracker.before("send")
            self.tracker.steps.append(step)

    def alert(self, finding: Finding) -> None:
        self.tracker.before("alert")
        self.tracker.alerts.append(finding.rule)

    def close(self, *, is_finished: bool) -> None:
        self.tracker.endings.append(is_finished)


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


def follower(folder: Path, tracker: Tracker, **options: Any) -> Follower:
    return Follower("fake", lambda: Connection(tracker), recorded_run(folder), **options)


def add_rows(folder: Path, *steps: int) -> None:
    append_rows(
        folder / "metrics.jsonl", [{"step": step, "train/reward": step / 7, "train/kl": None} for step in steps]
    )


def steps_of(tracker: Tracker) -> list[int]:
    return [step.step for step in tracker.steps]


def fail_at(count: int) -> Callable[[str], None]:
    """Raises at request number `count`, once."""
    left = [count]

    def before(request: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ConnectionError("refused")

    return before


def test_rows_arrive_in_order_with_their_numbers_and_without_nulls(tmp_path: Path, tracker: Tracker) -> None:
    add_rows(tmp_path, 0, 1, 2)
    one = follower(tmp_path, tracker)
    assert one.deliver()
    add_rows(tmp_path, 3)
    (tmp_path / "metrics.jsonl").open("ab").write(b'{"step": 4, "train/rew')  # it is being written
    assert one.deliver()
    assert steps_of(tracker) == [0, 1, 2, 3]
    assert tracker.steps[3].values == {"train/reward": 3 / 7}


@pytest.mark.parametrize("request_number", range(1, 12))
def test_an_outage_at_any_request_loses_and_doubles_nothing(
    tmp_path: Path, tracker: Tracker, request_number: int
) -> None:
    add_rows(tmp_path, *range(1, 6))
    tracker.before = fail_at(request_number)
    one = follower(tmp_path, tracker)
    results = [one.deliver()]
    add_rows(tmp_path, 6, 7)
    results += [one.deliver(), one.deliver()]
    assert results[-1]
    assert steps_of(tracker) == [1, 2, 3, 4, 5, 6, 7]
    assert len(list(one.warnings())) == results.count(False) <= 1


def test_an_answer_that_got_lost_does_not_double_the_step(tmp_path: Path, tracker: Tracker) -> None:
    add_rows(tmp_path, 1, 2, 3)
    one = follower(tmp_path, tracker)
    arrived = Connection.send

    def send_and_fail(self: Connection, steps: Sequence[LoggedStep]) -> None:
        arrived(self, steps)
        raise TimeoutError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", send_and_fail)
        assert not one.deliver()
    assert one.deliver()
    assert steps_of(tracker) == [1, 2, 3]


def test_a_killed_and_resumed_run_goes_on_where_the_tracker_is(tmp_path: Path, tracker: Tracker) -> None:
    add_rows(tmp_path, *range(1, 6))
    assert follower(tmp_path, tracker).deliver()
    (tmp_path / "metrics.jsonl").unlink()  # resumed from step 3: rows 4 and 5 are trained again
    add_rows(tmp_path, 1, 2, 3)
    again = follower(tmp_path, tracker)
    assert again.deliver()
    for step in (4, 5, 6):
        add_rows(tmp_path, step)
        assert again.deliver()
    assert steps_of(tracker) == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_was_made_again_is_read_from_its_start(tmp_path: Path, tracker: Tracker) -> None:
    add_rows(tmp_path, 1, 2, 3)
    one = follower(tmp_path, tracker)
    assert one.deliver()
    (tmp_path / "metrics.jsonl").unlink()
    add_rows(tmp_path, 4)
    assert one.deliver()
    assert steps_of(tracker) == [1, 2, 3, 4]


def test_a_validation_that_comes_later_is_sent_alone(tmp_path: Path, tracker: Tracker) -> None:
    add_rows(tmp_path, 1, 2)
    one = follower(tmp_path, tracker)
    assert one.deliver()
    complete_row(tmp_path / "metrics.jsonl", {"step": 2, "validation/accuracy": 0.5})
    assert one.deliver()
    add_rows(tmp_path, 3)
    assert one.deliver()
    assert [(step.step, set(step.values)) for step in tracker.steps[1:]] == [
        (2, {"train/reward"}),
        (2, {"validation/accuracy"}),
        (3, {"train/reward"}),
    ]
    again = follower(tmp_path, tracker)  # the run is resumed, and step 3 validated
    assert again.deliver()
    complete_row(tmp_path / "metrics.jsonl", {"step": 3, "validation/accuracy": 0.6})
    assert again.deliver()
    assert [(step.step, set(step.values)) for step in tracker.steps[4:]] == [(3, {"validation/accuracy"})]


def test_many_rows_are_sent_in_parts(tmp_path: Path, tracker: Tracker) -> None:
    add_rows(tmp_path, *range(1, 2 * STEPS_AT_ONCE + 4))
    one = follower(tmp_path, tracker)
    assert one.deliver()
    assert steps_of(tracker) == list(range(1, 2 * STEPS_AT_ONCE + 4))
    assert one.num_sent == 2 * STEPS_AT_ONCE + 3


def test_findings_become_alerts_once_also_after_a_resume(tmp_path: Path, tracker: Tracker) -> None:
    def find(step: int, rule: str, severity: str) -> None:
        finding = Finding(step, rule, severity, "train/kl", 1.0, "it runs away", ("lr=1e-6",), "seed")
        append_rows(tmp_path / "findings.jsonl", [finding.to_json()])

    add_rows(tmp_path, 1)
    find(1, "kl-runaway", "warning")
    assert follower(tmp_path, tracker).deliver()
    find(2, "kl-runaway", "error")
    find(2, "truncated", "error")
    assert follower(tmp_path, tracker).deliver()
    assert tracker.alerts == ["kl-runaway", "kl-runaway", "truncated"]
    tracker.steps.clear()  # a tracker that is filled anew
    assert follower(tmp_path, tracker).deliver()
    assert tracker.alerts[3:] == ["kl-runaway", "kl-runaway", "truncated"]


def test_answers_of_a_step_go_along_as_a_table(tmp_path: Path, tracker: Tracker, group: Any) -> None:
    add_rows(tmp_path, 1)
    write_rollouts(tmp_path / "rollouts" / "step_1.jsonl.gz", [group(0), group(1)])
    assert follower(tmp_path, tracker, num_answers=3).deliver()
    assert len(tracker.steps[0].answers) == 3
    assert tracker.steps[0].answers[0][0] == 1
    tracker.steps.clear()
    assert follower(tmp_path, tracker).deliver()
    assert tracker.steps[0].answers == ()


def test_the_thread_sends_what_is_left_at_the_end(tmp_path: Path, tracker: Tracker) -> None:
    one = follower(tmp_path, tracker)
    one.start()
    for step in range(1, 20):
        add_rows(tmp_path, step)
        one.wake()
    one.end(is_finished=True)
    assert one.has_ended(60)
    assert steps_of(tracker) == list(range(1, 20))
    assert tracker.endings == [True]


def test_a_tracker_that_hangs_does_not_hold_up_the_end(tmp_path: Path, tracker: Tracker) -> None:
    released = threading.Event()
    tracker.before = lambda request: (released.wait(), None)[1]
    add_rows(tmp_path, 1)
    one = follower(tmp_path, tracker)
    one.start()
    one.end(is_finished=True)
    assert not one.has_ended(0.05)
    assert "still sending" in one.problem
    released.set()


def test_a_client_that_ends_the_process_ends_nothing_and_is_no_success(tmp_path: Path, tracker: Tracker) -> None:
    def leave(request: str) -> None:
        raise SystemExit(1)

    tracker.before = leave
    add_rows(tmp_path, 1)
    one = follower(tmp_path, tracker)
    one.start()
    one.end(is_finished=True)
    assert not one.has_ended(60)
    assert "SystemExit" in one.problem


def test_problems_are_said_once_per_outage_with_the_reason(tmp_path: Path, tracker: Tracker) -> None:
    def refuse(request: str) -> None:
        raise LoggerProblem("there is no API key: type `wandb login`")

    tracker.before = refuse
    one = follower(tmp_path, tracker)
    assert [one.deliver(), one.deliver()] == [False, False]
    (warning,) = one.warnings()
    assert warning.startswith("logger fake: there is no API key: type `wandb login`; the run continues")


def test_a_missing_client_is_named_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers_module, "find_spec", lambda name: None)
    trackers = Loggers(LoggerConfig(wandb_enabled=True))
    (line,) = trackers.start(recorded_run(tmp_path))
    assert "pip install 'posttrain[wandb]'" in line
    assert f"posttrain log sync {tmp_path} --to wandb" in line
    assert trackers.wake() == []
    assert trackers.finish(is_finished=True, limit_s=1) == []


def test_a_run_keeps_its_identity_in_run_json(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"record_id": "abc", "title": "GRPO of x"}))
    assert (recorded_run(tmp_path).id, recorded_run(tmp_path).title) == ("abc", "GRPO of x")
    (tmp_path / "run.json").write_text(json.dumps({"started_at": "2026-01-01"}))  # of an earlier version
    assert recorded_run(tmp_path).id == recorded_run(tmp_path).id != "abc"
