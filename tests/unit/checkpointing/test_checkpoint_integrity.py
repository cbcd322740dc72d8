"""Sealing a folder and finding damage in it, with files of several pieces."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from posttrain.checkpointing import integrity
from posttrain.checkpointing.integrity import CHECKSUMS, find_damage, seal, total_bytes
from posttrain.files import durable

IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(integrity, "_PIECE_BYTES", 100)
    monkeypatch.setattr(integrity, "_READ_BYTES", 7)  # does not divide the piece
    return 100


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 300])
def test_digests_are_those_of_the_pieces(tmp_path: Path, small_pieces: int, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    seal(tmp_path)
    recorded = json.loads((tmp_path / "checksums.json").read_text())
    pieces = [content[start : start + small_pieces] for start in range(0, size, small_pieces)] or [b""]
    assert recorded["piece_bytes"] == small_pieces
    expected = {"size": size, "sha256": [hashlib.sha256(piece).hexdigest() for piece in pieces]}
    assert recorded["files"] == {"file": expected}
    assert find_damage(tmp_path) == []
    assert total_bytes(tmp_path) == size


def test_a_flipped_bit_is_found_and_located(tmp_path: Path, small_pieces: int) -> None:
    content = bytes(range(256))
    (tmp_path / "file").write_bytes(content)
    seal(tmp_path)
    for position in (0, 1, 50, 99, 100, 101, 199, 200, 254, 255):
        flipped = bytearray(content)
        flipped[position] ^= 0x80
        (tmp_path / "file").write_bytes(flipped)
        start = position // small_pieces * small_pieces
        (problem,) = find_damage(tmp_path)
        assert problem.endswith(f"first in bytes {start} to {min(start + small_pieces, 256)}")
    assert find_damage(tmp_path, contents=False) == []


def test_the_size_of_pieces_is_taken_from_the_checkpoint(
    tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1000))
    seal(tmp_path)
    monkeypatch.setattr(integrity, "_PIECE_BYTES", 64)
    assert find_damage(tmp_path) == []


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(name * 10)
    seal(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "c").write_text("short")
    assert find_damage(tmp_path) == ["a is missing", "c has 5 bytes instead of 10"]


def test_a_file_that_cannot_be_read_is_damage_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("content")
    seal(tmp_path)
    monkeypatch.setattr(integrity, "_digest_of_piece", Mock(side_effect=IO_ERROR))
    (problem,) = find_damage(tmp_path)
    assert problem.startswith("file ")


def test_everything_is_synced_before_the_folder_counts_as_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").write_text("w")
    (tmp_path / "config.yaml").write_text("c")
    synced: list[Path] = []
    sync_file, sync_folder = durable.sync_file, durable.sync_folder
    monkeypatch.setattr(durable, "sync_file", lambda path: (synced.append(path), sync_file(path)))
    monkeypatch.setattr(durable, "sync_folder", lambda path: (synced.append(path), sync_folder(path)))
    seal(tmp_path)
    assert set(synced[:2]) == {tmp_path / "policy" / "weights", tmp_path / "config.yaml"}
    assert synced[2:] == [tmp_path / "checksums.json", tmp_path / "policy", tmp_path]


def test_a_write_that_fails_leaves_the_earlier_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    durable.write_text(path, "first")
    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "fsync", Mock(side_effect=IO_ERROR))
        with pytest.raises(OSError, match="Input/output"):
            durable.write_text(path, "second")
        with pytest.raises(OSError, match="Input/output"):  # not taken for a file system that syncs no folders
            durable.sync_folder(tmp_path)
    assert path.read_text() == "first"
    durable.write_text(path, "third")
    assert path.read_text() == "third"
    assert os.listdir(tmp_path) == ["status.json"]


def test_syncing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        durable.sync_file(tmp_path / "file")
        durable.sync_folder(tmp_path)
        durable.write_text(tmp_path / "file", "y")
    assert len(os.listdir("/proc/self/fd")) == before


# -- the list itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    (tmp_path / "policy" / "weights").mkdir(parents=True)
    (tmp_path / "policy" / "weights" / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "train_dataloader.pt").write_text("state")
    (tmp_path / "config.yaml").write_text("sft: {}")
    seal(tmp_path)
    return tmp_path


def change_list(folder: Path, change: Callable[[dict[str, Any]], object], *, as_before: bool) -> None:
    """`as_before`: as earlier versions of posttrain wrote the list, without a checksum of its own."""
    path = folder / "checksums.json"
    content = json.loads(path.read_text())
    change(content)
    if as_before:
        content.pop("own_sha256", None)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("as_before", [False, True])
@pytest.mark.parametrize("dropped", ["policy/weights/model.safetensors", "train_dataloader.pt", "config.yaml", "all"])
def test_a_dropped_entry_is_damage_although_the_file_is_there(sealed: Path, dropped: str, as_before: bool) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["files"] = {name: entry for name, entry in content["files"].items() if dropped not in (name, "all")}

    change_list(sealed, drop, as_before=as_before)
    if dropped != "all":
        (sealed / dropped).write_bytes(b"changed")
    (problem,) = find_damage(sealed)
    named = "lists no files" if dropped == "all" else f"{dropped} is not in"
    assert (named if as_before else "own_sha256") in problem


def test_every_flipped_bit_of_the_list_is_found_or_changes_no_entry(sealed: Path) -> None:
    path = sealed / "checksums.json"
    content = path.read_bytes()
    before = json.loads(content)
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        if not find_damage(sealed):  # white space, or the name of the checksum itself
            assert json.loads(path.read_text())["files"] == before["files"]


def test_a_file_that_would_be_loaded_and_is_not_listed_is_damage(sealed: Path) -> None:
    (sealed / "notes.txt").write_text("best run so far")
    (sealed / "hf").mkdir()
    (sealed / "hf" / "model.safetensors").write_text("converted later")
    (sealed / "policy" / ".DS_Store").write_text("of the file browser")
    assert find_damage(sealed) == []
    (sealed / "policy" / "weights" / "pytorch_model.bin").write_text("planted")
    assert find_damage(sealed) == ["policy/weights/pytorch_model.bin is not in checksums.json"]
    assert find_damage(sealed, below="policy/weights") == ["policy/weights/pytorch_model.bin is not in checksums.json"]
    assert find_damage(sealed, below="policy/tokenizer") == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/file", "policy/../../file"])
def test_a_list_that_names_files_outside_of_the_folder_is_damage(sealed: Path, name: str) -> None:
    entry = {"size": 1, "sha256": ["00"]}
    change_list(sealed, lambda content: None, as_before=True)
    assert find_damage(sealed) == [], "a list of an earlier version is accepted"
    change_list(sealed, lambda content: content["files"].update({name: entry}), as_before=True)
    (problem,) = find_damage(sealed)
    assert "outside of the folder" in problem


@pytest.mark.parametrize("name", [CHECKSUMS, "a.bin"])
def test_a_named_pipe_is_damage_and_is_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    seal(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert any("pipe" in problem or "not a regular file" in problem for problem in find_damage(tmp_path))


def test_checksums_that_are_nested_without_end_are_damage(tmp_path: Path) -> None:
    (tmp_path / CHECKSUMS).write_text("[" * 200_000)
    assert "nested more than" in find_damage(tmp_path)[0]
