"""Page allocation of the KV cache: free pages and reference counts. No tensors."""

from __future__ import annotations

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
