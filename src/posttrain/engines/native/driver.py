"""The continuous batching loop, shared by `NativeEngine.generate`, sessions and the server.

`add` requests and call `step` until none is left. A step either prefills waiting samples and draws their first tokens, or
draws one more token for every active sample; the two alternate while samples wait. The scheduler decides which samples run.

With `DecodeGraphs` the device is one step ahead of the host: a step is launched before the tokens of the previous one are
read. A sample that drew a stop token then takes part in one more step, whose token is discarded.

With `Speculation` the last samples are decoded with drafts: a step then draws one token or more for each. It starts
when no sample waits, and ends when it is no longer faster or pages run short. The host reads all tokens when it starts
and ends.

A sample may be added with tokens that it drew earlier: they are prefilled, as after a preemption. So a caller can stop
stepping, keep the tokens of unfinished samples, and continue them in another driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.engines.native.cuda_graph_cache import GraphCaptureError
from posttrain.engines.native.decoding import Decoding, warn_without_graphs
from posttrain.engines.native.forward import ForwardPass, first_logits, prefill
from posttrain.engines.native.graphs import DecodeGraphs, Drawn, ModelLogprobs
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import Admission, Prefill, PromptGroup, Sample, Scheduler
from posttrain.engines.native.speculation import DrawnWithDrafts, Speculation
from posttrain.engines.native.stopping import StopRules
from posttrain.types import FinishReason


@dataclass(eq=False)
class Request:
    """The samples of one prompt, and how their tokens are drawn."""

    group: PromptGroup
    samples: Sequence[Sample]
    sampler: TokenSampler
    stop: StopRules
    num_top_logprobs: int | None = None  # None: the model's own log-probabilities are not needed
    earlier: Sequence[Sequence[int]] = ()  # finished answers to the prompt, to draft from
    unfinished: dict[int, Sample] = field(init=False)  # by index

    def __post_init__(self) -> None:
        self.unfinished = {sample.index: sample for sample in self.samples}

    def finished_texts(self) -> Iterator[Sequence[int]]:
        yield from self.earlier
        yield from (sample.token_ids for sample in self.samples if sample.finish_reason is not None)


class NewToken(NamedTuple):
    sample: Sample
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    model_logprobs: ModelLogprobs | None = None


class NanLogits(NamedTuple):
    """The logits of the sample's next token are NaN. Its request is cancelled."""

    sample: Sample


Update = NewToken | NanLogits


class Driver:
    """`graphs` and `speculation` require that all requests have equal sampling settings and no adapter. `activate` is called
    with the name of the adapter whose samples come next, whenever it changes. `max_admitted_tokens` limits the prefill of one
    step."""

    def __init__(
        self,
        forward: ForwardPass,
        cache: PagedKvCache,
        scheduler: Scheduler,
        decoding: Decoding,
        max_prefill_tokens: int,
        *,
        graphs: DecodeGraphs | None = None,
        speculation: Speculation | None = None,
        activate: Callable[[str], None] | None = None,
        max_admitted_tokens: int | None = None,
    ) -> None:
        self.forward = forward
        self.cache = cache
        self.scheduler = scheduler
        self.decoding = decoding
        self.graphs = graphs
        self.speculation = speculation
        self._max_prefill_tokens = max_prefill_tokens
        self._max_admitted_tokens = max_admitted_tokens
        self._activate = activate
        self._adapter: str | None = None  # the active one
        self._requests: dict[PromptGroup, Request] = {}
        self._in_flight: list[Drawn] = []  # drawn on the device, not read yet
        self._prefilled_last = False

    @property
    def unfinished(self) -> bool:
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        assert self._activate is not None or not request.group.adapter, "the driver was built without adapters"
        self._requests[request.group] = request
        self.scheduler.add(request.samples)

    def cancel(self, request: Request) -> None:
        """Free the slots and pages of the request at once. Tokens that are in flight are discarded."""
        for sample in request.unfinished.values():
            self.scheduler.cancel(sample)
        request.unfinished.clear()
        self._forget(request)

    def interrupt(self) -> list[Update]:
        """Read the tokens in flight and cancel all requests. Unfinished samples keep their tokens."""
        updates = self._read_all()
        for request in list(self._requests.values()):
            self.cancel(request)
        return updates

    def _forget(self, request: Request) -> None:
        self.scheduler.forget(request.group)
        del self._requests[request.group]

    def step(self) -> list[Update]:
        """Prefill waiting samples, or launch one more token for every active one. Returns the tokens that were read.

        The two alternate, so that neither a stream of arrivals nor one of long answers holds up the other.
        """
        scheduler = self.scheduler
        if (num_drafts := self._num_drafts()) is not None:
            return self._step_with_drafts(num_drafts)
        if scheduler.waiting and not (self._prefilled_last and scheduler.active):
            admission = scheduler.admit(self._max_admitted_tokens)
            if admission.samples:
                self._prefilled_last = True
                return self._start(admission)
        self._prefilled_last = False
        updates: list[Update] = []
        if self.graphs is None or scheduler.may_run_short or not scheduler.active:
            # Without graphs the host needs the tokens. A sample can only be preempted with all its tokens on the host.
            updates += self._read_all()
        scheduler.reserve_step()
        for samples in self._by_adapter(list(scheduler.active)):
            try:
                launched = self._launch(samples)
            except GraphCaptureError as error:
                warn_without_graphs(error)
                assert self.graphs is not None
                self.graphs.give_up()
                self.graphs = self.speculation = None
                return updates  # the next step computes these tokens without graphs
            if self.speculation is not None:
                self.speculation.launched_without(len(samples))
            updates += self._read_all()  # tokens of the previous step, while the device computes this one
            self._in_flight = [launched]
            if self.graphs is None:
                updates += self._read_all()
        return updates

    # -- drafts --------------------------------------------------------------------------------------------------------

    def _num_drafts(self) -> int | None:
        """Tokens to draft for each sample in this step; 0: stop drafting; None: a step without drafts."""
        speculation, scheduler = self.speculation, self.scheduler
        if speculation is None or not (scheduler.active or speculation.is_active):
            return None
        possible = not scheduler.waiting and bool(scheduler.active)
        wanted = speculation.drafts_for(len(scheduler.active)) if possible else 0
        if speculation.is_active:
            return wanted
        return wanted if wanted and scheduler.has_room_for(2 * (1 + wanted)) else None

    def _step_with_drafts(self, num_drafts: int) -> list[Update]:
        speculation, scheduler, updates = self.speculation, self.scheduler, list[Update]()
        assert speculation is not None
        if num_drafts and not speculation.is_active:
            updates += self._read_all()  # texts are laid out on the host
            if not scheduler.active:
                return updates
            speculation.begin(scheduler.active, lambda group: self._requests[group].finished_texts())
        width = 1 + num_drafts
        if num_drafts and speculation.is_active and scheduler.reserve_ahead(width):
            samples = list(scheduler.active)
            sampler = self._requests[samples[0].group].sampler
            try:
                launched = speculation.step(samples, sampler, num_drafts)
            except GraphCaptureError as error:
                warn_without_graphs(error)
                return updates + self._without_drafts(for_good=True)
            for sample in samples:
                sample.in_flight += width
            updates += self._read_all()
            self._in_flight = [launched]
            return updates if self.graphs is not None else updates + self._read_all()
        # Drafts are not faster; or pages run short, and a step without drafts preempts a sample; or texts are too long.
        return updates + self._without_drafts(for_good=not speculation.is_active)

    def _without_drafts(self, *, for_good: bool) -> list[Update]:
        """Continue without drafts, until they are faster again or, with `for_good`, permanently. The host reads all
        tokens.
        """
        updates = self._read_all()
        assert self.speculation is not None
        self.speculation.is_active = False
        if for_good:
            self.speculation = None
        self.decoding.drop_copies()
        if self.graphs is not None:
            self.graphs.forget_rows()
            self.graphs.join(self.scheduler.active)
        return updates

    # -- prompts and adapters ------------------------------------------------------------------------------------------

    def _by_adapter(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """The samples of each adapter, with that adapter active. The currently active one comes first."""
        if self._activate is None:
            if samples:
                yield samples
            return
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group.adapter, []).append(sample)
        for adapter in sorted(groups, key=lambda name: (name != self._adapter, name)):
            if adapter != self._adapter:
                self._activate(adapter)
                self._adapter = adapter
            yield groups[adapter]

    def _start(self, admission: Admission) -> list[Update]:
        for samples in self._by_adapter(admission.samples):
            groups = dict.fromkeys(sample.group for sample in samples)
            self._prefill([admission.prompts[group] for group in groups if group in admission.prompts])
        self.scheduler.remember_prompts(admission)
        self.cache.copy_pages(admission.copies)
        updates: list[Update] = []
        for samples in self._by_adapter(admission.samples):
            self._prefill([admission.resumed[sample] for sample in samples if sample in admission.resumed])
            if self.graphs is not None and (known := [sample for sample in samples if sample.token_ids]):
                self.graphs.join(known)
            if fresh := [sample for sample in samples if not sample.token_ids]:
                self._in_flight.append(self._draw(fresh, first_logits(self.forward, fresh), joins=True))
            if self.graphs is None or not self.scheduler.active:  # no decode step follows to overlap with the wait
                updates += self._read_all()
        return updates

    def _prefill(self, jobs: Sequence[Prefill]) -> None:
        prefill(self.forward, self.cache, jobs, self._max_prefill_tokens)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _launch(self, samples: Sequence[Sample]) -> Drawn:
        """One more token for each of `samples`."""
        if self.graphs is not None:
            sampler = self._requests[samples[0].group].sampler
            return self._launched(self.graphs.step(samples, sampler))
        return self._draw(samples, self.decoding.next_logits(self._adapter or "", samples))

    def _draw(self, samples: Sequence[Sample], logits: Tensor, *, joins: bool = False) -> Drawn:
        keys = [sample.noise_key for sample in samples]
        index = [sample.noise_index for sample in samples]
        noise = torch.tensor([keys, index], dtype=torch.long).to(self.cache.device, non_blocking=True)
        rows_of: dict[TokenSampler, list[int]] = {}  # rows with equal settings are drawn together
        for row, sample in enumerate(samples):
            rows_of.setdefault(self._requests[sample.group].sampler, []).append(row)
        if len(rows_of) == 1:
            values = _draw_rows(next(iter(rows_of)), logits, noise)
        else:
            values = torch.empty(2, len(samples), dtype=torch.float64, device=self.cache.device)
            for sampler, rows in rows_of.items():
                at = torch.tensor(rows, device=self.cache.device)
                values.index_copy_(1, at, _draw_rows(sampler, logits[at], noise[:, at]))
        if joins and self.graphs is not None:
            self.graphs.join(samples, values[0].long())
        drawn = Drawn.to_host(samples, values)
        wanted = {
            row: number
            for row, sample in enumerate(samples)
            if (number := self._requests[sample.group].num_top_logprobs) is not None
        }
        if wanted:
            vocab_size = self._requests[samples[0].group].sampler.vocab_size
            drawn.model_logprobs = _model_logprobs(wanted, logits, values[0], vocab_size)
        return self._launched(drawn)

    def _launched(self, drawn: Drawn) -> Drawn:
        for sample in drawn.samples:
            sample.in_flight += 1
        if self.graphs is not None:
            self._leave_at_limit(drawn.samples)  # does not require reading their last tokens
        return drawn

    def _leave_at_limit(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.admission >= 0 and sample.num_drawn >= sample.group.max_new_tokens:
                self.scheduler.leave(sample)

    def _read_all(self) -> list[Update]:
        """Wait for the tokens in flight and append them; finished samples leave the batch."""
        updates: list[Update] = []
        for drawn in self._in_flight:
            if isinstance(drawn, DrawnWithDrafts):
                updates += self._read_drafts(drawn)
                continue
            tokens, logprobs = drawn.read()
            if self.graphs is None:  # samples with NaN logits keep their pages until those are cleared
                rows = zip(drawn.samples, logprobs, strict=True)
                self._leave_at_limit(sample for sample, logprob in rows if not math.isnan(logprob))
            for row, (sample, token, logprob) in enumerate(zip(drawn.samples, tokens, logprobs, strict=True)):
                sample.in_flight -= 1
                if sample.is_cancelled or sample.finish_reason is not None:
                    if math.isnan(logprob):
                        self._clear_damaged_pages()
                    continue  # drawn before the end of the sample was known
                updates.append(self._append(sample, token, logprob, drawn.model_logprobs.get(row)))
        self._in_flight = []
        return updates

    def _read_drafts(self, drawn: DrawnWithDrafts) -> Iterator[Update]:
        assert self.speculation is not None
        for sample, tokens in zip(drawn.samples, self.speculation.read(drawn), strict=True):
            sample.in_flight -= 1 + drawn.num_drafts
            for token, logprob in tokens:
                if sample.is_cancelled or sample.finish_reason is not None:
                    if math.isnan(logprob):
                        self._clear_damaged_pages()
                    break
                yield self._append(sample, token, logprob, None)

    def _append(self, sample: Sample, token: int, logprob: float, model_logprobs: ModelLogprobs | None) -> Update:
        request = self._requests[sample.group]
        if math.isnan(logprob):
            self._fail(request)
            return NanLogits(sample)
        sample.token_ids.append(token)
        sample.logprobs.append(logprob)
        reason = request.stop.reason(sample.token_ids, sample.group.max_new_tokens, sample.scanner)
        if reason is not None:
            self._finish(request, sample, reason)
        return NewToken(sample, token, logprob, reason, model_logprobs)

    def _finish(self, request: Request, sample: Sample, reason: FinishReason) -> None:
        sample.finish_reason = reason
        if sample.admission >= 0:
            self.scheduler.leave(sample)
        del request.unfinished[sample.index]
        if not request.unfinished:
            self._forget(request)

    def _fail(self, request: Request) -> None:
        """Cancel a request whose logits are NaN."""
        self.cancel(request)
        self._clear_damaged_pages()

    def _clear_damaged_pages(self) -> None:
        """After NaN logits, clear all pages before reuse. A mask does not stop NaN (0 * NaN is NaN), and the damaged
        page may be that of a request that has already finished. Requests that hold a damaged page fail on their own.
        """
        if self.scheduler.prefixes is not None:
            self.scheduler.prefixes.clear()
        pages = self.scheduler.pages
        pages.clear_when_free(range(pages.num_pages), self.cache.clear_pages)
        self.decoding.drop_copies()


def _draw_rows(sampler: TokenSampler, logits: Tensor, noise: Tensor) -> Tensor:
    """Token ids and log-probabilities [2, rows] as float64, which holds every token id and every float32."""
    tokens, logprobs = sampler.draw(logits, noise[0], noise[1])
    return torch.stack([tokens.double(), logprobs.double()])


def _model_logprobs(
    wanted: Mapping[int, int], logits: Tensor, tokens: Tensor, vocab_size: int
) -> dict[int, ModelLogprobs]:
    """For each row in `wanted`: log-probabilities of its token and of the requested number of most probable tokens."""
    at = torch.tensor(list(wanted), device=logits.device)
    logprobs = logits[at].float().log_softmax(dim=-1)
    of_token = logprobs.gather(1, tokens[at].long()[:, None])[:, 0].tolist()
    best = logprobs[:, :vocab_size].topk(min(max(1, *wanted.values()), vocab_size), dim=-1)
    tops = [
        tuple(zip(ids[:number], values[:number], strict=True))
        for ids, values, number in zip(best.indices.tolist(), best.values.tolist(), wanted.values(), strict=True)
    ]
    return {row: ModelLogprobs(*found) for row, found in zip(wanted, zip(of_token, tops, strict=True), strict=True)}
