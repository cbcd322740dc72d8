"""Decode backends for next-token logits without CUDA graphs: dense copies of the pages on a CPU, or the pages in place.

All of them write to the same pages, which hold every key and value. A dense copy is a faster view of the pages. It may
be dropped at any time, and must be dropped after steps that did not update it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from posttrain.engines.native.attention import DenseDecode, PagedDecode
from posttrain.engines.native.cuda_graph_cache import GraphCaptureError
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.scheduler import Sample, pages_for

# A dense copy grows in steps of about this many tokens; see `DenseDecode`.
_DENSE_HEADROOM_TOKENS = 96


class Decoding(Protocol):
    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        """[samples, vocabulary], valid until the next call. `adapter` is active."""

    def drop_copies(self) -> None:
        """Drop dense copies whose pages were cleared or written without updating the copy."""


@dataclass
class SingleBackend:
    """One decode backend for all steps and all adapters."""

    forward: ForwardPass
    backend: DenseDecode | PagedDecode

    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        return self.forward.next_logits(self.backend, samples)

    def drop_copies(self) -> None:
        if isinstance(self.backend, DenseDecode):
            self.backend.forget_rows()


class BackendPerAdapter:
    """A decode backend for each adapter. `num_pages` counts pages for sequences; the cache has one more for padding."""

    def __init__(
        self, forward: ForwardPass, cache: PagedKvCache, num_pages: int, max_rows: int, max_total_tokens: int
    ) -> None:
        self._forward, self._cache, self._num_pages = forward, cache, num_pages
        self._max_total_tokens = max_total_tokens
        self.copies: dict[str, DenseDecode] = {}  # by adapter
        self._paged = self.new_paged(max_rows)

    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        longest = 1 + max(sample.num_cached for sample in samples)
        return self._forward.next_logits(self.decode_backend_for(adapter, len(samples), longest), samples)

    def drop_copies(self) -> None:
        self.copies.clear()

    def forget_rows(self) -> None:
        """Later samples may have the admission numbers of earlier ones."""
        self.drop_copies()
        self._paged.forget_rows()

    def decode_backend_for(self, adapter: str, num_rows: int, longest: int) -> DenseDecode | PagedDecode:
        """On a CPU the dense copies together never take more memory than the pages."""
        if self._cache.device.type != "cpu":
            return self._paged
        size, longest_ever = self._cache.page_size, self._max_total_tokens
        limit = self._num_pages * size
        rows, length = num_rows, pages_for(min(longest + _DENSE_HEADROOM_TOKENS, longest_ever), size) * size
        if rows * length > limit:  # a long answer among many short ones: read the pages in place
            self.copies.pop(adapter, None)  # the copy would miss the tokens of these steps
            return self._paged
        if (copy := self.copies.get(adapter)) is not None:
            rows, length = max(rows, copy.num_rows), max(length, copy.row_length)
        held = sum(copy.num_rows * copy.row_length for name, copy in self.copies.items() if name != adapter)
        if rows * length + held > limit:
            self.drop_copies()  # refilled on next use
        return self.copies.setdefault(adapter, DenseDecode(self._cache, longest_ever))

    def new_paged(self, max_rows: int) -> PagedDecode:
        most = pages_for(self._max_total_tokens, self._cache.page_size) + 1
        return PagedDecode(self._cache, max_rows, most)


def warn_without_graphs(error: GraphCaptureError) -> None:
    warnings.warn(f"decoding goes on without CUDA graphs, more slowly: {error}", stacklevel=3)
