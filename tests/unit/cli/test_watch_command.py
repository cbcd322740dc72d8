"""`posttrain watch` on the command line: what it refuses, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from made_runs import make_run

from posttrain.cli.main import main
from posttrain.cli.watch_command import TOKEN_VARIABLE


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["watch", *arguments]) == 64
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str) -> None:
    said = refusal(capsys, str(tmp_path), "--host", host)
    assert host in said
    assert "--token-file" in said


def test_token_must_be_long_and_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_text("abc\n")
    assert "at least 16" in refusal(capsys, str(tmp_path), "--host", "0.0.0.0", "--token-file", str(tmp_path / "short"))
    assert "cannot be read" in refusal(capsys, str(tmp_path), "--token-file", str(tmp_path / "missing"))
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    assert TOKEN_VARIABLE in refusal(capsys, str(tmp_path))


def test_folders_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not found" in refusal(capsys, str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    assert "give the folder" in refusal(capsys, str(tmp_path / "file"))
    monkeypatch.chdir(tmp_path)
    assert "posttrain watch FOLDER" in refusal(capsys)


def test_command_says_where_it_listens_and_ends_with_a_signal(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    command = [sys.executable, "-m", "posttrain", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        address = said.split()[2]
        assert "1 run in" in said
        with urllib.request.urlopen(f"{address}api/runs") as answer:
            assert b'"name":"run"' in answer.read()
        with urllib.request.urlopen(f"{address}api/events") as stream:  # an open page does not hold it up
            stream.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, 128 + signal.SIGTERM)
