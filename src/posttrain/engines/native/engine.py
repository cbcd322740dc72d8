"""The native engine: samples from the modules that are being trained. Implements `roles.Engine`.

Weights are never merged or changed, and are copied only for FP8 sampling (`fp8.py`). The KV cache and other working
memory are allocated on first use. On a GPU they stay for the next call, together with the CUDA graphs that contain
their addresses, until `release` frees them for training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import ConfigDict, PositiveInt
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase

from posttrain.config.policy import NativeConfig
from posttrain.engines.native.attention import DenseDecode, PagedDecode
from posttrain.engines.native.driver import Driver, FailedGrammar, NanLogits, Request, Update
from posttrain.engines.native.forward import ForwardPass, SingleBackend
from posttrain.engines.native.fp8 import cache_layers, check_fp8, fp8_weights
from posttrain.engines.native.graphs import DecodeGraphs
from posttrain.engines.native.kv_cache import (
    GIB,
    PagedKvCache,
    PrefixCache,
    StateSlots,
    num_pages_for_call,
    usable_bytes,
)
from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.recurrent_states import NUM_PROMPT_SLOTS, RecurrentStates
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import PromptGroup, Sample, Scheduler, pages_for, pages_needed
from posttrain.engines.native.speculation import Speculation
from posttrain.engines.native.stopping import StopRules
from posttrain.errors import InputError, StopRequested
from posttrain.policy.experts import compute_adapters_by_rows
from posttrain.policy.fused.fp8 import Fp8Weights
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.host_memory import available_bytes
from posttrain.policy.memory.peak_memory import KEPT_CACHE_SHARE
from posttrain.policy.memory.settings import MAX_DRAFTED_ROWS
from posttrain.policy.model_support import check_length
from posttrain.policy.parallel.experts import spreads_experts
from posttrain.policy.routing import RouteRecorder
from posttrain.policy.runtime import evaluation_mode
from posttrain.roles import Progress
from posttrain.types import (
    SMALLEST_TEMPERATURE,
    Completion,
    NoiseKey,
    OpenGroup,
    PrefillTokens,
    Quota,
    Sampling,
    Task,
    Unfinished,
    completions_of,
)

# On a GPU, where launching a prefill takes longer than a decode step.
_STEPS_BETWEEN_PREFILLS = 16


# What prompts of a call must have in common to share it: queries that read keys from pages are slower than those of a
# whole prompt.
_LEAST_SHARED_TOKENS = 256


class NativeSettings(NativeConfig):
    """The config section and further settings. Sizes do not change what is sampled; number formats do."""

    model_config = ConfigDict(frozen=True)

    max_total_tokens: PositiveInt = 4096  # prompt and completion together
    # The same call computes the same bits, independent of earlier calls and of free memory.
    deterministic: bool = False
    records_routes: bool = False  # which experts are chosen; without CUDA graphs and drafts


@dataclass
class Workspace:
    """Working memory of calls."""

    cache: PagedKvCache
    num_pages: int
    is_largest: bool  # memory did not allow more pages
    max_length: int  # maximum sequence length in tokens
    decode: DenseDecode | PagedDecode
    graphs: DecodeGraphs | None = None
    speculation: Speculation | None = None
    fp8: Fp8Weights | None = None
    prefixes: PrefixCache | None = None  # pages of earlier calls; None: they are not kept

    def fits(self, wanted: int, least: int, longest: int) -> bool:
        enough = self.num_pages >= wanted or (self.is_largest and self.num_pages >= least)
        return enough and longest <= self.max_length

    def begin(self, groups: Sequence[PromptGroup], num_samples: int) -> None:
        """Reset after the previous call, whose samples had the same admission numbers but other pages."""
        self.decode.forget_rows()
        if self.graphs is not None:
            self.graphs.begin(groups, num_samples)
        if self.speculation is not None:
            self.speculation.forget_call()

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes + sum(part.num_bytes for part in (self.fp8, self.speculation) if part is not None)


class NativeEngine:
    """`model` is a causal language model of `transformers`, loaded with `attn_implementation="posttrain"`, or a
    PeftModel of one. Adapters are active unless the caller has turned them off.
    """

    shares_tensors = has_weights = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        settings: NativeSettings | None = None,
        *,
        use_graphs: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or NativeSettings()
        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        compute_adapters_by_rows(model)
        self.forward = ForwardPass(model)
        num_fused = fuse_layers(self.forward.head.decoder, may_join=not sharded)
        check_fp8(self.forward, self.settings, num_fused=num_fused, is_sharded=sharded)
        # Until a capture fails. Sharded modules are sampled with whole parameters (`policy/parallel/fsdp.py`), whose
        # addresses may differ between calls; then graphs are captured again. Ranks that share layers or experts sample
        # without graphs.
        shares_layers = sharded and (self.forward.head.tensor_group is not None or spreads_experts(model))
        self._use_graphs = use_graphs and self.forward.device.type == "cuda" and not shares_layers
        self._keeps_workspace = self.forward.device.type != "cpu"  # else only with cached prefixes
        if self.settings.records_routes:
            self._use_graphs = False
            self.forward.routes = RouteRecorder(model, self.forward.config.num_hidden_layers)
        self._workspace: Workspace | None = None
        self._keeps_prefixes = False  # between calls
        self._prefilled = PrefillTokens()
        self.should_stop: Callable[[], bool] = lambda: False  # checked at every token
        self.when_whole: Callable[[OpenGroup], None] | None = None  # gets each group when its last answer is finished
        self._largest = (0, 0)  # largest number of pages, and longest sequence, of calls so far
        self.num_preemptions = 0  # in the last call; many preemptions mean that the KV cache is too small
        # In the last call: tokens drawn in steps with drafts, and the number of (sample, step) pairs of such steps.
        self.drafted = (0, 0)
        # Ids up to the tokenizer's highest may be drawn; the rest of the output head is padding.
        self.vocab_size = min(max(tokenizer.get_vocab().values()) + 1, self.forward.head.vocab_size)

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """For each task `num_samples` completions, in order. `progress` gets numbers of finished completions."""
        _check(sampling, num_samples)
        groups = [OpenGroup(task, key.step, (Unfinished(),) * num_samples) for task in tasks]
        return completions_of(self._sample(groups, sampling, key.seed, None, progress))

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        """Sample until `quota` is met or all answers are finished. Keys and values of continued answers
        are recomputed.
        """
        _check(sampling, 1)
        return self._sample(groups, sampling, seed, quota, progress)

    @torch.no_grad()  # not inference_mode: its tensors could remain in buffers that training uses
    def _sample(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None,
        progress: Progress | None,
    ) -> list[OpenGroup]:
        stop = StopRules.of(self.forward.base, self.tokenizer, sampling)
        sampler = TokenSampler(sampling, self.vocab_size)
        requests: dict[int, Request] = {}  # by place in `groups`
        for place, group in enumerate(groups):
            prompt = self._group(group.task, sampling.limit_of(group.task))
            first = group.task.first_sample
            samples = [
                _continued(answer, prompt, index, sequence_key(seed, group.born, group.task.draw, index), stop)
                for index, answer in enumerate(group.answers, start=first)
                if isinstance(answer, Unfinished)
            ]
            if samples:
                earlier = [answer.token_ids for answer in group.answers if isinstance(answer, Completion)]
                requests[place] = Request(prompt, samples, sampler, stop, earlier=earlier)
        born = [group.born for group in groups]
        if (tower := self.forward.head.tower) is not None:
            tower.prepare(image for request in requests.values() for image in request.group.task.images)

        def is_over() -> bool:
            return quota is not None and quota.is_met(
                born, [not (at in requests and requests[at].unfinished) for at in range(len(groups))]
            )

        if (tell := self.when_whole) is not None:
            progress = self._telling(tell, groups, requests, progress)
        if requests and not is_over():
            with evaluation_mode(self.model):
                largest = max(len(request.samples) for request in requests.values())
                self._run(list(requests.values()), largest, progress, is_over if quota is not None else None)
        after = [self._group_after(group, requests[at]) if at in requests else group for at, group in enumerate(groups)]
        if self.forward.routes is not None:
            self.forward.routes.clear()
        return after

    def _telling(
        self,
        tell: Callable[[OpenGroup], None],
        groups: Sequence[OpenGroup],
        requests: Mapping[int, Request],
        progress: Progress | None,
    ) -> Progress:
        waiting = set(requests)

        def note(num_finished: int) -> None:
            if progress is not None:
                progress(num_finished)
            for at in [at for at in waiting if not requests[at].unfinished]:
                waiting.remove(at)
                if (after := self._group_after(groups[at], requests[at], with_routes=False)).is_whole:
                    tell(after)

        return note

    def _group_after(self, group: OpenGroup, request: Request, *, with_routes: bool = True) -> OpenGroup:
        answers = list(group.answers)
        for sample in request.samples:
            place = sample.index - group.task.first_sample
            before = answers[place]
            assert isinstance(before, Unfinished)
            ids, logprobs = tuple(sample.token_ids), tuple(sample.logprobs)
            if sample.finish_reason is None:
                answers[place] = Unfinished(ids, logprobs, before.versions)
            else:
                text = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
                done = Completion(ids, logprobs, text, sample.finish_reason, versions=before.versions)
                if with_routes and (routes := self.forward.routes) is not None:
                    found = routes.take((sample.group, sample), sample.group.prompt_length + len(ids) - 1)
                    done = replace(done, routed_experts=found)
                answers[place] = done
        return replace(group, answers=tuple(answers))

    # -- weights and memory --------------------------------------------------------------------------------------------

    def keep_prefixes(self, wanted: bool) -> PrefillTokens:
        """Reuse from here on what earlier calls have computed, or no longer. Nothing that was computed before this call
        is reused. Returns what was prefilled since the last call.
        """
        self._keeps_prefixes = wanted
        if not self._keeps_workspace:
            self._workspace = None
        self._forget_prefixes()
        prefilled, self._prefilled = self._prefilled, PrefillTokens()
        return prefilled

    def _forget_prefixes(self) -> None:
        if self._workspace is not None:
            self._workspace.prefixes = None

    def take_weights(self, version: int) -> None:
        """These are the trainer's tensors. Nothing that was computed before is reused."""
        self._forget_prefixes()

    def forget_weights(self) -> None:
        self._forget_prefixes()

    def close(self) -> None: ...

    def make_room(self) -> None:
        """A large KV cache is freed for training. A small one stays, with the CUDA graphs captured for it."""
        self._forget_prefixes()
        if self._workspace is not None and self.forward.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.forward.device).total_memory
            if self.num_held_bytes > KEPT_CACHE_SHARE * total:
                self.release()

    def release(self) -> None:
        """Free the memory of the KV cache, of CUDA graphs and of FP8 weights. The next call allocates them again."""
        if self._workspace is not None:
            self._workspace = self.forward.fp8 = None
            torch.cuda.empty_cache()  # the graphs' memory pool is not reusable earlier

    @property
    def num_held_bytes(self) -> int:
        """Memory that `release` would free, excluding CUDA graphs."""
        return 0 if self._workspace is None else self._workspace.num_bytes

    def _group(self, task: Task, max_new_tokens: int) -> PromptGroup:
        length, limit = len(task.prompt_ids), self.settings.max_total_tokens
        if not 0 < length < limit:
            raise InputError(
                f"task {task.id!r} has {length} prompt tokens: between 1 and {limit - 1} fit max_total_tokens {limit}"
            )
        if not 0 <= min(task.prompt_ids) <= max(task.prompt_ids) < self.forward.head.vocab_size:
            raise InputError(
                f"task {task.id!r} has a token outside the model's vocabulary of {self.forward.head.vocab_size}: "
                "was it made with another tokenizer?"
            )
        return PromptGroup(task, min(max_new_tokens, limit - length), images=self.forward.layout(task))

    def _run(
        self,
        requests: Sequence[Request],
        num_samples: int,
        progress: Progress | None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        """Run until all requests are finished or `is_over`, which is checked whenever an answer is finished."""
        groups = [request.group for request in requests]
        longest = max(group.prompt_length + group.max_new_tokens for group in groups)
        check_length(self.forward.config, longest)
        workspace = self._workspace_for(requests, longest)
        workspace.begin(groups, num_samples)
        states, prefixes = workspace.cache.states, workspace.prefixes
        if prefixes is None and states is None and self._can_keep_prefixes():
            # For prompts of one call that begin alike. Pages are shared while samples hold them, however many there
            # are: the same call computes the same.
            prefixes = PrefixCache(workspace.num_pages, self.settings.page_size, only_held=_LEAST_SHARED_TOKENS)
        scheduler = Scheduler(
            workspace.num_pages,
            self.settings.page_size,
            self.settings.max_batch_size,
            prefixes=prefixes,
            num_state_slots=None if states is None else states.num_slots,
        )
        decoding = SingleBackend(self.forward, workspace.decode)
        driver = Driver(
            self.forward,
            workspace.cache,
            scheduler,
            decoding,
            self.settings.max_prefill_tokens,
            graphs=None if workspace.graphs is None else {"": workspace.graphs},
            # The end of a round determines which weights draw a token. It must not depend on the number of accepted
            # drafts.
            speculation=workspace.speculation if is_over is None and not any(g.images for g in groups) else None,
            steps_between_prefills=_STEPS_BETWEEN_PREFILLS if workspace.graphs is not None else 1,
        )
        for request in requests:
            driver.add(request)
        try:
            while driver.unfinished:
                if self.should_stop():
                    raise StopRequested
                num_finished = _num_finished(driver.step())
                if num_finished and is_over is not None and is_over():
                    num_finished += _num_finished(driver.interrupt())
                if num_finished and progress is not None:
                    progress(num_finished)
        except BaseException:
            self._workspace = self.forward.fp8 = None  # steps may still be running in it
            raise
        self.num_preemptions = scheduler.num_preemptions
        self._prefilled += PrefillTokens(scheduler.num_prefilled_tokens, scheduler.num_reused_tokens)
        if (drafts := workspace.speculation) is not None:
            self.drafted = drafts.num_tokens, drafts.num_sample_steps
        if workspace.graphs is not None and driver.graphs is None:
            self._use_graphs, workspace.graphs, workspace.speculation = False, None, None

    def _workspace_for(self, requests: Sequence[Request], longest: int) -> Workspace:
        """The previous call's working memory if it is large enough or as large as memory allows; else a new one, with
        the cached pages.
        """
        settings, size, held = self.settings, self.settings.page_size, self._workspace
        groups = [request.group for request in requests]
        # No page is evicted while memory suffices, however large the cache is: bits may depend on it.
        keeps = self._keeps_prefixes and self._can_keep_prefixes() and self.forward.routes is None
        num_together = sum(len(one.samples) for one in requests) if keeps else settings.max_batch_size
        wanted = needed = _pages_wanted([(one.group, len(one.samples)) for one in requests], num_together, size)
        least = max(pages_needed(group, size) for group in groups)
        if keeps and held is not None and held.prefixes is None:
            held.prefixes = new_prefixes(held.cache, held.num_pages)
        prefixes = None if held is None else held.prefixes
        kept: list[int] = []  # cached pages
        if prefixes is not None:
            kept = prefixes.unheld
            wanted += len(kept)
            if held is not None and not held.fits(wanted, least, longest):  # some of them are counted in both
                wanted -= sum(len(prefixes.find("", group.key_ids[:-1]).pages) for group in groups)
            wanted = needed = max(least, wanted)
        if held is not None and held.fits(wanted, least, longest):
            if held.fp8 is not None:
                held.fp8.refresh()  # the weights may have been trained since
            return held
        contents = held.cache.read_pages(kept) if held is not None and kept else []
        states = held.cache.states if held is not None and kept else None
        held = None  # its memory is free from here on
        self.release()
        if keeps:  # the next calls have longer prompts
            wanted, longest = wanted * 3 // 2, min(longest * 3 // 2, settings.max_total_tokens)
            wanted = max(wanted, 0 if prefixes is None else prefixes.num_pages)  # a smaller cache would lose its pages
        if self._keeps_workspace:
            if settings.deterministic:
                longest = settings.max_total_tokens  # the split of attention over processors depends on it
            # Call sizes alternate, e.g. over the turns of conversations. The largest size so far fits all of them.
            wanted, longest = self._largest = max(wanted, self._largest[0]), max(longest, self._largest[1])
        fp8 = fp8_weights(self.forward, settings)  # before the cache takes the remaining memory
        num_pages = num_pages_for(self.forward, settings, wanted, least, has_states=states is not None)
        if (group := self.forward.head.tensor_group) is not None:
            num_pages = group.smallest(num_pages)  # ranks that share layers run the same schedule
        depends_on_free_memory = self._keeps_workspace and settings.kv_cache_gib is None and num_pages < needed
        if settings.deterministic and depends_on_free_memory:
            raise InputError(
                "deterministic sampling needs a KV cache for all answers that run together, in a conversation for all "
                f"that are open, and the free memory holds {num_pages / needed:.0%} of it: which answers wait would "
                "depend on what else is in memory. Set kv_cache_gib, or lower max_batch_size"
            )
        cache = new_cache(self.forward, settings, num_pages, states)
        if not keeps:
            prefixes = None
        elif prefixes is None or not kept or num_pages < prefixes.num_pages:
            prefixes = new_prefixes(cache, num_pages)
        else:
            prefixes.grow(num_pages)
            cache.write_pages(kept, contents)
        width = pages_for(longest, size)
        decode: DenseDecode | PagedDecode
        if self._keeps_workspace:
            decode = PagedDecode(cache, settings.max_batch_size, width, num_heads=self.forward.num_heads)
            graphs = DecodeGraphs(self.forward, decode) if self._use_graphs else None
            longest = width * size
        else:
            decode, graphs = DenseDecode(cache, longest), None
        # A larger need is then refused, not met by dropping pages.
        is_largest = num_pages < (needed if settings.deterministic else wanted)
        workspace = Workspace(
            cache, num_pages, is_largest, longest, decode, graphs, self._speculation(cache, width, graphs), fp8,
            prefixes,
        )  # fmt: skip
        self.forward.fp8 = fp8
        if self._keeps_workspace or keeps:
            self._workspace = workspace
        return workspace

    def _can_keep_prefixes(self) -> bool:
        """With an FP8 cache, a prompt that continues cached pages would attend to rounded keys, and one that is
        computed as a whole to exact ones.
        """
        return not any(shape.is_fp8 for shape in cache_layers(self.forward, self.settings).values())

    def _speculation(self, cache: PagedKvCache, width: int, graphs: DecodeGraphs | None) -> Speculation | None:
        """None if it is off, or if its timing-based choice could change the bits of a run that must be reproducible."""
        wanted, on_gpu = self.settings.num_speculative_tokens, cache.device.type == "cuda"
        if wanted == 0 or self.forward.head.tensor_group is not None or self.settings.records_routes:
            return None  # ranks that share layers would have to agree
        if cache.states is not None:
            if wanted != "auto":
                warnings.warn(
                    f"num_speculative_tokens = {wanted} has no effect: {self.forward.config.model_type} has recurrent "
                    "layers, whose state cannot be taken back when a draft is wrong",
                    stacklevel=2,
                )
            return None
        if wanted == "auto" and (not on_gpu or graphs is None or self.settings.deterministic):
            return None
        return Speculation(
            self.forward, cache, self.settings.max_batch_size, width,
            graphs=None if graphs is None else graphs.cache, num_drafts=None if wanted == "auto" else wanted,
        )  # fmt: skip


def _continued(answer: Unfinished, group: PromptGroup, index: int, noise_key: int, stop: StopRules) -> Sample:
    scanner = stop.scanner()
    if scanner is not None and answer.token_ids:
        scanner.found(answer.token_ids)  # reads the text so far
    return Sample(group, index, noise_key, list(answer.token_ids), list(answer.logprobs), scanner=scanner)


def _num_finished(updates: Sequence[Update]) -> int:
    num_finished = 0
    for update in updates:
        if isinstance(update, NanLogits):
            sample = update.sample
            raise FloatingPointError(
                f"the logits for token {len(sample.token_ids)} of task {sample.group.task.id!r} are NaN: "
                "the weights of the model have diverged"
            )
        assert not isinstance(update, FailedGrammar), "generate has no grammars"
        num_finished += update.finish_reason is not None
    return num_finished


def num_pages_for(
    forward: ForwardPass,
    settings: NativeSettings,
    wanted: int,
    least: int,
    num_prompt_rows: int = 0,
    *,
    has_states: bool = False,
) -> int:
    """Number of pages for sequences that memory allows, between `least` and `wanted`. `num_prompt_rows`: of a decode
    step, beside the samples. `has_states`: those of recurrent layers are allocated.
    """
    num_drafted = 0 if settings.num_speculative_tokens == 0 or forward.device.type == "cpu" else MAX_DRAFTED_ROWS
    num_rows = max(settings.max_batch_size + num_prompt_rows, num_drafted)
    num_slots = _num_state_slots(forward, settings) + 1 if forward.shapes().states and not has_states else 0
    reserved_for_states = num_slots * forward.shapes().state_bytes
    return num_pages_for_call(
        cache_layers(forward, settings), settings.page_size, settings.kv_cache_gib, forward.device,
        wanted=wanted, least=least,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        reserve=forward.working_bytes(settings.max_prefill_tokens, num_rows) + reserved_for_states,
    )  # fmt: skip


def new_prefixes(cache: PagedKvCache, num_pages: int) -> PrefixCache:
    return PrefixCache(num_pages, cache.page_size, StateSlots(cache.states.num_slots) if cache.states else None)


def new_cache(
    forward: ForwardPass, settings: NativeSettings, num_pages: int, states: RecurrentStates | None = None
) -> PagedKvCache:
    """A cache with `num_pages` for sequences and the scratch page for padding. `states` are kept, if there are any."""
    if states is None and (shapes := forward.shapes().states):
        states = RecurrentStates(shapes, _num_state_slots(forward, settings), forward.device)
    return PagedKvCache(cache_layers(forward, settings), num_pages + 1, settings.page_size, forward.device, states)


def _num_state_slots(forward: ForwardPass, settings: NativeSettings) -> int:
    """Sequences and prompts whose states fit into half of the usable memory; others wait."""
    fitting, wanted = _fitting_states(forward.device, settings, forward.shapes().state_bytes)
    if fitting < 2 or (settings.deterministic and fitting < wanted):
        check_states(forward.device, settings, forward.shapes().state_bytes)
    return min(fitting, wanted)


def _fitting_states(device: torch.device, settings: NativeSettings, state_bytes: int) -> tuple[int, int]:
    """How many states fit, and how many a batch wants."""
    on_gpu = device.type == "cuda"
    usable = usable_bytes(device, settings.gpu_memory_utilization) if on_gpu else available_bytes()
    return int(max(usable, 0) / 2 / state_bytes), settings.max_batch_size + NUM_PROMPT_SLOTS


def check_states(device: torch.device, settings: NativeSettings, state_bytes: int) -> None:
    """InputError if the states of a batch do not fit. `state_bytes`: of one sequence, whatever its length."""
    fitting, wanted = _fitting_states(device, settings, state_bytes) if state_bytes else (0, 0)
    if fitting < wanted:
        remedy = f"max_batch_size = {fitting - NUM_PROMPT_SLOTS} fits" if fitting > NUM_PROMPT_SLOTS else "none fits"
        raise InputError(
            f"max_batch_size = {settings.max_batch_size}: recurrent layers keep {state_bytes / GIB:.3g} GiB of each "
            f"sequence, {wanted * state_bytes / GIB:.3g} GiB of a batch, and {fitting * state_bytes / GIB:.3g} GiB may "
            f"be used for that: {remedy}"
        )


def _pages_wanted(groups: Sequence[tuple[PromptGroup, int]], num_together: int, size: int) -> int:
    """Number of pages at which a batch of `num_together` samples never waits for a page. Each group has its number of
    samples.
    """

    def own(group: PromptGroup) -> int:
        return pages_for(group.prompt_length + group.max_new_tokens, size) - group.prompt_length // size + 1

    total, slots = 0, num_together
    for group, num_samples in sorted(groups, key=lambda item: own(item[0]), reverse=True):
        together = min(num_samples, slots)
        total += pages_for(group.prompt_length, size) + together * own(group)
        slots -= together
        if slots == 0:
            break
    return max(total + 1, max(pages_needed(group, size) for group, _ in groups))


def _check(sampling: Sampling, num_samples: int) -> None:
    wrong = {
        "num_samples": (num_samples, num_samples >= 1, "at least 1"),
        "max_new_tokens": (sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        "temperature": (
            sampling.temperature,
            sampling.temperature == 0 or sampling.temperature >= SMALLEST_TEMPERATURE,
            f"0 (greedy), or at least {SMALLEST_TEMPERATURE:g},",
        ),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1 (off)"),
        "top_k": (sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        "stop_strings": (sampling.stop_strings, all(sampling.stop_strings), "strings that are not empty"),
    }
    for name, (value, fine, accepted) in wrong.items():
        if not fine:
            raise InputError(f"{name} is {value!r}: {accepted} is accepted")
