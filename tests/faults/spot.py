"""Machines of a run on the local cluster are taken away: with notice, with SIGTERM, without a word."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from spot_runs import SCHEDULERS, Interruption, SpotRun, assert_same_end, run_through

from faults.campaign import Case, NotPossibleHere, Part
from faults.lab import Lab
from posttrain.apps.launch.local.local_cluster import why_impossible

INTERRUPTIONS = 20
STEPS = 150  # if a run ends before all interruptions, another one has the rest


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for scheduler in SCHEDULERS if not short else ():  # CI: tests/integration/test_spot_is_exact.py
        yield Case(scheduler, partial(lose_machines, lab, scheduler), tries=INTERRUPTIONS)


PART = Part(
    "spot",
    "a run on two nodes that loses machines at random moments is the run that does not, bit for bit, under every "
    "scheduler",
    cases,
    45,
)


def lose_machines(lab: Lab, scheduler: str, folder: Path, chance: random.Random) -> None:
    if (why := why_impossible()) is not None:
        raise NotPossibleHere(why)
    whole = lab.shared("spot", lambda place: _whole(lab, place))
    left = drawn(chance, INTERRUPTIONS)
    while left:
        run = SpotRun(folder / f"local{len(left)}", scheduler, lab.model, lab.data, steps=STEPS)
        count = run_through(run, left)
        assert_same_end(run, whole)
        assert count, "a run of one attempt is not interrupted"
        left = left[count:]


def _whole(lab: Lab, folder: Path) -> SpotRun:
    run = SpotRun(folder / "local", "jobset", lab.model, lab.data, steps=STEPS)
    run_through(run, [])
    return run


def drawn(chance: random.Random, count: int) -> list[Interruption]:
    found: list[Interruption] = []
    num_fruitless = 0
    for _ in range(count):
        found.append(Interruption.draw(chance, num_fruitless))
        num_fruitless = num_fruitless + 1 if found[-1].num_checkpoints == 0 else 0
    return found
