"""Utilisation, memory and power of the GPUs of this machine, from NVML, as means over a step."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import ModuleType

GIB = 2**30
Sample = Mapping[str, float]  # by metric


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
        by_index = word.isdigit()
        found[number] = nvml.nvmlDeviceGetHandleByIndex(int(word)) if by_index else nvml.nvmlDeviceGetHandleByUUID(word)
    return found


def _sample(nvml: ModuleType, handles: Mapping[int, object]) -> dict[str, float]:
    found = {}
    for number, handle in handles.items():
        found[f"gpu_{number}_utilization"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        found[f"gpu_{number}_memory_gib"] = nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
        found[f"gpu_{number}_power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return found
