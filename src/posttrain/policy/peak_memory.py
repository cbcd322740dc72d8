"""A GPU's memory, which sampling and training take from each other, and the most that each of them held.

On a CPU nothing is measured. Values are the device's (`torch.cuda.max_memory_allocated`): what a phase found there, and what it
added.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GIB = 2**30


def enable_expandable_segments() -> None:
    """Before training, in a process with a GPU: what one phase gives back must be of use to the next, whatever the sizes.

    Otherwise torch keeps blocks of the sizes that it was asked for. One small tensor that stays, such as an optimizer's, keeps
    the whole block that it was cut from: a quarter of the GPU was lost to a KV cache that way.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        change = (
            getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        )
        change("expandable_segments:True")


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
