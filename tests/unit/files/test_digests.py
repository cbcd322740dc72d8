"""Hashes of files are remembered as long as nobody can have changed them; a model is known by every byte."""

from __future__ import annotations

import array
import datetime
import hashlib
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from posttrain.files.digests import FileHashes, digest, hash_files
from posttrain.models.accepted_names import folder_fingerprint


def age(file: Path, seconds: float = 10.0) -> os.stat_result:
    """Let the file be as old as that."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)))
    return file.stat()


def change(file: Path, at: int, content: bytes, mark: os.stat_result) -> None:
    """Same size, same inode; the time is put back."""
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(content)
    os.utime(file, ns=(mark.st_atime_ns, mark.st_mtime_ns))


def test_a_changed_file_has_another_hash_and_an_unchanged_one_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("one")
    mark = age(file)
    hashes = FileHashes(tmp_path / "memory.json")
    first = hashes.of(file)
    hashes.save()
    change(file, 0, b"two", mark)
    assert FileHashes(tmp_path / "memory.json").of(file) == first
    os.utime(file, ns=(mark.st_atime_ns, mark.st_mtime_ns + 1))
    assert FileHashes(tmp_path / "memory.json").of(file) != first


def test_a_file_that_was_written_a_moment_ago_is_not_cached(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("one")
    hashes = FileHashes(tmp_path / "memory.json")
    first = hashes.of(file)
    change(file, 0, b"two", file.stat())
    assert hashes.of(file) != first, "written twice within one tick of the clock"


def test_entries_of_several_processes_are_merged_and_removed_files_dropped(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "gone")]
    for file in files:
        file.write_text(file.name)
        age(file)
    one, other = (FileHashes(tmp_path / "memory.json") for _ in range(2))
    one.of_all(files)
    other.of(files[0])
    one.save()
    files[2].unlink()
    other.save()
    remembered = FileHashes(tmp_path / "memory.json")
    assert remembered.unknown_bytes(files[:2]) == 0
    assert "gone" not in (tmp_path / "memory.json").read_text()


def test_every_byte_of_a_model_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(8 << 20))
    mark = age(weights)
    first = folder_fingerprint(model)
    shutil.copytree(model, tmp_path / "copy")
    assert folder_fingerprint(tmp_path / "copy") == first
    (model / "README.md").write_text("a model card is no part of the model")

    with monkeypatch.context() as patch:
        real = hashlib.file_digest
        read: list[str] = []
        patch.setattr(hashlib, "file_digest", lambda stream, name: read.append(stream.name) or real(stream, name))
        assert folder_fingerprint(model) == first
    assert read == [str(model / "config.json")], "large files are remembered from one command to the next"

    change(weights, 2 << 20, b"x", mark)
    os.utime(weights, ns=(mark.st_atime_ns, mark.st_mtime_ns + 1))
    assert folder_fingerprint(model) != first, "one byte between the beginning and the middle"


def test_an_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.safetensors").write_bytes(bytes(2 << 20))
    age(tmp_path / "model.safetensors")
    assert folder_fingerprint(tmp_path) == folder_fingerprint(tmp_path)


def test_two_commands_that_cache_at_once_lose_nothing(tmp_path: Path) -> None:
    files = [tmp_path / f"file{number}" for number in range(40)]
    for file in files:
        file.write_text(file.name)
        age(file)
    memory = tmp_path / "memory.json"

    def remember(part: list[Path]) -> None:
        for file in part:
            hashes = FileHashes(memory)
            hashes.of(file)
            hashes.save()

    threads = [threading.Thread(target=remember, args=(files[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FileHashes(memory).unknown_bytes(files) == 0


def test_a_user_without_a_home_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    (tmp_path / "a").write_text("a")
    assert hash_files([tmp_path / "a"]) == [hashlib.sha256(b"a").hexdigest()]


def test_a_digest_depends_on_content_and_not_on_addresses() -> None:
    class Decoder:
        """Its text says where it is in memory, as that of most objects."""

    day = datetime.date(2026, 1, 1)
    for value in (Decoder, lambda: array.array("b", [1, 2]), lambda: b"bytes", lambda: day, lambda: Path("a/b")):
        assert digest({"column": value()}) == digest({"column": value()})
    assert digest(array.array("b", [1, 2])) != digest(array.array("b", [1, 3]))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(day) != digest(datetime.date(2026, 1, 2))
