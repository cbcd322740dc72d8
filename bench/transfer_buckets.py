"""Buckets that carry weights between two processes: what goes where, packing, digests, and memory that can be shared.

Used by `weight_transfer.py`. A bucket is a flat tensor of bytes. Every weight is cut where a bucket ends, so buckets
are full.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the digest is then computed by torch's operators
    triton = None

_ALIGNMENT = 256  # bytes
# Odd, and below 2^63: torch and Triton take them as they are.
_STRIDE, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_CHUNK_WORDS = 2**22
_WORDS_PER_PROGRAM = 2**14


@dataclass(frozen=True)
class LlamaSizes:
    """Of Llama 3.1 8B; `tests/unit/bench` compares them with shapes.py, which takes seconds to import."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    vocab: int = 128256

    def linear(self) -> dict[str, tuple[int, int]]:
        attended, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (attended, self.hidden), "k_proj": (kv, self.hidden), "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, attended), "gate_proj": (self.inner, self.hidden),
            "up_proj": (self.inner, self.hidden), "down_proj": (self.hidden, self.inner),
        }  # fmt: skip

    def weights(self) -> list[tuple[int, ...]]:
        norms: list[tuple[int, ...]] = [(self.hidden,), (self.hidden,)]
        layer = [*self.linear().values(), *norms]
        return [(self.vocab, self.hidden), *layer * self.layers, (self.hidden,), (self.vocab, self.hidden)]

    def adapters(self, rank: int) -> list[tuple[int, ...]]:
        layer = [shape for out, into in self.linear().values() for shape in ((rank, into), (out, rank))]
        return layer * self.layers


TINY = LlamaSizes(hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=512)


# -- what goes where ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Part of a weight, and where it is in its bucket; in elements of the weight, and in bytes."""

    weight: int
    begin: int
    count: int
    offset: int


def plan(shapes: Sequence[Sequence[int]], bucket_bytes: int, itemsize: int = 2) -> list[list[Piece]]:
    buckets: list[list[Piece]] = [[]]
    offset = 0
    for weight, shape in enumerate(shapes):
        begin, numel = 0, int(torch.Size(shape).numel())
        while begin < numel:
            if bucket_bytes - offset < _ALIGNMENT:
                buckets.append([])
                offset = 0
            count = min(numel - begin, (bucket_bytes - offset) // itemsize)
            buckets[-1].append(Piece(weight, begin, count, offset))
            begin += count
            offset += -(-count * itemsize // _ALIGNMENT) * _ALIGNMENT
    return buckets


def slices(weights: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    return [weights[piece.weight].view(-1)[piece.begin : piece.begin + piece.count] for piece in pieces]


def places(bucket: Tensor, weights: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    found = []
    for piece in pieces:
        dtype = weights[piece.weight].dtype
        found.append(bucket[piece.offset : piece.offset + piece.count * dtype.itemsize].view(dtype))
    return found


def used_bytes(pieces: Sequence[Piece], itemsize: int = 2) -> int:
    """Of a bucket, up to a multiple of 8."""
    end = max(piece.offset + piece.count * itemsize for piece in pieces)
    return -(-end // 8) * 8


class Copier:
    """Copies between weights and buckets. Views are made once: 300 of them take longer than copying a bucket does."""

    def __init__(self, weights: Sequence[Tensor], buckets: Sequence[Tensor], planned: list[list[Piece]]) -> None:
        self.planned = planned
        self._weights = [slices(weights, pieces) for pieces in planned]
        self._places = [places(buckets[index % len(buckets)], weights, pieces) for index, pieces in enumerate(planned)]
        self._buckets = buckets

    def bucket(self, index: int) -> Tensor:
        return self._buckets[index % len(self._buckets)][: used_bytes(self.planned[index])]

    def pack(self, index: int) -> None:
        torch._foreach_copy_(self._places[index], self._weights[index])

    def unpack(self, index: int) -> None:
        torch._foreach_copy_(self._weights[index], self._places[index])


# -- digests -----------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def digest_kernel(
        words_ptr, sums_ptr, count, STRIDE: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr
    ):
        begin = tl.program_id(0).to(tl.int64) * BLOCK * LOOPS
        total = tl.zeros((BLOCK,), tl.int64)
        for loop in range(LOOPS):
            at = begin + loop * BLOCK + tl.arange(0, BLOCK)
            word = tl.load(words_ptr + at, mask=at < count, other=0, eviction_policy="evict_first")
            mixed = (word ^ ((at + 1) * STRIDE)) * MIX
            mixed = mixed ^ (mixed >> 29)
            total += tl.where(at < count, mixed, 0)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def digest(bucket: Tensor, kernel: bool = True) -> Tensor:
    """A number of 64 bits that changes with any bit and with the order of words. Sums wrap around, so their order is
    free.
    """
    words = bucket.view(torch.int64)
    if kernel and triton is not None and bucket.is_cuda:
        programs = triton.cdiv(words.numel(), _WORDS_PER_PROGRAM)
        sums = torch.empty(programs, dtype=torch.int64, device=bucket.device)
        digest_kernel[(programs,)](
            words, sums, words.numel(), STRIDE=_STRIDE, MIX=_MIX, BLOCK=1024, LOOPS=_WORDS_PER_PROGRAM // 1024,
            num_warps=4,
        )  # fmt: skip
        return sums.sum()
    total = torch.zeros((), dtype=torch.int64, device=bucket.device)
    for begin in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[begin : begin + _CHUNK_WORDS]
        at = torch.arange(begin + 1, begin + 1 + chunk.numel(), dtype=torch.int64, device=bucket.device)
        mixed = (chunk ^ (at * _STRIDE)) * _MIX
        total += (mixed ^ (mixed >> 29)).sum()
    return total


# -- memory that another process can open
# --------------------------------------------------------------------------------

PLAIN, POOL, POOL_OFF, DRIVER = "torch.empty", "MemPool", "MemPool, segments off meanwhile", "cuMemAlloc"
WAYS = (PLAIN, POOL, POOL_OFF, DRIVER)
_pools: list[Any] = []  # a pool must outlive its tensors


def set_allocator(setting: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(setting)


def allocate(way: str, num_bytes: int, device: str) -> Tensor:
    if device == "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
    if way == PLAIN:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if way == DRIVER:
        pointer = ctypes.c_uint64()
        _driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return tensor_at(pointer.value, num_bytes)
    _pools.append(torch.cuda.MemPool())
    if way == POOL_OFF:
        set_allocator("expandable_segments:False")
    try:
        with torch.cuda.use_mem_pool(_pools[-1]):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    finally:
        if way == POOL_OFF:
            set_allocator("expandable_segments:True")


def release(way: str, bucket: Tensor) -> None:
    """Of a bucket from `allocate`, which must not be in use; the caller drops its tensor."""
    if way == DRIVER and bucket.is_cuda:
        _driver("cuMemFree_v2", ctypes.c_uint64(bucket.data_ptr()))


def is_expandable(bucket: Tensor) -> bool | None:
    """Whether torch took the memory from a segment that can grow; None: it is not torch's."""
    if not bucket.is_cuda:
        return None
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= bucket.data_ptr() < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable"))
    return None


def share(way: str, bucket: Tensor) -> bytes:
    """What `open_shared` in another process makes the same memory of."""
    if way == DRIVER and bucket.is_cuda:
        handle = _Handle()
        _driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(bucket.data_ptr()))
        return bytes(handle)
    return bytes(ForkingPickler.dumps(bucket))


def open_shared(way: str, shared: bytes, num_bytes: int, device: str) -> Tensor:
    if way == DRIVER and device == "cuda":
        pointer = ctypes.c_uint64()
        _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(shared), ctypes.c_uint(1))
        return tensor_at(pointer.value, num_bytes)
    opened: Tensor = ForkingPickler.loads(shared)
    return opened


def close_shared(way: str, bucket: Tensor) -> None:
    if way == DRIVER and bucket.is_cuda:
        _driver("cuIpcCloseMemHandle", ctypes.c_uint64(bucket.data_ptr()))


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(ctypes.addressof(self), 64)


class _DeviceMemory:
    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor_at(pointer: int, num_bytes: int) -> Tensor:
    return torch.as_tensor(_DeviceMemory(pointer, num_bytes), device="cuda")


def _driver(name: str, *arguments: Any) -> None:
    torch.cuda.current_stream()  # makes torch's context the current one
    torch.cuda.synchronize()
    function: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    code = function(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with code {code}")
