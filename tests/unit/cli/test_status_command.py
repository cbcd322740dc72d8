"""`posttrain status`: alive or not, who holds the folder, and why a run stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main
from posttrain.cli.run_commands import status_lines
from posttrain.files import run_folder_lock as attempts
from posttrain.files.locks import Holder
from posttrain.files.run_folder_lock import Attempt, AttemptRecord

NODE = replace(Holder.this(), host="node-7", pid=4242, machine="another boot", command="posttrain grpo")


def save(folder: Path, status: str, reason: str = "", **attempt: Any) -> None:
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    (folder / "attempts" / "0001.json").write_text(
        attempts._text(AttemptRecord(1, "t", NODE, heartbeat=1000.0, **attempt))
    )
    info = {"status": status, "reason": reason, "max_steps": 100, "updated_at": "2026-03-01T09:12:44+00:00"}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "metrics.jsonl").write_text('{"step": 41}\n{"step": 42}\n')
    (folder / "step_40").mkdir(exist_ok=True)


def shown(folder: Path, now: float) -> dict[str, str]:
    first, *lines = status_lines(folder, now)
    assert first == str(folder)
    return {line[2:13].strip(): line[14:] for line in lines}


def test_a_run_that_is_alive(tmp_path: Path) -> None:
    save(tmp_path, "running")
    found = shown(tmp_path, 1004.0)
    assert found["state"] == "alive"
    assert found["held by"].startswith("process 4242 on node-7 (posttrain grpo), since ")
    assert found["held by"].endswith("heartbeat 4 s old")
    assert found["step"].startswith("42 of 100")
    assert found["checkpoint"].startswith("step_40, saved ")
    assert "why" not in found


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    save(tmp_path, "running")
    found = shown(tmp_path, 1600.0)
    assert found["state"] == "killed"
    assert found["held by"] == "no process: the folder is free"
    assert found["why"].startswith("no heartbeat for 600 s and no end")


@pytest.mark.parametrize(
    ("status", "reason", "attempt", "state", "why"),
    [
        ("crashed", "x", {"error": "RuntimeError: x"}, "crashed", "RuntimeError: x"),
        ("running", "", {"error": "StorageError: x", "exit_code": 74}, "ended by an error", "StorageError: x"),
        ("ended early", "stopped by signal SIGTERM", {"exit_code": 85}, "ended early", "stopped by signal SIGTERM"),
        ("finished", "finished", {"exit_code": 0}, "finished", "finished"),
    ],
)
def test_a_run_that_has_ended(
    status: str, reason: str, attempt: dict[str, Any], state: str, why: str, tmp_path: Path
) -> None:
    save(tmp_path, status, reason, ended="2026-03-01T10:00:00+00:00", **attempt)
    found = shown(tmp_path, 1001.0)
    assert (found["state"], found["why"]) == (state, why)
    assert "ended 2026-03-01T10:00:00+00:00 with" in found["attempt"]


def test_command_exits_with_0_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = Attempt(tmp_path / "run")
    attempt.has_begun = True
    attempt.end(None, "RuntimeError: out of memory")
    before = sorted(tmp_path.rglob("*"))
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "why         RuntimeError: out of memory" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_run_is_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["status", str(tmp_path / name)]) == 64
    assert "there is no run in it" in capsys.readouterr().err
