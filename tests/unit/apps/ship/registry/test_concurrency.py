"""Several processes at once: one production version, and a history without gaps."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.apps.ship.registry import Lineage, Registry, RegistryBusy
from posttrain.apps.ship.registry.store import DATABASE, LOCK
from posttrain.files.locks import locked

NUM_PROCESSES = int(os.environ.get("POSTTRAIN_TEST_PROMOTIONS", "5"))

# One interpreter imports MLflow and then forks: importing it in each process would take far longer than promoting.
PROMOTE_ALL = """
import os, sys
import mlflow.store.model_registry.sqlalchemy_store, mlflow.store.tracking.sqlalchemy_store, sqlalchemy.orm
from posttrain.apps.ship.registry import Registry, RegistryConflict

def promote(folder, name, version, expect):
    try:
        Registry(folder, wait_s=120).promote(name, version, "production", why=f"promotion {version}", expect=expect)
        return 0
    except RegistryConflict:
        return 7

def promote_all(folder, count, name, expect):
    children = []
    for version in range(1, count + 1):
        child = os.fork()
        if child == 0:
            os._exit(promote(folder, name, version, expect))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

sqlalchemy.orm.configure_mappers()
folder, count = sys.argv[1], int(sys.argv[2])
print(*promote_all(folder, count, "in-turn", None))
print(*promote_all(folder, count, "first-only", 0))
"""


def test_concurrent_promotions_leave_one_production_version_and_a_full_history(
    registry: Registry, registry_folder: Path, make_model: Callable[[str], Path], passed: Lineage
) -> None:
    folder = make_model("a")
    for name in ("in-turn", "first-only"):
        for _ in range(NUM_PROCESSES):
            registry.add(name, folder, passed)
    script = [sys.executable, "-c", PROMOTE_ALL, str(registry_folder), str(NUM_PROCESSES)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    in_turn, first_only = ([int(code) for code in line.split()] for line in ended.stdout.splitlines())

    assert in_turn == [0] * NUM_PROCESSES
    entries = registry.history("in-turn")
    assert [entry.change.ordinal for entry in entries] == list(range(1, NUM_PROCESSES + 1))
    assert sorted(entry.change.version for entry in entries) == list(range(1, NUM_PROCESSES + 1))
    before = None
    for entry in entries:  # each promotion takes the place of the one before it
        replaced = [move.version for move in entry.moves if move.after == "archived"]
        assert replaced == ([] if before is None else [before])
        before = entry.change.version
    stages = {version.version: version.stage for version in registry.versions("in-turn")}
    assert [version for version, stage in stages.items() if stage == "production"] == [before]
    assert sorted(stages.values()) == ["archived"] * (NUM_PROCESSES - 1) + ["production"]
    assert int(registry._store.client.get_registered_model("in-turn").aliases["production"]) == before

    # Promotions that expect an empty place: exactly one of them finds it empty.
    assert sorted(first_only) == [0] + [7] * (NUM_PROCESSES - 1)
    winner = first_only.index(0) + 1
    assert registry.get("first-only").version == winner
    assert [entry.change.version for entry in registry.history("first-only")] == [winner]


def _hold(path: Path, held: multiprocessing.synchronize.Event) -> None:
    with locked(path, wait_s=1):
        held.set()
        time.sleep(60)


def test_registry_is_busy_while_another_process_writes(
    registry: Registry, registry_folder: Path, make_model: Callable[[str], Path], passed: Lineage
) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=_hold, args=(registry_folder / LOCK, held))
    holder.start()
    try:
        assert held.wait(30)
        with pytest.raises(RegistryBusy, match=rf"being written by process {holder.pid} on .*; waited 0.2 s"):
            Registry(registry_folder, wait_s=0.2).add("m", make_model("a"), passed)
        assert registry.names() == [], "reading needs no lock, and nothing was written"
        assert not (registry_folder / "artifacts").exists(), "the copy is gone, too"
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        assert Registry(registry_folder, wait_s=5).add("m", make_model("b"), passed).version == 1
    finally:
        holder.kill()
        holder.join()


@pytest.mark.parametrize("kind", ["EXCLUSIVE", "IMMEDIATE"])  # MLflow tries for 20 s
def test_locked_database_is_reported_as_busy_in_one_line(
    registry: Registry,
    registry_folder: Path,
    tmp_path: Path,
    make_model: Callable[[str], Path],
    passed: Lineage,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """Such as a backup, or MLflow's own pages: they know nothing of our lock."""
    registry.add("m", make_model("a"), passed)
    copied = shutil.copytree(registry_folder, tmp_path / kind)  # no process has a connection to this one yet
    other = sqlite3.connect(copied / DATABASE, isolation_level=None)
    other.execute(f"BEGIN {kind}")
    capfd.readouterr()
    try:
        with pytest.raises(RegistryBusy, match=r"another process is writing to the registry; waited \d+ s"):
            Registry(copied, wait_s=0).promote("m", 1, "canary", why="a test")
    finally:
        other.close()
    assert "Traceback" not in capfd.readouterr().err
    Registry(copied, wait_s=5).promote("m", 1, "canary", why="a test")
