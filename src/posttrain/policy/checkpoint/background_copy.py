"""A copy of tensors in host memory, made while the device continues to compute.

Memory is allocated once and reused for every copy of the same tensors. On a GPU the copy runs on its own stream;
tensors in host memory are copied by the thread that calls `finish`. The tensors must not change before `wait` has
returned.

Only the thread that began a copy calls CUDA: another one would fail while a CUDA graph is being captured. The end of
a copy from the device is detected in the memory itself, where the last byte to arrive is a flag.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.models.tensor_files import in_batches
from posttrain.policy import host_memory

_SEGMENT_BYTES = 4 * 2**30  # each segment is allocated as one block
_POLL_S = 0.002
_LONGEST_ALLOCATION_S = 900.0  # a hundred gigabytes take half a minute
_LONGEST_COPY_S = 120.0  # a hundred gigabytes take a few seconds


class StagingArea:
    """Host memory for one copy of some tensors."""

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._segments: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        self._allocating: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_registered = False

    @staticmethod
    def num_bytes(tensors: Mapping[str, Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def is_made_for(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._layout == _layout_of(tensors)

    def prepare(self, tensors: Mapping[str, Tensor]) -> bool:
        """Allocate the memory, in another thread at first. True once it is ready; call again until then."""
        if not self.is_made_for(tensors):
            self._start_allocating(tensors)
            return False
        if self._allocating is not None and self._allocating.is_alive():
            return False
        self.views(tensors)
        return True

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A buffer for each tensor, with its shape and dtype. Waits until the memory is allocated."""
        if not self.is_made_for(tensors):
            self._start_allocating(tensors)
        if self._allocating is not None:
            self._wait_for_allocation(self._allocating)
            self._allocating = None
        if self._error is not None:
            error, self._error, self._layout = self._error, None, []
            raise error
        if self.pin and not self._is_registered:
            for segment in self._segments:
                host_memory.register(segment)
        self._is_registered = True
        return dict(self._views)

    def _start_allocating(self, tensors: Mapping[str, Tensor]) -> None:
        if self._allocating is not None:
            # The set of tensors has changed since allocation began: an optimizer creates its state in the first update.
            self._wait_for_allocation(self._allocating)
            self._error = None
        self._layout, self._is_registered = _layout_of(tensors), False
        self._segments, self._views = [], {}  # free the old memory before the new is allocated
        shapes = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in tensors.items()}
        self._allocating = threading.Thread(target=self._allocate, args=(shapes,), daemon=True)
        self._allocating.start()

    def _wait_for_allocation(self, thread: threading.Thread) -> None:
        thread.join(_LONGEST_ALLOCATION_S)
        if thread.is_alive():
            raise RuntimeError(f"memory for a checkpoint was not allocated within {_LONGEST_ALLOCATION_S:g} s")

    def _allocate(self, shapes: Mapping[str, Tensor]) -> None:
        try:
            for keys in in_batches({key: shape.nbytes for key, shape in shapes.items()}, _SEGMENT_BYTES):
                group = [shapes[key] for key in keys]
                starts, total = host_memory.place(group)
                buffer = host_memory.allocate(total)
                self._segments.append(buffer)
                for key, start, like in zip(keys, starts, group, strict=True):
                    self._views[key] = host_memory.view(buffer, start, like)
        except Exception as error:  # raised by `views`
            self._error = error


class HostCopy:
    """One copy under way: `add`, `seal` where the tensors are used, `finish` in a thread, `wait` before a change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_host_memory: list[tuple[Tensor, Tensor]] = []
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._mark: Tensor | None = None
        self._is_done = threading.Event()

    def add(self, target: Tensor, source: Tensor) -> None:
        (self._on_device if source.is_cuda else self._in_host_memory).append((target, source.detach()))

    def seal(self) -> None:
        """No more tensors follow. Starts the device copies, after all work enqueued earlier."""
        if self._device.type != "cuda":
            return
        mark = host_memory.pinned_like([torch.empty(1, dtype=torch.uint8)])[0]
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for target, source in self._on_device:
                target.copy_(source, non_blocking=True)
            arrived = torch.ones(1, dtype=torch.uint8, device=self._device)
            mark.copy_(arrived, non_blocking=True)
        self._on_device.append((mark, arrived))  # tensors must live until they are copied
        self._mark = mark

    def finish(self) -> None:
        """Copy what is in host memory, and wait for the device. Makes no call to CUDA."""
        try:
            for target, source in self._in_host_memory:
                target.copy_(source)
            limit = time.monotonic() + _LONGEST_COPY_S
            while self._mark is not None and int(self._mark.numpy()[0]) == 0:
                # After an error on the device the copy never completes, and no error is raised.
                if time.monotonic() > limit:
                    raise RuntimeError(
                        f"the copy of a checkpoint did not arrive in host memory within {_LONGEST_COPY_S:g} s"
                    )
                time.sleep(_POLL_S)
        finally:
            self._in_host_memory, self._on_device = [], []
            self._is_done.set()

    def wait(self) -> None:
        """Return once the tensors may change."""
        if not self._is_done.wait(2 * _LONGEST_COPY_S):
            raise RuntimeError(f"the copy of a checkpoint has not ended within {2 * _LONGEST_COPY_S:g} s")


def _layout_of(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()]
