"""The tensors of the paged KV cache: per layer one pool of pages for keys and one for values, and how large they may be.

Which page belongs to whom is not known here; see `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import InputError

GIB = 2**30
_CPU_DEFAULT_BYTES = 2 * GIB
# Of the free memory of a GPU; the rest is for activations and logits.
_CUDA_SHARE_OF_FREE = 0.8


class KvCacheTooSmallError(InputError):
    """One sequence alone does not fit into the cache."""


@dataclass(frozen=True)
class LayerShape:
    """What an attention layer keeps of one token."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on a CPU until they are written.

    `torch.zeros` writes every byte. The pages that the system hands out for `np.zeros` are zero already, and are made real
    by the first write. Zeros, because what a mask hides still meets a factor of 0, and 0 * nan is nan.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class PagedKvCache:
    def __init__(self, layers: dict[int, LayerShape], num_pages: int, page_size: int, device: torch.device) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.keys: dict[int, Tensor] = {}  # layer -> [pages, page size, heads, dim]
        self.values: dict[int, Tensor] = {}
        for layer, shape in layers.items():
            pages = (num_pages, page_size, shape.num_heads)
            self.keys[layer] = zeros((*pages, shape.key_dim), shape.dtype, device)
            self.values[layer] = zeros((*pages, shape.value_dim), shape.dtype, device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the tokens' keys and values at `slots` (page * page size + place in the page)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def read(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of the sequence that lies in `pages`; [length, heads, dim]."""
        keys = self.keys[layer].index_select(0, pages).flatten(0, 1)
        values = self.values[layer].index_select(0, pages).flatten(0, 1)
        return keys[:length], values[:length]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        source, target = torch.tensor(copies, dtype=torch.long).T.contiguous().to(self.device)
        for pool in (*self.keys.values(), *self.values.values()):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def slots(self, pages: Sequence[int], start: int, end: int) -> list[int]:
        """Where positions [start, end) of the sequence in `pages` are kept."""
        size = self.page_size
        return [pages[position // size] * size + position % size for position in range(start, end)]


def num_pages_for_call(
    layers: dict[int, LayerShape],
    page_size: int,
    kv_cache_gib: float | None,
    device: torch.device,
    *,
    wanted: int,
    least: int,
) -> int:
    """Pages of a cache for one call: `wanted` if memory allows, never fewer than the `least` that one sequence takes."""
    page_bytes = page_size * sum(shape.bytes_per_token for shape in layers.values())
    # On a CPU decoding keeps a dense copy of the active sequences, which takes about as much again.
    budget_per_page = page_bytes * (2 if device.type == "cpu" else 1)
    if kv_cache_gib is not None:
        budget = kv_cache_gib * GIB
    elif device.type == "cpu":
        budget = float(max(_CPU_DEFAULT_BYTES, least * budget_per_page))
    else:
        budget = _CUDA_SHARE_OF_FREE * _free_cuda_bytes(device)
    affordable = int(budget // budget_per_page)
    if affordable < least:
        raise KvCacheTooSmallError(
            f"the longest sequence of this call needs {least * budget_per_page / GIB:.3g} GiB of KV cache and "
            f"{budget / GIB:.3g} GiB may be used: raise kv_cache_gib, or lower max_new_tokens or the length of prompts"
        )
    return min(wanted, affordable)


def _free_cuda_bytes(device: torch.device) -> int:
    """What the driver calls free, and what torch holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
