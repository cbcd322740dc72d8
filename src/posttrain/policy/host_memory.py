"""Large pieces of host memory that a GPU can copy to and from at full speed, without blocking its other work.

Memory is allocated in huge pages and touched by several threads at once, then registered with CUDA ("pinned"). torch's
own pinned memory is rounded up to a power of two, which is too much for tens of gigabytes. Without CUDA it is ordinary
memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: for every CUDA context of the process
_TOUCH_BYTES = 64 * 2**20
_NUM_THREADS = 4


class _Mapping(mmap.mmap):
    """Memory that is unregistered from CUDA before it is freed. Tensors made from it and their views keep it alive."""

    registered_at: int | None = None

    def __del__(self) -> None:
        if self.registered_at is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()  # by address


def allocate(num_bytes: int) -> Tensor:
    """Bytes of memory of this process, with every page mapped. Makes no call to CUDA, so any thread may call it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapped = _Mapping(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower to register, otherwise the same
            mapped.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(mapped, dtype=torch.uint8)
    _mappings[buffer.data_ptr()] = mapped
    starts = range(0, num_bytes, _TOUCH_BYTES)
    with ThreadPoolExecutor(min(_NUM_THREADS, len(starts))) as pool:
        list(pool.map(lambda start: buffer.numpy()[start : start + _TOUCH_BYTES].fill(0), starts))
    return buffer


def map_file(file: Path, num_bytes: int) -> Tensor:
    """The bytes of a file, as every process has them that maps it; pinned where there is CUDA."""
    with file.open("r+b") as opened:
        mapped = _Mapping(opened.fileno(), num_bytes)
    buffer = torch.frombuffer(mapped, dtype=torch.uint8)
    _mappings[buffer.data_ptr()] = mapped
    if torch.cuda.is_available():
        register(buffer)
    return buffer


def flush(buffer: Tensor) -> None:
    """Write memory from `map_file` to its file, for other machines."""
    _mappings[buffer.data_ptr()].flush()


def register(buffer: Tensor) -> bool:
    """Pin memory from `allocate` or `map_file` until it is freed. False if CUDA refuses: then copies block the caller.

    Not while another thread captures a CUDA graph: capturing forbids this call.
    """
    if buffer.numel() == 0:
        return True
    address = buffer.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, buffer.numel(), _PORTABLE)) != 0:
        return False
    _mappings[address].registered_at = address
    return True


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in pinned host memory, of the shapes and types of `tensors`, in one piece."""
    places, total = place(tensors)
    buffer = allocate(total)
    if torch.cuda.is_available():
        register(buffer)
    return [view(buffer, start, tensor) for start, tensor in zip(places, tensors, strict=True)]


def place(tensors: Sequence[Tensor], alignment: int = 64) -> tuple[list[int], int]:
    """Where each tensor begins when they lie one after another, and the bytes of them all."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // alignment) * alignment
    return starts, end


def view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The part of `buffer` from byte `start` on, as a tensor with shape and type of `like`."""
    num_bytes = like.numel() * like.element_size()
    return buffer[start : start + num_bytes].view(like.dtype).view(like.shape)


def available_bytes() -> int:
    """Host memory that this process can still take: what the machine has free, and what its container allows."""
    free: int = psutil.virtual_memory().available
    return free if (allowed := _container_bytes()) is None else min(free, allowed)


def _container_bytes() -> int | None:
    """By control groups, version 2 or 1. Cached files count as used there, but are dropped when memory is needed."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            allowed = (root / limit).read_text().strip()
            statistics = (root / limit).with_name("memory.stat").read_text().splitlines()
            reclaimable = sum(int(line.split()[1]) for line in statistics if line.split()[0] == cached)
            if allowed != "max":
                return int(allowed) - int((root / used).read_text()) + reclaimable
        except (OSError, ValueError, IndexError):
            continue
    return None
