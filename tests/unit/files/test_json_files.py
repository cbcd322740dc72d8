"""JSON is read strictly: what is nested without end, ambiguous or endless is refused with its reason and its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from posttrain.errors import InputError
from posttrain.files.json_files import MAX_DEPTH, parse_json, read_at_most, read_json

REFUSED = {
    "[" * 200_000: "nested more than 100 deep",
    "[" * 200_000 + "]" * 200_000: "nested more than 100 deep",
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1): "nested more than 100 deep",
    '{"a": ' * 300 + "1" + "}" * 300: "nested more than 100 deep",
    "1" * 5000: "a number has too many digits",
    '{"a": 1, "b": {"c": 1, "c": 2}}': "the key 'c' is set twice",
    '{"a": ': "Expecting value",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=lambda text: text[:20])
def test_texts_that_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match=reason):
            parse_json(given)
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"a.json: not JSON .{reason}"):
        read_json(file)


def test_values_are_those_of_python() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    brackets = json.dumps("[{" * 1000)
    for text in (deep, brackets, '{"a": [1, 2.5, null, true, "ü"], "b": {}}', "3"):
        assert parse_json(text) == json.loads(text)


def test_bytes_that_are_not_utf8_and_files_without_an_end_are_refused() -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        parse_json(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read_at_most(Path("/dev/zero"), 2**20)


@pytest.mark.parametrize("path", ["missing.json", "/dev/null/x.json", "x" * 300])
def test_a_path_that_cannot_be_read_is_named_with_the_reason(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read .(No such file|Not a directory|File name too long)"):
        read_json(tmp_path / path)


def test_a_named_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"a.json: cannot be read .a named pipe, not a file"):
        read_json(tmp_path / "a.json")


def test_a_pipe_of_the_shell_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"{}")
    os.close(writer)
    assert read_at_most(Path(f"/dev/fd/{reader}"), 100) == b"{}"
    os.close(reader)
