"""A decode step on a GPU as a CUDA graph: recorded once per batch size, replayed for every token.

A step launches some hundreds of small kernels. Launched one by one from Python they take several times as long as they
run. What a step needs to know of its rows (last token, position, key of the noise) stays on the device, and the step itself
moves it on, so that the next step can be launched before the host has seen what this one drew.

Batches are padded to the next recorded size; the padding writes to a page that belongs to nobody, and stands still.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.drawing import Drawn, FreshTokens
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.prefixes import SharedPrefixes
from posttrain.engines.native.recording import Recorder, Staging, batch_sizes
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import PromptGroup, Sample
from posttrain.policy.fused.adapters import recorded_state

# Rows of the device's state.
_TOKEN, _POSITION, _KEY, _INDEX, _LIVE = range(5)


class DecodeGraphs:
    """Rows that decode together, on the device. Lives as long as its KV cache; recordings are made when first needed."""

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
        # The rows as they will be; in place of the token the number of the place where it is found.
        self._new_rows = torch.zeros_like(self.state)
        self._staged_rows, self._staged_table = Staging(self._new_rows), Staging(self.table)
        self._order: list[int] = []  # admissions of the samples in the rows
        self._recorder = Recorder(device)
        self._prefixes = SharedPrefixes(decode)
        self._model_state: int | None = None

    def begin(self, groups: Sequence[PromptGroup], num_samples: int) -> None:
        """Forget the rows of the call before, as `decode` has. `groups` with `num_samples` each will be decoded."""
        self._order = []
        self._model_state = None
        self._prefixes.begin(groups, num_samples)

    def give_up(self) -> None:
        """Steps are not recorded any more: nobody will tell the device who shares a prompt."""
        self.decode.shared = None

    def step(self, samples: Sequence[Sample], fresh: FreshTokens, sampler: TokenSampler) -> Drawn:
        """Launch one more token for each sample. Nothing here waits for the device."""
        size = next(size for size in self.sizes if size >= len(samples))
        self._arrange(samples, fresh)
        self._send_table(samples)
        if self._model_state is None:  # not before prompts are computed: that may bring weights to another place
            self._model_state = recorded_state(self.forward.base)
        drawing = sampler.sampling
        way = (drawing.temperature, drawing.top_p, drawing.top_k)
        name = (size, *way, self._prefixes.samples_per_tile, self._model_state)
        # Trying the step is harmless for the cache: it writes the same keys and values to the same places.
        drawn = self._recorder.run(name, lambda: self._compute(size, sampler), changes=self.state)
        return Drawn.under_way(samples, drawn[:, : len(samples)])

    def _arrange(self, samples: Sequence[Sample], fresh: FreshTokens) -> None:
        """Bring the device's rows into the order of `samples`: some have moved, some are new, some have gone."""
        order = [sample.admission for sample in samples]
        if order == self._order:
            return
        row_of = {admission: row for row, admission in enumerate(self._order)}
        most, count = self.state.shape[1], len(samples)
        source = [row_of[a] if a in row_of else most + fresh.place(s) for a, s in zip(order, samples, strict=True)]
        rows = self._staged_rows.fill()
        rows[:, count:] = 0
        rows[_TOKEN, :count] = source
        rows[_POSITION, :count] = [sample.num_cached for sample in samples]
        rows[_KEY, :count] = [sample.noise_key for sample in samples]
        rows[_INDEX, :count] = [sample.noise_index for sample in samples]
        rows[_LIVE, :count] = 1
        self._staged_rows.send(self._new_rows)
        tokens = torch.cat([self.state[_TOKEN], fresh.tokens(self.state.device)])
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
    """A decode step up to the logits, for a session, whose rows are drawn in different ways. The host knows all tokens."""

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
        self._recorder = Recorder(device)

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
        return self._recorder.run(size, lambda: self._compute(size))[:count]

    def _compute(self, size: int) -> Tensor:
        token, position = self.rows[:, :size]
        self.decode.point_at(self.table[:size], position)
        return self.forward.head.logits(self.forward.hidden(self.decode, token, position))
