"""A console that is full, closed or gone: commands go on, and one whose output is its result does not claim success."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
from tiny_runs import command, rows_of, save_data, save_model, sft

from posttrain.checkpointing import Interruption
from posttrain.cli.console import ConsoleStream, surviving_console, unwritten
from posttrain.cli.main import main

SHOW = ["config", "show", "sft"]


def full() -> TextIO:
    return open("/dev/full", "w", buffering=1)


def without_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1)


def closed() -> None:
    return None


CONSOLES = [full, without_reader, closed]


@pytest.mark.parametrize("make", CONSOLES)
def test_writes_to_a_broken_stream_do_not_raise_and_are_noted(make: Any) -> None:
    stream = ConsoleStream(make())
    assert not stream.isatty()
    for _ in range(3):
        assert stream.write("text\n") == 5
        stream.flush()
    assert unwritten(stream)
    assert stream.is_reader_gone == (make is without_reader)


def test_output_appears_again_when_the_disk_has_room_again() -> None:
    class Disk:
        is_full, content = True, ""

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            self.content += text
            return len(text)

        def flush(self) -> None: ...

    disk = Disk()
    stream = ConsoleStream(disk)  # type: ignore[arg-type]
    stream.write("lost")
    disk.is_full = False
    stream.write("kept")
    assert disk.content == "kept"
    assert unwritten(stream) == "No space left on device"


def test_characters_that_the_stream_cannot_encode_are_escaped(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        ConsoleStream(file).write("▶ step\n")
    assert (tmp_path / "log").read_text() == "\\u25b6 step\n"


def test_closed_stream_that_nothing_is_printed_to_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with surviving_console() as (out, _):
        assert sys.stdout is out
        assert not unwritten(out)
    assert sys.stdout is None


@pytest.mark.parametrize("make", CONSOLES)
def test_training_goes_on_without_its_console(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = sft(save_model(tmp_path / "model"), save_data(tmp_path / "data"), tmp_path / "run", steps=2)
    monkeypatch.setattr(sys, "stdout", make())
    monkeypatch.setattr(sys, "stderr", make())
    assert main(arguments) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2]
    assert (tmp_path / "run" / "step_2").is_dir()


@pytest.mark.parametrize("make", CONSOLES)
def test_command_whose_result_is_its_output_does_not_claim_success(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", make())
    assert main(SHOW) == 1
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert ("could not be written to stdout" in message) == (make is not without_reader)


def test_help_on_a_full_disk_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", full())
    assert main(["--help"]) == 1


@pytest.mark.parametrize(("redirection", "code"), [(">/dev/full", 1), (">&-", 1), ("2>&-", 0), ("<&- >/dev/null", 0)])
def test_exit_code_of_a_process_with_redirected_streams(redirection: str, code: int) -> None:
    """Python flushes once more at exit; a failure there would change the code to 120."""
    script = f'"$@" {redirection}'
    ended = subprocess.run(["sh", "-c", script, "sh", *command(SHOW)], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_a_signal_is_stored_although_stderr_is_gone() -> None:
    saved = os.dup(2)
    stream = without_reader()
    try:
        os.dup2(stream.fileno(), 2)
        with Interruption() as interruption:
            os.kill(os.getpid(), 15)
            assert interruption.exit_code == 85
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def test_control_characters_are_shown_and_colours_stay() -> None:
    shown = io.StringIO()
    stream = ConsoleStream(shown)
    stream.write("a\x1b[2Jb\x1b]0;title\x07c\x9bd\tä\r\n")
    stream.write("\x1b[1;31mred\x1b[0m \x1b[2K\x1b[1A\x1b[?25l")
    assert shown.getvalue() == "a\\x1b[2Jb\\x1b]0;title\\x07c\\x9bd\tä\r\n\x1b[1;31mred\x1b[0m \x1b[2K\x1b[1A\x1b[?25l"
