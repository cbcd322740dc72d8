"""Decode steps on a GPU as CUDA graphs: captured once per batch size, replayed for every token.

A step launches several hundred small kernels. Launching them from Python takes several times as long as running them.
`DecodeGraphs` keeps the state of its rows (last token, position, noise key) on the device, and the step itself advances
it. So the next step can be launched before the host has read the tokens of this one.

Batches are padded to the next captured size. Padding rows write to the scratch page, and their state does not advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.cuda_graph_cache import CudaGraphCache, Staging, batch_sizes
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import PromptGroup, Sample
from posttrain.policy.fused.adapters import capture_key

if TYPE_CHECKING:
    from posttrain.engines.native.kernels import PrefixTiles

# Rows of the device's state.
_TOKEN, _POSITION, _KEY, _INDEX, _LIVE = range(5)


@dataclass(frozen=True)
class ModelLogprobs:
    """The model's log-probabilities at temperature 1: of the drawn token, and of the most probable ones."""

    of_token: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Drawn:
    """The next token of each sample and its log-probability, with the copy to the host in flight."""

    samples: Sequence[Sample]
    values: Tensor  # [2, samples]; float64 holds every token id and every float32
    arrived: torch.cuda.Event | None = None
    model_logprobs: Mapping[int, ModelLogprobs] = field(default_factory=dict)  # by row, if requested

    @classmethod
    def to_host(cls, samples: Sequence[Sample], values: Tensor) -> Drawn:
        """`values` may be overwritten by the next step: the copy to the host is queued before it."""
        if not values.is_cuda:
            return cls(samples, values.clone())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(samples, host, arrived)

    def read(self) -> tuple[list[int], list[float]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values[0].long().tolist(), self.values[1].tolist()


@dataclass
class FreshTokens:
    """The last tokens of samples that join the batch, on the device."""

    _drawn: list[Tensor] = field(default_factory=list)
    _place: dict[int, int] = field(default_factory=dict)  # admission -> place
    _count: int = 0

    def add(self, samples: Sequence[Sample], tokens: Tensor) -> None:
        self._drawn.append(tokens)
        for place, sample in enumerate(samples, start=self._count):
            self._place[sample.admission] = place
        self._count += len(samples)

    def place(self, sample: Sample) -> int:
        return self._place[sample.admission]

    def tokens(self, device: torch.device) -> Tensor:
        return torch.cat([*self._drawn, torch.zeros(1, dtype=torch.long, device=device)])

    def clear(self) -> None:
        self._drawn, self._place, self._count = [], {}, 0


class SharedPrefixes:
    """The rows of a decode step that share their prompt's pages, for the kernel that reads shared pages once.

    Whether to share is decided once per call, as it is part of the captured graph. The rows may change between steps.
    """

    def __init__(self, decode: PagedDecode) -> None:
        self.decode = decode
        self.samples_per_tile = 0  # 0: every row reads its prompt separately
        # By samples per tile: one on the device, two on the host.
        self._tiles: dict[int, tuple[PrefixTiles, list[PrefixTiles]]] = {}
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def begin(self, groups: Sequence[PromptGroup], num_samples: int) -> None:
        self.samples_per_tile, self.decode.shared = 0, None
        kernel, cache = self.decode.kernel, self.decode.cache
        if kernel is None or not cache.layers or num_samples < 2:
            return
        layer, heads = next(iter(cache.layers.values())), self.decode.num_heads
        max_rows = len(self.decode.host_table)
        most = batch_sizes(max_rows)[-1]  # rows of a graph, padding included
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
        """Tokens of the prompt's full pages; every sample has its own copy of the rest."""
        size = self.decode.cache.page_size
        return group.prompt_length // size * size

    def send(self, samples: Sequence[Sample]) -> None:
        """Copy the rows that share a prompt to the device."""
        if not self.samples_per_tile:
            return
        members: dict[tuple[PromptGroup, int], list[int]] = {}
        for row, sample in enumerate(samples):
            # A recomputed prompt is in other pages; samples that started earlier keep the old pages.
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


class DecodeGraphs:
    """Decode steps of requests with equal sampling settings, tokens drawn inside the graph. Same lifetime as its KV
    cache.
    """

    def __init__(self, forward: ForwardPass, decode: PagedDecode) -> None:
        self.forward = forward
        self.decode = decode
        self.scratch_page = decode.cache.scratch_page
        device = decode.cache.device
        max_rows, width = decode.host_table.shape
        self.sizes = batch_sizes(max_rows)
        most = self.sizes[-1]
        self.state = torch.zeros(5, most, dtype=torch.long, device=device)
        self.table = torch.full((most, width), self.scratch_page, dtype=torch.int32, device=device)
        # The rows of the next step. The token's entry holds the index at which `_arrange` finds the token.
        self._new_rows = torch.zeros_like(self.state)
        self._staged_rows, self._staged_table = Staging(self._new_rows), Staging(self.table)
        self._order: list[int] = []  # admissions of the samples in the rows
        self._fresh = FreshTokens()
        self.cache = CudaGraphCache(device)
        self._prefixes = SharedPrefixes(decode)
        self._model_state: int | None = None

    def begin(self, groups: Sequence[PromptGroup], num_samples: int) -> None:
        """Reset the rows of the previous call. `groups` with `num_samples` each will be decoded."""
        self.forget_rows()
        self._model_state = None
        self._prefixes.begin(groups, num_samples)

    def give_up(self) -> None:
        """Stop sharing prefixes: their tiles are only updated with graphs."""
        self.decode.shared = None

    def join(self, samples: Sequence[Sample], tokens: Tensor | None = None) -> None:
        """Samples that take part from the next step on, with their last tokens; None: those that the host has read."""
        if tokens is None:
            last = torch.tensor([sample.token_ids[-1] for sample in samples], dtype=torch.long)
            tokens = last.to(self.state.device)
        self._fresh.add(samples, tokens)

    def forget_rows(self) -> None:
        """Make all samples join again, after steps outside of this class have advanced them."""
        self._order = []
        self._fresh.clear()

    def step(self, samples: Sequence[Sample], sampler: TokenSampler) -> Drawn:
        """Launch one more token for each sample. Does not synchronise with the device."""
        size = next(size for size in self.sizes if size >= len(samples))
        self._arrange(samples)
        self._send_table(samples)
        if self._model_state is None:  # after the first prefill, which may move weights to another address
            self._model_state = capture_key(self.forward.base)
        drawing = sampler.sampling
        settings = (drawing.temperature, drawing.top_p, drawing.top_k)
        key = (size, *settings, self._prefixes.samples_per_tile, self._model_state)
        # Warm-up is safe for the KV cache: it writes the same keys and values to the same slots.
        drawn = self.cache.run(key, lambda: self._compute(size, sampler), changes=self.state)
        self._fresh.clear()
        return Drawn.to_host(samples, drawn[:, : len(samples)])

    def _arrange(self, samples: Sequence[Sample]) -> None:
        """Arrange the device's rows in the order of `samples`: rows move, join and leave."""
        order = [sample.admission for sample in samples]
        if order == self._order:
            return
        row_of = {admission: row for row, admission in enumerate(self._order)}
        most, count = self.state.shape[1], len(samples)
        source = [
            row_of[a] if a in row_of else most + self._fresh.place(s) for a, s in zip(order, samples, strict=True)
        ]
        rows = self._staged_rows.fill()
        rows[:, count:] = 0
        rows[_TOKEN, :count] = source
        rows[_POSITION, :count] = [sample.num_cached for sample in samples]
        rows[_KEY, :count] = [sample.noise_key for sample in samples]
        rows[_INDEX, :count] = [sample.noise_index for sample in samples]
        rows[_LIVE, :count] = 1
        self._staged_rows.send(self._new_rows)
        tokens = torch.cat([self.state[_TOKEN], self._fresh.tokens(self.state.device)])
        self.state.copy_(self._new_rows)
        self.state[_TOKEN] = tokens.index_select(0, self._new_rows[_TOKEN])
        self._order = order
        self._prefixes.send(samples)

    def _send_table(self, samples: Sequence[Sample]) -> None:
        changed = self.decode.update_table(samples)
        if not changed and len(samples) == self.decode.num_sent:
            return
        self.decode.num_sent = len(samples)
        table = self._staged_table.fill()
        table[: len(samples)] = self.decode.host_table[: len(samples)]
        table[len(samples) :] = self.scratch_page
        self._staged_table.send(self.table)

    def _compute(self, size: int, sampler: TokenSampler) -> Tensor:
        token, position, key, index, live = self.state[:, :size]
        self.decode.point_at(self.table[:size], position)
        hidden = self.forward.hidden(self.decode, token, position)
        tokens, logprobs = sampler.draw(self.forward.head.logits(hidden), key, index)
        if (kernel := self.decode.kernel) is not None:
            drawn: Tensor = kernel.move_on(token, position, index, live, tokens, logprobs)
            return drawn
        token.copy_(tokens)
        position.add_(live)
        index.add_(live)
        return torch.stack([tokens.double(), logprobs.double()])


class LogitGraphs:
    """Decode steps up to the logits, for requests with different sampling settings. The host has read all tokens."""

    def __init__(self, forward: ForwardPass, decode: PagedDecode) -> None:
        self.forward = forward
        self.decode = decode
        self.scratch_page = decode.cache.scratch_page
        device = decode.cache.device
        max_rows, width = decode.host_table.shape
        self.sizes = batch_sizes(max_rows)
        self.rows = torch.zeros(2, self.sizes[-1], dtype=torch.long, device=device)  # token, position
        self.table = torch.full((self.sizes[-1], width), self.scratch_page, dtype=torch.int32, device=device)
        self._staged_rows, self._staged_table = Staging(self.rows), Staging(self.table)
        self._cache = CudaGraphCache(device)

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        """[samples, vocabulary], valid until the next call."""
        count = len(samples)
        size = next(size for size in self.sizes if size >= count)
        rows, table = self._staged_rows.fill(), self._staged_table.fill()
        rows[:, count:] = 0
        rows[_TOKEN, :count] = [sample.token_ids[-1] for sample in samples]
        rows[_POSITION, :count] = [sample.num_cached for sample in samples]
        self._staged_rows.send(self.rows)
        self.decode.update_table(samples)
        table[:count] = self.decode.host_table[:count]
        table[count:] = self.scratch_page
        self._staged_table.send(self.table)
        return self._cache.run(size, lambda: self._compute(size))[:count]

    def _compute(self, size: int) -> Tensor:
        token, position = self.rows[:, :size]
        self.decode.point_at(self.table[:size], position)
        return self.forward.head.logits(self.forward.hidden(self.decode, token, position))
