"""Finds runs, pipelines and registries under the given folders. Browsers address them by id."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from posttrain.apps.ship.pipeline.records import ITERATION_FILE, ITERATION_FOLDER
from posttrain.apps.ship.registry.store import DATABASE
from posttrain.apps.watch.places import LocalPlace, Place
from posttrain.apps.watch.rollout_store import StepCache
from posttrain.apps.watch.run_view import RunView
from posttrain.files.digests import sha256_of
from posttrain.reporting.run_files import INFO_FILE, METRICS_FILE

MAX_DEPTH = 5
MAX_RUNS = 2000
MAX_FOLDERS = 20_000  # that are looked into
TABLE_BYTES = 128 * 2**20  # of the metrics of all runs that are kept in memory
MIN_SCAN_PERIOD_S = 2.0
SCAN_TIME_SHARE = 0.05  # of the time that looking for new runs may take
_SKIPPED = re.compile(
    r"\.|__pycache__$|(tmp_|removing_|old_)?step_\d|rollouts$|attempts$|logs$|node_modules$|evaluations$"
)
_RUN_FILES = {METRICS_FILE, INFO_FILE}


class Catalogue:
    def __init__(
        self,
        roots: Sequence[Place],
        *,
        registries: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots = tuple(roots)
        self._clock, self._ticks = clock, ticks
        self._cache = StepCache()
        self._lock = threading.Lock()
        self._runs: dict[str, RunView] = {}
        self._pipelines: dict[str, Path] = {}
        self._registries: dict[str, str] = {_id(text): text for text in registries}
        self._next_scan = 0.0
        self._used: dict[str, RunView] = {}  # those whose metrics are in memory, the last used one last

    @property
    def runs(self) -> dict[str, RunView]:
        self._scan()
        return self._runs

    @property
    def pipelines(self) -> dict[str, Path]:
        self._scan()
        return self._pipelines

    @property
    def registries(self) -> dict[str, str]:
        self._scan()
        return self._registries

    def run(self, run_id: str) -> RunView | None:
        """With its metrics. Those of the runs that were used least recently are dropped if all take too much memory."""
        found = self._runs.get(run_id) or self.runs.get(run_id)
        if found is None:
            return None
        found.metrics.refresh()
        with self._lock:
            self._used.pop(run_id, None)
            self._used[run_id] = found
            while len(self._used) > 1 and sum(one.metrics.num_bytes for one in self._used.values()) > TABLE_BYTES:
                self._used.pop(next(iter(self._used))).drop_metrics()
        return found

    def _scan(self) -> None:
        with self._lock:
            started = self._ticks()
            if started < self._next_scan:
                return
            runs: dict[str, RunView] = {}
            for root in self._roots:
                for place, label, is_linked_run in islice(_folders(root, prefixed=len(self._roots) > 1), MAX_FOLDERS):
                    names = place.names()
                    if (is_linked_run or not _RUN_FILES.isdisjoint(names)) and len(runs) < MAX_RUNS:
                        run_id = _id(place.url)
                        runs[run_id] = self._runs.get(run_id) or RunView(run_id, place, label, self._cache, self._clock)
                    if isinstance(place, LocalPlace):
                        if any(
                            ITERATION_FOLDER.fullmatch(name) and place.is_file(f"{name}/{ITERATION_FILE}")
                            for name in names
                        ):
                            self._pipelines[_id(place.url)] = place.path
                        if DATABASE in names and place.is_file(DATABASE):
                            self._registries.setdefault(_id(place.url), place.url)
            self._runs = runs
            self._used = {run_id: run for run_id, run in self._used.items() if run_id in runs}
            took_s = self._ticks() - started
            self._next_scan = self._ticks() + max(MIN_SCAN_PERIOD_S, took_s / SCAN_TIME_SHARE)


def _folders(root: Place, *, prefixed: bool) -> Iterator[tuple[Place, str, bool]]:
    """The folder and those in it, to a depth, with the names under which they are shown. True: a link to a run
    elsewhere, which is shown, but not followed."""
    pending: list[tuple[Place, str, int]] = [(root, root.name or root.url, 0)]
    while pending:
        place, label, depth = pending.pop()
        yield place, label, False
        if depth == MAX_DEPTH:
            continue
        begin = f"{label}/" if depth or prefixed else ""
        for name in place.linked_runs(_RUN_FILES):
            yield place.inside(name), begin + name, True
        for name in sorted(place.folders(), reverse=True):
            if not _SKIPPED.match(name):
                pending.append((place.inside(name), begin + name, depth + 1))


def _id(text: str) -> str:
    return sha256_of(text.encode("utf-8", "backslashreplace"))[:12]
