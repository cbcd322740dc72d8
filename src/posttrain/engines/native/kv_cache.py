"""The paged KV cache: its tensors, per layer one pool of pages for keys and one for values; which pages are free, with
reference counts; and the prefix cache.

`scheduler.py` allocates the pages to sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import InputError
from posttrain.policy.model_support import LayerShape
from posttrain.policy.runtime import to_device

if TYPE_CHECKING:
    from posttrain.engines.native.recurrent_states import RecurrentStates


class PageAllocator:
    """A free list with reference counts. A page with several holders is read-only."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._to_clear: dict[int, Callable[[Sequence[int]], None]] = {}  # once they have no holder

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} pages requested, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each of `pages`."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one holder from each of `pages`; pages without a holder become free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._to_clear:
                    self._to_clear.pop(page)((page,))
                self._without_holder(page)

    def clear_when_free(self, pages: Collection[int], clear: Callable[[Sequence[int]], None]) -> None:
        """Call `clear` with the pages without a holder now, and with each other page when its last holder
        releases it.
        """
        clear(sorted(page for page in pages if not self._holders[page]))
        self._to_clear |= {page: clear for page in pages if self._holders[page]}

    def _without_holder(self, page: int) -> None:
        self._free.append(page)


class StateSlots:
    """Slots for the states of recurrent layers: of sequences, and of cached prefixes, by the page that each ends in.
    The latter count as free, and are taken when no other slot is: least recently kept first.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._kept: OrderedDict[int, int] = OrderedDict()  # by page

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    def __contains__(self, page: int) -> bool:
        return page in self._kept

    def take(self) -> int:
        return self._free.pop() if self._free else self._kept.popitem(last=False)[1]

    def take_kept(self, page: int) -> int:
        """The slot with the state at the end of a cached prefix, for the sequence that continues it."""
        return self._kept.pop(page)

    def kept(self, page: int) -> int:
        """The same slot, to be copied."""
        self._kept.move_to_end(page)
        return self._kept[page]

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, page: int, slot: int) -> None:
        """The slot of a sequence has the state at the end of the prefix that ends in `page`."""
        self.drop(page)
        self._kept[page] = slot

    def drop(self, page: int) -> None:
        if page in self._kept:
            self._free.append(self._kept.pop(page))

    def drop_all(self) -> None:
        self._free += self._kept.values()
        self._kept.clear()


# Key of a page: its predecessor (a page, or the adapter at the start of a sequence) and its tokens.
_Key = tuple[int | str, tuple[int, ...]]


class CachedPrefix(NamedTuple):
    """The first `num_tokens` of a sequence are in `pages`. The last page may be partly filled."""

    pages: list[int]
    num_tokens: int


NOT_CACHED = CachedPrefix([], 0)


class PrefixCache(PageAllocator):
    """A cached page without a holder counts as free. Pages are evicted when needed, least recently released first.

    Sequences are released from their end, and a holder of a page holds all pages before it. So a page is evicted after
    the cached pages that follow it.

    The last, partly filled page of a sequence that has ended is cached too. Who continues the sequence writes to it, so
    it leaves the cache with its new holder.

    `only_held`: pages are cached only as long as they have a holder, and prefixes of fewer tokens are not found.

    With recurrent layers (`states`) a prefix is found where its state was kept: where a sequence has ended, and at the
    page where two prompts were seen to part.
    """

    def __init__(
        self, num_pages: int, page_size: int, states: StateSlots | None = None, *, only_held: int | None = None
    ) -> None:
        super().__init__(num_pages)
        self.only_held = only_held
        self._page_size = page_size
        self.states = states
        self._page_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._tails: dict[int | str, set[tuple[int, ...]]] = {}  # tokens of partly filled pages, by predecessor
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached, without a holder

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._evictable)

    def full_pages(self, adapter: str, token_ids: Sequence[int]) -> list[int]:
        """The full pages of the longest prefix whose keys and values are cached."""
        pages: list[int] = []
        for _, key in self._keys(adapter, token_ids, pages):
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def find(self, adapter: str, token_ids: Sequence[int]) -> CachedPrefix:
        """The longest cached prefix. The caller must `hold` it before it allocates pages."""
        pages = self.full_pages(adapter, token_ids)
        while True:
            num_tokens, before = len(pages) * self._page_size, pages[-1] if pages else adapter
            rest = tuple(token_ids[num_tokens : num_tokens + self._page_size])
            tails = [tail for tail in self._tails.get(before, ()) if tail == rest[: len(tail)]]
            if self.states is None:
                break
            tails = [tail for tail in tails if self._page_of[before, tail] in self.states]
            if tails or not pages or pages[-1] in self.states:
                break
            pages.pop()
        if tails:
            longest = max(tails, key=len)
            pages.append(self._page_of[before, longest])
            num_tokens += len(longest)
        return CachedPrefix(pages, num_tokens) if num_tokens >= (self.only_held or 0) else NOT_CACHED

    def hold(self, prefix: CachedPrefix) -> None:
        """Add a holder to each full page, and make it the only one of a partly filled page."""
        num_full = prefix.num_tokens // self._page_size
        self.share(prefix.pages[:num_full])
        for page in prefix.pages[num_full:]:
            self._uncache(page)
            del self._evictable[page]
            self._holders[page] = 1

    def insert(self, adapter: str, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Cache the full pages among `pages`, up to the first page whose contents are cached already in another one, or
        that is to be cleared. Keys and values of the tokens are written to them before any others that are found from
        here on.
        """
        for index, key in self._new_keys(adapter, token_ids, pages):
            page = pages[index]
            if page in self._to_clear or self._page_of.setdefault(key, page) != page:
                return
            self._key_of[page] = key

    def insert_and_release(self, adapter: str, token_ids: Sequence[int], pages: Sequence[int]) -> int | None:
        """Cache the pages of a sequence that has ended, also the last one, and remove its holder. Returns the cached
        page that the sequence ends in; None: it is not cached to its end.

        Where contents are cached already, that page takes the place of the sequence's own, so that those after it can
        be cached.
        """
        last: int | None = None
        pages, size = list(pages), self._page_size
        for index, key in self._new_keys(adapter, token_ids, pages):
            own = pages[index]
            if own in self._to_clear:
                break
            pages[index] = self._page_of.setdefault(key, own)
            self._key_of[pages[index]] = key
            if pages[index] != own:
                self.share(pages[index : index + 1])
                self.release((own,))
        else:
            num_full = len(token_ids) // size
            key = (pages[num_full - 1] if num_full else adapter, tuple(token_ids[num_full * size :]))
            page = pages[num_full] if key[1] else -1
            last = None if key[1] or not num_full else pages[num_full - 1]
            is_own = page >= 0 and self._holders[page] == 1 and page not in self._key_of and page not in self._to_clear
            if is_own and key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key
                self._tails.setdefault(key[0], set()).add(key[1])
                last = page
        self.release(pages)
        return last

    def _keys(
        self, adapter: str, token_ids: Sequence[int], pages: Sequence[int], first: int = 0
    ) -> Iterable[tuple[int, _Key]]:
        """Keys of the full pages from `first` on. `pages` may change during iteration, up to the current one."""
        size = self._page_size
        for index in range(first, len(token_ids) // size):
            yield index, (pages[index - 1] if index else adapter, tuple(token_ids[index * size : (index + 1) * size]))

    def _new_keys(self, adapter: str, token_ids: Sequence[int], pages: Sequence[int]) -> Iterable[tuple[int, _Key]]:
        """Of the pages after those that are cached already, whose tokens need not be looked at."""
        num_cached = next((index for index, page in enumerate(pages) if page not in self._key_of), len(pages))
        return self._keys(adapter, token_ids, pages, num_cached)

    def clear(self) -> None:
        for page in list(self._evictable):
            self._evict(page)
        if self.states is not None:
            self.states.drop_all()
        self._page_of.clear()
        self._key_of.clear()
        self._tails.clear()

    def forget(self) -> None:
        """The weights change: no page that is cached or held now is found later."""
        self.clear()
        for page, num_holders in enumerate(self._holders):
            if num_holders:
                self._to_clear.setdefault(page, lambda pages: None)

    @property
    def unheld(self) -> list[int]:
        """Cached pages without a holder."""
        return list(self._evictable)

    def grow(self, num_pages: int) -> None:
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        self._holders += [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count} pages requested, {self.num_free} free"
        while len(self._free) < count:
            self._evict(next(iter(self._evictable)))
        return super().take(count)

    def _evict(self, page: int) -> None:
        del self._evictable[page]
        self._uncache(page)
        self._free.append(page)

    def _uncache(self, page: int) -> None:
        before, tokens = key = self._key_of.pop(page)
        del self._page_of[key]
        if self.states is not None:
            self.states.drop(page)
        if len(tokens) < self._page_size:
            self._tails[before].discard(tokens)
            if not self._tails[before]:
                del self._tails[before]

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page in self._evictable:
                del self._evictable[page]
                self._holders[page] = 1
            else:
                super().share((page,))

    def release(self, pages: Iterable[int]) -> None:
        super().release(reversed(list(pages)))

    def _without_holder(self, page: int) -> None:
        if page in self._key_of:
            self._evictable[page] = None
            if self.only_held is not None:
                self._evict(page)
        else:
            super()._without_holder(page)


GIB = 2**30
_CPU_DEFAULT_BYTES = 2 * GIB


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory on a CPU until they are written.

    `torch.zeros` writes every byte; for `np.zeros` the system maps zero pages, allocated on the first write. Masked
    positions must be finite, because their weight of 0 times NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def pools_of(shape: LayerShape, size: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For keys and values of a layer: [*size, width]. Of latent vectors the values are a view of the keys."""
    keys = zeros((*size, shape.key_dim), shape.dtype, device)
    if shape.expanded is not None:
        return keys, keys[..., : shape.value_dim]
    return keys, zeros((*size, shape.value_dim), shape.dtype, device)


@dataclass(eq=False)
class PagedKvCache:
    """The last page is the scratch page for padding: it fills unused entries of page tables."""

    layers: dict[int, LayerShape]
    num_pages: int
    page_size: int
    device: torch.device
    states: RecurrentStates | None = None  # of recurrent layers

    def __post_init__(self) -> None:
        self.keys: dict[int, Tensor] = {}  # layer -> [pages, page size, heads, dim]
        self.values: dict[int, Tensor] = {}
        # Of FP8 layers, the scales of keys and values: [pages, page size, heads].
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}
        device = self.device
        for layer, shape in self.layers.items():
            pages = (self.num_pages, self.page_size, shape.num_heads)
            self.keys[layer], self.values[layer] = pools_of(shape, pages, device)
            if shape.is_fp8:
                self.factors[layer] = zeros(pages, torch.float32, device), zeros(pages, torch.float32, device)

    @property
    def scratch_page(self) -> int:
        return self.num_pages - 1

    @property
    def num_bytes(self) -> int:
        pages = self.num_pages * self.page_size * sum(shape.bytes_per_token for shape in self.layers.values())
        return pages if self.states is None else pages + self.states.num_bytes

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values of tokens to `slots` (page * page size + offset in the page)."""
        if layer in self.factors:
            from posttrain.policy.fused.fp8_kernels import quantise_into

            pools = (self.keys[layer], self.values[layer])
            for rows, pool, factors in zip((key, value), pools, self.factors[layer], strict=True):
                quantise_into(rows, pool, factors, slots)
            return
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        if self.layers[layer].expanded is None:
            self.values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values at `slots`; [slots, heads, dim]. `dtype` is the result type of an FP8 cache."""
        pools = (self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1))
        if (shape := self.layers[layer]).expanded is not None:
            rows = pools[0].index_select(0, slots)
            return rows, rows[..., : shape.value_dim]
        if layer not in self.factors:
            return pools[0].index_select(0, slots), pools[1].index_select(0, slots)
        key_factors, value_factors = (factors.flatten(0, 1) for factors in self.factors[layer])
        return dequantised(pools[0], key_factors, slots, dtype), dequantised(pools[1], value_factors, slots, dtype)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        source, target = to_device(torch.tensor(copies, dtype=torch.long).T.contiguous(), self.device)
        for pool in self._pools():
            pool.index_copy_(0, target, pool.index_select(0, source))

    def read_pages(self, pages: Sequence[int]) -> list[Tensor]:
        """Their contents, in host memory."""
        at = to_device(torch.tensor(pages, dtype=torch.long), self.device)
        return [pool.index_select(0, at).cpu() for pool in self._pools()]

    def write_pages(self, pages: Sequence[int], contents: Sequence[Tensor]) -> None:
        """What `read_pages` returned."""
        at = to_device(torch.tensor(pages, dtype=torch.long), self.device)
        for pool, values in zip(self._pools(), contents, strict=bool(contents)):
            pool.index_copy_(0, at, values.to(self.device))

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros: masked positions must be finite, see `zeros`."""
        at = to_device(torch.tensor(pages, dtype=torch.long), self.device)
        for pool in self._pools():
            pool.index_fill_(0, at, 0)

    def _pools(self) -> Iterator[Tensor]:
        """All tensors with a first dimension of pages, in types that torch can index."""
        values = [pool for layer, pool in self.values.items() if self.layers[layer].expanded is None]
        for pool in (*self.keys.values(), *values):
            yield pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
        for factors in self.factors.values():
            yield from factors

    def slots(self, pages: Sequence[int], start: int, end: int) -> np.ndarray:
        """Slots of positions [start, end) of the sequence in `pages`."""
        position, size = np.arange(start, end), self.page_size
        return np.asarray(pages, dtype=np.int64)[position // size] * size + position % size


def dequantised(pool: Tensor, factors: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries of an FP8 pool, by index in its first dimension."""
    values = pool.view(torch.uint8)[at].view(pool.dtype)
    return (values.float() * factors[at][..., None]).to(dtype)


def usable_bytes(device: torch.device, gpu_memory_utilization: float) -> float:
    """Until `gpu_memory_utilization` of the GPU's memory is in use, by any process."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what torch has cached
    return free - (1 - gpu_memory_utilization) * total


def num_pages_for_call(
    layers: dict[int, LayerShape],
    page_size: int,
    kv_cache_gib: float | None,
    device: torch.device,
    *,
    wanted: int,
    least: int,
    gpu_memory_utilization: float = 0.9,
    reserve: int = 0,
) -> int:
    """Pages of a cache for one call: `wanted` if memory allows, never fewer than `least`, the need of one sequence.

    On a GPU the cache may take memory until `gpu_memory_utilization` of it is in use, by any process; `reserve` bytes
    of it are left for forward passes.
    """
    if not layers:
        return wanted  # a model of recurrent layers only: pages hold nothing
    page_bytes = page_size * sum(shape.bytes_per_token for shape in layers.values())
    # On a CPU decoding keeps a dense copy of the active sequences, which takes about as much again.
    budget_per_page = page_bytes * (2 if device.type == "cpu" else 1)
    if kv_cache_gib is not None:
        budget = kv_cache_gib * GIB
    elif device.type == "cpu":
        budget = float(max(_CPU_DEFAULT_BYTES, least * budget_per_page))
    else:
        budget = usable_bytes(device, gpu_memory_utilization) - reserve
    affordable = int(budget // budget_per_page)
    if affordable < least:
        raise InputError(
            f"the longest sequence of this call needs {least * budget_per_page / GIB:.3g} GiB of KV cache and "
            f"{max(budget, 0) / GIB:.3g} GiB may be used: raise kv_cache_gib or gpu_memory_utilization, or lower "
            "max_new_tokens or the length of prompts"
        )
    return min(wanted, affordable)
