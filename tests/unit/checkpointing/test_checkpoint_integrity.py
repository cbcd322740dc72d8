"""Sealing a folder and finding damage in it, with files of several pieces."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from posttrain.checkpointing import durable, integrity
from posttrain.checkpointing.integrity import find_damage, seal, total_bytes


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


def test_sealing_again_replaces_the_list(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("first")
    seal(tmp_path)
    (tmp_path / "file").write_text("second")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "er").write_text("")
    seal(tmp_path)
    assert find_damage(tmp_path) == []
    assert set(json.loads((tmp_path / "checksums.json").read_text())["files"]) == {"file", "deep/er"}


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

    def unreadable(path: Path, start: int, piece_bytes: int) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(integrity, "_digest_of_piece", unreadable)
    (problem,) = find_damage(tmp_path)
    assert problem.startswith("file cannot be read")


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

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            durable.write_text(path, "second")
    assert path.read_text() == "first"
    durable.write_text(path, "third")
    assert path.read_text() == "third"
    assert os.listdir(tmp_path) == ["status.json"]


def test_losing_data_while_syncing_a_folder_is_not_taken_for_a_missing_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        durable.sync_folder(tmp_path)


def test_syncing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        durable.sync_file(tmp_path / "file")
        durable.sync_folder(tmp_path)
        durable.write_text(tmp_path / "file", "y")
    assert len(os.listdir("/proc/self/fd")) == before
