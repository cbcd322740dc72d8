"""Two ranks under Ray that lose each other, their node or their driver, and processes that stand still for a while.

The run is long enough that one which trains on after the loss would be seen by its rows.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import psutil
import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.kills import _ranks_of
from faults.lab import Lab
from faults.processes import Finished, Running, Surroundings

STEPS, AT_ROW = 60, 12
MAX_ROWS_AFTER = 2  # the step under way, and a row that was just being written
MAX_STOP_S = 20.0  # 10 of them wait for the rank that caused an error
STILL_S = 60.0  # longer than the heartbeat of a run folder may be old
DEADLINE_S = 60  # of every operation, the start of the ranks among them; the default is hours


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    if short:  # a start of Ray takes long
        return
    for victim in ("rank", "raylet", "gcs"):
        yield Case(f"killed:{victim}", partial(killed, lab, victim))
    for victim in ("driver", "rank"):
        yield Case(f"still:{victim}", partial(still, lab, victim))
    yield Case("still-for-good:rank", partial(still_for_good, lab))


PART = Part("ranks", "a run that loses a rank or its node stops within seconds; one that stood still goes on", cases, 6)


def arguments(lab: Lab, folder: Path) -> list[str]:
    own = [f"dpo.max_num_steps={STEPS}", "dpo.val_period=0", "checkpointing.save_period=10"]
    return [*lab.arguments("dpo-ray", folder), *own, "checkpointing.metric_name=null"]


def whole(lab: Lab) -> Path:
    def make(shared: Path) -> Path:
        finished = processes.run(arguments(lab, shared / "run"), shared / "log", limit_s=300)
        assert finished.code == 0, finished
        return shared / "run"

    found: Path = lab.shared("ranks", make)
    return found


def assert_same_end(lab: Lab, run: Path, finished: Finished) -> None:
    assert finished.code == 0, finished
    assert tiny_runs.results_of(run) == tiny_runs.results_of(whole(lab)), "other rows"
    last = f"step_{STEPS}"
    assert tiny_runs.weights_of(run / last) == tiny_runs.weights_of(whole(lab) / last), "other weights"


def begun(lab: Lab, folder: Path, **environment: str) -> Running:
    """A run in its steps, with a checkpoint behind it."""
    run = folder / "run"
    whole(lab)
    running = processes.begin(arguments(lab, run), folder / "killed.log", Surroundings(environment=environment))
    assert running.wait_for(lambda: tiny_runs.count_rows(run) >= AT_ROW), f"over too early: {running.finish()}"
    return running


def processes_named(running: Running, name: str) -> list[psutil.Process]:
    return [one for one in processes.descendants(running.pid) if one.name().startswith(name)]


VICTIMS: dict[str, Callable[[Running], Sequence[psutil.Process]]] = {
    "rank": lambda running: _ranks_of(running, "rank_1"),
    "raylet": lambda running: processes_named(running, "raylet"),
    "gcs": lambda running: processes_named(running, "gcs_server"),
    "driver": lambda running: [psutil.Process(running.pid)],
}


def assert_stops_and_resumes(
    lab: Lab, running: Running, folder: Path, everybody: Sequence[psutil.Process], limit_s: float
) -> None:
    run, started, rows = folder / "run", time.monotonic(), tiny_runs.count_rows(folder / "run")
    try:
        finished = running.finish(limit_s + 60)
        seconds, after = time.monotonic() - started, tiny_runs.count_rows(run) - rows
        assert finished.code not in (0, 64), f"a lost process was not noticed, or taken for bad input: {finished}"
        assert after <= MAX_ROWS_AFTER, f"trained on for {after} steps: {finished}"
        assert seconds <= limit_s, f"stopped after {seconds:.0f} s: {finished}"
        left = processes.wait_until_gone([one for one in everybody if one.pid != running.pid], 30)
        assert not left, f"still running: {[' '.join(one.cmdline())[:80] for one in left]}"
    finally:
        processes.kill(everybody)
    assert_same_end(lab, run, processes.run(arguments(lab, run), folder / "log", limit_s=300))


def killed(lab: Lab, victim: str, folder: Path, chance: random.Random) -> None:
    running = begun(lab, folder)
    everybody, victims = processes.descendants(running.pid), VICTIMS[victim](running)
    assert victims, f"no {victim} among {[one.name() for one in everybody]}"
    processes.kill(victims)
    assert_stops_and_resumes(lab, running, folder, everybody, MAX_STOP_S)


def still(lab: Lab, victim: str, folder: Path, chance: random.Random) -> None:
    """Shorter than any deadline: as when a machine swaps, or is moved."""
    running = begun(lab, folder)
    (process,) = VICTIMS[victim](running)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(STILL_S)
    os.kill(process.pid, signal.SIGCONT)
    assert_same_end(lab, folder / "run", running.finish(300))


def still_for_good(lab: Lab, folder: Path, chance: random.Random) -> None:
    running = begun(lab, folder, POSTTRAIN_WORKER_DEADLINE_S=str(DEADLINE_S))
    everybody = processes.descendants(running.pid)
    (process,) = VICTIMS["rank"](running)
    os.kill(process.pid, signal.SIGSTOP)
    assert_stops_and_resumes(lab, running, folder, everybody, DEADLINE_S + MAX_STOP_S)
