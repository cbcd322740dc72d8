"""Full and read-only disks: an error that says so, intact checkpoints, and the same end once there is room."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tiny_runs

from faults import processes
from faults.campaign import Case, NotPossibleHere, Part
from faults.lab import Lab, assert_refused
from faults.processes import Finished, Surroundings

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
KIB = 1024
# A checkpoint of the tiny model has about 560 KiB, its largest file 250.
SIZES_KIB = (64, 300, 600, 900, 1300, 1800)
FILE_SIZES_KIB = (16, 60, 120, 200)  # no less: the console is a file, too
KINDS = ("dpo", "dpo-background", "grpo")
CANNOT_MOUNT = 77


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for kind in KINDS[:1] if short else KINDS:
        for size in FILE_SIZES_KIB[-1:] if short else FILE_SIZES_KIB:
            yield Case(f"files-up-to-{size}k:{kind}", partial(limited_files, lab, kind, size * KIB))
        for size in (900,) if short else SIZES_KIB:
            yield Case(f"disk-of-{size}k:{kind}", partial(small_disk, lab, kind, size * KIB))
    for kind in KINDS[:0] if short else KINDS:
        for change in ("full", "read-only"):
            yield Case(f"{change}-in-mid-run:{kind}", partial(changed_disk, lab, kind, change))
    yield Case("read-only:run-folder", partial(read_only, lab, "run"))
    for target in () if short else ("convert", "rewards", "pairs", "registry", "eval"):
        yield Case(f"read-only:{target}", partial(read_only, lab, target))


PART = Part("disks", "a full or read-only disk ends a run with its error; nothing saved before is lost", cases, 2)


def assert_said_and_resumes(lab: Lab, kind: str, run: Path, failed: Finished, folder: Path) -> None:
    assert failed.code not in (0, 85), f"the disk was full, and the run says that it is done: {failed}"
    assert any(word in failed.output for word in ("No space left", "File too large", "Read-only")), (
        f"no reason: {failed}"
    )
    for checkpoint in run.glob("step_*"):
        step = int(checkpoint.name.removeprefix("step_"))
        expected = lab.whole(kind) / f"step_{step}" / "policy/weights/model/model.safetensors"
        assert (checkpoint / "policy/weights/model/model.safetensors").read_bytes() == expected.read_bytes()
    lab.assert_same_end(kind, run, processes.run(lab.arguments(kind, run), folder / "log"))


def limited_files(lab: Lab, kind: str, size: int, folder: Path, chance: random.Random) -> None:
    """No file may grow beyond `size`: what a quota or an old file system does."""
    run = folder / "run"
    failed = processes.run(
        lab.arguments(kind, run), folder / "failed.log", Surroundings(max_file_bytes=size), limit_s=120
    )
    assert_said_and_resumes(lab, kind, run, failed, folder)


def small_disk(lab: Lab, kind: str, size: int, folder: Path, chance: random.Random) -> None:
    """A file system of `size` bytes, in a mount namespace of its own; what was on it is copied out in the end."""
    lab.whole(kind)
    disk, run = folder / "disk", folder / "run"
    disk.mkdir()
    arguments = lab.arguments(kind, disk / "run")
    finished = processes.begin_function(
        _run_on_small_disk, (arguments, str(disk), size, str(run)), folder / "failed.log"
    ).finish()
    if finished.code == CANNOT_MOUNT:
        raise NotPossibleHere(f"no tmpfs in a user namespace: {finished.output.strip()}")
    run.mkdir(exist_ok=True)
    if finished.code == 0:  # it fitted: with checkpoints of a background run there is no telling beforehand
        lab.assert_same_end(kind, run, finished)
    else:
        assert_said_and_resumes(lab, kind, run, finished, folder)


def _own_mounts() -> Any:
    """Root in a user namespace, with mounts of its own. This process has one thread: it was just forked."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(libc, None, "/", None, MS_REC | MS_PRIVATE)
    return libc


def _mount(
    libc: Any, source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if libc.mount(*words, flags, options.encode() if options else None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def _run_on_small_disk(arguments: list[str], disk: str, size: int, copy: str) -> int:
    try:
        _mount(_own_mounts(), "tmpfs", disk, "tmpfs", 0, f"size={size}")
    except OSError as error:
        print(error, flush=True)
        return CANNOT_MOUNT
    child = os.fork()
    if child == 0:
        from posttrain.cli.main import main

        os._exit(main(arguments))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if os.path.isdir(f"{disk}/run"):
        shutil.copytree(f"{disk}/run", copy)
    return code


def changed_disk(lab: Lab, kind: str, change: str, folder: Path, chance: random.Random) -> None:
    """A file system that becomes full or read-only after the second row, as one does whose device has errors."""
    lab.whole(kind)
    disk, run = folder / "disk", folder / "run"
    disk.mkdir()
    finished = processes.begin_function(
        _run_on_changing_disk, (lab.arguments(kind, disk / "run"), str(disk), change, str(run)), folder / "failed.log"
    ).finish()
    if finished.code == CANNOT_MOUNT:
        raise NotPossibleHere(f"no tmpfs in a user namespace: {finished.output.strip()}")
    assert_said_and_resumes(lab, kind, run, finished, folder)


def _run_on_changing_disk(arguments: list[str], disk: str, change: str, copy: str) -> int:
    try:
        libc = _own_mounts()
        _mount(libc, "tmpfs", disk, "tmpfs", 0, f"size={64 << 20}")
    except OSError as error:
        print(error, flush=True)
        return CANNOT_MOUNT
    child = os.fork()
    if child == 0:
        from posttrain.cli.main import main

        os._exit(main(arguments))
    while tiny_runs.count_rows(Path(disk) / "run") < 2:
        time.sleep(0.002)
    os.kill(child, signal.SIGSTOP)  # its next step comes after the change
    if change == "full":
        with suppress(OSError), open(f"{disk}/ballast", "wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
    while change == "read-only":
        try:
            _mount(libc, None, disk, None, MS_REMOUNT | MS_RDONLY)
            break
        except OSError:  # a file is open for writing: a little later
            os.kill(child, signal.SIGCONT)
            time.sleep(0.002)
            os.kill(child, signal.SIGSTOP)
    os.kill(child, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.copytree(f"{disk}/run", copy)
    return code


def _run_read_only(arguments: list[str], disk: str) -> int:
    try:
        _mount(_own_mounts(), "tmpfs", disk, "tmpfs", MS_RDONLY)
    except OSError as error:
        print(error, flush=True)
        return CANNOT_MOUNT
    from posttrain.cli.main import main

    os.chdir(disk)
    return main(arguments)


def read_only(lab: Lab, target: str, folder: Path, chance: random.Random) -> None:
    disk = folder / "disk"
    disk.mkdir()
    samples = folder / "samples.jsonl"
    samples.write_text('{"problem": "1 + 1?", "answer": "2", "response": "2", "reference": "2"}\n')
    commands = {
        "run": lambda: lab.arguments("dpo", disk / "run"),
        "convert": lambda: ["convert", str(lab.whole("dpo")), "--to", str(disk / "hf")],
        "rewards": lambda: ["rewards", "test", "--type", "math", str(samples), "--out", str(disk / "scores.jsonl")],
        "pairs": lambda: ["data", "pairs", str(lab.data / "traces.jsonl"), str(disk / "pairs.jsonl")],
        "registry": lambda: ["registry", "add", "m", str(lab.model), "--registry", str(disk / "registry")],
        "eval": lambda: ["eval", str(lab.model), f"data.dataset_name={samples}", f"eval.save_path={disk / 'eval'}"],
    }
    finished = processes.begin_function(_run_read_only, (commands[target](), str(disk)), folder / "log").finish()
    if finished.code == CANNOT_MOUNT:
        raise NotPossibleHere(f"no tmpfs in a user namespace: {finished.output.strip()}")
    assert_refused(finished)
    assert "Read-only file system" in finished.output or str(disk) in finished.output, f"no reason: {finished}"
