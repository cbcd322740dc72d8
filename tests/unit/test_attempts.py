"""One writer per run folder: leases with a heartbeat, the fence between attempts, and their record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain import attempts
from posttrain.attempts import STALE_S, Attempt, AttemptRecord, holder_of, read_attempts
from posttrain.errors import FolderHeld, InputError, Superseded
from posttrain.locks import Holder

NEVER = 1e9  # seconds between heartbeats: none in a test
TAKES = """
import sys
from pathlib import Path
from posttrain.attempts import Attempt
attempt = Attempt(Path(sys.argv[1]))
attempt.has_begun = True
print(attempt.number, flush=True)
sys.stdin.read()
"""


def take(folder: Path, **options: Any) -> Attempt:
    return Attempt(folder, beat_s=NEVER, **options)


def elsewhere(folder: Path, *, heartbeat: float, number: int = 1) -> AttemptRecord:
    """An attempt of a process on another machine."""
    holder = replace(Holder.this(), host="node-7", pid=4242, machine="another boot")
    record = AttemptRecord(number, f"token{number}", holder, heartbeat)
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    attempts._write(folder / "attempts" / f"{number:04d}.json", record)
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


def test_a_killed_holder_on_this_machine_does_not_block_at_all(tmp_path: Path) -> None:
    process = process_that_holds(tmp_path / "run")
    process.kill()
    process.communicate()
    assert take(tmp_path / "run").number == 2


def test_a_process_with_the_pid_of_a_dead_holder_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    holder = replace(Holder.this(), created=1.0)  # this pid, of an earlier process
    attempts._write(tmp_path / "attempts" / "0001.json", AttemptRecord(1, "token", holder, heartbeat=1e12))
    assert take(tmp_path).number == 2


@pytest.mark.parametrize(("age", "is_refused"), [(0.0, True), (STALE_S - 1, True), (STALE_S, False), (1e6, False)])
def test_on_another_machine_the_heartbeat_decides(tmp_path: Path, age: float, is_refused: bool) -> None:
    elsewhere(tmp_path, heartbeat=1000.0)
    if is_refused:
        with pytest.raises(FolderHeld, match=f"4242 on node-7 .* its heartbeat is {age:.0f} s old"):
            take(tmp_path, clock=lambda: 1000.0 + age)
    else:
        assert take(tmp_path, clock=lambda: 1000.0 + age).number == 2


def test_a_container_on_the_same_machine_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    """Its pid means nothing here: with the same number there is another process, or none."""
    record = elsewhere(tmp_path, heartbeat=1000.0)
    boot, _, pids = Holder.this().machine.rpartition(" ")
    holder = replace(record.holder, host=os.uname().nodename, machine=f"{boot} {pids}-of-a-container", pid=os.getpid())
    attempts._write(tmp_path / "attempts" / "0001.json", replace(record, holder=holder))
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
    def no_links(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    first = take(tmp_path)
    assert [record.token for record in read_attempts(tmp_path)] == [first.record.token]
    with pytest.raises(FolderHeld):
        take(tmp_path)


def test_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"logger.log_dir: .*file/run cannot be written \(Not a directory\)"):
        take(tmp_path / "file" / "run", setting="logger.log_dir")


# -- fence -------------------------------------------------------------------------------------------------------------


def test_an_attempt_stops_when_a_newer_one_exists(tmp_path: Path) -> None:
    attempt = take(tmp_path)
    attempt.confirm()
    elsewhere(tmp_path, heartbeat=1.0, number=2)
    with pytest.raises(Superseded, match="taken over by attempt 2: process 4242 on node-7") as stopped:
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


def test_a_record_that_cannot_be_read_blocks_nothing_and_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "0003.json").write_text(json.dumps({"number": 3}))
    assert take(tmp_path).number == 4
