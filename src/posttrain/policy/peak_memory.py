"""The most memory that tensors held on a GPU in each phase of a step. On a CPU nothing is measured.

Values are the device's (`torch.cuda.max_memory_allocated`): what a phase found there, and what it added.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GIB = 2**30


class PeakMemory:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peaks: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            peak = torch.cuda.max_memory_allocated(self.device) / _GIB
            self._peaks[phase] = max(self._peaks.get(phase, 0.0), peak)

    def take(self) -> dict[str, float]:
        """Of the phases since this was asked last, as metrics: of several ranks the largest counts."""
        found = {f"peak_gib_{phase}_max": peak for phase, peak in self._peaks.items()}
        self._peaks = {}
        return found
