"""One call of the engine, from prompts to completions: the loop of continuous batching.

Admit what fits, compute its prompts, draw first tokens; then one token for everybody who is active; whoever is finished
leaves, and the loop begins again. The scheduler decides who, this decides nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from posttrain.generation.native.attention import DenseDecode, PagedDecode, PrefillAttention, PrefillPiece
from posttrain.generation.native.forward import ForwardPass
from posttrain.generation.native.graphs import DecodeGraphs, RecordingError
from posttrain.generation.native.kv_cache import PagedKvCache
from posttrain.generation.native.sampler import TokenSampler
from posttrain.generation.native.scheduler import Admission, Prefill, PromptGroup, Sample, Scheduler
from posttrain.generation.native.stopping import StopRules
from posttrain.roles import Progress


class GenerationCall:
    def __init__(
        self,
        forward: ForwardPass,
        cache: PagedKvCache,
        scheduler: Scheduler,
        decode: DenseDecode | PagedDecode,
        sampler: TokenSampler,
        stop: StopRules,
        max_prefill_tokens: int,
        progress: Progress | None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.forward = forward
        self.cache = cache
        self.scheduler = scheduler
        self.decode = decode
        self.sampler = sampler
        self.stop = stop
        self.max_prefill_tokens = max_prefill_tokens
        self.progress = progress
        self.graphs = graphs

    def run(self) -> None:
        while self.scheduler.unfinished:
            admission = self.scheduler.admit()
            if admission.samples:
                self._start(admission)
            self.scheduler.reserve_step()
            if self.scheduler.active:
                self._step(list(self.scheduler.active))

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _start(self, admission: Admission) -> None:
        self._prefill(admission.prompts)
        self.cache.copy_pages(admission.copies)
        self._prefill(admission.resumed)
        fresh = [sample for sample in admission.samples if not sample.token_ids]
        if not fresh:
            return
        # All samples of a group draw their first token from one row of logits.
        groups = list(dict.fromkeys(sample.group for sample in fresh))
        row_of = {group: row for row, group in enumerate(groups)}
        logits = self.forward.head.logits(torch.stack([_last_hidden(group) for group in groups]))
        rows = torch.tensor([row_of[sample.group] for sample in fresh]).to(self.cache.device)
        self._draw(fresh, logits.index_select(0, rows))

    def _prefill(self, jobs: Sequence[Prefill]) -> None:
        """Several prompts in one packed row; one that is longer than a row goes through in pieces."""
        for row in packed_rows(jobs, self.max_prefill_tokens):
            tokens: list[int] = []
            positions: list[int] = []
            pieces: list[PrefillPiece] = []
            ends: list[tuple[Prefill, int]] = []
            for job, begin, end in row:
                pieces.append(PrefillPiece(len(tokens), end - begin, job.start + begin, job.pages))
                tokens += job.token_ids[begin:end]
                positions += range(job.start + begin, job.start + end)
                if job.group is not None and end == len(job.token_ids):
                    ends.append((job, len(tokens) - 1))
            inputs = torch.tensor([tokens, positions], dtype=torch.long).to(self.cache.device)
            hidden = self.forward.hidden(PrefillAttention(self.cache, pieces), inputs[0], inputs[1])
            last = hidden.index_select(0, torch.tensor([at for _, at in ends], dtype=torch.long).to(hidden.device))
            for (job, _), vector in zip(ends, last, strict=True):
                assert job.group is not None
                job.group.last_hidden = vector

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _step(self, samples: Sequence[Sample]) -> None:
        """One more token for each of `samples`."""
        if self.graphs is not None:
            try:
                drawn = self.graphs.step(samples)
            except RecordingError as error:
                warnings.warn(f"decoding goes on without CUDA graphs, more slowly: {error}", stacklevel=2)
                self.graphs = None
            else:
                self._keep(samples, drawn)
                return
        size = self.cache.page_size
        last = [sample.token_ids[-1] for sample in samples]
        at = [sample.num_cached for sample in samples]
        slots = [
            sample.pages[position // size] * size + position % size
            for sample, position in zip(samples, at, strict=True)
        ]
        inputs = torch.tensor([last, at, slots], dtype=torch.long).to(self.cache.device, non_blocking=True)
        self.decode.prepare(samples, inputs[2])
        hidden = self.forward.hidden(self.decode, inputs[0], inputs[1])
        self._draw(samples, self.forward.head.logits(hidden))

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> None:
        keys = [sample.noise_key for sample in samples]
        index = [sample.noise_index for sample in samples]
        noise = torch.tensor([keys, index], dtype=torch.long).to(self.cache.device, non_blocking=True)
        tokens, logprobs = self.sampler.draw(logits, noise[0], noise[1])
        # float64 holds every token id and every float32.
        self._keep(samples, torch.stack([tokens.double(), logprobs.double()]))

    def _keep(self, samples: Sequence[Sample], drawn: Tensor) -> None:
        """Append what was drawn, and let those leave who are finished."""
        num_finished = 0
        # The only wait for the device in a step.
        for sample, token, logprob in zip(samples, *drawn.tolist(), strict=True):
            if math.isnan(logprob):
                raise FloatingPointError(
                    f"the logits for token {len(sample.token_ids)} of task {sample.group.task.id!r} are not numbers: "
                    "the weights of the model have diverged"
                )
            sample.token_ids.append(int(token))
            sample.logprobs.append(logprob)
            sample.finish_reason = self.stop.reason(sample.token_ids, sample.group.max_new_tokens, sample.scanner)
            if sample.finish_reason is not None:
                self.scheduler.leave(sample)
                num_finished += 1
        if num_finished and self.progress is not None:
            self.progress(num_finished)


def packed_rows(jobs: Sequence[Prefill], max_tokens: int) -> Iterator[list[tuple[Prefill, int, int]]]:
    """Rows of at most `max_tokens`, each a list of (job, begin, end). A job is cut only if it is longer than a row."""
    row: list[tuple[Prefill, int, int]] = []
    used = 0
    for job in jobs:
        length = len(job.token_ids)
        if row and used + length > max_tokens:
            yield row
            row, used = [], 0
        begin = 0
        while length - begin > max_tokens:
            yield [(job, begin, begin + max_tokens)]
            begin += max_tokens
        row.append((job, begin, length))
        used += length - begin
    if row:
        yield row


def _last_hidden(group: PromptGroup) -> Tensor:
    assert group.last_hidden is not None, "a prompt is computed before its samples start"
    return group.last_hidden
