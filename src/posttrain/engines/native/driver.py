"""The continuous batching loop, shared by `NativeEngine.generate`, sessions and the server.

`add` requests and call `step` until none is left. A step either prefills waiting samples and draws their first tokens,
or draws one more token for every active sample, and the first one of samples with short prompts. The scheduler decides
which samples run.

With `DecodeGraphs` the device is one step ahead of the host: a step is launched before the tokens of the previous one
are read. A sample that drew a stop token then takes part in one more step, whose token is discarded. Pages of a sample
that has left may still be written by that step; their next user writes later on the same stream.

With `Speculation` the last samples are decoded with drafts: a step then draws one token or more for each. It starts
when no sample waits, and ends when it is no longer faster or pages run short. The host reads all tokens when it starts
and ends.

A sample may be added with tokens that it drew earlier: they are prefilled, as after a preemption. So a caller can stop
stepping, keep the tokens of unfinished samples, and continue them in another driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.engines.native.cuda_graph_cache import GraphCaptureError
from posttrain.engines.native.forward import Decoding, ForwardPass, first_logits, prefill, warn_without_graphs
from posttrain.engines.native.graphs import DecodeGraphs
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.sampler import Candidates, Drawn, TokenSampler, draw, top_logprobs
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
    num_top_logprobs: int = 0  # the most probable tokens that are reported
    earlier: Sequence[Sequence[int]] = ()  # finished answers to the prompt, to draft from
    unfinished: dict[int, Sample] = field(init=False)  # by index

    def __post_init__(self) -> None:
        self.unfinished = {sample.index: sample for sample in self.samples}

    @property
    def is_constrained(self) -> bool:
        return self.samples[0].constraint is not None

    def finished_texts(self) -> Iterator[Sequence[int]]:
        yield from self.earlier
        yield from (sample.token_ids for sample in self.samples if sample.finish_reason is not None)


class NewToken(NamedTuple):
    sample: Sample
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    candidates: Candidates = ()


class NanLogits(NamedTuple):
    """The logits of the sample's next token are NaN. Its request is cancelled."""

    sample: Sample


class FailedGrammar(NamedTuple):
    """The grammar that the sample obeys cannot be continued. Its request is cancelled."""

    sample: Sample
    reason: str


Update = NewToken | NanLogits | FailedGrammar

# Waiting samples that are not collected further: this many, or the share of the batch that may stay idle meanwhile.
_ENOUGH_TO_PREFILL = 16
_IDLE_SHARE = 1 / 8


@dataclass(eq=False)
class Driver:
    """`graphs` are those of each adapter. `speculation` requires that all requests have equal sampling settings and no
    adapter. `activate` is called with the name of an adapter before the model runs for its samples, whenever it
    changes.

    `max_admitted_tokens` limits the prefill of one step. A prefill of a few prompts reads all weights, as a decode step
    of the whole batch does. So while samples are active, prompts that arrive one by one are collected over
    `steps_between_prefills` decode steps. Prompts of up to `max_prompt_rows` tokens together are computed by a decode
    step instead, if its graphs have rows for them.
    """

    forward: ForwardPass
    cache: PagedKvCache
    scheduler: Scheduler
    decoding: Decoding
    max_prefill_tokens: int
    _: KW_ONLY
    graphs: Mapping[str, DecodeGraphs] | None = None
    speculation: Speculation | None = None
    activate: Callable[[str], None] | None = None
    max_admitted_tokens: int | None = None
    steps_between_prefills: int = 1
    max_prompt_rows: int = 0

    def __post_init__(self) -> None:
        self._adapter: str | None = None  # the active one
        self._requests: dict[PromptGroup, Request] = {}
        self._in_flight: list[Drawn] = []  # drawn on the device, not read yet; in the order of their launches
        self._has_read_nan = False
        self._read_early: list[Update] = []  # tokens that were read in the middle of a step
        self._num_steps_since_prefill = self.steps_between_prefills
        self._enough_to_prefill = min(_ENOUGH_TO_PREFILL, max(1, int(self.scheduler.max_batch_size * _IDLE_SHARE)))
        self._has_backlog = False  # the last prefill took fewer samples than could start

    @property
    def unfinished(self) -> bool:
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        assert self.activate is not None or not request.group.adapter, "the driver was built without adapters"
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

        There is a decode step between two prefills, so that a stream of arrivals does not hold up active samples. Short
        prompts are computed by the decode step.
        """
        scheduler = self.scheduler
        if (num_drafts := self._num_drafts()) is not None:
            return self._step_with_drafts(num_drafts)
        if self.graphs is not None and not scheduler.active:
            for graphs in self.graphs.values():
                graphs.forget_rows()  # tokens of samples that left before a step
        may_join = self.graphs is not None and self.max_prompt_rows > 0
        joining = scheduler.admit_short(self.max_prompt_rows) if may_join else Admission()
        if not joining.samples and self._may_prefill():
            admission = scheduler.admit(self.max_admitted_tokens)
            if admission.samples:
                self._num_steps_since_prefill = 0
                self._has_backlog = scheduler.num_startable > 0
                return self._start(admission)
        self._num_steps_since_prefill += 1
        updates: list[Update] = []
        if self.graphs is None or scheduler.may_run_short or not scheduler.active:
            # Without graphs the host needs the tokens. A sample can only be preempted with all its tokens on the host.
            updates += self._read_all()
        scheduler.reserve_step()
        num_before = len(self._in_flight)
        self._read_early = []
        try:
            for adapter, samples in self._by_adapter(scheduler.active):
                launched = self._launch(adapter, samples, joining)  # may read, and so replace the list
                self._in_flight.append(launched)
        except GraphCaptureError as error:
            warn_without_graphs(error)
            self._give_up_graphs()
            updates += self._read_early
            # The next step computes the missing tokens without graphs.
            missing = [sample for sample in joining.samples if not sample.num_drawn]
            prompts = {sample.group: joining.prompts[sample.group] for sample in missing}
            return updates + self._start(Admission(prompts=prompts, samples=missing))
        if self.speculation is not None and len(self._in_flight) > num_before:
            self.speculation.launched_without(len(self._in_flight[-1].samples))
        # Tokens of the previous step, while the device computes this one. Grammars may have needed them already.
        updates += self._read_early or self._read(num_before)
        return updates if self.graphs is not None else updates + self._read_all()

    def _may_prefill(self) -> bool:
        if not (num_startable := self.scheduler.num_startable):
            self._has_backlog = False
            return False
        enough = self._has_backlog or num_startable >= self._enough_to_prefill
        needed = 1 if enough else self.steps_between_prefills
        return not self.scheduler.active or self._num_steps_since_prefill >= needed

    def _give_up_graphs(self) -> None:
        assert self.graphs is not None
        for graphs in self.graphs.values():
            graphs.give_up()
        self.graphs = self.speculation = None

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
            self.graphs[""].forget_rows()
            self.graphs[""].join(self.scheduler.active)
        return updates

    # -- prompts and adapters ------------------------------------------------------------------------------------------

    def _by_adapter(self, samples: Sequence[Sample]) -> list[tuple[str, list[Sample]]]:
        """Each adapter with its samples. The currently active one comes first."""
        if self.activate is None:
            return [("", list(samples))] if samples else []
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group.adapter, []).append(sample)
        return sorted(groups.items(), key=lambda item: (item[0] != self._adapter, item[0]))

    def _use(self, adapter: str) -> None:
        if self.activate is not None and adapter != self._adapter:
            self.activate(adapter)
            self._adapter = adapter

    def _start(self, admission: Admission) -> list[Update]:
        if self.cache.states is not None:
            self.cache.states.copy(admission.state_loads)
        for adapter, samples in self._by_adapter(admission.samples):
            groups = dict.fromkeys(sample.group for sample in samples)
            jobs = [admission.prompts[group] for group in groups if group in admission.prompts]
            self._prefill(adapter, self._from_borders(adapter, jobs))
        self.scheduler.keep_borders(admission)
        self.cache.copy_pages(admission.copies)
        if self.cache.states is not None:
            self.cache.states.copy(admission.state_copies)
        for adapter, samples in self._by_adapter(admission.samples):
            self._prefill(adapter, [admission.resumed[sample] for sample in samples if sample in admission.resumed])
            if self.graphs is not None and (known := [sample for sample in samples if sample.token_ids]):
                self.graphs[adapter].join(known)
            if fresh := [sample for sample in samples if not sample.token_ids]:
                self._in_flight.append(self._draw_first(adapter, fresh))
        if self.graphs is None or not self.scheduler.active:  # no decode step follows to overlap with the wait
            return self._read_all()
        return []

    def _from_borders(self, adapter: str, jobs: list[Prefill]) -> list[Prefill]:
        """Compute those prompts up to the page whose state is kept; returns what is left of all."""
        split = [job for job in jobs if job.border]
        if not split or self.cache.states is None:
            return jobs
        self._prefill(
            adapter, [replace(job, token_ids=job.token_ids[: job.border - job.start], group=None) for job in split]
        )
        self.cache.states.copy([(job.state_slot, job.border_slot) for job in split])
        return [
            replace(job, token_ids=job.token_ids[job.border - job.start :], start=job.border) if job.border else job
            for job in jobs
        ]

    def _prefill(self, adapter: str, jobs: Sequence[Prefill]) -> None:
        if jobs:
            self._use(adapter)
            prefill(self.forward, self.cache, jobs, self.max_prefill_tokens)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _launch(self, adapter: str, samples: Sequence[Sample], joining: Admission) -> Drawn:
        """One more token for each of `samples`, the first one for those that join."""
        if self.graphs is not None:
            graphs, settings = self.graphs[adapter], [self._requests[sample.group] for sample in samples]

            def read_earlier() -> None:  # grammars need it
                self._read_early += self._read_all()

            if joining.samples:
                prompts = {one: joining.prompts[one.group] for one in joining.samples if one.group.adapter == adapter}
                graphs.join_prompts(prompts)
            return self._launched(graphs.step(samples, settings, lambda: self._use(adapter), read_earlier))
        self._use(adapter)
        return self._draw(samples, self.decoding.next_logits(adapter, samples))[1]

    def _draw_first(self, adapter: str, samples: Sequence[Sample]) -> Drawn:
        self._use(adapter)
        tokens, drawn = self._draw(samples, first_logits(self.forward, samples))
        if self.graphs is not None and any(
            sample.admission >= 0 for sample in samples
        ):  # else all had one token to draw
            self.graphs[adapter].join(samples, tokens)
        return drawn

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> tuple[Tensor, Drawn]:
        """The tokens on the device, and on their way to the host."""
        settings = [self._requests[sample.group] for sample in samples]
        tokens, logprobs = draw(samples, settings, logits)
        values = torch.stack([tokens.double(), logprobs.double()])
        return tokens, self._launched(Drawn.to_host(samples, values, top_logprobs(settings, logits)))

    def _launched(self, drawn: Drawn) -> Drawn:
        for sample in drawn.samples:
            sample.in_flight += 1
        keeps_states = self.scheduler.prefixes is not None and self.cache.states is not None
        if self.graphs is not None and not keeps_states:  # a state is kept with the tokens that it has seen
            self._leave_at_limit(drawn.samples)  # does not require reading their last tokens
        return drawn

    def _leave_at_limit(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.admission >= 0 and sample.num_drawn >= sample.group.max_new_tokens:
                self.scheduler.leave(sample)

    def _read_all(self) -> list[Update]:
        return self._read(len(self._in_flight))

    def _read(self, count: int) -> list[Update]:
        """Wait for the tokens of the first `count` launches in flight and append them; finished samples leave the
        batch.
        """
        launches, self._in_flight = self._in_flight[:count], self._in_flight[count:]
        updates: list[Update] = []
        for drawn in launches:
            rows = self._read_drafts(drawn) if isinstance(drawn, DrawnWithDrafts) else self._read_rows(drawn)
            updates += [self._append(*row) for row in rows]
        if self._has_read_nan:
            self._has_read_nan = False
            self._clear_damaged_pages()
        return updates

    def _read_rows(self, drawn: Drawn) -> Iterator[tuple[Sample, int, float, Candidates]]:
        """The tokens of samples that have not ended."""
        tokens, logprobs = drawn.read()
        candidates = drawn.read_candidates()
        if self.graphs is None:  # samples with NaN logits keep their pages until those are cleared
            rows = zip(drawn.samples, logprobs, strict=True)
            self._leave_at_limit(sample for sample, logprob in rows if not math.isnan(logprob))
        for row, (sample, token, logprob) in enumerate(zip(drawn.samples, tokens, logprobs, strict=True)):
            sample.in_flight -= 1
            self._has_read_nan |= math.isnan(logprob)
            if not (sample.is_cancelled or sample.finish_reason is not None):  # else drawn before its end was known
                yield sample, token, logprob, candidates.get(row, ())

    def _read_drafts(self, drawn: DrawnWithDrafts) -> Iterator[tuple[Sample, int, float, Candidates]]:
        assert self.speculation is not None
        for sample, tokens in zip(drawn.samples, self.speculation.read(drawn), strict=True):
            sample.in_flight -= 1 + drawn.num_drafts
            for token, logprob in tokens:
                self._has_read_nan |= math.isnan(logprob)
                if sample.is_cancelled or sample.finish_reason is not None:
                    break
                yield sample, token, logprob, ()

    def _append(self, sample: Sample, token: int, logprob: float, candidates: Candidates) -> Update:
        request = self._requests[sample.group]
        if sample.constraint is not None:
            sample.constraint.accept(token)
            if error := sample.constraint.error:
                self.cancel(request)
                return FailedGrammar(sample, error)
        if math.isnan(logprob):
            self.cancel(request)
            return NanLogits(sample)
        sample.token_ids.append(token)
        sample.logprobs.append(logprob)
        reason = request.stop.reason(sample.token_ids, sample.group.max_new_tokens, sample.scanner)
        if reason is not None:
            self._finish(request, sample, reason)
        return NewToken(sample, token, logprob, reason, candidates)

    def _finish(self, request: Request, sample: Sample, reason: FinishReason) -> None:
        sample.finish_reason = reason
        if sample.admission >= 0:
            self.scheduler.leave(sample)
        del request.unfinished[sample.index]
        if not request.unfinished:
            self._forget(request)

    def _clear_damaged_pages(self) -> None:
        """After NaN logits, clear all pages before reuse. A mask does not stop NaN (0 * NaN is NaN), and the damaged
        page may be that of a request that has already finished. Requests that hold a damaged page fail on their own.
        """
        if self.scheduler.prefixes is not None:
            self.scheduler.prefixes.clear()
        pages = self.scheduler.pages
        pages.clear_when_free(range(pages.num_pages), self.cache.clear_pages)
        self.decoding.drop_copies()
