"""How a process computes: memory of the GPU and copies to it, deterministic algorithms, evaluation mode.

Determinism: no code of posttrain adds up in a nondeterministic order. Three of torch's operations do on a GPU: the
backward pass of attention and of a lookup add with atomics, and cuBLAS may choose another workspace for a stream.
Sampling uses only the last of them, so only the passes of training run with torch's deterministic algorithms; sampling
has `NativeSettings.deterministic`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

_GIB = 2**30
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def enable_expandable_segments() -> None:
    """Before training, in a process with a GPU: memory that one phase frees must be usable by the next.

    Otherwise torch keeps blocks of the sizes that were requested. One small tensor that stays, such as an optimizer's,
    keeps the whole block that it was cut from: a quarter of the GPU was lost to a KV cache that way.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        _set_expandable_segments(True)


@contextmanager
def shareable_memory() -> Iterator[None]:
    """GPU memory that is allocated inside can be shared with another process; not so that of expandable segments."""
    given = "".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    _set_expandable_segments(False)
    try:
        yield
    finally:
        _set_expandable_segments(not given or "expandable_segments:True" in given)


def _set_expandable_segments(wanted: bool) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(f"expandable_segments:{wanted}")


@cache
def triton_kernels(module: str) -> Any:
    """A module of Triton kernels by its name; None in a torch build without Triton."""
    try:
        return import_module(f"posttrain.{module}")
    except ImportError:
        return None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host that does not wait for the device. From pageable memory, a copy waits until all
    that was launched before it has run.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PeakMemory:
    """The most memory that a GPU held in each phase (`torch.cuda.max_memory_allocated`). Not on a CPU."""

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
        """Peaks of the phases since the last call, as metrics; of several ranks the largest counts."""
        found = {f"peak_gib_{phase}_max": peak for phase, peak in self._peaks.items()}
        self._peaks = {}
        return found


def prepare_determinism() -> None:
    """Call before the first matrix product of the process: cuBLAS reads its setting once."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    # The mode would also fill new tensors, to show reads of unwritten memory. Our tests poison memory for that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def mode_of(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All modules are in this mode inside, and afterwards in the one that they were in."""
    changed = [module for module in model.modules() if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


evaluation_mode = partial(mode_of, training=False)  # dropout off
