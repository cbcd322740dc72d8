"""The logits of a session's next tokens: by recorded steps on a GPU, dense copies on a CPU, or straight from the pages.

All ways write to the same pages, which have everything. A dense copy is a faster view of them: it may be thrown away at any
time, and must be when steps were taken without it. Each adapter has its own. Knows nothing of requests or of drawing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from posttrain.engines.native.attention import DenseDecode, PagedDecode
from posttrain.engines.native.engine import NativeSettings
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.graphs import LogitGraphs
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.pages import pages_for
from posttrain.engines.native.recording import RecordingError
from posttrain.engines.native.scheduler import Sample

# A dense copy grows in steps of about this many tokens; see `DenseDecode`.
_DENSE_HEADROOM_TOKENS = 96


class SessionDecoding:
    """`num_pages` are those that sequences may have; the cache has one more, for padding."""

    def __init__(self, forward: ForwardPass, cache: PagedKvCache, settings: NativeSettings, num_pages: int) -> None:
        self._forward, self._cache, self._settings, self._num_pages = forward, cache, settings, num_pages
        self.copies: dict[str, DenseDecode] = {}  # by adapter
        self.may_record = cache.device.type == "cuda"  # until it fails once
        self._graphs: dict[str, LogitGraphs] = {}  # a recorded step has the adapter that was on when it was recorded
        self._paged = self._new_paged()

    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        """[samples, vocabulary], valid until the next call. `adapter` is on."""
        if self.may_record:
            try:
                return self._graphs_of(adapter).logits(samples)
            except RecordingError as error:
                warnings.warn(f"decoding goes on without CUDA graphs, more slowly: {error}", stacklevel=2)
                self.may_record = False
        longest = 1 + max(sample.num_cached for sample in samples)
        return self._forward.next_logits(self.way_for(adapter, len(samples), longest), samples)

    def forget_copies(self) -> None:
        self.copies.clear()

    def forget_rows(self) -> None:
        """Samples that come may have the numbers of others that were here."""
        self.forget_copies()
        for decode in (self._paged, *(graphs.decode for graphs in self._graphs.values())):
            decode.forget_rows()

    def way_for(self, adapter: str, num_rows: int, longest: int) -> DenseDecode | PagedDecode:
        """On a CPU the dense copies together never take more than the pages do."""
        if self._cache.device.type != "cpu":
            return self._paged
        size, longest_ever = self._settings.page_size, self._settings.max_total_tokens
        limit = self._num_pages * size
        rows, length = num_rows, pages_for(min(longest + _DENSE_HEADROOM_TOKENS, longest_ever), size) * size
        if rows * length > limit:  # one long answer among many short ones: read the pages where they lie
            self.copies.pop(adapter, None)  # it would miss the tokens of these steps
            return self._paged
        if (copy := self.copies.get(adapter)) is not None:
            rows, length = max(rows, copy.num_rows), max(length, copy.row_length)
        held = sum(copy.num_rows * copy.row_length for name, copy in self.copies.items() if name != adapter)
        if rows * length + held > limit:
            self.forget_copies()  # whoever needs one makes it again
        return self.copies.setdefault(adapter, DenseDecode(self._cache, longest_ever))

    def _graphs_of(self, adapter: str) -> LogitGraphs:
        if adapter not in self._graphs:
            self._graphs[adapter] = LogitGraphs(self._forward, self._new_paged())
        return self._graphs[adapter]

    def _new_paged(self) -> PagedDecode:
        most = pages_for(self._settings.max_total_tokens, self._settings.page_size) + 1
        return PagedDecode(self._cache, self._settings.max_batch_size, most)
