"""Recording what a GPU is told to do, as CUDA graphs, and the way of numbers from the host to it.

Knows nothing of models or sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import reason_of

_MAX_RECORDINGS = 128  # a run has some dozens; settings and adapters that keep changing would add to them for ever
_NUM_WARM_UPS = 1  # before recording, so that kernels are compiled and libraries have their workspaces


class RecordingError(RuntimeError):
    """This model's step cannot be recorded: some layer waits for the device, or asks it for a number."""


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    result: Tensor  # overwritten by each replay


class Recorder:
    """Computations by name: recorded when first asked for, then replayed. All of them share their memory; of very many
    those are forgotten that nobody has asked for the longest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, name: Hashable, compute: Callable[[], Tensor], changes: Tensor | None = None) -> Tensor:
        """What `compute` returns, valid until anything is run again. `changes` is what it moves on: trials must not."""
        recording = self._recordings.pop(name, None)
        if recording is None:
            self._make_room()
            recording = self._record(compute, changes)
        self._recordings[name] = recording  # the latest one last
        recording.graph.replay()
        return recording.result

    def _make_room(self) -> None:
        if len(self._recordings) < _MAX_RECORDINGS:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # it may be the one that is running
        del self._recordings[next(iter(self._recordings))]

    def _record(self, compute: Callable[[], Tensor], changes: Tensor | None) -> _Recording:
        before = None if changes is None else changes.clone()
        side = _recording_stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                compute()
                if changes is not None and before is not None:
                    changes.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._capturing(graph, side):
                result = compute()
        except RuntimeError as error:
            raise RecordingError(reason_of(error)) from error
        return _Recording(graph, result)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
        """`torch.cuda.graph` first gives everything that is free back to the driver, pinned memory too. That makes room
        for a new pool; for each of a dozen recordings in it, it would cost several times what recording does."""
        if not self._recordings:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                yield
            return
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool)
            try:
                yield
            finally:
                graph.capture_end()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: the matrix library keeps a workspace for every stream that it has been used on."""
    return torch.cuda.Stream(device)


class Staging:
    """Two pinned buffers of one shape in turn: one may still be on its way to the device while the other is filled."""

    def __init__(self, like: Tensor) -> None:
        self._buffers = [torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self) -> np.ndarray:
        self._turn = 1 - self._turn
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        return self._buffers[self._turn].numpy()

    def send(self, target: Tensor) -> None:
        target.copy_(self._buffers[self._turn], non_blocking=True)
        if target.is_cuda:
            self._sent[self._turn] = sent = torch.cuda.Event()
            sent.record()


def batch_sizes(max_rows: int) -> list[int]:
    """Ascending. Small batches cost the same whatever their size, since the weights are read for them all the same;
    in large ones every row costs, so there the steps are finer."""
    sizes = [size for size in (8, 16, 32, 64, 128, 192, 256) if size < max_rows]
    sizes += range(320, max_rows, 64)
    return [*sizes, -(-max_rows // 8) * 8]
