"""One call of the engine, from prompts to completions: the loop of continuous batching.

Admit what fits, compute its prompts, draw first tokens; then one token for everybody who is active; whoever is finished
leaves, and the loop begins again. The scheduler decides who, this decides nothing.

With CUDA graphs the device is one step ahead: a step is launched before the tokens of the one before are looked at, so that
the device never waits for the host. Who draws a stop token takes part in one step more, whose token is thrown away.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.engines.native.attention import DenseDecode, PagedDecode
from posttrain.engines.native.drawing import Drawn, FreshTokens
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.graphs import DecodeGraphs
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.prefill import first_logits, prefill
from posttrain.engines.native.recording import RecordingError
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import Admission, Sample, Scheduler
from posttrain.engines.native.stopping import StopRules
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
        self.fresh = FreshTokens()

    def run(self) -> None:
        under_way: list[Drawn] = []  # drawn on the device, not yet looked at
        while self.scheduler.unfinished or under_way:
            admission = self.scheduler.admit()
            if admission.samples:
                under_way += self._start(admission)
            if self.graphs is None or self.scheduler.may_run_short or not self.scheduler.active:
                # Without graphs the host needs the tokens; and whoever has to make room leaves with all of them.
                under_way = self._collect(under_way)
            self.scheduler.reserve_step()
            if not self.scheduler.active:
                continue
            try:
                launched = self._step(list(self.scheduler.active))
            except RecordingError as error:
                warnings.warn(f"decoding goes on without CUDA graphs, more slowly: {error}", stacklevel=2)
                assert self.graphs is not None
                self.graphs.give_up()
                self.graphs = None
                continue
            self._collect(under_way)  # of the step before, while the device computes this one
            under_way = [launched] if self.graphs is not None else self._collect([launched])

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _start(self, admission: Admission) -> list[Drawn]:
        prefill(self.forward, self.cache, admission.prompts, self.max_prefill_tokens)
        self.cache.copy_pages(admission.copies)
        prefill(self.forward, self.cache, admission.resumed, self.max_prefill_tokens)
        fresh = [sample for sample in admission.samples if not sample.token_ids]
        if resumed := [sample for sample in admission.samples if sample.token_ids]:
            self.fresh.add_known(resumed, self.cache.device)
        if not fresh:
            return []
        return [self._draw(fresh, first_logits(self.forward, fresh), joins=True)]

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _step(self, samples: Sequence[Sample]) -> Drawn:
        """One more token for each of `samples`."""
        if self.graphs is not None:
            drawn = self.graphs.step(samples, self.fresh, self.sampler)
            self.fresh.clear()
            return self._launched(drawn)
        return self._draw(samples, self.forward.next_logits(self.decode, samples))

    def _draw(self, samples: Sequence[Sample], logits: Tensor, *, joins: bool = False) -> Drawn:
        keys = [sample.noise_key for sample in samples]
        index = [sample.noise_index for sample in samples]
        noise = torch.tensor([keys, index], dtype=torch.long).to(self.cache.device, non_blocking=True)
        tokens, logprobs = self.sampler.draw(logits, noise[0], noise[1])
        if joins:
            self.fresh.add_drawn(samples, tokens)
        return self._launched(Drawn.under_way(samples, torch.stack([tokens.double(), logprobs.double()])))

    def _launched(self, drawn: Drawn) -> Drawn:
        """Whoever has as many tokens as it may have leaves at once: no need to look at the last of them for that."""
        for sample in drawn.samples:
            sample.in_flight += 1
            if sample.num_drawn >= sample.group.max_new_tokens:
                self.scheduler.leave(sample)
        return drawn

    def _collect(self, under_way: Sequence[Drawn]) -> list[Drawn]:
        """Wait for what was drawn and keep it; those who are finished leave. Returns what is left to collect: nothing."""
        num_finished = 0
        for drawn in under_way:
            for sample, token, logprob in zip(drawn.samples, *drawn.read(), strict=True):
                sample.in_flight -= 1
                if sample.finish_reason is not None:
                    continue  # drawn before it was known that the token before was the last
                if math.isnan(logprob):
                    raise FloatingPointError(
                        f"the logits for token {len(sample.token_ids)} of task {sample.group.task.id!r} are not numbers: "
                        "the weights of the model have diverged"
                    )
                sample.token_ids.append(token)
                sample.logprobs.append(logprob)
                sample.finish_reason = self.stop.reason(sample.token_ids, sample.group.max_new_tokens, sample.scanner)
                if sample.finish_reason is not None:
                    num_finished += 1
                    if sample.admission >= 0:
                        self.scheduler.leave(sample)
        if num_finished and self.progress is not None:
            self.progress(num_finished)
        return []
