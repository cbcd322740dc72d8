"""Decode steps on a GPU as CUDA graphs: captured once per batch size, replayed for every token.

A step launches several hundred small kernels. Launching them from Python takes several times as long as running them.
`DecodeGraphs` keeps the state of its rows (last token, position, noise key, temperature) on the device, and the step
itself advances it. So the next step can be launched before the host has read the tokens of this one.

Tokens are drawn inside the graph, at any temperature. If a row needs top-k, top-p, a grammar or the most probable
tokens, the graph ends at the logits, and its tokens are drawn after it: the settings of requests would otherwise add
graphs without bound.

A step may also compute short prompts of samples that join, a row for each token. A prefill of its own would read all
weights for a few tokens, and launching its kernels from Python takes longer than that.

Batches are padded to the next captured size. Padding rows write to the scratch page, and their state does not advance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.cuda_graph_cache import CudaGraphCache, Staging, batch_sizes
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.recurrent_states import DecodeRecurrence
from posttrain.engines.native.sampler import Drawn, DrawSettings, draw, draw_plain, top_logprobs
from posttrain.engines.native.scheduler import Prefill, PromptGroup, Sample
from posttrain.policy.fused.adapters import capture_key
from posttrain.policy.runtime import to_device

if TYPE_CHECKING:
    from posttrain.engines.native.kernels import PrefixTiles

# Rows of the device's state.
_TOKEN, _POSITION, _KEY, _INDEX, _LIVE, _STATE_SLOT, _OFFSET = range(7)
# In the order of rows: a row that computes a token of a prompt, in place of an admission. Not part of any later step.
_OF_PROMPT = -1


@dataclass
class FreshTokens:
    """The last tokens of samples that join the batch, on the device."""

    _drawn: list[Tensor] = field(default_factory=list)
    _place: dict[int, int] = field(default_factory=dict)  # admission -> place
    _count: int = 0

    def add(self, samples: Sequence[Sample], tokens: Tensor) -> int:
        """The first of `tokens` are those of `samples`. Returns the place of the token behind them."""
        self._drawn.append(tokens)
        for place, sample in enumerate(samples, start=self._count):
            self._place[sample.admission] = place
        behind = self._count + len(samples)
        self._count += len(tokens)
        return behind

    def place(self, sample: Sample) -> int:
        return self._place[sample.admission]

    def tokens(self, device: torch.device) -> Tensor:
        return torch.cat([*self._drawn, torch.zeros(1, dtype=torch.long, device=device)])

    def clear(self) -> None:
        self._drawn, self._place, self._count = [], {}, 0


class PromptRow(NamedTuple):
    """One token of a prompt that a decode step computes."""

    sample: Sample
    position: int
    place: int  # among the fresh tokens


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
        if layer.expanded is not None:  # all heads of a row read its latent vectors once already
            return
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
    """Decode steps of the requests of one adapter. Same lifetime as its KV cache. `like`: other graphs, which never run
    at the same time and share the memory of these.
    """

    def __init__(self, forward: ForwardPass, decode: PagedDecode, like: DecodeGraphs | None = None) -> None:
        self.forward = forward
        self.decode = decode
        device = decode.cache.device
        max_rows, width = decode.host_table.shape
        self.sizes = batch_sizes(max_rows)
        most = self.sizes[-1]
        self.state = torch.zeros(7, most, dtype=torch.long, device=device)
        self.inverse_temperature = torch.zeros(most, dtype=torch.float32, device=device)
        self.table = torch.full((most, width), decode.cache.scratch_page, dtype=torch.int32, device=device)
        # The rows of the next step. The token's entry holds the index at which `_arrange` finds the token.
        self._new_rows = torch.zeros_like(self.state)
        self._staged_rows, self._staged_table = Staging(self._new_rows), Staging(self.table)
        self._staged_temperature = Staging(self.inverse_temperature)
        self._order: list[int] = []  # admissions of the samples in the rows
        self._draws_inside = True  # whether the graph draws the tokens of these rows
        self._fresh = FreshTokens()
        self._prompt_rows: list[PromptRow] = []  # of the next step
        self.cache: CudaGraphCache = CudaGraphCache(device, None if like is None else like.cache)
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
            tokens = to_device(last, self.state.device)
        self._fresh.add(samples, tokens)

    def join_prompts(self, jobs: Mapping[Sample, Prefill]) -> None:
        """Samples whose prompts the next step computes, with a row for each token. The row of a prompt's last token
        draws the first token of its sample; the other rows are behind all samples. Every layer writes the keys and
        values of all rows before it reads any.
        """
        last = [job.token_ids[-1] for job in jobs.values()]
        earlier = [
            (sample, position, token)
            for sample, job in jobs.items()
            for position, token in enumerate(job.token_ids[:-1], start=job.start)
        ]
        tokens = torch.tensor([*last, *(token for _, _, token in earlier)], dtype=torch.long)
        behind = self._fresh.add(list(jobs), to_device(tokens, self.state.device))
        self._prompt_rows += [
            PromptRow(sample, position, place) for place, (sample, position, _) in enumerate(earlier, start=behind)
        ]

    def forget_rows(self) -> None:
        """Make all samples join again, after steps outside of this class have advanced them."""
        self._order = []
        self._fresh.clear()
        self._prompt_rows = []

    def step(
        self,
        samples: Sequence[Sample],
        settings: Sequence[DrawSettings],
        activate: Callable[[], None] = lambda: None,
        read_earlier: Callable[[], None] = lambda: None,
    ) -> Drawn:
        """Launch one more token for each sample. Does not synchronise with the device, unless a sample is constrained.

        `activate` is called before the model is run by Python: to capture a graph, not to replay it. `read_earlier`
        reads all tokens in flight, which grammars need, while the device computes the logits.
        """
        count, rows = len(samples), [*samples, *(row.sample for row in self._prompt_rows)]
        assert len(rows) <= self.sizes[-1], f"{len(rows)} rows, and the largest step has {self.sizes[-1]}"
        size = next(size for size in self.sizes if size >= len(rows))
        self._arrange(samples, settings)
        self.decode.send_table(rows, self._staged_table, self.table)
        if self._model_state is None:  # after the first prefill, which may move weights to another address
            activate()
            self._model_state = capture_key(self.forward.base)
        vocab_size = settings[0].sampler.vocab_size if self._draws_inside else None

        def compute() -> Tensor:
            activate()
            return self._compute(size, vocab_size)

        key = (size, vocab_size, self._prefixes.samples_per_tile, self._model_state)
        # Warm-up is safe for the KV cache: the step writes the slots of its tokens again before they are read.
        # States of recurrent layers would advance: it uses the slot for padding.
        result = self.cache.run(key, compute, changes=self.state, in_warm_up=self._without_states)
        self._fresh.clear()
        self._prompt_rows = []
        if self._draws_inside:
            return Drawn.to_host(samples, result[:, :count])
        logits = result[:count]
        if any(one.is_constrained for one in settings):
            read_earlier()
        tokens, logprobs = draw(samples, settings, logits)
        return Drawn.to_host(samples, self._move_on(tokens, logprobs), top_logprobs(settings, logits))

    def _arrange(self, samples: Sequence[Sample], settings: Sequence[DrawSettings]) -> None:
        """Arrange the device's rows in the order of `samples`, prompts behind them: rows move, join and leave."""
        prompts = self._prompt_rows
        order = [*(sample.admission for sample in samples), *[_OF_PROMPT] * len(prompts)]
        if order == self._order and not prompts:
            return
        row_of = {admission: row for row, admission in enumerate(self._order)}
        most, count = self.state.shape[1], len(samples)
        source = [
            row_of[a] if a in row_of else most + self._fresh.place(s) for a, s in zip(order, samples, strict=False)
        ]
        rows = self._staged_rows.fill()
        rows[:, count:] = 0
        rows[_TOKEN, count : len(order)] = [most + row.place for row in prompts]
        rows[_POSITION, count : len(order)] = [row.position for row in prompts]
        rows[_TOKEN, :count] = source
        rows[_POSITION, :count] = [sample.num_cached for sample in samples]
        rows[_KEY, :count] = [sample.noise_key for sample in samples]
        rows[_INDEX, :count] = [sample.noise_index for sample in samples]
        rows[_LIVE, :count] = 1
        rows[_OFFSET, :count] = [sample.group.offset for sample in samples]
        if (states := self.decode.cache.states) is not None:
            rows[_STATE_SLOT, :count] = [sample.state_slot for sample in samples]
            rows[_STATE_SLOT, count:] = states.scratch_slot
        self._staged_rows.send(self._new_rows)
        tokens = torch.cat([self.state[_TOKEN], self._fresh.tokens(self.state.device)])
        self.state.copy_(self._new_rows)
        self.state[_TOKEN] = tokens.index_select(0, self._new_rows[_TOKEN])
        temperature = self._staged_temperature.fill()
        temperature[:count] = [one.sampler.inverse_temperature for one in settings]
        temperature[count:] = 0.0
        self._staged_temperature.send(self.inverse_temperature)
        self._draws_inside = all(
            one.sampler.is_plain and not (one.num_top_logprobs or one.is_constrained) for one in settings
        )
        self._order = order
        self._prefixes.send(samples)

    def _compute(self, size: int, vocab_size: int | None) -> Tensor:
        """Tokens and log-probabilities [2, size]; without `vocab_size` the logits."""
        token, position, key, index, _, state_slots, offset = self.state[:, :size]
        self.decode.point_at(self.table[:size], position)
        if (states := self.decode.cache.states) is not None:
            self.decode.recurrence = DecodeRecurrence(states, state_slots)
        turned = position if self.forward.head.tower is None else position + offset  # after images
        logits = self.forward.head.logits(self.forward.hidden(self.decode, token, turned))
        if vocab_size is None:
            return logits
        return self._move_on(*draw_plain(logits, key, index, self.inverse_temperature[:size], vocab_size))

    def _without_states(self) -> None:
        if (states := self.decode.cache.states) is not None:
            self.state[_STATE_SLOT] = states.scratch_slot

    def _move_on(self, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Advance the state of the first rows. Returns both as float64, [2, rows]."""
        token, position, _, index, live, *_ = self.state[:, : len(tokens)]
        if (kernel := self.decode.kernel) is not None:
            return kernel.move_on(token, position, index, live, tokens, logprobs)
        token.copy_(tokens)
        position.add_(live)
        index.add_(live)
        return torch.stack([tokens.double(), logprobs.double()])


class GraphsPerAdapter(dict[str, DecodeGraphs]):
    """The decode steps of each adapter, made on first use: rows keep their state while another adapter steps."""

    def __init__(self, forward: ForwardPass, new_decode: Callable[[], PagedDecode]) -> None:
        super().__init__()
        self._forward, self._new_decode = forward, new_decode

    def __missing__(self, adapter: str) -> DecodeGraphs:
        like = next(iter(self.values()), None)
        graphs = self[adapter] = DecodeGraphs(self._forward, self._new_decode(), like)
        return graphs

    def forget_rows(self) -> None:
        """Later samples may have the admission numbers of earlier ones."""
        for graphs in self.values():
            graphs.forget_rows()
            graphs.decode.forget_rows()
