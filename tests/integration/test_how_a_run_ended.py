"""What a run leaves in its folder, and its exit code, when it crashes, is stopped early or loses its storage."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tiny_runs import run, sft

from posttrain import build
from posttrain import run as start
from posttrain.files.run_folder_lock import read_attempts
from posttrain.reporting import recorder


@pytest.fixture
def arguments(model: Path, data: Path, tmp_path: Path) -> list[str]:
    return [*sft(model, data, tmp_path / "run", steps=3), "checkpointing.save_period=1", "sft.val_at_start=false"]


def fail_at_row(monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
    append = recorder.append_rows

    def fail_or_append(path: Path, rows: Any) -> None:
        if path.name == "metrics.jsonl" and rows[0]["step"] == step:
            raise error
        append(path, rows)

    monkeypatch.setattr(recorder, "append_rows", fail_or_append)


def info_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_a_crash_leaves_its_reason_and_the_same_command_resumes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        fail_at_row(patched, 2, RuntimeError("the cable was pulled"))
        assert run(arguments) == 1
    assert (info_of(folder)["status"], info_of(folder)["reason"]) == ("crashed", "RuntimeError: the cable was pulled")
    (record,) = read_attempts(folder)
    assert (record.exit_code, record.error) == (None, "RuntimeError: the cable was pulled")
    log = (folder / "logs" / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "RuntimeError: the cable was pulled" in log
    assert run(arguments) == 0
    assert info_of(folder)["status"] == "finished"
    log = (folder / "logs" / "train.log").read_text()
    assert log.index("==== attempt 1: ") < log.index("Traceback") < log.index("==== attempt 2: ")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT, errno.EIO])
def test_storage_that_fails_during_a_run_is_no_bad_input(
    number: int,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    fail_at_row(monkeypatch, 2, OSError(number, os.strerror(number), str(folder / "metrics.jsonl")))
    assert run(arguments) == 74
    words = f"{folder / 'metrics.jsonl'}: {os.strerror(number)}"
    assert f"posttrain: error: {words}" in capsys.readouterr().err
    (record,) = read_attempts(folder)
    assert record.exit_code == 74
    assert words in str(record.error)
    assert words in info_of(folder)["reason"]


def test_a_crash_before_the_run_begins_is_in_the_record_and_the_log(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "start_workers", Mock(side_effect=RuntimeError("no room for the model")))
    assert run(arguments) == 1
    (record,) = read_attempts(tmp_path / "run")
    assert record.error == "RuntimeError: no room for the model"
    log = (tmp_path / "run" / "logs" / "train.log").read_text()
    assert log.startswith("==== attempt 1: ")
    assert "RuntimeError: no room for the model" in log


@pytest.mark.parametrize("moment", ["libraries are imported", "the model is loaded"])
def test_a_signal_before_the_loop_ends_the_attempt_and_leaves_nothing(
    moment: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if moment == "the model is loaded":
        monkeypatch.setattr(build, "start_workers", interrupted)
    else:
        monkeypatch.setattr(start, "quieten_libraries", interrupted)
    assert run(arguments) == 143
    assert "posttrain: SIGTERM: stopped at once" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
