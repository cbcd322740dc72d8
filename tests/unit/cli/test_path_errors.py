"""A path that cannot be used ends a command with 64 and one line: the path and the reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from posttrain.cli.main import main, report_errors

LONG = "x" * 300


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/dev/null/x", "Not a directory"),
        (f"/tmp/{LONG}", "File name too long"),
        ("/proc/x", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_made(
    folder: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"input": "a", "output": "b"}\n')
    code, told = called(
        capsys,
        "sft",
        f"data.train={{data_path: {data}}}",
        f"checkpointing.checkpoint_dir={folder}",
        "policy.device=cpu",
    )
    assert code == 64
    assert folder in told.splitlines()[-1]
    assert reason in told.splitlines()[-1]


def test_a_read_only_file_system(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/mnt/runs/a")

    assert report_errors(write) == 64
    assert capsys.readouterr().err == "posttrain: error: /mnt/runs/a: Read-only file system\n"


def test_an_error_that_is_not_about_a_path_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/dev/sda")

    assert report_errors(fail) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_word_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = called(capsys, "config", "show", "sft", "--config", "a\udcffb")
    assert code == 64
    assert "a\\udcffb is not UTF-8" in told


def test_a_working_directory_that_was_deleted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, told = called(capsys, "config", "show", "sft")
    assert code == 64
    assert "the working directory does not exist any more" in told
