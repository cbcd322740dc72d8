"""Frames between processes, and children that end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from posttrain.processes import Child, ending_of, frame, read_frame, take_frames, write_frame


def test_frames_are_taken_whole_and_in_order_however_the_bytes_come() -> None:
    sent = frame(b"one") + frame(b"") + frame(b"x" * 300)
    buffer, found = bytearray(), []
    for start in range(0, len(sent), 7):
        buffer += sent[start : start + 7]
        found += take_frames(buffer, max_bytes=300)
    assert found == [b"one", b"", b"x" * 300]
    assert buffer == b""


def test_a_frame_that_is_too_long_is_refused_after_those_before_it() -> None:
    buffer = bytearray(frame(b"good") + frame(b"x" * 11))
    assert take_frames(buffer, max_bytes=10) == [b"good"]
    with pytest.raises(ValueError, match="11 bytes"):
        take_frames(buffer, max_bytes=10)


def test_a_pipe_carries_frames_until_it_is_closed() -> None:
    reading, writing = os.pipe()
    write_frame(writing, b"one")
    assert read_frame(reading) == b"one"
    os.write(writing, frame(b"half of it")[:-3])
    os.close(writing)
    assert read_frame(reading) is None
    os.close(reading)


def test_a_child_is_killed_with_what_it_started_and_its_end_is_described() -> None:
    reading, writing = os.pipe()
    output, theirs = os.pipe()
    program = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    child = Child([sys.executable, "-c", program], [writing], theirs, os.environ)
    os.close(theirs)
    with os.fdopen(output, "rb") as lines, os.fdopen(reading, "rb") as inherited:
        assert lines.readline() == b"up\n"
        child.kill_group(wait_s=60)
        assert ending_of(child.returncode) == "signal 9 (SIGKILL)"
        assert lines.read() == b"", "what it started held the pipe, too"
        assert inherited.read() == b""


@pytest.mark.parametrize("how", ["die_with_parent", "die_on_hangup"])
def test_a_child_ends_with_a_parent_that_is_killed(how: str) -> None:
    child = (
        f"import sys, time; from posttrain import processes; processes.{how}(int(sys.argv[-1]))\n"
        "print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, sys, time; from posttrain.processes import Child\n"
        f"child = Child([sys.executable, '-c', {child!r}], [], 1, os.environ); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b"", "the child holds the pipe for as long as it lives"


def test_endings() -> None:
    assert ending_of(3) == "exit code 3"
    assert ending_of(-64) in ("signal 64 (unknown)", "signal 64 (SIGRTMAX)")
