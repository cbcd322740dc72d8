"""The prefix cache of a session: full pages of the KV cache, looked up by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from posttrain.engines.native.page_allocator import PageAllocator

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
