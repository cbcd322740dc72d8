"""Which rows of a decode step have the pages of their prompt in common, for the kernel that reads those once for all.

Decided once per call whether it pays, since a recorded step either does it or does not; who shares with whom may change from
step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.recording import batch_sizes
from posttrain.engines.native.scheduler import PromptGroup, Sample


class SharedPrefixes:
    def __init__(self, decode: PagedDecode) -> None:
        self.decode = decode
        self.samples_per_tile = 0  # 0: every row reads its prompt on its own
        self._tiles: dict[int, tuple[Any, list[Any]]] = {}  # by samples per tile: the device's, and two on the host
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def begin(self, groups: Sequence[PromptGroup], num_samples: int) -> None:
        self.samples_per_tile, self.decode.shared = 0, None
        kernel, cache = self.decode.kernel, self.decode.cache
        if kernel is None or not cache.layers or num_samples < 2:
            return
        layer, heads = next(iter(cache.layers.values())), self.decode.num_heads
        max_rows = len(self.decode.host_table)
        most = batch_sizes(max_rows)[-1]  # rows of a recorded step, padding included
        together = groups[: max(1, max_rows // num_samples)]
        shape = kernel.DecodeShape(heads, layer.num_heads, layer.key_dim, layer.value_dim, layer.dtype.itemsize)
        sizes = [min(num_samples, max_rows)] * len(together)
        if not kernel.shared_prefix_pays(shape, sizes, [self._num_shared(group) for group in together]):
            return
        self.samples_per_tile = kernel.samples_per_tile(heads // layer.num_heads, layer.dtype.itemsize, sizes[0])
        if self.samples_per_tile not in self._tiles:
            device, samples = cache.device, self.samples_per_tile
            pinned = device.type == "cuda"
            self._tiles[samples] = (
                kernel.PrefixTiles.empty(most, samples, device=device),
                [kernel.PrefixTiles.empty(most, samples, pinned=pinned) for _ in range(2)],
            )
        self.decode.shared = self._tiles[self.samples_per_tile][0]

    def _num_shared(self, group: PromptGroup) -> int:
        """Tokens of the prompt's full pages; the rest of it every sample has for itself."""
        size = self.decode.cache.page_size
        return group.prompt_length // size * size

    def send(self, samples: Sequence[Sample]) -> None:
        """Tell the device who shares with whom from now on."""
        if not self.samples_per_tile:
            return
        members: dict[tuple[PromptGroup, int], list[int]] = {}
        for row, sample in enumerate(samples):
            # A prompt that had to be computed again lies in other pages: whoever began before keeps the old ones.
            members.setdefault((sample.group, sample.pages[0]), []).append(row)
        on_device, on_host = self._tiles[self.samples_per_tile]
        self._turn = 1 - self._turn
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        on_host[self._turn].plan(list(members.values()), [self._num_shared(group) for group, _ in members])
        on_device.copy_(on_host[self._turn])
        if self.decode.cache.device.type == "cuda":
            self._sent[self._turn] = sent = torch.cuda.Event()
            sent.record()
