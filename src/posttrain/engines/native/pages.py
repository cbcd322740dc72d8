"""Page allocation of the KV cache: free pages with reference counts, and the prefix cache of a session. No tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence


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


# Key of a full page: its predecessor (a page, or the adapter at the start of a sequence) and its tokens.
_Key = tuple[int | str, tuple[int, ...]]


class PrefixCache(PageAllocator):
    """A cached page without a holder counts as free. Pages are evicted when needed, least recently released first.

    Sequences are released from their end, and a holder of a page holds all pages before it. So a page is evicted after
    the cached pages that follow it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self._page_size = page_size
        self._page_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached, without a holder

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._evictable)

    def find(self, adapter: str, token_ids: Sequence[int]) -> list[int]:
        """The cached pages of the longest prefix. The caller must share them before it allocates others."""
        pages: list[int] = []
        for key in self._keys(adapter, token_ids, pages):
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def insert(self, adapter: str, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Cache `pages`, which hold the keys and values of the tokens. Of pages with equal contents the first is kept.

        A page that is to be cleared is not cached, nor are those after it.
        """
        for key, page in zip(self._keys(adapter, token_ids, pages), pages, strict=False):
            if page in self._to_clear or self._page_of.setdefault(key, page) != page:
                return
            self._key_of[page] = key

    def _keys(self, adapter: str, token_ids: Sequence[int], pages: Sequence[int]) -> Iterable[_Key]:
        """Keys of the full pages. `pages` may grow during iteration."""
        size = self._page_size
        for index in range(len(token_ids) // size):
            yield pages[index - 1] if index else adapter, tuple(token_ids[index * size : (index + 1) * size])

    def clear(self) -> None:
        for page in self._evictable:
            self._free.append(page)
        self._evictable.clear()
        self._page_of.clear()
        self._key_of.clear()

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count} pages requested, {self.num_free} free"
        while len(self._free) < count:
            page, _ = self._evictable.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._free.append(page)
        return super().take(count)

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
        else:
            super()._without_holder(page)
