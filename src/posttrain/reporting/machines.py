"""What the machines of a run are doing: GPUs of this one, and `workers.jsonl` for readers outside the run.

    {"step": 7, "time": 1763290000.1, "phase": "Training policy"}            a phase begins
    {"step": 7, "time": 1763290004.9, "phase": "step done", "ranks": [...]}  host, process, device, memory of each rank

Utilisation, memory and power of GPUs come from NVML, as means over a step. The file is not a record: a run continues if
it cannot be written.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from posttrain.reporting.run_files import WORKERS_FILE, Row, append_rows

GIB = 2**30
Sample = Mapping[str, float]  # by metric
RANKS_PERIOD_S = 10.0
SHORT_STEP_S = 2.0  # the phases of shorter steps are not written
STEP_DONE = "step done"
AskRanks = Callable[[], Sequence[Row]]


class GpuMonitor:
    """Looks at the GPUs in a thread, from `start` to `close`. Without GPUs or NVML it sees nothing."""

    def __init__(self, interval_s: float, look: Callable[[], Sample] | None = None) -> None:
        self._interval_s = interval_s
        self._look = look
        self._lock = threading.Lock()
        self._seen: defaultdict[str, list[float]] = defaultdict(list)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="GPU monitor", daemon=True)

    def start(self) -> None:
        self._look = self._look or open_nvml()
        if self._look is not None:
            self._thread.start()

    def take(self) -> dict[str, float]:
        """The means since the last call, with one look at the present."""
        self._keep()
        with self._lock:
            seen, self._seen = self._seen, defaultdict(list)
        return {name: sum(values) / len(values) for name, values in seen.items()}

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._keep()

    def _keep(self) -> None:
        if self._look is None:
            return
        try:
            found = self._look()
        except Exception:  # a driver that fails has nothing to do with the run
            return
        with self._lock:
            for name, value in found.items():
                self._seen[name].append(value)


def open_nvml() -> Callable[[], Sample] | None:
    """A function that looks at the visible GPUs; None if there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = _visible(pynvml)
    except Exception:  # no package, no driver, no device
        return None
    return (lambda: _sample(pynvml, handles)) if handles else None


def _visible(nvml: ModuleType) -> dict[int, object]:
    """Handles by the number that CUDA gives a device: CUDA_VISIBLE_DEVICES has numbers or UUIDs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [str(index) for index in range(nvml.nvmlDeviceGetCount())] if named is None else named.split(",")
    found = {}
    for number, word in enumerate(word.strip() for word in words if word.strip() not in ("", "-1")):
        by_index = word.isdecimal()
        found[number] = nvml.nvmlDeviceGetHandleByIndex(int(word)) if by_index else nvml.nvmlDeviceGetHandleByUUID(word)
    return found


def _sample(nvml: ModuleType, handles: Mapping[int, object]) -> dict[str, float]:
    found = {}
    for number, handle in handles.items():
        found[f"gpu_{number}_utilization"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        found[f"gpu_{number}_memory_gib"] = nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
        found[f"gpu_{number}_power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return found


class WorkerRows:
    def __init__(
        self,
        folder: Path,
        ask_ranks: AskRanks,
        may_write: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = folder / WORKERS_FILE
        self._ask_ranks = ask_ranks
        self._may_write = may_write
        self._clock = clock
        self._next_ranks = 0.0
        self._last_done: float | None = None
        self._steps_are_short = False
        self._phase = ""
        self.step = 0  # the one that has begun

    def phase(self, phase: str) -> None:
        """A phase begins or continues: a repeated phase, such as updates, is written once."""
        if phase != self._phase and not self._steps_are_short:
            self._append({"step": self.step, "time": self._clock(), "phase": phase})
        self._phase = phase

    def step_done(self, step: int) -> None:
        """Between steps the ranks are free to answer; they are asked at most once in a period."""
        now, self._phase = self._clock(), ""
        self._steps_are_short = self._last_done is not None and now - self._last_done < SHORT_STEP_S
        self._last_done = now
        if now >= self._next_ranks:
            self._next_ranks = now + RANKS_PERIOD_S
            with suppress(Exception):  # the next operation of a faulty rank raises its error
                self._append({"step": step, "time": now, "phase": STEP_DONE, "ranks": list(self._ask_ranks())})

    def _append(self, row: Row) -> None:
        with suppress(OSError):
            if self._may_write():
                append_rows(self._path, [row])
