"""A decode step on a GPU as a CUDA graph: recorded once per batch size, replayed for every token.

A step launches some hundreds of small kernels. Launched one by one from Python they take several times as long as they
run. Batches are padded to the next recorded size; the padding writes to a page that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from posttrain.generation.native.attention import PagedDecode
from posttrain.generation.native.forward import ForwardPass
from posttrain.generation.native.sampler import TokenSampler
from posttrain.generation.native.scheduler import Sample

_SMALLEST = 16
_NUM_WARM_UPS = 2  # before recording, so that kernels are compiled and libraries have their workspaces
# Rows of the input buffer.
_TOKEN, _POSITION, _SLOT, _LENGTH, _KEY, _INDEX = range(6)


class RecordingError(RuntimeError):
    """This model's step cannot be recorded: some layer waits for the device, or asks it for a number."""


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    drawn: Tensor  # [2, size]: token ids and log-probabilities, overwritten by each replay


class DecodeGraphs:
    def __init__(
        self, forward: ForwardPass, decode: PagedDecode, sampler: TokenSampler, max_rows: int, scratch_page: int
    ) -> None:
        self.forward = forward
        self.decode = decode
        self.sampler = sampler
        device = decode.cache.device
        self.sizes = batch_sizes(max_rows)
        pages = decode.host_table.shape[1]
        self.host_inputs = torch.zeros(6, self.sizes[0], dtype=torch.long, pin_memory=True)
        self.host_table = torch.zeros(self.sizes[0], pages, dtype=torch.int32, pin_memory=True)
        self.inputs = torch.zeros(6, self.sizes[0], dtype=torch.long, device=device)
        self.table = torch.zeros(self.sizes[0], pages, dtype=torch.int32, device=device)
        self.scratch_page = scratch_page
        self.recordings: dict[int, _Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def step(self, samples: Sequence[Sample]) -> Tensor:
        """Token ids and log-probabilities of the next token of each sample, [2, samples], on the device."""
        size = min(size for size in self.sizes if size >= len(samples))
        self._send(samples, size)
        if size not in self.recordings:
            self.recordings[size] = self._record(size)
        recording = self.recordings[size]
        recording.graph.replay()
        return recording.drawn[:, : len(samples)]

    def _send(self, samples: Sequence[Sample], size: int) -> None:
        count, page_size = len(samples), self.decode.cache.page_size
        self.decode.update_table(samples)
        rows = np.array(
            [
                (s.token_ids[-1], at := s.num_cached, s.pages[at // page_size] * page_size + at % page_size, at + 1,
                 s.noise_key, s.noise_index)
                for s in samples
            ],
            dtype=np.int64,
        )  # fmt: skip
        inputs, table = self.host_inputs.numpy(), self.host_table.numpy()
        inputs[:, :count] = rows.T
        inputs[:, count:size] = 0
        inputs[_SLOT, count:size] = self.scratch_page * page_size
        inputs[_LENGTH, count:size] = 1
        table[:count] = self.decode.host_table[:count]
        table[count:size] = self.scratch_page
        self.inputs.copy_(self.host_inputs, non_blocking=True)
        self.table.copy_(self.host_table, non_blocking=True)

    def _record(self, size: int) -> _Recording:
        # Running the step more than once is harmless: it writes the same keys and values to the same places.
        side = _recording_stream(self.inputs.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                self._compute(size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=side):
                drawn = self._compute(size)
        except RuntimeError as error:
            raise RecordingError(str(error).splitlines()[0]) from error
        return _Recording(graph, drawn)

    def _compute(self, size: int) -> Tensor:
        inputs = self.inputs[:, :size]
        self.decode.table = self.table[:size]
        self.decode.lengths = inputs[_LENGTH].int()
        self.decode.slots = inputs[_SLOT]
        hidden = self.forward.hidden(self.decode, inputs[_TOKEN], inputs[_POSITION])
        tokens, logprobs = self.sampler.draw(self.forward.head.logits(hidden), inputs[_KEY], inputs[_INDEX])
        return torch.stack([tokens.double(), logprobs.double()])


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: the matrix library keeps a workspace for every stream that it has been used on."""
    return torch.cuda.Stream(device)


def batch_sizes(max_rows: int) -> list[int]:
    """Descending: the largest batch, rounded up, then halves of it."""
    sizes = [-(-max_rows // 8) * 8]
    while sizes[-1] > _SMALLEST:
        sizes.append(max(_SMALLEST, -(-sizes[-1] // 16) * 8))
    return sizes
