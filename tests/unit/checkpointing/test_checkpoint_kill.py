"""A checkpoint folder after `kill -9`: at random instants of a saving loop, and at every single filesystem
operation."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.checkpointing import CheckpointStore

# Goes on from the newest checkpoint; saves every step twice, so that swaps happen as often as new folders. `save`
# counts the saves, and every file holds that number.
SAVING_LOOP = """
import sys
from pathlib import Path
from posttrain.checkpointing import CheckpointStore

def say(line):
    print("said", line, flush=True)

store = CheckpointStore(
    Path(sys.argv[1]), keep_top_k=2, say=say
)
newest = store.latest()
save = store.read_info(newest)["save"] if newest else 0
while True:
    save += 1
    with store.writing(save // 2) as tmp:
        (tmp / "policy" / "weights").mkdir(parents=True)
        for index in range(3):
            (tmp / "policy" / "weights" / f"shard_{index}").write_text(str(save) * 500)
        store.save_info(tmp, {"save": save})
    print("complete", save, flush=True)
"""


def make_store(folder: Path, said: list[str], keep_top_k: int = 2) -> CheckpointStore:
    return CheckpointStore(folder, keep_top_k=keep_top_k, say=said.append)


def run_and_kill(script: Path, folder: Path, output: Path, *, let_one_complete: bool, delay_s: float) -> list[str]:
    """What the loop printed before it was killed, `delay_s` after its start or after its first complete save."""
    with output.open("w") as stdout:
        child = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=stdout, stderr=subprocess.STDOUT)
        try:
            while let_one_complete and "complete" not in output.read_text() and child.poll() is None:
                time.sleep(0.005)
            time.sleep(delay_s)
            assert child.poll() is None, f"the loop ended by itself: {output.read_text()}"
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    # A line counts if it was written to its end.
    return output.read_text().split("\n")[:-1]


def test_random_kills_never_lose_a_checkpoint_that_was_announced(tmp_path: Path) -> None:
    chance = random.Random(0)
    script = tmp_path / "saving_loop.py"
    script.write_text(SAVING_LOOP)
    folder = tmp_path / "checkpoints"
    announced = 0
    for number in range(20):
        # Every fourth may hit the start: finding the newest, putting the folder in order.
        late = number % 4 != 0
        delay_s = chance.random() * (0.1 if late else 0.2)
        lines = run_and_kill(script, folder, tmp_path / "output", let_one_complete=late, delay_s=delay_s)
        assert not [line for line in lines if "damaged" in line], (
            "what a killed one left is never taken for a checkpoint"
        )
        announced = max([announced, *(int(line.split()[1]) for line in lines if line.startswith("complete "))])

        said: list[str] = []
        store = make_store(folder, said)
        newest = store.latest()
        assert not [line for line in said if "damaged" in line]
        if newest is None:
            assert announced == 0
            continue
        save = store.read_info(newest)["save"]
        assert save >= announced
        for index in range(3):
            assert (newest / "policy/weights" / f"shard_{index}").read_text() == str(save) * 500
    assert announced >= 15


KILLING = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "open")


def die_at_operation(number: int) -> None:
    """From here on the process ends, as by kill -9, just before its `number`-th operation on the filesystem."""
    left = [number]

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in KILLING:
        setattr(os, name, counted(getattr(os, name)))


def write(store: CheckpointStore, step: int, version: int) -> None:
    with store.writing(step) as tmp:
        (tmp / "policy").mkdir()
        (tmp / "policy" / "weights").write_text(f"weights {version}")
        store.save_info(tmp, {"version": version})


@pytest.mark.parametrize("step", [2, 3], ids=["replacing the newest", "a new one that makes another surplus"])
def test_killed_at_every_operation_of_a_save(tmp_path: Path, step: int) -> None:
    said: list[str] = []
    before = make_store(tmp_path / "before", said)
    write(before, 1, 1)
    write(before, 2, 2)

    finished = False
    number = 0
    while not finished:
        folder = tmp_path / str(number)
        shutil.copytree(before.folder, folder)
        child = os.fork()
        if child == 0:
            try:
                die_at_operation(number)
                write(make_store(folder, said), step, 3)
            finally:
                os._exit(1 if sys.exc_info()[0] else 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), code
        finished = code == 0

        # A new process finds the old one or the new one, whole, and nothing that looks damaged.
        said.clear()
        reader = make_store(folder, said)
        newest = reader.latest()
        assert newest is not None, f"killed at operation {number}: {sorted(os.listdir(folder))}"
        assert not [line for line in said if "damaged" in line], said
        version = reader.read_info(newest)["version"]
        assert version in ((3,) if finished else (2, 3))
        assert (newest / "policy/weights").read_text() == f"weights {version}"

        # It goes on, and nothing of the killed one stays.
        write(reader, 4, 4)
        kept = {4, *(s for s in (1, 2, 3) if s in reader.steps())}
        assert reader.steps() == sorted(kept)
        assert len(kept) == 2
        leftovers = {name for name in os.listdir(folder) if not name.startswith("step_")}
        assert leftovers == {"latest_checkpoint_status.json"}
        status = json.loads((folder / "latest_checkpoint_status.json").read_text())
        assert status["last_checkpoint_step"] == 4
        number += 1
    assert number > 20, "a save has more operations than that"
