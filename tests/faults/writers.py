"""Several commands with one run folder: one writes, the others are refused at once, the record is of one run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.lab import Lab, assert_no_traceback
from faults.processes import Finished

EXIT_INPUT, EXIT_IN_USE = 64, 75
OTHER_RATE = "policy.optimizer.kwargs.lr=3e-3"


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for number in range(1 if short else 12):
        yield Case(f"two-at-once-{number}", partial(at_once, lab, 2))
    for number in range(0 if short else 4):
        yield Case(f"four-at-once-{number}", partial(at_once, lab, 4))
    for number in range(1 if short else 6):
        yield Case(f"two-resumes-{number}", partial(two_resumes, lab))
    yield Case("suspended", partial(suspended, lab))
    yield Case("killed", partial(killed, lab))


PART = Part(
    "writers", "a run folder has one writer; a second command is refused, and a dead writer blocks nothing", cases, 1
)


def assert_refused_by(finished: Finished, pid: int | None = None) -> None:
    assert finished.code == EXIT_IN_USE, f"not refused: {finished}"
    assert_no_traceback(finished)
    assert pid is None or str(pid) in finished.output, f"the holder {pid} is not named: {finished}"


def at_once(lab: Lab, count: int, folder: Path, chance: random.Random) -> None:
    """With two learning rates. Who wins is chance; what is in the folder is that one's alone.

    A command that starts after the end of the winner's run finds it complete (0), or with another rate (64).
    """
    wholes = {"": lab.whole("dpo"), OTHER_RATE: other_whole(lab)}
    run, rates = folder / "run", [OTHER_RATE if number % 2 else "" for number in range(count)]
    running = []
    for number, rate in enumerate(rates):
        words = [*lab.arguments("dpo", run), *([rate] if rate else [])]
        running.append(processes.begin(words, folder / f"log_{number}"))
        time.sleep(chance.uniform(0, 0.3))
    finished = [one.finish() for one in running]
    written = {rate for rate, end in zip(rates, finished, strict=True) if end.code == 0}
    assert len(written) == 1, f"{len(written)} settings have been trained: {[one.code for one in finished]}"
    for end in finished:
        if end.code == EXIT_INPUT and "trained with other settings up to step 6" in end.output:
            assert_no_traceback(end)
        elif end.code:
            assert_refused_by(end)
    whole = wholes[written.pop()]
    assert tiny_runs.results_of(run) == tiny_runs.results_of(whole), "rows of another run"
    assert tiny_runs.weights_of(run / "step_6") == tiny_runs.weights_of(whole / "step_6")


def other_whole(lab: Lab) -> Path:
    def make(shared: Path) -> Path:
        finished = processes.run([*lab.arguments("dpo", shared / "run"), OTHER_RATE], shared / "log")
        assert finished.code == 0, finished
        return shared / "run"

    found: Path = lab.shared("other-rate", make)
    return found


def suspended(lab: Lab, folder: Path, chance: random.Random) -> None:
    """A holder that lives but does nothing keeps the folder, and goes on when it may."""
    run = folder / "run"
    holder = processes.begin(lab.arguments("dpo", run), folder / "holder.log")
    holder.wait_for(lambda: tiny_runs.count_rows(run) >= 1)
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        second = processes.run(lab.arguments("dpo", run), folder / "log")
    finally:
        os.kill(holder.pid, signal.SIGCONT)
    assert_refused_by(second, holder.pid)
    lab.assert_same_end("dpo", run, holder.finish())


def killed(lab: Lab, folder: Path, chance: random.Random) -> None:
    """On the same machine there is nothing to wait for."""
    run = folder / "run"
    holder = processes.begin(lab.arguments("dpo", run), folder / "holder.log")
    holder.wait_for(lambda: tiny_runs.count_rows(run) >= 2)
    holder.kill_all()
    lab.assert_same_end("dpo", run, processes.run(lab.arguments("dpo", run), folder / "log", limit_s=60))


def two_resumes(lab: Lab, folder: Path, chance: random.Random) -> None:
    """Of a run that was killed, started at the same instant: as two operators, or a scheduler and an operator, do."""
    run = folder / "run"
    dead = processes.begin(lab.arguments("dpo", run), folder / "dead.log")
    dead.wait_for(lambda: any(run.glob("step_*")))
    dead.kill_all()
    running = [processes.begin(lab.arguments("dpo", run), folder / f"log_{number}") for number in range(2)]
    finished = [one.finish() for one in running]
    winners = [end for end in finished if end.code == 0]
    assert winners, f"both were refused: {[str(end) for end in finished]}"
    for end in finished:
        if end.code:
            assert_refused_by(end)
    lab.assert_same_end("dpo", run, winners[0])
