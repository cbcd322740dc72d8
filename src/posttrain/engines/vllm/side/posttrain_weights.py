"""Weights between two processes: buckets of tensors by their names in the model's files, each with a digest. torch
only.

A bucket's bytes are in a file in shared memory (CPU), which the receiver maps, or in GPU memory whose CUDA IPC handle
the receiver opens. The sender reuses GPU memory for the next bucket, so the receiver copies.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
ALIGNMENT = 64  # bytes; the digest reads words of 8


@dataclasses.dataclass
class WeightBucket:
    """Description of one bucket, for the receiver. Plain values only: it is sent as JSON."""

    version: int  # version of the weights
    index: int
    size: int  # bytes
    digest: int
    tensors: list[tuple[str, str, list[int], int]]  # name, dtype, shape, first byte
    file: str = ""
    handle: str = ""  # CUDA IPC handle of GPU memory


def digest(flat: Tensor) -> int:
    """Sum of the 64-bit words times odd weights, on the tensor's device. Detects any change of one word."""
    words = flat.view(torch.int64)
    step = 1 << (20 if flat.device.type == "cpu" else 24)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, words.numel(), step):
        part = words[first : first + step]
        weight = torch.arange(first, first + part.numel(), device=part.device) * 0x1E3779B97F4A7C15 | 1
        total += (part * weight).sum()
    return int(total)


def views(bucket: WeightBucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, dtype_name, shape, first in bucket.tensors:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, flat[first : first + size].view(dtype).view(shape)


def lots_of(weights: Iterable[tuple[Name, Tensor]], limit: int) -> Iterator[list[tuple[Name, Tensor]]]:
    """Tensors in order, in batches of at most `limit` bytes; a larger tensor gets its own batch."""
    lot: list[tuple[Name, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if lot and size + padded(tensor.nbytes) > limit:
            yield lot
            lot, size = [], 0
        lot.append((name, tensor))
        size += padded(tensor.nbytes)
    if lot:
        yield lot


def layout(version: int, index: int, lot: list[tuple[str, Tensor]]) -> WeightBucket:
    bucket = WeightBucket(version, index, 0, 0, [])
    for name, tensor in lot:
        bucket.tensors.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bucket.size))
        bucket.size += padded(tensor.nbytes)
    return bucket


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def handle_of(memory: Tensor) -> str:
    """IPC handle of GPU memory outside of expandable segments, which cannot be shared in containers."""
    from torch.multiprocessing.reductions import reduce_tensor

    return base64.b64encode(pickle.dumps(reduce_tensor(memory)[1])).decode()


def open_handle(handle: str, device_index: int) -> Tensor:
    """The memory of `handle`, on its device as numbered in this process."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments: list[Any] = list(pickle.loads(base64.b64decode(handle)))
    arguments[6] = device_index
    memory: Tensor = rebuild_cuda_tensor(*arguments)
    return memory
