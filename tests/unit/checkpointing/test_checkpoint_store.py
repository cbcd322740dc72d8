"""Writing, finding and removing checkpoints; damage of every kind; readers beside a writer."""

from __future__ import annotations

import errno
import json
import math
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from torch.distributed.checkpoint.api import CheckpointException

from posttrain.checkpointing import CheckpointError, CheckpointStore
from posttrain.checkpointing import store as store_module
from posttrain.errors import StorageError, Superseded
from posttrain.files import durable
from posttrain.files.run_folder_lock import Attempt


class Said(list[str]):
    """Collects what the store says."""

    def __call__(self, line: str) -> None:
        self.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self)


@pytest.fixture
def said() -> Said:
    return Said()


def make_store(
    folder: Path, said: Said, *, keep_top_k: int | None = None, metric_name: str | None = None
) -> CheckpointStore:
    return CheckpointStore(folder, keep_top_k=keep_top_k, metric_name=metric_name, save_period=10, say=said)


def save(store: CheckpointStore, step: int, weights: bytes = b"weights", **info: object) -> Path:
    with store.writing(step) as tmp:
        (tmp / "policy" / "weights").mkdir(parents=True)
        (tmp / "policy" / "weights" / "model.safetensors").write_bytes(weights)
        (tmp / "config.yaml").write_text("grpo: {}\n")
        store.save_info(tmp, {"total_steps": step, **info})
    return store.folder / f"step_{step}"


def save_and_fail(store: CheckpointStore, step: int, error: BaseException) -> None:
    with store.writing(step) as tmp:
        (tmp / "half").write_text("…")
        raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


# --- the ordinary life ---


def test_a_folder_that_does_not_exist_has_no_checkpoint_and_is_not_created(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path / "results" / "run", said)
    assert store.latest() is None
    assert store.steps() == []
    store.retain()
    assert not (tmp_path / "results").exists()


def test_a_written_checkpoint_is_complete_listed_and_announced(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path / "results" / "run", said)
    with store.writing(10) as tmp:
        assert tmp == store.folder / "tmp_step_10"
        (tmp / "file").write_text("content")
        assert store.latest() is None, "not there before it is complete"
    save(store, 20)

    assert store.steps() == [10, 20]
    assert store.latest() == store.folder / "step_20"
    assert names(store.folder) == ["step_10", "step_20"]
    status = json.loads((store.folder / "latest_checkpoint_status.json").read_text())
    assert status["last_checkpoint_step"] == 20
    assert status["last_successful_ckpt_save_completion"] > 0


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
LOST = FileNotFoundError(errno.ENOENT, "No such file or directory", "tmp_step_1/.metadata")
WRAPPED = CheckpointException("write", {0: (LOST, traceback.extract_stack())})


@pytest.mark.parametrize(
    ("error", "seen", "step"),
    [
        pytest.param(KeyboardInterrupt(), KeyboardInterrupt, 20, id="stopped"),
        pytest.param(NO_SPACE, OSError, 20, id="full disk"),
        pytest.param(NO_SPACE, OSError, 10, id="full disk, a step that is there"),
        pytest.param(WRAPPED, FileNotFoundError, 20, id="wrapped by torch"),
    ],
)
def test_an_exception_while_writing_leaves_the_earlier_checkpoints_and_nothing_else(
    error: BaseException, seen: type[BaseException], step: int, tmp_path: Path, said: Said
) -> None:
    store = make_store(tmp_path, said)
    save(store, 10)
    with pytest.raises(seen) as caught:
        save_and_fail(store, step, error)
    assert isinstance(error, KeyboardInterrupt) or f"step_{step}" in caught.value.__notes__[-1]
    assert names(tmp_path) == ["step_10"]
    assert store.latest() == tmp_path / "step_10"


@pytest.mark.parametrize(("free", "is_said"), [(100, True), (1 << 40, False)])
def test_a_full_disk_is_named_where_the_error_does_not(
    free: int, is_said: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError if is_said else RuntimeError):
        save_and_fail(make_store(tmp_path, said), 1, RuntimeError("unexpected pos 704 vs 598"))


def test_a_disk_that_is_full_when_files_are_synced_fails_the_save(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, said)
    save(store, 10)
    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "fsync", Mock(side_effect=NO_SPACE))
        with pytest.raises(OSError, match="No space left"):
            save(store, 20)
    assert names(tmp_path) == ["step_10"]
    assert store.latest() == tmp_path / "step_10"


def test_filesystems_that_cannot_sync_folders_are_accepted(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable.os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    store = make_store(tmp_path, said)
    save(store, 10)
    assert store.latest() == tmp_path / "step_10"


def test_a_failed_rename_puts_the_replaced_checkpoint_back(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, said)
    save(store, 10, b"first")
    rename = store_module.os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(source).name == "tmp_step_10":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(store_module.os, "rename", failing)
        with pytest.raises(OSError, match="Input/output"):
            save(store, 10, b"second")
    assert names(tmp_path) == ["step_10"]
    assert (tmp_path / "step_10/policy/weights/model.safetensors").read_bytes() == b"first"
    assert store.latest() == tmp_path / "step_10"


def test_saving_a_step_again_replaces_it(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    save(store, 10, b"first")
    save(store, 10, b"second")
    assert names(tmp_path) == ["step_10"]
    assert (tmp_path / "step_10/policy/weights/model.safetensors").read_bytes() == b"second"
    assert store.latest() == tmp_path / "step_10"


def test_errors_after_a_complete_checkpoint_are_reported_and_do_not_fail_the_run(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "write_text", Mock(side_effect=NO_SPACE))
    store = make_store(tmp_path, said)
    save(store, 10)
    assert store.latest() == tmp_path / "step_10"
    assert "step_10" in said.text


def test_training_info_holds_numbers_of_all_kinds_as_json(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    numbers = {"val_reward": math.nan, "consumed_samples": np.int64(96), "val:accuracy": np.float32(0.5)}
    save(store, 10, current_step=3, sampler_name=None, lengths=[1, math.inf], **numbers)
    expected = {"total_steps": 10, "current_step": 3, "sampler_name": None, "lengths": [1, None]}
    read = store.read_info(tmp_path / "step_10")
    assert read == {**expected, "val_reward": None, "consumed_samples": 96, "val:accuracy": 0.5}


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_training_info_that_cannot_be_read_names_the_file(tmp_path: Path, said: Said, content: str) -> None:
    (tmp_path / "training_info.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"training_info\.json"):
        make_store(tmp_path, said).read_info(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused_with_its_field(tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpointing\.checkpoint_dir"):
        make_store(tmp_path / "file", said)


# --- damage ---


WEIGHTS, CHECKSUMS = "policy/weights/model.safetensors", "checksums.json"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def forget_a_digest(path: Path) -> None:
    content = json.loads(path.read_text())
    content["files"]["config.yaml"]["sha256"] = []
    del content["own_sha256"]  # as checkpoints of earlier versions are
    path.write_text(json.dumps(content))


def put_a_folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "file", "named"),
    [
        pytest.param(flip_a_bit, WEIGHTS, "model.safetensors", id="flip_a_bit"),
        pytest.param(truncate, WEIGHTS, "model.safetensors has 6 bytes instead of 7", id="truncate"),
        pytest.param(Path.unlink, "config.yaml", "config.yaml is missing", id="lose_a_file"),
        pytest.param(Path.unlink, CHECKSUMS, "checksums.json is missing", id="lose_the_checksums"),
        pytest.param(
            lambda path: path.write_text(path.read_text()[:40]), CHECKSUMS, CHECKSUMS, id="tear_the_checksums"
        ),
        pytest.param(lambda path: path.write_text("{}"), CHECKSUMS, CHECKSUMS, id="empty_the_checksums"),
        pytest.param(lambda path: path.write_text("[]"), CHECKSUMS, CHECKSUMS, id="make_the_checksums_a_list"),
        pytest.param(forget_a_digest, CHECKSUMS, "config.yaml", id="forget_a_digest"),
        pytest.param(put_a_folder_in_its_place, "config.yaml", "config.yaml", id="put_a_folder_in_a_files_place"),
    ],
)
def test_a_damaged_checkpoint_is_reported_skipped_and_left_in_place(
    damage: Callable[[Path], None], file: str, named: str, tmp_path: Path, said: Said
) -> None:
    store = make_store(tmp_path, said)
    save(store, 10)
    damage(save(store, 20) / file)
    assert store.latest() == tmp_path / "step_10"
    assert f"Skipping damaged checkpoint {tmp_path / 'step_20'}" in said.text
    assert named in said.text
    assert (tmp_path / "step_20").is_dir()


def test_when_every_checkpoint_is_damaged_there_is_none(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    flip_a_bit(save(store, 10) / WEIGHTS)
    truncate(save(store, 20) / WEIGHTS)
    assert store.latest() is None
    assert len(said) == 2


def test_an_unfinished_save_is_reported_and_skipped_by_a_reader_and_removed_by_the_next_save(
    tmp_path: Path, said: Said
) -> None:
    store = make_store(tmp_path, said)
    save(store, 10)
    for step in (7, 20):
        (tmp_path / f"tmp_step_{step}").mkdir()
        (tmp_path / f"tmp_step_{step}" / "half").write_text("…")
    assert store.latest() == tmp_path / "step_10"
    assert f"Skipping {tmp_path / 'tmp_step_20'}: the save did not finish" in said
    assert names(tmp_path) == ["step_10", "tmp_step_20", "tmp_step_7"]
    checkpoint = save(store, 20)
    assert names(tmp_path) == ["step_10", "step_20"]
    assert not (checkpoint / "half").exists()


def test_files_that_people_add_to_a_checkpoint_do_not_damage_it(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    (save(store, 10) / "NOTES.md").write_text("the good one")
    assert store.latest() == tmp_path / "step_10"


def test_folders_with_similar_names_are_no_checkpoints(tmp_path: Path, said: Said) -> None:
    for name in ("step_", "step_x", "step_010", "my_step_10", "tmp_step_x", "best", "step_10_copy"):
        (tmp_path / name).mkdir()
    store = make_store(tmp_path, said, keep_top_k=1)
    assert store.steps() == []
    save(store, 20)
    assert store.steps() == [20]
    assert len(names(tmp_path)) == 8


# --- what a killed writer leaves ---


def test_a_swap_that_was_cut_in_two_is_readable_and_undone_by_the_next_save(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    save(store, 10, b"first")
    (tmp_path / "step_10").rename(tmp_path / "old_step_10")
    assert store.steps() == [10]
    assert store.latest() == tmp_path / "old_step_10"
    save(store, 20)
    assert names(tmp_path) == ["step_10", "step_20"]
    assert (tmp_path / "step_10/policy/weights/model.safetensors").read_bytes() == b"first"
    assert "Restored checkpoint" in said.text


def test_a_removal_that_was_cut_short_is_finished_by_the_next_save(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    save(store, 10)
    save(store, 20)
    (tmp_path / "step_10").rename(tmp_path / "removing_step_10")
    shutil.copytree(tmp_path / "step_20", tmp_path / "old_step_20")
    assert store.steps() == [20]
    save(store, 30)
    assert names(tmp_path) == ["step_20", "step_30"]


# --- retention on the disk ---


def test_the_best_are_kept_and_the_latest_too(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said, keep_top_k=2, metric_name="val:accuracy")
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.1)):
        save(store, step, **{"val:accuracy": accuracy})
    assert store.steps() == [20, 30, 40]
    assert said == [f"Removing checkpoint {tmp_path / 'step_10'} due to being outside top-2"]
    save(store, 50, **{"val:accuracy": 0.8})
    assert store.steps() == [20, 50]


@pytest.mark.parametrize(
    ("keep_top_k", "left"),
    [(None, [[10], [10, 13], [10, 13, 20]]), (2, [[10], [10, 13], [10, 20]])],  # null keeps all
)
def test_a_checkpoint_between_two_periods_is_kept_while_it_is_the_latest(
    keep_top_k: int | None, left: list[list[int]], tmp_path: Path, said: Said
) -> None:
    store = make_store(tmp_path, said, keep_top_k=keep_top_k)
    for step, steps in zip((10, 13, 20), left, strict=True):
        save(store, step)
        assert store.steps() == steps


def test_damaged_checkpoints_do_not_push_good_ones_out(tmp_path: Path, said: Said) -> None:
    """A run that resumes before two damaged checkpoints must keep what it saves, though theirs are the higher steps."""
    store = make_store(tmp_path, said, keep_top_k=1)
    save(store, 10)
    everything = make_store(tmp_path, said, keep_top_k=None)
    flip_a_bit(save(everything, 30) / WEIGHTS)
    truncate(save(everything, 40) / WEIGHTS)
    resumed = make_store(tmp_path, said, keep_top_k=1)
    assert resumed.latest() == tmp_path / "step_10"
    save(resumed, 20)
    assert resumed.steps() == [20, 30, 40]
    assert resumed.latest() == tmp_path / "step_20"
    save(resumed, 30)
    assert resumed.latest() == tmp_path / "step_30"
    assert resumed.steps() == [30, 40]


def test_the_newest_checkpoint_survives_retention(tmp_path: Path, said: Said) -> None:
    flip_a_bit(save(make_store(tmp_path, said), 30) / WEIGHTS)
    store = make_store(tmp_path, said, keep_top_k=1)
    save(store, 20)
    assert store.steps() == [20, 30]


def test_an_unreadable_metric_counts_as_missing(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said, keep_top_k=1, metric_name="val:accuracy")
    save(store, 10, **{"val:accuracy": "high"})
    save(store, 20, **{"val:accuracy": True})
    save(store, 30, **{"val:accuracy": 0.1})
    save(store, 40)
    assert store.steps() == [30, 40]


# --- a reader beside the writer ---


def test_a_reader_finds_a_complete_checkpoint_at_every_moment_of_repeated_swaps(tmp_path: Path, said: Said) -> None:
    store = make_store(tmp_path, said)
    save(store, 10, b"version 0")
    stop = threading.Event()
    failures: list[str] = []
    looks = 0

    def read() -> None:
        nonlocal looks
        heard = Said()
        reader = make_store(tmp_path, heard)
        while not stop.is_set():
            found = reader.latest()
            looks += 1
            if found is None:
                failures.append(f"nothing found; said {heard.text}")
            if "damaged" in heard.text:
                failures.append(heard.text)
            heard.clear()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for version in range(1, 40):
            save(store, 10, f"version {version}".encode())
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert looks > 0
    assert store.latest() == tmp_path / "step_10"


def test_a_checkpoint_renamed_while_the_folder_is_listed_is_not_missed(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, said)
    listings = iter([["step_10"], ["step_10", "old_step_20"]])
    monkeypatch.setattr(store_module.os, "listdir", lambda folder: next(listings))
    assert store.steps() == [10, 20]


def test_a_swap_that_ends_between_two_looks_hides_nothing(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, said)
    save(store, 10)
    looks: list[str] = []
    stat = Path.stat

    def in_the_middle_of_a_swap(path: Path, **options: bool) -> object:
        if path.parent == tmp_path:
            looks.append(path.name)
            if len(looks) == 1:  # the old one has just lost its name, the new one gets it right after this look
                raise FileNotFoundError
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", in_the_middle_of_a_swap)
    assert store.latest() == tmp_path / "step_10"
    assert looks[:3] == ["step_10", "old_step_10", "step_10"]


# --- a newer attempt ---


def test_a_writer_that_wakes_up_leaves_the_checkpoint_of_a_newer_attempt_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung while it flushed a checkpoint, and another attempt began one meanwhile."""
    store = make_store(tmp_path, said)
    store.attempt = Attempt(tmp_path)
    theirs = tmp_path / "tmp_step_20.2"
    publish = durable.put_folder

    def publish_late(*arguments: Path) -> None:
        publish(*arguments)
        (tmp_path / "attempts" / "0002.json").write_text("{}")
        theirs.mkdir()

    monkeypatch.setattr(durable, "put_folder", publish_late)
    with pytest.raises(Superseded):
        save(store, 10)
    assert theirs.is_dir()
    assert (tmp_path / "step_10").is_dir()
    assert not (tmp_path / "latest_checkpoint_status.json").exists()


def test_a_repair_removes_what_this_and_older_attempts_were_writing_only(tmp_path: Path, said: Said) -> None:
    for name in ("tmp_step_1", "tmp_step_2.1", "removing_step_3"):
        (tmp_path / name).mkdir()
    store = make_store(tmp_path, said)
    store.attempt = Attempt(tmp_path)  # number 2: there is a folder of attempt 1
    (tmp_path / "tmp_step_4.3").mkdir()
    save(store, 10)
    assert names(tmp_path) == ["attempts", "step_10", "tmp_step_4.3"]
