"""A long-lived session of the native engine: requests come and go while others run.

`NativeEngine.generate` takes a list of prompts and returns when the last is done. A server cannot wait for that, so here the
loop is the caller's: `add` a request, `cancel` one, and call `step` again and again. The KV cache is made once and never
grows. Each request has its own settings; tokens are drawn per set of equal settings from the logits that all share, with noise
that is keyed by the request's seed, so what a request gets does not depend on what runs beside it.

A session may switch adapters: requests of one adapter go through the model together, one adapter after another.

Knows nothing of text beyond stop strings, nothing of HTTP, and is not thread-safe: one thread calls everything but `check`.
A process may have several sessions, but only one of them may be inside `step` at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.engines.native.engine import NativeEngine, SamplingError
from posttrain.engines.native.kv_cache import PagedKvCache, num_pages_for_call
from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.pages import pages_for
from posttrain.engines.native.prefill import first_logits, prefill
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import Admission, Prefill, PromptGroup, Sample, Scheduler
from posttrain.engines.native.session_decoding import SessionDecoding
from posttrain.engines.native.session_values import (
    Event,
    FailureEvent,
    ModelLogprobs,
    SessionRequest,
    TokenEvent,
)
from posttrain.engines.native.stopping import StopRules
from posttrain.types import Sampling, Task


@dataclass(eq=False)
class _Entry:
    """A request in the session."""

    request: SessionRequest
    group: PromptGroup
    stop: StopRules
    sampler: TokenSampler
    unfinished: dict[int, Sample]  # by index


class GenerationSession:
    """`activate` is called with the name of the adapter whose requests come next, whenever it changes."""

    def __init__(self, engine: NativeEngine, activate: Callable[[str], None] | None = None) -> None:
        settings = engine.settings
        self.forward, self.tokenizer, self.settings = engine.forward, engine.tokenizer, settings
        self.device = self.forward.device
        self._activate = activate
        self._adapter: str | None = None
        head = self.forward.head.vocab_size
        self._vocab_size = min(max(engine.tokenizer.get_vocab().values()) + 1, head)
        self._samplers: dict[Sampling, TokenSampler] = {}
        engine.model.eval()
        self._make_cache()
        self._entries: dict[str, _Entry] = {}
        self._by_group: dict[PromptGroup, _Entry] = {}
        self._prefilled_last = False
        self.num_preemptions = 0  # of schedulers that `reset` has thrown away

    @torch.no_grad()
    def _make_cache(self) -> None:
        settings, size, longest = self.settings, self.settings.page_size, self.settings.max_total_tokens
        self.forward.check_length(longest)
        layers = self.forward.layers()
        one = pages_for(longest, size) + 1
        self.num_pages = num_pages_for_call(
            layers, size, settings.kv_cache_gib, self.device, wanted=one * settings.max_batch_size + 1, least=one,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            reserve=self.forward.working_bytes(settings.max_prefill_tokens, settings.max_batch_size),
        )  # fmt: skip
        self.cache = PagedKvCache(layers, self.num_pages + 1, size, self.device)  # one that belongs to nobody
        self._decoding = SessionDecoding(self.forward, self.cache, settings, self.num_pages)
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler([], self.num_pages, self.settings.page_size, self.settings.max_batch_size)

    # -- what a server looks at ----------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        return bool(self._entries)

    @property
    def num_active(self) -> int:
        return len(self.scheduler.active)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def pages_in_use(self) -> int:
        return self.num_pages - self.scheduler.pages.num_free

    @property
    def preemptions(self) -> int:
        return self.num_preemptions + self.scheduler.num_preemptions

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise SamplingError for a request that `add` could not run. Reads only what never changes: any thread may call."""
        length, limit = len(prompt_ids), self.settings.max_total_tokens
        if length < 1 or max_new_tokens < 1 or length + max_new_tokens > limit:
            raise SamplingError(
                f"{length} prompt tokens and {max_new_tokens} new ones: at least 1 of each, and at most {limit} together"
            )
        vocabulary = self.forward.head.vocab_size
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocabulary:
            raise SamplingError(f"a prompt token is outside the model's vocabulary of {vocabulary} tokens")

    def add(self, request: SessionRequest) -> None:
        """Put a request at the end of the queue."""
        assert request.id not in self._entries, f"two requests have the id {request.id}"
        assert request.num_samples >= 1
        sampling = request.sampling
        self.check(request.prompt_ids, sampling.max_new_tokens)
        stop = StopRules.of(self.forward.base, self.tokenizer, sampling)
        group = PromptGroup(Task(0, request.id, "", request.prompt_ids), sampling.max_new_tokens)
        samples = [
            Sample(group, index, sequence_key(request.seed, 0, 0, index), scanner=stop.scanner())
            for index in range(request.num_samples)
        ]
        entry = _Entry(request, group, stop, self._sampler(sampling), dict(enumerate(samples)))
        self._entries[request.id] = self._by_group[group] = entry
        self.scheduler.add(samples)

    def _sampler(self, sampling: Sampling) -> TokenSampler:
        """The same object for all settings that draw in the same way."""
        if len(self._samplers) > 256:  # settings of requests long gone
            self._samplers.clear()
        drawing = Sampling(1, sampling.temperature, sampling.top_p, sampling.top_k)
        if sampling.temperature == 0.0:
            drawing = Sampling(1, 0.0)
        return self._samplers.setdefault(drawing, TokenSampler(drawing, self._vocab_size))

    def cancel(self, request_id: str) -> None:
        """Nobody waits for the request any more: its slots and pages are free at once. Unknown ids are no error."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        for sample in entry.unfinished.values():
            self.scheduler.cancel(sample)
        entry.unfinished.clear()
        self._forget(entry)

    def _fail(self, entry: _Entry) -> None:
        """Cancel a request whose numbers are none. They go with it: a mask does not hide them from whoever comes next."""
        pages = {page for sample in entry.unfinished.values() for page in sample.pages}
        self.cache.clear_pages(sorted(pages.union(entry.group.pages or ())))
        self._decoding.forget_copies()
        self.cancel(entry.request.id)

    def reset(self) -> list[str]:
        """Forget everything, after `step` has raised. Returns the ids of the requests that are lost."""
        lost = list(self._entries)
        self._entries.clear()
        self._by_group.clear()
        self._decoding.forget_rows()
        self.num_preemptions += self.scheduler.num_preemptions
        self.scheduler = self._new_scheduler()
        self._adapter, self._prefilled_last = None, False
        return lost

    def _forget(self, entry: _Entry) -> None:
        self.scheduler.forget(entry.group)
        del self._entries[entry.request.id], self._by_group[entry.group]

    # -- the loop ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Either start waiting requests and draw their first tokens, or draw one more token for everybody who runs.

        The two alternate while requests arrive: neither a stream of arrivals nor one of long answers holds up the other.
        """
        if self.scheduler.waiting and not (self._prefilled_last and self.scheduler.active):
            admission = self._admit()
            if admission.samples:
                self._prefilled_last = True
                return self._start(admission)
        self._prefilled_last = False
        self.scheduler.reserve_step()
        events: list[Event] = []
        for samples in self._batches(list(self.scheduler.active)):
            logits = self._decoding.next_logits(self._adapter or "", samples)
            events += self._keep(samples, *self._draw(samples, logits))
        if not self.scheduler.active:
            self._decoding.forget_copies()  # an idle server keeps none
        return events

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """The samples of each adapter, with that adapter switched on. The one that is on comes first."""
        by_adapter: dict[str, list[Sample]] = {}
        for sample in samples:
            by_adapter.setdefault(self._by_group[sample.group].request.adapter, []).append(sample)
        for adapter in sorted(by_adapter, key=lambda name: (name != self._adapter, name)):
            self._switch(adapter)
            yield by_adapter[adapter]

    def _switch(self, adapter: str) -> None:
        if adapter != self._adapter:
            assert self._activate is not None or not adapter, "the session was made without adapters"
            if self._activate is not None:
                self._activate(adapter)
            self._adapter = adapter

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _admit(self) -> Admission:
        """As many as slots and pages allow, and as go through the model in about one row: others wait for a step meanwhile."""
        budget, room = self.settings.max_prefill_tokens, 0
        slots = self.settings.max_batch_size - len(self.scheduler.active)
        seen: set[PromptGroup] = set()
        for sample in self.scheduler.waiting:
            known = sample.group in seen or sample.group.pages is not None
            cost = len(sample.token_ids) + (0 if known else sample.group.prompt_length)
            if room == slots or (room and cost > budget):
                break
            seen.add(sample.group)
            budget -= cost
            room += 1
        self.scheduler.max_batch_size = len(self.scheduler.active) + room
        return self.scheduler.admit()

    def _start(self, admission: Admission) -> list[Event]:
        first = {job.group: job for job in admission.prompts}
        back = [sample for sample in admission.samples if len(sample.token_ids) > 1]
        resumed = dict(zip(back, admission.resumed, strict=True))
        for samples in self._batches(admission.samples):
            groups = dict.fromkeys(sample.group for sample in samples)
            self._prefill([first[group] for group in groups if group in first])
        self.cache.copy_pages(admission.copies)
        events: list[Event] = []
        for samples in self._batches(admission.samples):
            self._prefill([resumed[sample] for sample in samples if sample in resumed])
            fresh = [sample for sample in samples if not sample.token_ids]
            if fresh:
                events += self._keep(fresh, *self._draw(fresh, first_logits(self.forward, fresh)))
        return events

    def _prefill(self, jobs: Sequence[Prefill]) -> None:
        prefill(self.forward, self.cache, jobs, self.settings.max_prefill_tokens)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> tuple[Tensor, Mapping[int, ModelLogprobs]]:
        """Token ids and log-probabilities [2, rows]; and the model's log-probabilities for the rows that want them."""
        keys = [sample.noise_key for sample in samples]
        index = [sample.noise_index for sample in samples]
        noise = torch.tensor([keys, index], dtype=torch.long).to(self.device, non_blocking=True)
        rows_of: dict[TokenSampler, list[int]] = {}
        for row, sample in enumerate(samples):
            rows_of.setdefault(self._by_group[sample.group].sampler, []).append(row)
        if len(rows_of) == 1:
            drawn = _drawn(next(iter(rows_of)), logits, noise)
        else:
            drawn = torch.empty(2, len(samples), dtype=torch.float64, device=self.device)
            for sampler, rows in rows_of.items():
                at = torch.tensor(rows, device=self.device)
                drawn.index_copy_(1, at, _drawn(sampler, logits[at], noise[:, at]))
        return drawn, self._model_logprobs(samples, logits, drawn[0])

    def _model_logprobs(self, samples: Sequence[Sample], logits: Tensor, tokens: Tensor) -> dict[int, ModelLogprobs]:
        wanted = {
            row: number
            for row, sample in enumerate(samples)
            if (number := self._by_group[sample.group].request.num_top_logprobs) is not None
        }
        if not wanted:
            return {}
        at = torch.tensor(list(wanted), device=self.device)
        logprobs = logits[at].float().log_softmax(dim=-1)
        of_token = logprobs.gather(1, tokens[at].long()[:, None])[:, 0].tolist()
        best = logprobs[:, : self._vocab_size].topk(min(max(1, *wanted.values()), self._vocab_size), dim=-1)
        tops = [
            tuple(zip(ids[:number], values[:number], strict=True))
            for ids, values, number in zip(best.indices.tolist(), best.values.tolist(), wanted.values(), strict=True)
        ]
        return {row: ModelLogprobs(*found) for row, found in zip(wanted, zip(of_token, tops, strict=True), strict=True)}

    def _keep(
        self, samples: Sequence[Sample], drawn: Tensor, model_logprobs: Mapping[int, ModelLogprobs]
    ) -> list[Event]:
        """Append what was drawn, let those leave who are finished, and say what happened."""
        events: list[Event] = []
        for row, (sample, token, logprob) in enumerate(zip(samples, *drawn.tolist(), strict=True)):
            entry = self._by_group.get(sample.group)
            if entry is None:
                continue  # another sample of the request has just failed, and the request with it
            request = entry.request
            if math.isnan(logprob):
                self._fail(entry)
                events.append(FailureEvent(request.id, "the model's output is not a number: its weights are damaged"))
                continue
            sample.token_ids.append(int(token))
            reason = entry.stop.reason(sample.token_ids, entry.group.max_new_tokens, sample.scanner)
            event = TokenEvent(request.id, sample.index, int(token), logprob, reason)
            events.append(replace(event, model_logprobs=found) if (found := model_logprobs.get(row)) else event)
            if reason is not None:
                self.scheduler.leave(sample)
                del entry.unfinished[sample.index]
                if not entry.unfinished:
                    self._forget(entry)
        return events


def _drawn(sampler: TokenSampler, logits: Tensor, noise: Tensor) -> Tensor:
    """Token ids and log-probabilities as float64, which holds every one of either."""
    tokens, logprobs = sampler.draw(logits, noise[0], noise[1])
    return torch.stack([tokens.double(), logprobs.double()])
