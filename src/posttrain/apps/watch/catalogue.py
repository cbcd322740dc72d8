"""Finds runs, pipelines and registries under the given folders. Browsers address them by id."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

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
_EARLIER = "earlier_"  # folders of runs that were in the same folder before


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
        self._pipelines: dict[str, LocalPlace] = {}
        self._named = {_id(text): text for text in registries}
        self._registries: dict[str, str | LocalPlace] = {**self._named}
        self._scanning = threading.Lock()
        self._next_scan: float | None = None
        self._used: dict[str, RunView] = {}  # those whose metrics are in memory, the last used one last

    @property
    def runs(self) -> dict[str, RunView]:
        self._scan()
        return self._runs

    @property
    def pipelines(self) -> dict[str, LocalPlace]:
        self._scan()
        return self._pipelines

    @property
    def registries(self) -> dict[str, str | LocalPlace]:
        """Those that the user named, and the folders in which one was found."""
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
        """Look for new runs, unless that was done a moment ago. A request that comes meanwhile gets what was found
        before."""
        if not self._scanning.acquire(blocking=self._next_scan is None):
            return
        try:
            started = self._ticks()
            if self._next_scan is not None and started < self._next_scan:
                return
            runs: dict[str, RunView] = {}
            order: dict[str, list[str]] = {}  # as a listing of all folders has them
            pipelines: dict[str, LocalPlace] = {}
            registries: dict[str, str | LocalPlace] = {**self._named}
            for number, root in enumerate(self._roots):
                for found in islice(_folders(root, prefixed=len(self._roots) > 1), MAX_FOLDERS):
                    place, names = found.place, found.names
                    if found.is_run and len(runs) < MAX_RUNS:
                        run_id = _id(place.url)
                        order.setdefault(run_id, [f"{number:06d}", *found.label.split("/")])
                        known = self._runs.get(run_id)
                        runs[run_id] = known or RunView(run_id, place, found.label, self._cache, self._clock)
                    if isinstance(place, LocalPlace):
                        if any(
                            ITERATION_FOLDER.fullmatch(name) and place.is_file(f"{name}/{ITERATION_FILE}")
                            for name in names
                        ):
                            pipelines[_id(place.url)] = place
                        if DATABASE in names and place.is_file(DATABASE):
                            registries.setdefault(_id(place.url), place)
            self._runs = {run_id: runs[run_id] for run_id in sorted(runs, key=order.__getitem__)}
            self._pipelines, self._registries = pipelines, registries
            with self._lock:
                self._used = {run_id: run for run_id, run in self._used.items() if run_id in runs}
            took_s = self._ticks() - started
            self._next_scan = self._ticks() + max(MIN_SCAN_PERIOD_S, took_s / SCAN_TIME_SHARE)
        finally:
            self._scanning.release()


class _Folder(NamedTuple):
    place: Place
    label: str  # under which it is shown
    names: list[str]
    is_run: bool


def _folders(root: Place, *, prefixed: bool) -> Iterator[_Folder]:
    """The folder and those in it, to a depth; of a run's folder, only the runs that were in it before. A link to a run
    elsewhere is shown, but not followed. Those with the fewest folders before them, in each folder on the way, are
    first: where not all can be looked into, one that holds many hides its own later ones, and none in other folders."""
    order = count()
    pending: list[tuple[int, int, int, Place, str, bool]] = [(0, next(order), 0, root, root.name or root.url, False)]
    while pending:
        cost, _, depth, place, label, is_link = heappop(pending)
        names = place.names()
        is_run = is_link or not _RUN_FILES.isdisjoint(names)
        yield _Folder(place, label, names, is_run)
        if depth == MAX_DEPTH or is_link:
            continue
        begin = f"{label}/" if depth or prefixed else ""
        inner = {name: False for name in place.folders() if not _SKIPPED.match(name)}
        if is_run and depth:
            inner = {name: False for name in inner if name.startswith(_EARLIER)}
        else:
            inner |= dict.fromkeys(place.linked_runs(_RUN_FILES), True)
        first = sorted(inner)[: MAX_FOLDERS - cost]  # as many as the cost come before any of these
        for position, name in enumerate(first, start=cost + 1):
            heappush(pending, (position, next(order), depth + 1, place.inside(name), begin + name, inner[name]))


def _id(text: str) -> str:
    return sha256_of(text.encode("utf-8", "backslashreplace"))[:12]
