"""A long-lived session of the native engine: requests arrive and are cancelled while others run.

`NativeEngine.generate` returns when its last completion is done. A server calls `add`, `cancel` and `step` itself. The
KV cache is allocated once and never grows. Each request has its own sampling settings; its noise is keyed by its seed,
so its tokens do not depend on other requests.

A session may switch adapters: samples of one adapter run through the model together, one adapter after another.

Not thread-safe: one thread calls everything. A process may have several sessions, but only one of them may be
inside `step` at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from posttrain.engines.native.constraints import Constraint
from posttrain.engines.native.driver import Driver, FailedGrammar, NanLogits, Request, Update
from posttrain.engines.native.engine import NativeEngine, NativeSettings, new_cache, new_prefixes, num_pages_for
from posttrain.engines.native.forward import BackendPerAdapter
from posttrain.engines.native.fp8 import fp8_weights
from posttrain.engines.native.graphs import GraphsPerAdapter
from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.sampler import Candidates, TokenSampler
from posttrain.engines.native.scheduler import PromptGroup, Sample, Scheduler, pages_for
from posttrain.engines.native.stopping import StopRules, ends_of_sequence
from posttrain.errors import InputError
from posttrain.policy.model_support import check_length
from posttrain.types import FinishReason, ImageRef, Sampling, Task

# Tokens of prompts that a decode step computes beside the samples. More are a prefill of their own, which is faster by
# then.
_MAX_PROMPT_ROWS = 256
# On a GPU, where launching a prefill takes longer than a decode step. Prompts wait less than in `generate`.
_STEPS_BETWEEN_PREFILLS = 4


@dataclass(frozen=True)
class SessionRequest:
    """A prompt with `num_samples` completions. The same seed gives the same answers, independent of other requests."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    num_samples: int = 1
    adapter: str = ""  # "" is the model as it was loaded
    num_top_logprobs: int = 0  # the most probable tokens that are reported with each token
    grammar: str = ""  # that the answer obeys; see `constraints.py`
    images: tuple[ImageRef, ...] = ()  # of the prompt


class TokenEvent(NamedTuple):
    """One more token of one sample. `logprob` is the sampler's, under the temperature used, as in `Completion`; so are
    those of `candidates`, the most probable tokens.
    """

    request_id: str
    sample: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None = None
    candidates: Candidates = ()


@dataclass(frozen=True)
class FailureEvent:
    """The request has ended without an answer."""

    request_id: str
    message: str


Event = TokenEvent | FailureEvent


@dataclass(frozen=True)
class SessionLimits:
    """Constants of a session: sufficient to validate a request without the model."""

    max_total_tokens: int
    max_batch_size: int
    vocab_size: int
    num_pages: int
    model_ends: frozenset[int]  # the model's own end-of-sequence tokens

    def check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise InputError for a request that `GenerationSession.add` would refuse."""
        length, limit = len(prompt_ids), self.max_total_tokens
        if length < 1 or max_new_tokens < 1 or length + max_new_tokens > limit:
            raise InputError(
                f"{length} prompt tokens and {max_new_tokens} new ones: at least 1 of each, and at most {limit} "
                "together"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocab_size:
            raise InputError(f"a prompt token is outside the model's vocabulary of {self.vocab_size} tokens")


class SessionCounts(NamedTuple):
    """Current numbers of samples and pages; preemptions and reused tokens since the start."""

    num_active: int = 0
    num_waiting: int = 0
    pages_in_use: int = 0
    num_preemptions: int = 0
    num_reused_tokens: int = 0


class GenerationSession:
    """`activate` is called with the name of the adapter whose samples come next, whenever it changes. `settings`
    replace the engine's. `keeps_prefixes`: reuse cached prefixes of earlier sequences.
    """

    def __init__(
        self,
        engine: NativeEngine,
        activate: Callable[[str], None] | None = None,
        settings: NativeSettings | None = None,
        *,
        keeps_prefixes: bool = False,
    ) -> None:
        self.forward, self.tokenizer = engine.forward, engine.tokenizer
        self.settings = settings or engine.settings
        self._activate = activate
        self._keeps_prefixes = keeps_prefixes
        self._vocab_size = engine.vocab_size
        self._samplers: dict[Sampling, TokenSampler] = {}
        self._requests: dict[str, Request] = {}
        self._before = SessionCounts()  # the last `reset`
        engine.model.eval()
        self._allocate()
        self.limits = SessionLimits(
            self.settings.max_total_tokens,
            self.settings.max_batch_size,
            self.forward.head.vocab_size,
            self.num_pages,
            ends_of_sequence(self.forward.base),
        )
        self.driver = self._new_driver()

    @torch.no_grad()
    def _allocate(self) -> None:
        settings, longest = self.settings, self.settings.max_total_tokens
        check_length(self.forward.config, longest)
        self.forward.fp8 = fp8_weights(self.forward, settings)
        least = pages_for(longest, settings.page_size) + 1
        on_gpu = self.forward.device.type == "cuda"
        self.num_pages = num_pages_for(
            self.forward, settings, least * settings.max_batch_size + 1, least, _MAX_PROMPT_ROWS if on_gpu else 0
        )
        self._cache = new_cache(self.forward, settings, self.num_pages)
        self._decoding = BackendPerAdapter(
            self.forward, self._cache, self.num_pages, settings.max_batch_size, settings.max_total_tokens
        )
        self._graphs = self._new_graphs() if on_gpu else None

    def _new_graphs(self) -> GraphsPerAdapter:
        max_rows = self.settings.max_batch_size + _MAX_PROMPT_ROWS
        return GraphsPerAdapter(self.forward, partial(self._decoding.new_paged, max_rows))

    def _new_driver(self) -> Driver:
        settings = self.settings
        states = self._cache.states
        scheduler = Scheduler(
            self.num_pages,
            settings.page_size,
            settings.max_batch_size,
            prefixes=new_prefixes(self._cache, self.num_pages) if self._keeps_prefixes else None,
            num_state_slots=None if states is None else states.num_slots,
        )
        # Prefill about one row of prompts at a time, which bounds the wait of active samples.
        tokens = settings.max_prefill_tokens
        return Driver(
            self.forward,
            self._cache,
            scheduler,
            self._decoding,
            tokens,
            graphs=self._graphs,
            activate=self._activate,
            max_admitted_tokens=tokens,
            steps_between_prefills=1 if self._graphs is None else _STEPS_BETWEEN_PREFILLS,
            max_prompt_rows=_MAX_PROMPT_ROWS if states is None else 0,
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        return self.driver.unfinished

    @property
    def counts(self) -> SessionCounts:
        scheduler = self.driver.scheduler
        return SessionCounts(
            num_active=len(scheduler.active),
            num_waiting=len(scheduler.waiting),
            pages_in_use=self.num_pages - scheduler.pages.num_free,
            num_preemptions=self._before.num_preemptions + scheduler.num_preemptions,
            num_reused_tokens=self._before.num_reused_tokens + scheduler.num_reused_tokens,
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: SessionRequest) -> None:
        """Append a request to the queue."""
        assert request.id not in self._requests, f"two requests have the id {request.id}"
        assert request.num_samples >= 1
        sampling = request.sampling
        self.limits.check(request.prompt_ids, sampling.max_new_tokens)
        stop = StopRules.of(self.forward.base, self.tokenizer, sampling)
        task = Task(0, request.id, "", request.prompt_ids, images=request.images)
        group = PromptGroup(task, sampling.max_new_tokens, request.adapter, images=self.forward.layout(task))
        samples = [
            Sample(
                group,
                index,
                sequence_key(request.seed, 0, 0, index),
                scanner=stop.scanner(),
                constraint=Constraint(self.tokenizer, request.grammar, stop.token_ids) if request.grammar else None,
            )
            for index in range(request.num_samples)
        ]
        added = Request(group, samples, self._sampler(sampling), stop, request.num_top_logprobs)
        self._requests[request.id] = added
        self.driver.add(added)

    def _sampler(self, sampling: Sampling) -> TokenSampler:
        """One sampler per set of equal sampling settings."""
        if len(self._samplers) > 256:  # mostly settings of finished requests
            self._samplers.clear()
        drawing = Sampling(1, sampling.temperature, sampling.top_p, sampling.top_k)
        if sampling.temperature == 0.0:
            drawing = Sampling(1, 0.0)
        return self._samplers.setdefault(drawing, TokenSampler(drawing, self._vocab_size))

    def cancel(self, request_id: str) -> None:
        """Free the slots and pages of the request at once. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.driver.cancel(request)

    def forget_prefixes(self) -> None:
        """Before weights or an adapter change: nothing computed so far is reused."""
        if self.driver.scheduler.prefixes is not None:
            self.driver.scheduler.prefixes.forget()

    def reset(self) -> list[str]:
        """Drop all requests, after `step` has raised. Returns their ids."""
        lost = list(self._requests)
        self._requests.clear()
        self._decoding.forget_rows()
        if self.driver.graphs is None:  # no graphs, or a capture has failed
            self._graphs = None
        elif self._graphs is not None:
            self._graphs.forget_rows()
        self._before = self.counts
        self.driver = self._new_driver()
        return lost

    # -- steps ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Event]:
        """One step of the driver: prefill waiting requests, or draw one more token for every active sample. On a GPU it
        returns the tokens of the previous step, while the device computes this one.
        """
        events: list[Event] = []
        for update in self.driver.step():
            request_id = update.sample.group.task.id
            events.append(_event(request_id, update))
            request = self._requests.get(request_id)
            if request is not None and not request.unfinished:
                del self._requests[request_id]
        if not self.driver.scheduler.active:
            self._decoding.drop_copies()  # an idle server keeps no dense copies
        return events


def _event(request_id: str, update: Update) -> Event:
    if isinstance(update, NanLogits):
        return FailureEvent(request_id, "the model's output is NaN: its weights are damaged")
    if isinstance(update, FailedGrammar):
        return FailureEvent(request_id, f"the grammar of the answer cannot be continued: {update.reason}")
    return TokenEvent(
        request_id, update.sample.index, update.token_id, update.logprob, update.finish_reason, update.candidates
    )
