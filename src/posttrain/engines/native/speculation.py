"""Speculative decoding: several tokens of an answer per step, once no answer waits and few are left.

Small batches are bound by reading the weights, so verifying a few drafted tokens costs little more than computing one.
`drafting.py` describes what is drafted and why samples do not change. Texts and state of all samples are on the device,
where a step finds its drafts. So, as in `graphs.py`, a step is launched before the host has read the tokens of the
previous one. The host learns their number only when it reads them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from posttrain.engines.native import drafting
from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.cuda_graph_cache import CudaGraphCache, Staging, batch_sizes
from posttrain.engines.native.drafting import END, FROM, INDEX, KEY, LEFT, NUM_FIELDS, POSITION, TO, lay_out
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.sampler import Drawn, TokenSampler
from posttrain.engines.native.scheduler import PromptGroup, Sample, pages_for
from posttrain.policy.fused.adapters import capture_key
from posttrain.policy.memory.settings import MOST_DRAFTED_SAMPLES, draft_length
from posttrain.policy.runtime import to_device

_TEXT_CAPACITY = 1 << 22  # tokens
_NUM_TIMED = 5  # minimum number of timed steps
_GAIN = 1.05  # minimum expected speedup of drafts
_HOPE = 2.0  # assumed tokens per step before any are counted
_STEPS_UNTIL_RETRY = 256


class Payoff:
    """Whether drafts are faster, from counted tokens per step and measured step times. It affects the cost of a step,
    not how a token is drawn. But matrix products of other shapes round differently, so it is not used where runs must
    be bitwise reproducible.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._times: dict[tuple[int, int], deque[float]] = {}  # (samples of the graph, drafts) -> seconds
        self._last: tuple[tuple[int, int], float] | None = None
        self.begin()

    def begin(self) -> None:
        """Reset token counts for a new call with other texts. Step times stay valid."""
        self._tokens: dict[int, tuple[float, float]] = {}  # drafts -> (tokens, sample steps), both decaying
        self._plain_steps = 0
        self._last = None

    def launched(self, size: int, drafts: int) -> None:
        """Called after every launch. The time between two launches of the same kind is one step time."""
        now, kind = self._clock(), (size, drafts)
        if self._last is not None and self._last[0] == kind:
            self._times.setdefault(kind, deque(maxlen=9)).append(now - self._last[1])
        self._last = kind, now
        self._plain_steps = 0 if drafts else self._plain_steps + 1
        if self._plain_steps >= _STEPS_UNTIL_RETRY:
            self._plain_steps = 0
            self._tokens.clear()  # more answers are finished now, and more drafts are found

    def accepted(self, drafts: int, num_tokens: int, num_samples: int) -> None:
        tokens, steps = self._tokens.get(drafts, (0.0, 0.0))
        self._tokens[drafts] = 0.95 * tokens + num_tokens, 0.95 * steps + num_samples

    def pays(self, size: int, drafts: int) -> bool:
        # A plain step: the next larger measured size, as small differences in row count hardly change the time.
        sizes = sorted(timed for timed, drafted in self._times if drafted == 0 and timed >= size)
        plain = next((found for timed in sizes if (found := self._time(timed, 0)) is not None), None)
        if plain is None:
            return False
        with_drafts = self._time(size, drafts)
        if with_drafts is None:
            # Not measured yet: at least the time of a plain step with as many rows, if known.
            with_drafts = self._time(size * (1 + drafts), 0) or plain
        tokens, steps = self._tokens.get(drafts, (0.0, 0.0))
        return (tokens / steps if steps else _HOPE) * plain > _GAIN * with_drafts

    def _time(self, size: int, drafts: int) -> float | None:
        times = self._times.get((size, drafts), ())
        return median(times) if len(times) >= _NUM_TIMED else None


@dataclass
class DrawnWithDrafts(Drawn):
    """Values are those of `drafting.accept`."""

    num_drafts: int = 0

    def read_several(self) -> list[list[tuple[int, float]]]:
        """(token, log-probability) of all tokens that each sample drew."""
        if self.arrived is not None:
            self.arrived.synchronize()
        several = []
        for count, _, *values in self.values.T.tolist():
            tokens, logprobs = values[: int(count)], values[1 + self.num_drafts :]
            several.append([(int(token), logprob) for token, logprob in zip(tokens, logprobs, strict=False)])
        return several


class Speculation:
    """`num_drafts` tokens are drafted for each sample; None: chosen by measurement. `graphs` is the cache of CUDA
    graphs; None: no graphs.
    """

    def __init__(
        self,
        forward: ForwardPass,
        cache: PagedKvCache,
        max_rows: int,
        max_pages_per_row: int,
        *,
        graphs: CudaGraphCache | None,
        num_drafts: int | None,
        payoff: Payoff | None = None,
    ) -> None:
        self.forward = forward
        self.sizes = batch_sizes(min(max_rows, MOST_DRAFTED_SAMPLES))
        self.decode = PagedDecode(cache, self.sizes[-1], max_pages_per_row)
        self.payoff = payoff or Payoff()
        self.is_active = False
        self.num_tokens, self.num_sample_steps = 0, 0  # of this call
        self._num_drafts, self._graphs = num_drafts, graphs
        self._steps = drafting if self.decode.kernel is None else self.decode.kernel
        self.text = torch.full((_TEXT_CAPACITY,), drafting.NOTHING, dtype=torch.int32, device=cache.device)
        # The last column is for rows without a sample: no token is left to draw.
        self._no_sample = self.sizes[-1]
        self.state = torch.zeros(NUM_FIELDS, self.sizes[-1] + 1, dtype=torch.long, device=cache.device)
        self.table = torch.full(
            (self.sizes[-1], max_pages_per_row), cache.scratch_page, dtype=torch.int32, device=cache.device
        )
        self._staged_table = Staging(self.table)
        self._order: list[int] = []  # admissions of the samples in the rows
        self._model_state: int | None = None
        self._plain_sizes = batch_sizes(max_rows)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.text, self.state, self.table))

    def forget_call(self) -> None:
        self.is_active, self._model_state = False, None
        self.num_tokens, self.num_sample_steps = 0, 0
        self.payoff.begin()

    def drafts_for(self, num_samples: int) -> int:
        """How many tokens to draft for each of `num_samples`; 0: decode without drafts."""
        if num_samples > self.sizes[-1]:
            return 0
        size = self._size(num_samples)
        drafts = draft_length(size, self._num_drafts)
        return drafts if self._num_drafts is not None or self.payoff.pays(size, drafts) else 0

    def _size(self, num_samples: int) -> int:
        if self._graphs is None:
            return num_samples
        return next(size for size in self.sizes if size >= num_samples)

    def launched_without(self, num_samples: int) -> None:
        self.payoff.launched(next(size for size in self._plain_sizes if size >= num_samples), 0)

    # -- texts ---------------------------------------------------------------------------------------------------------

    def begin(self, samples: Sequence[Sample], texts_of: Callable[[PromptGroup], Iterable[Sequence[int]]]) -> None:
        """Lay out the texts of the samples' groups. The host has read all tokens. `texts_of` a group:
        finished answers.
        """
        members: dict[PromptGroup, list[Sample]] = {}
        for sample in samples:
            members.setdefault(sample.group, []).append(sample)
        lengths = [group.prompt_length + len(own) * group.max_new_tokens for group, own in members.items()]
        free = _TEXT_CAPACITY - 2 * drafting.MARGIN - sum(lengths) - 2 * len(samples)
        if free < 0:
            return
        groups: list[list[tuple[Sequence[int], int]]] = []
        for group, own in members.items():
            finished = []
            for text in texts_of(group):
                if len(text) < free:
                    finished.append((text, 0))
                    free -= len(text) + 1
            answers = [(sample.token_ids, _left(sample)) for sample in own]
            groups.append([(group.task.prompt_ids, 0), *finished, *answers])
        numbers, starts, ranges = lay_out(groups)
        self.text[: len(numbers)].copy_(torch.from_numpy(numbers))
        where: dict[Sample, tuple[int, tuple[int, int]]] = {}
        for own, begun, span in zip(members.values(), starts, ranges, strict=True):
            where.update({sample: (start, span) for sample, start in zip(own, begun[-len(own) :], strict=True)})
        self._order = [sample.admission for sample in samples]
        state = np.zeros(self.state.shape, dtype=np.int64)
        state[[END, FROM, TO]] = drafting.MARGIN
        for row, sample in enumerate(samples):
            start, (first, end) = where[sample]
            state[END, row] = start + len(sample.token_ids) - 1
            state[POSITION, row], state[LEFT, row] = sample.num_cached, _left(sample)
            state[KEY, row], state[INDEX, row] = sample.noise_key, sample.noise_index
            state[FROM, row], state[TO, row] = first, end
        self.state.copy_(torch.from_numpy(state))
        self.decode.forget_rows()
        self.is_active = True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], sampler: TokenSampler, num_drafts: int) -> DrawnWithDrafts:
        """Launch one step: one token or more for each sample. Does not synchronise with the device."""
        size, width = self._size(len(samples)), 1 + num_drafts
        self._arrange(samples)
        self.decode.send_table(samples, self._staged_table, self.table)
        if self._graphs is None:
            drawn = self._compute(size, width, sampler)
        else:
            if self._model_state is None:
                self._model_state = capture_key(self.forward.base)
            drawing = sampler.sampling
            key: Hashable = (
                "drafts", size, width, drawing.temperature, drawing.top_p, drawing.top_k, self._model_state,
            )  # fmt: skip
            # Warm-up may write tokens after the ends of texts: the same tokens that the step then draws.
            drawn = self._graphs.run(key, lambda: self._compute(size, width, sampler), changes=self.state)
        self.payoff.launched(size, num_drafts)
        host = Drawn.to_host(samples, drawn[:, : len(samples)])
        return DrawnWithDrafts(samples, host.values, host.arrived, num_drafts=num_drafts)

    def read(self, drawn: DrawnWithDrafts) -> list[list[tuple[int, float]]]:
        tokens = drawn.read_several()
        self.num_tokens += (count := sum(map(len, tokens)))
        self.num_sample_steps += len(tokens)
        self.payoff.accepted(drawn.num_drafts, count, len(tokens))
        return tokens

    def _arrange(self, samples: Sequence[Sample]) -> None:
        """Arrange rows in the order of `samples`. Rows of finished samples are dropped; no sample joins."""
        order = [sample.admission for sample in samples]
        if order == self._order:
            return
        row_of: Mapping[int, int] = {admission: row for row, admission in enumerate(self._order)}
        padding = [self._no_sample] * (self.state.shape[1] - len(order))
        source = torch.tensor([row_of[admission] for admission in order] + padding, dtype=torch.long)
        self.state.copy_(self.state.index_select(1, to_device(source, self.state.device)))
        self._order = order

    def _compute(self, size: int, width: int, sampler: TokenSampler) -> Tensor:
        decode, cache = self.decode, self.decode.cache
        state, table = self.state[:, :size], self.table[:size]
        rows = self._steps.plan_rows(self.text, state, table, width, cache.page_size, cache.scratch_page)
        if decode.kernel is None and not table.is_cuda:  # gathers whole rows of the table
            table = table[:, : pages_for(int(rows.lengths.max()), cache.page_size)]
        decode.table = table[:, None].expand(-1, width, -1).reshape(size * width, -1)
        decode.slots, decode.lengths = rows.slots.flatten(), rows.lengths.flatten()
        hidden = self.forward.hidden(decode, rows.tokens.flatten(), rows.positions.flatten())
        tokens, logprobs = sampler.draw(self.forward.head.logits(hidden), rows.keys.flatten(), rows.index.flatten())
        return self._steps.accept(self.text, state, rows, tokens, logprobs)


def _left(sample: Sample) -> int:
    return sample.group.max_new_tokens - len(sample.token_ids)
