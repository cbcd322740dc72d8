"""The scheduler of continuous batching: a waiting queue, the active batch, and the KV-cache pages of each sample.

No tensors and no model; the tensors of the pages are in `kv_cache.py`.

A *group* is a prompt and its samples. The prompt is computed once, into pages that the group holds while any of its
samples wait. A sample that starts shares the prompt's full pages. It gets a copy of the last, partly filled page,
because it will write there. The last sample to start gets the group's pages without a copy.

When a page is needed and none is free, pages are freed in this order: prompts of groups without active samples, the
sample admitted last, prompts of groups with active samples. A preempted sample keeps its tokens and goes to the head of
the queue; its keys and values are recomputed later. No token is lost and none is drawn twice.

With `prefixes`, pages stay cached by their tokens after their sequence has finished, until the memory is needed. A
later prompt with the same prefix reuses them.

A model with recurrent layers has a slot for the states of each active sample, and one for each prompt that is kept.
With `prefixes` the slot of a sample that ends stays with its last page, until a prompt continues it or the slot is
needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from posttrain.engines.native.constraints import Constraint
from posttrain.engines.native.kv_cache import NOT_CACHED, CachedPrefix, PageAllocator, PrefixCache, StateSlots
from posttrain.engines.native.stopping import StopStringScanner
from posttrain.models.vision import PromptImages
from posttrain.types import FinishReason, Task


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


@dataclass(eq=False)
class PromptGroup:
    """A prompt and its state in the cache. `pages` is None before the prompt is computed and after it is dropped."""

    task: Task
    max_new_tokens: int
    adapter: str = ""  # "": the model as set up by the caller
    pages: list[int] | None = None
    state_slot: int = -1  # of a model with recurrent layers, where the state after the prompt is; kept as long as pages
    last_hidden: Tensor | None = None  # hidden state at the prompt's last position, for the first token of every sample
    num_waiting: int = 0
    num_active: int = 0
    images: PromptImages | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.task.prompt_ids)

    @property
    def key_ids(self) -> tuple[int, ...]:
        """The prompt's tokens as the prefix cache knows them: images with different contents differ."""
        return self.task.prompt_ids if self.images is None else self.images.key_ids

    @property
    def offset(self) -> int:
        """What the position of a token after the prompt is from its place in the sequence."""
        return 0 if self.images is None else self.images.offset


@dataclass(eq=False)
class Sample:
    """One completion being sampled. Initial tokens are prefilled, as after a preemption."""

    group: PromptGroup
    index: int  # index among the samples of its task
    noise_key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    pages: list[int] = field(default_factory=list)
    state_slot: int = -1
    scanner: StopStringScanner | None = None  # state of the search for stop strings
    constraint: Constraint | None = None  # state of the grammar that the answer obeys
    admission: int = -1  # admission number while active, else -1; increases with every admission
    in_flight: int = 0  # tokens drawn on the device that the host has not read yet; with drafts an upper bound
    is_cancelled: bool = False  # discard tokens that are still in flight

    @property
    def num_drawn(self) -> int:
        return len(self.token_ids) + self.in_flight

    @property
    def noise_index(self) -> int:
        """Index of the next token's noise: its position among all tokens after the task's first prompt."""
        return self.group.task.first_token + self.num_drawn

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache while the sample is active: all but the last one drawn."""
        return self.group.prompt_length + self.num_drawn - 1


@dataclass(frozen=True)
class Prefill:
    """Tokens to run through the model into `pages`, from position `start`; earlier positions are already cached."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    group: PromptGroup | None = None  # set if this is a prompt
    state_slot: int = -1  # of recurrent layers: written, and read if `start` is not 0
    border: int = 0  # after so many tokens of the sequence the state is copied to `border_slot`; 0: nowhere
    border_slot: int = -1
    images: PromptImages | None = None  # of the prompt, also where the tokens come after it


@dataclass
class Admission:
    """The work to do, in this order, before the admitted samples can decode."""

    state_loads: list[tuple[int, int]] = field(default_factory=list)  # slot of a cached prefix -> slot
    prompts: dict[PromptGroup, Prefill] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)  # page -> page
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # slot -> slot
    resumed: dict[Sample, Prefill] = field(default_factory=dict)  # tokens drawn before a preemption
    samples: list[Sample] = field(default_factory=list)


class Scheduler:
    """`prefixes` may hold pages of earlier sequences. `num_state_slots`: of a model with recurrent layers, the states
    that it has room for.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        *,
        prefixes: PrefixCache | None = None,
        num_state_slots: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.max_batch_size = max_batch_size
        self.prefixes = prefixes
        self.pages = prefixes or PageAllocator(num_pages)
        self.states = None if num_state_slots is None else StateSlots(num_state_slots)
        if prefixes is not None:
            self.states = prefixes.states
        self.waiting: deque[Sample] = deque()
        self.active: list[Sample] = []
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0  # of prompts, and of samples that were preempted
        self.num_reused_tokens = 0  # prompt tokens found in the prefix cache
        self._num_admissions = 0
        self._groups: list[PromptGroup] = []

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.active)

    # -- joining -------------------------------------------------------------------------------------------------------

    def add(self, samples: Sequence[Sample]) -> None:
        """Append the samples of new groups to the queue."""
        for group in dict.fromkeys(sample.group for sample in samples):
            assert group.num_waiting + group.num_active == 0, "the group is new"
            needed = pages_needed(group, self.page_size)
            assert needed <= self.pages.num_pages, (
                f"a sequence needs {needed} pages, the cache has {self.pages.num_pages}"
            )
            self._groups.append(group)
        for sample in samples:
            sample.group.num_waiting += 1
        self.waiting.extend(samples)

    @property
    def num_startable(self) -> int:
        """Waiting samples that have a slot."""
        return min(len(self.waiting), self.max_batch_size - len(self.active))

    def admit(self, max_tokens: int | None = None) -> Admission:
        """Start as many waiting samples as slots and pages allow, in the order of the queue.

        `max_tokens`: start no more than have about this many tokens to prefill, but at least one.
        """
        slots = self.num_startable
        return self._admit(slots if max_tokens is None else self._num_within(max_tokens, slots))

    def admit_short(self, max_tokens: int) -> Admission:
        """The same for samples at the head of the queue that are the only ones of their prompts, up to the first that
        is not or whose prompt has too many tokens to compute; `max_tokens` is for all of them together.
        """
        return self._admit(self.num_startable, max_tokens)

    def _admit(self, slots: int, max_short_tokens: int | None = None) -> Admission:
        admission, room = Admission(), max_short_tokens
        while self.waiting and len(admission.samples) < slots and self._fits(self.waiting[0]):
            sample = self.waiting[0]
            group = sample.group
            is_apart = sample.token_ids or group.pages is not None or group.num_waiting > 1 or group.images is not None
            if room is not None and is_apart:
                break
            known = self._known(group) if group.pages is None else NOT_CACHED
            if room is not None and (room := room - group.prompt_length + known.num_tokens) < 0:
                break
            self.waiting.popleft()
            group.num_waiting -= 1
            group.num_active += 1
            if group.pages is None:
                group.state_slot = self._take_state_slot(known, admission)
                border, border_slot = self._border(group, known)
                if self.prefixes is not None:
                    self.prefixes.hold(known)
                start = known.num_tokens
                self.num_reused_tokens += start
                self.num_prefilled_tokens += group.prompt_length - start
                missing = pages_for(group.prompt_length, self.page_size) - len(known.pages)
                group.pages = known.pages + self.pages.take(missing)
                if self.prefixes is not None:  # prompts of one admission share them: a pass writes before it reads
                    self.prefixes.insert(group.adapter, group.key_ids, group.pages)
                # A copy of the list: the last sample to start owns the list and appends to it.
                admission.prompts[group] = Prefill(
                    group.task.prompt_ids[start:],
                    start,
                    tuple(group.pages),
                    group,
                    group.state_slot,
                    border,
                    border_slot,
                    group.images,
                )
            self._start(sample, admission)
            sample.admission = self._num_admissions
            self._num_admissions += 1
            self.active.append(sample)
            admission.samples.append(sample)
        return admission

    def _known(self, group: PromptGroup) -> CachedPrefix:
        """What is cached of the prompt. The last token is always computed, for its logits."""
        return NOT_CACHED if self.prefixes is None else self.prefixes.find(group.adapter, group.key_ids[:-1])

    def _num_to_prefill(self, group: PromptGroup) -> int:
        """Tokens of the prompt that must be computed."""
        return group.prompt_length - self._known(group).num_tokens if group.pages is None else 0

    def keep_borders(self, admission: Admission) -> None:
        """Called when the prompts of the admission have been computed."""
        for group, job in admission.prompts.items():
            if job.border and self.prefixes is not None:
                pages = self.prefixes.full_pages(group.adapter, group.key_ids[: job.border])
                is_cached = len(pages) * self.page_size == job.border
                self._return_state_slot(job.border_slot, pages[-1] if is_cached else None)

    def _border(self, group: PromptGroup, known: CachedPrefix) -> tuple[int, int]:
        """Where the prompt parts from one that is cached, whose state there was not kept, and a slot for that state."""
        if self.prefixes is None or self.states is None or self.states.num_free <= group.num_waiting + 1:
            return 0, -1
        border = self.page_size * len(self.prefixes.full_pages(group.adapter, group.key_ids[:-1]))
        return (border, self.states.take()) if border > known.num_tokens else (0, -1)

    def _num_within(self, max_tokens: int, slots: int) -> int:
        """How many samples from the head of the queue have `max_tokens` to prefill; at least 1 if there is a slot."""
        count = 0
        seen: set[PromptGroup] = set()
        for sample in self.waiting:
            if count == slots:
                break
            cost = len(sample.token_ids) + (0 if sample.group in seen else self._num_to_prefill(sample.group))
            if count and cost > max_tokens:
                break
            seen.add(sample.group)
            max_tokens -= cost
            count += 1
        return count

    def _fits(self, sample: Sample) -> bool:
        """Whether the sample can start and leave a page for the next step of each active sample. Always true if none is
        active.
        """
        if not self.active:
            while not self._has_state_slots(sample) or self._pages_to_start(sample) > self.pages.num_free:
                dropped = self._drop_prompt(spare=sample.group)
                assert dropped, "the cache was checked to hold any sequence alone"
            return True
        needed = self._pages_to_start(sample) + len(self.active) + 1
        return needed <= self.pages.num_free and self._has_state_slots(sample)

    def _has_state_slots(self, sample: Sample) -> bool:
        """For the prompt unless it has one, and for the sample unless it is the last that starts from the prompt."""
        needed = (sample.group.pages is None) + (sample.group.num_waiting > 1)
        return self.states is None or needed <= self.states.num_free

    def _take_state_slot(self, known: CachedPrefix, admission: Admission) -> int:
        """With the state at the end of `known`, if that is not empty. Other prompts may continue a full page too."""
        if self.states is None:
            return -1
        if not known.pages:
            return self.states.take()
        if known.num_tokens % self.page_size or self.states.num_free <= 1:
            return self.states.take_kept(known.pages[-1])
        source = self.states.kept(known.pages[-1])
        admission.state_loads.append((source, own := self.states.take()))
        return own

    def _release_state_slot(self, owner: Sample | PromptGroup, last_page: int | None = None) -> None:
        if self.states is not None:
            self._return_state_slot(owner.state_slot, last_page)
            owner.state_slot = -1

    def _return_state_slot(self, slot: int, last_page: int | None) -> None:
        """The state is kept with the cached page that its sequence ends in, if there is one."""
        assert self.states is not None
        if last_page is None:
            self.states.release(slot)
        else:
            self.states.keep(last_page, slot)

    def _pages_to_start(self, sample: Sample) -> int:
        group = sample.group
        prompt = 0 if group.pages is not None else pages_for(group.prompt_length, self.page_size)
        written = group.prompt_length + len(sample.token_ids)
        shared = group.prompt_length // self.page_size
        return prompt + pages_for(written, self.page_size) - shared

    def _start(self, sample: Sample, admission: Admission) -> None:
        group = sample.group
        assert group.pages is not None
        if group.num_waiting == 0:
            sample.pages, group.pages = group.pages, None
            sample.state_slot, group.state_slot = group.state_slot, -1
        else:
            num_full = group.prompt_length // self.page_size
            shared, partial = group.pages[:num_full], group.pages[num_full:]
            self.pages.share(shared)
            own = self.pages.take(len(partial))
            admission.copies.extend(zip(partial, own, strict=True))
            sample.pages = shared + own
            if self.states is not None:
                sample.state_slot = self.states.take()
                admission.state_copies.append((group.state_slot, sample.state_slot))
        if len(sample.token_ids) > 1:
            missing = pages_for(sample.num_cached, self.page_size) - len(sample.pages)
            sample.pages += self.pages.take(max(missing, 0))
            self.num_prefilled_tokens += len(sample.token_ids) - 1
            admission.resumed[sample] = Prefill(
                sample.token_ids[:-1],
                group.prompt_length,
                tuple(sample.pages),
                state_slot=sample.state_slot,
                images=group.images,
            )

    # -- running -------------------------------------------------------------------------------------------------------

    @property
    def may_run_short(self) -> bool:
        """Whether the next step could need more pages than are free, and so preempt a sample."""
        return self.pages.num_free < len(self.active)

    def reserve_step(self) -> None:
        """Give every active sample a page for its next token; preempt samples when pages run out."""
        for sample in sorted(self.active, key=lambda sample: sample.admission):
            while sample.admission >= 0 and sample.num_cached >= len(sample.pages) * self.page_size:
                if self.pages.num_free:
                    sample.pages += self.pages.take(1)
                else:
                    self._make_room()

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether every active sample could have pages for `num_tokens` more."""
        return self.pages.num_free >= len(self.active) * (pages_for(num_tokens, self.page_size) + 1)

    def reserve_ahead(self, num_tokens: int) -> bool:
        """Give every active sample pages for `num_tokens` more, but not beyond its limit. Without preemption: returns
        False and changes nothing if there are not enough pages.
        """
        missing: list[int] = []
        for sample in self.active:
            longest = sample.group.prompt_length + sample.group.max_new_tokens
            wanted = pages_for(min(sample.num_cached + num_tokens, longest), self.page_size)
            missing.append(max(0, wanted - len(sample.pages)))
        if sum(missing) > self.pages.num_free:
            return False
        for sample, count in zip(self.active, missing, strict=True):
            sample.pages += self.pages.take(count)
        return True

    def _make_room(self) -> None:
        if self._drop_prompt(idle=True):
            return
        if len(self.active) > 1:
            self._preempt(max(self.active, key=lambda sample: sample.admission))
            return
        dropped = self._drop_prompt()
        assert dropped, "the cache was checked to hold any sequence alone"

    def _drop_prompt(self, *, idle: bool = False, spare: PromptGroup | None = None) -> bool:
        """Free the pages of the newest prompt that is kept for waiting samples."""
        for group in reversed(self._groups):
            if group.pages is not None and group is not spare and not (idle and group.num_active):
                self._release_prompt(group)
                return True
        return False

    def _release_prompt(self, group: PromptGroup) -> None:
        assert group.pages is not None
        self.pages.release(group.pages)
        self._release_state_slot(group)
        group.pages = None

    def _preempt(self, sample: Sample) -> None:
        self.leave(sample)
        sample.group.num_waiting += 1
        self.waiting.appendleft(sample)
        self.num_preemptions += 1

    # -- leaving -------------------------------------------------------------------------------------------------------

    def leave(self, sample: Sample) -> None:
        """Remove the sample from the batch, finished or preempted, and free its pages."""
        last_page = None
        if self.prefixes is not None and self.prefixes.only_held is None:
            written = [*sample.group.key_ids, *sample.token_ids][: sample.num_cached]
            last_page = self.prefixes.insert_and_release(sample.group.adapter, written, sample.pages)
            if len(written) < sample.num_cached:  # the state is further than the tokens that are known
                last_page = None
        else:
            self.pages.release(sample.pages)
        self._release_state_slot(sample, last_page)
        sample.pages = []
        sample.admission = -1
        sample.group.num_active -= 1
        # The last row moves into the free slot, so all other rows stay in place.
        place = next(row for row, other in enumerate(self.active) if other is sample)
        last = self.active.pop()
        if last is not sample:
            self.active[place] = last

    def cancel(self, sample: Sample) -> None:
        """Remove the sample, active or waiting. A sample whose last token is in flight has already left the batch."""
        sample.is_cancelled = True
        if sample.admission >= 0:
            self.leave(sample)
            return
        if sample not in self.waiting:
            return
        self.waiting.remove(sample)
        group = sample.group
        group.num_waiting -= 1
        if group.num_waiting == 0 and group.pages is not None:  # prompt pages were kept for this sample
            self._release_prompt(group)

    def forget(self, group: PromptGroup) -> None:
        """Drop a group when all its samples are done, so a long-lived queue does not grow."""
        assert group.num_waiting + group.num_active == 0, "a sample of the group is waiting or active"
        assert group.pages is None, "the pages of a prompt are released with its last sample"
        self._groups.remove(group)


def pages_needed(group: PromptGroup, page_size: int) -> int:
    """Pages needed to run one sample of the group to its end, plus one for the copy of the prompt's last page."""
    return pages_for(group.prompt_length + group.max_new_tokens, page_size) + 1
