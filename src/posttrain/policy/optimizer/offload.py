"""Computes on a device over data in host memory: fetch a piece, compute, write it back, three pieces at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Piece = TypeVar("Piece")
Tensors = Sequence[Tensor | None]

_MAX_LEAVING = 2  # pieces on their way back before the next one is fetched: bounds the memory on the device


def run_through_device(
    pieces: Iterable[Piece],
    tensors_of: Callable[[Piece], Tensors],
    compute: Callable[[Piece, Tensors], None],
    device: torch.device,
    num_read: int = 0,
) -> None:
    """Call `compute` with each piece and its tensors on `device`, to be changed in place. Returns when all are back.
    The first `num_read` of them are only read.

    Tensors that are on the device already are passed on as they are. Host memory should be pinned, or nothing overlaps.
    """
    if device.type != "cuda":
        for piece in pieces:
            compute(piece, tensors_of(piece))
        return
    stream = _Stream(device, num_read)
    waiting: tuple[Piece, Tensors] | None = None
    for piece in pieces:
        fetched = stream.fetch(tensors_of(piece))  # while the one before is computed
        if waiting is not None:
            stream.finish(waiting[0], tensors_of(waiting[0]), waiting[1], compute)
        waiting = piece, fetched
    if waiting is not None:
        stream.finish(waiting[0], tensors_of(waiting[0]), waiting[1], compute)
    stream.outgoing.synchronize()


class _Stream:
    def __init__(self, device: torch.device, num_read: int) -> None:
        self.device, self.num_read = device, num_read
        self.incoming, self.outgoing = _side_streams(device)
        self.current = torch.cuda.current_stream(device)
        self._leaving: deque[torch.cuda.Event] = deque()

    def fetch(self, tensors: Tensors) -> Tensors:
        if not any(tensor is not None and not tensor.is_cuda for tensor in tensors):
            return tensors
        while len(self._leaving) > _MAX_LEAVING:
            self._leaving.popleft().synchronize()
        with torch.cuda.stream(self.incoming):
            return [None if t is None else t.to(self.device, non_blocking=True) for t in tensors]

    def finish(self, piece: Piece, home: Tensors, fetched: Tensors, compute: Callable[[Piece, Tensors], None]) -> None:
        self.current.wait_stream(self.incoming)
        compute(piece, fetched)
        pairs = list(zip(home, fetched, strict=True))
        for target, source in pairs[: self.num_read]:
            if source is not None and source is not target:
                source.record_stream(self.current)
        away = [(h, f) for h, f in pairs[self.num_read :] if h is not None and f is not None and h is not f]
        if not away:
            return
        self.outgoing.wait_stream(self.current)
        with torch.cuda.stream(self.outgoing):
            for target, source in away:
                # Its memory is of one stream and used on two others: it must not be reused before they are done.
                source.record_stream(self.current)
                source.record_stream(self.outgoing)
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.outgoing)
        self._leaving.append(event)


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The same ones every time: torch keeps memory that was freed on a stream for that stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
