"""A cache of CUDA graphs, and pinned buffers for copies from the host to the device. Independent of models and
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import reason_of

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_MAX_GRAPHS = 128  # a run needs a few dozen; changing sampling settings or adapters would add more without bound
# Other threads, such as NCCL's watchdog, may query events while this one captures.
_ERROR_MODE = "thread_local"
_NUM_WARM_UPS = 1  # before capture, so that kernels are compiled and libraries have their workspaces


class GraphCaptureError(RuntimeError):
    """This model's step cannot be captured: some layer synchronises with the device."""


@dataclass
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    result: Tensor  # overwritten by each replay


class CudaGraphCache:
    """CUDA graphs by key: captured on first use, then replayed. They share one memory pool, that of `like` if given;
    the least recently used graph is evicted when there are too many.
    """

    def __init__(self, device: torch.device, like: CudaGraphCache | None = None) -> None:
        self.device = device
        self._graphs: dict[Hashable, _CapturedGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle() if like is None else like._pool

    def run(
        self,
        key: Hashable,
        compute: Callable[[], Tensor],
        changes: Tensor | None = None,
        in_warm_up: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The result of `compute`, valid until the next `run` with the same pool. `changes` is the state that `compute`
        advances in place; it is restored after warm-up. `in_warm_up` may change it before.
        """
        captured = self._graphs.pop(key, None)
        if captured is None:
            self._evict()
            captured = self._capture(compute, changes, in_warm_up)
        self._graphs[key] = captured  # most recently used last
        captured.graph.replay()
        return captured.result

    def _evict(self) -> None:
        if len(self._graphs) < _MAX_GRAPHS:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the evicted graph may be running
        del self._graphs[next(iter(self._graphs))]

    def _capture(
        self, compute: Callable[[], Tensor], changes: Tensor | None, in_warm_up: Callable[[], None]
    ) -> _CapturedGraph:
        before = None if changes is None else changes.clone()
        side = _capture_stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                in_warm_up()
                compute()
                if changes is not None and before is not None:
                    changes.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._capturing(graph, side):
                result = compute()
        except RuntimeError as error:
            raise GraphCaptureError(reason_of(error)) from error
        return _CapturedGraph(graph, result)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
        """`torch.cuda.graph` first returns all cached memory to the driver, pinned memory too. That makes room for a
        new pool. For each further graph in the pool it would cost several times as much as the capture.
        """
        if not self._graphs:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=_ERROR_MODE):
                yield
            return
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, capture_error_mode=_ERROR_MODE)
            try:
                yield
            finally:
                graph.capture_end()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)


class Staging:
    """Two pinned buffers of one shape, used in turn: one is filled while the copy of the other may still be running."""

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
    """Batch sizes to capture, ascending. Small batches are bound by reading the weights, so their cost does not depend
    on size. In large batches every row adds cost, so the sizes are closer together. Not 448: cuBLAS 13.1 takes 13.9 ms
    for the products of an 8B model with 448 rows on an H200, and 9.5 and 10.8 ms with 432 and 512.
    """
    sizes = [size for size in (8, 16, 32, 64, 128, 160, 192, 208, 256, 320, 384, 432) if size < max_rows]
    sizes += range(512, max_rows, 64)
    largest = -(-max_rows // 8) * 8
    return [*sizes, 512 if largest == 448 else largest]
