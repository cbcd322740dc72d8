"""One writer per run folder: leases with a heartbeat, the fence between attempts, and their record."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from posttrain.checkpointing import CheckpointStore
from posttrain.errors import FolderHeld, InputError, StorageError, Superseded
from posttrain.files import durable
from posttrain.files import run_folder_lock as attempts
from posttrain.files.locks import Holder
from posttrain.files.run_folder_lock import STALE_S, Attempt, AttemptRecord, holder_of, read_attempts

NEVER = 1e9  # seconds between heartbeats: none in a test
TAKES = """
import sys
from pathlib import Path
from posttrain.files.run_folder_lock import Attempt
attempt = Attempt(Path(sys.argv[1]))
attempt.has_begun = True
print(attempt.number, flush=True)
sys.stdin.read()
"""


def take(folder: Path, **options: Any) -> Attempt:
    return Attempt(folder, beat_s=NEVER, **options)


def write_record(path: Path, record: AttemptRecord) -> None:
    path.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")


def elsewhere(folder: Path, *, heartbeat: float, number: int = 1, run: str | None = None) -> AttemptRecord:
    """An attempt of a process on another machine."""
    holder = replace(Holder.this(), host="node-7", pid=4242, machine="another boot")
    record = AttemptRecord(number, f"token{number}", holder, heartbeat, run=run)
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    write_record(folder / "attempts" / f"{number:04d}.json", record)
    return record


def process_that_holds(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return process


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- lease -------------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_with_the_holder_and_writes_nothing(tmp_path: Path) -> None:
    process = process_that_holds(tmp_path / "run")
    try:
        before = files(tmp_path)
        with pytest.raises(FolderHeld) as refused:
            take(tmp_path / "run")
        assert f"process {process.pid} on {os.uname().nodename}" in str(refused.value)
        assert read_attempts(tmp_path / "run")[0].started in str(refused.value), "since when"
        assert "checkpointing.checkpoint_dir" in str(refused.value)
        assert refused.value.exit_code == 75
        assert files(tmp_path) == before
    finally:
        process.communicate("")


def test_the_next_attempt_of_a_run_in_a_cluster_takes_over_from_a_live_one(tmp_path: Path) -> None:
    elsewhere(tmp_path, heartbeat=1000.0, run="grpo-run")
    new = take(tmp_path, clock=lambda: 1001.0, sleep=pytest.fail, run="grpo-run")
    assert new.number == 2
    assert read_attempts(tmp_path)[-1].run == "grpo-run"


@pytest.mark.parametrize("run", [None, "another-run"])
def test_other_runs_do_not_take_over(run: str | None, tmp_path: Path) -> None:
    elsewhere(tmp_path, heartbeat=1000.0, run="grpo-run")
    with pytest.raises(FolderHeld):
        take(tmp_path, clock=lambda: 1001.0, run=run)


def test_an_attempt_that_was_taken_over_stops_before_its_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = take(tmp_path, run="grpo-run")
    said: list[str] = []
    store = CheckpointStore(tmp_path, say=said.append, attempt=old)
    monkeypatch.setattr(Holder, "is_on_this_machine", False)

    def save() -> None:
        with store.writing(3) as folder:
            (folder / "weights").write_text("of the old attempt")
            take(tmp_path, run="grpo-run")  # in another pod

    with pytest.raises(Superseded):
        save()
    assert store.steps() == []


def test_a_killed_holder_on_this_machine_does_not_block_at_all(tmp_path: Path) -> None:
    process = process_that_holds(tmp_path / "run")
    process.kill()
    process.communicate()
    assert take(tmp_path / "run").number == 2


def test_a_process_with_the_pid_of_a_dead_holder_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    holder = replace(Holder.this(), created=1.0)  # this pid, of an earlier process
    write_record(tmp_path / "attempts" / "0001.json", AttemptRecord(1, "token", holder, heartbeat=1e12))
    assert take(tmp_path).number == 2


@pytest.mark.parametrize(("age", "is_refused"), [(0.0, True), (STALE_S - 1, True), (STALE_S, False), (1e6, False)])
def test_on_another_machine_the_heartbeat_decides(tmp_path: Path, age: float, is_refused: bool) -> None:
    elsewhere(tmp_path, heartbeat=1000.0)
    if is_refused:
        with pytest.raises(FolderHeld, match=f"4242 on node-7 .*{age:.0f} s"):
            take(tmp_path, clock=lambda: 1000.0 + age)
    else:
        slept: list[float] = []
        assert take(tmp_path, clock=lambda: 1000.0 + age, sleep=slept.append).number == 2
        assert sum(slept) == attempts.WATCH_S > 2 * attempts.BEAT_S


def test_a_clock_that_is_ahead_does_not_take_a_healthy_run_over(tmp_path: Path) -> None:
    elsewhere(tmp_path, heartbeat=1000.0)

    def beat_meanwhile(seconds: float) -> None:
        elsewhere(tmp_path, heartbeat=1005.0)

    before = files(tmp_path)
    with pytest.raises(FolderHeld, match="295 s"):
        take(tmp_path, clock=lambda: 1300.0, sleep=beat_meanwhile)
    assert list(files(tmp_path)) == list(before)


def test_a_holder_that_ends_while_it_is_watched_is_not_waited_for(tmp_path: Path) -> None:
    record = elsewhere(tmp_path, heartbeat=1000.0)
    slept: list[float] = []

    def end_meanwhile(seconds: float) -> None:
        slept.append(seconds)
        write_record(tmp_path / "attempts" / "0001.json", replace(record, ended="now", exit_code=85))

    assert take(tmp_path, clock=lambda: 2000.0, sleep=end_meanwhile).number == 2
    assert len(slept) == 1


def test_an_attempt_that_has_ended_is_not_watched(tmp_path: Path) -> None:
    write_record(
        tmp_path / "attempts" / "0001.json", replace(elsewhere(tmp_path, heartbeat=1000.0), ended="then", exit_code=85)
    )
    assert take(tmp_path, clock=lambda: 1001.0, sleep=pytest.fail).number == 2


def test_a_heartbeat_in_the_future_is_named_as_a_difference_of_the_clocks(tmp_path: Path) -> None:
    elsewhere(tmp_path, heartbeat=1300.0)
    with pytest.raises(FolderHeld, match="300 s"):
        take(tmp_path, clock=lambda: 1000.0)


def test_a_process_that_cannot_be_looked_up_is_judged_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc of some machines hides the processes of other users."""
    (tmp_path / "attempts").mkdir()
    holder = replace(Holder.this(), pid=4242)
    write_record(tmp_path / "attempts" / "0001.json", AttemptRecord(1, "token", holder, heartbeat=1000.0))

    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    assert holder.is_alive is None
    assert holder_of(tmp_path, lambda: 1001.0) is not None
    assert holder_of(tmp_path, lambda: 1000.0 + STALE_S) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"number": 1}', "[" * 100_000])
def test_a_live_holder_whose_record_cannot_be_parsed_keeps_the_folder(content: str, tmp_path: Path) -> None:
    first = take(tmp_path)
    record = tmp_path / "attempts" / "0001.json"
    record.write_text(content)
    os.utime(record, (1000.0, 1000.0))
    with pytest.raises(FolderHeld):
        take(tmp_path, clock=lambda: 1001.0)
    first.confirm()
    first.beat()
    assert [one.token for one in read_attempts(tmp_path)] == [first.record.token], "the next beat fixes it"


def test_a_record_with_a_key_of_a_newer_version_is_read(tmp_path: Path) -> None:
    take(tmp_path)
    path = tmp_path / "attempts" / "0001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reason": None}))
    with pytest.raises(FolderHeld, match=f"process {os.getpid()} on"):
        take(tmp_path)


def test_a_container_on_the_same_machine_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    """Its pid means nothing here: with the same number there is another process, or none."""
    record = elsewhere(tmp_path, heartbeat=1000.0)
    boot, _, pids = Holder.this().machine.rpartition(" ")
    holder = replace(record.holder, host=os.uname().nodename, machine=f"{boot} {pids}-of-a-container", pid=os.getpid())
    write_record(tmp_path / "attempts" / "0001.json", replace(record, holder=holder))
    assert holder_of(tmp_path, lambda: 1001.0) is not None
    assert holder_of(tmp_path, lambda: 1000.0 + STALE_S) is None


def test_heartbeats_move_on_while_the_holder_lives(tmp_path: Path) -> None:
    now = [1000.0]
    attempt = Attempt(tmp_path, beat_s=0.001, clock=lambda: now[0])
    now[0] = 2000.0
    seen = threading.Event()
    for _ in range(2000):
        if read_attempts(tmp_path)[0].heartbeat == 2000.0:
            break
        seen.wait(0.005)
    assert read_attempts(tmp_path)[0].heartbeat == 2000.0
    attempt.end(0)


def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them look before any of them writes."""
    everyone_has_looked = threading.Barrier(8)
    look = attempts.holder_of
    waited = threading.local()

    def look_and_wait(*arguments: Any) -> Any:
        found = look(*arguments)
        if not getattr(waited, "done", False):
            waited.done = True
            everyone_has_looked.wait()
        return found

    monkeypatch.setattr(attempts, "holder_of", look_and_wait)
    outcomes: list[str] = []

    def start() -> None:
        try:
            outcomes.append(f"attempt {take(tmp_path / 'run').number}")
        except FolderHeld:
            outcomes.append("refused")

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["attempt 1"] + ["refused"] * 7
    assert os.listdir(tmp_path / "run" / "attempts") == ["0001.json"]


def test_file_systems_without_hard_links_are_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(95, "Operation not supported")))
    first = take(tmp_path)
    assert [record.token for record in read_attempts(tmp_path)] == [first.record.token]
    with pytest.raises(FolderHeld):
        take(tmp_path)


def test_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"logger.log_dir: .*file/run.*Not a directory"):
        take(tmp_path / "file" / "run", setting="logger.log_dir")


@pytest.mark.parametrize(
    ("number", "has_earlier_attempts", "kind"),
    [
        (errno.EIO, False, StorageError),
        (errno.ESTALE, False, StorageError),
        (errno.ENOSPC, False, StorageError),
        (errno.EROFS, True, StorageError),  # it was written before
        (errno.EROFS, False, InputError),
        (errno.EACCES, False, InputError),
    ],
)
def test_storage_that_fails_at_the_start_is_no_bad_input(
    number: int, has_earlier_attempts: bool, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    if has_earlier_attempts:
        attempt = take(folder)
        attempt.has_begun = True
        attempt.end(74)
    error = OSError(number, os.strerror(number), str(folder / "attempts"))
    monkeypatch.setattr(durable, "create", Mock(side_effect=error))
    with pytest.raises(kind, match=os.strerror(number)):
        take(folder)
    assert (folder / "attempts" / "0001.json").exists() is has_earlier_attempts


# -- fence -------------------------------------------------------------------------------------------------------------


def test_an_attempt_stops_when_a_newer_one_exists(tmp_path: Path) -> None:
    attempt = take(tmp_path)
    attempt.confirm()
    elsewhere(tmp_path, heartbeat=1.0, number=2)
    with pytest.raises(Superseded, match="4242 on node-7") as stopped:
        attempt.confirm()
    assert stopped.value.exit_code == 76


def test_another_run_with_the_same_number_in_a_new_folder_of_the_same_name_is_recognised(tmp_path: Path) -> None:
    attempt = take(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    elsewhere(tmp_path / "run", heartbeat=1.0)
    before = files(tmp_path)
    with pytest.raises(Superseded, match="4242 on node-7"):
        attempt.confirm()
    attempt.beat()
    attempt.end(1)
    assert files(tmp_path) == before


def test_a_deleted_folder_is_made_again_and_counted(tmp_path: Path) -> None:
    attempt = take(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    attempt.confirm()
    attempt.confirm()
    assert attempt.num_losses == 1
    with pytest.raises(FolderHeld):
        take(tmp_path / "run")


def failing_reads(monkeypatch: pytest.MonkeyPatch, number: int, how_often: int) -> None:
    """Of records, with this errno."""
    monkeypatch.setattr(attempts, "_PAUSES_S", (0.0, 0.0, 0.0))
    read, failures = attempts.read_at_most, [number] * how_often

    def fail_or_read(path: Path, max_bytes: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "injected", str(path))
        return read(path, max_bytes)

    monkeypatch.setattr(attempts, "read_at_most", fail_or_read)


@pytest.mark.parametrize(("number", "how_often"), [(errno.ESTALE, 2), (errno.EIO, 2), (errno.ENOENT, 1)])
def test_a_record_that_cannot_be_read_for_a_moment_takes_nothing_over(
    number: int, how_often: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a network file system may be behind."""
    attempt = take(tmp_path)
    failing_reads(monkeypatch, number, how_often)
    attempt.confirm()
    assert attempt.num_losses == 0


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_record_that_stays_unreadable_is_a_fault_of_the_storage(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = take(tmp_path)
    failing_reads(monkeypatch, number, how_often=100)
    with pytest.raises(OSError, match="injected"):
        attempt.confirm()


def test_a_deleted_folder_of_records_is_made_again_and_nothing_else_is_lost(tmp_path: Path) -> None:
    attempt = take(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    shutil.rmtree(tmp_path / "attempts")
    attempt.confirm()
    assert attempt.num_losses == 0
    assert [record.token for record in read_attempts(tmp_path)] == [attempt.record.token]


# -- record ------------------------------------------------------------------------------------------------------------


def test_the_record_of_each_attempt_names_its_checkpoints_and_its_end(tmp_path: Path) -> None:
    for steps, code in (((10, 20, 30), 85), ((), 1), ((40,), 0)):
        attempt = take(tmp_path)
        attempt.has_begun = True
        for step in steps:
            attempt.note_checkpoint(step)
        attempt.end(code)
    records = read_attempts(tmp_path)
    assert [(r.number, r.first_checkpoint, r.last_checkpoint, r.exit_code) for r in records] == [
        (1, 10, 30, 85),
        (2, None, None, 1),
        (3, 40, 40, 0),
    ]
    assert all(record.ended and record.started and record.holder.pid == os.getpid() for record in records)


def test_an_attempt_that_began_nothing_leaves_nothing(tmp_path: Path) -> None:
    take(tmp_path / "results" / "run").end(64)
    assert os.listdir(tmp_path) == []


def test_a_crash_before_the_first_step_is_recorded(tmp_path: Path) -> None:
    take(tmp_path).end(None)
    (record,) = read_attempts(tmp_path)
    assert record.ended is not None
    assert take(tmp_path).number == 2


def test_an_old_record_that_cannot_be_read_blocks_nothing_and_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "0003.json").write_text(json.dumps({"number": 3}))
    os.utime(tmp_path / "attempts" / "0003.json", (1000.0, 1000.0))
    assert take(tmp_path, clock=lambda: 1000.0 + STALE_S, sleep=lambda seconds: None).number == 4


def test_numbers_go_on_after_the_records_were_deleted(tmp_path: Path) -> None:
    """An attempt removes what those of lower numbers were writing."""
    (tmp_path / "tmp_step_20.7").mkdir()
    assert take(tmp_path).number == 8


def test_an_attempt_ends_once_with_its_reason(tmp_path: Path) -> None:
    attempt = take(tmp_path)
    attempt.has_begun = True
    attempt.end(74, "StorageError: full")
    attempt.end(None, "later")
    (record,) = read_attempts(tmp_path)
    assert (record.exit_code, record.error) == (74, "StorageError: full")


def test_of_many_records_the_first_and_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(1, 131):
        record = elsewhere(tmp_path, heartbeat=1.0, number=number)
    write_record(tmp_path / "attempts" / "0130.json", replace(record, ended="then", exit_code=1))
    left, current = tmp_path / "attempts" / f".{'a' * 32}", tmp_path / "attempts" / f".{'b' * 32}"
    for path, when in ((left, 1000.0), (current, 2000.0)):
        path.write_text("{}")
        os.utime(path, (when, when))
    assert take(tmp_path, clock=lambda: 2001.0).number == 131
    assert [record.number for record in read_attempts(tmp_path)] == [1, *range(32, 132)]
    assert not left.exists(), "a kill left it behind"
    assert current.exists()
