"""Who runs: a waiting queue, the active batch, and the pages each of them holds. No tensors, no model.

A *group* is a prompt and the samples that are drawn for it. Its prompt is computed once, into pages that the group holds as
long as samples of it wait. A sample that starts shares the prompt's full pages and gets a copy of the last, partly
filled one, because it will write there; the last sample to start takes the group's pages over, and nothing is copied.

When a page is wanted and none is free, room is made in this order: prompts of groups that have nothing running; the youngest
active sample; at the very end prompts of groups that do run. A sample that has to leave keeps its tokens and goes to the
head of the queue; its keys and values are computed again later. So nothing is lost but time, and nothing that was drawn
is drawn twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from posttrain.engines.native.pages import PageAllocator, pages_for
from posttrain.engines.native.stopping import StopStringScanner
from posttrain.types import FinishReason, Task


@dataclass(eq=False)
class PromptGroup:
    """A prompt and how it stands in the cache. `pages` None: not computed, or no longer kept."""

    task: Task
    max_new_tokens: int
    pages: list[int] | None = None
    last_hidden: Tensor | None = None  # at the prompt's last position: predicts the first token of every sample
    num_waiting: int = 0
    num_active: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.task.prompt_ids)


@dataclass(eq=False)
class Sample:
    """One completion in the making."""

    group: PromptGroup
    index: int  # among the samples of its task
    noise_key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    pages: list[int] = field(default_factory=list)
    scanner: StopStringScanner | None = None  # where the search for stop strings stands
    admission: int = -1  # counts admissions over the whole call: the youngest sample has the largest
    in_flight: int = 0  # tokens that the device has drawn and the host has not seen

    @property
    def num_drawn(self) -> int:
        return len(self.token_ids) + self.in_flight

    @property
    def noise_index(self) -> int:
        """The name of the next token's noise: its place among all tokens after the task's first prompt."""
        return self.group.task.first_token + self.num_drawn

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache while it is active: all but the one drawn last."""
        return self.group.prompt_length + self.num_drawn - 1


@dataclass(frozen=True)
class Prefill:
    """Tokens to run through the model into `pages`, beginning at position `start`; what lies before is there already."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    group: PromptGroup | None = None  # set when this is a prompt


@dataclass
class Admission:
    """What has to be done, in this order, before the admitted samples are ready to decode."""

    prompts: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # page -> page
    resumed: list[Prefill] = field(default_factory=list)  # tokens of samples that had to leave before
    samples: list[Sample] = field(default_factory=list)


class Scheduler:
    def __init__(self, samples: Sequence[Sample], num_pages: int, page_size: int, max_batch_size: int) -> None:
        self.page_size = page_size
        self.max_batch_size = max_batch_size
        self.pages = PageAllocator(num_pages)
        self.waiting = deque(samples)
        self.active: list[Sample] = []
        self.num_preemptions = 0
        self._num_admissions = 0
        self._groups = list(dict.fromkeys(sample.group for sample in samples))
        for sample in samples:
            sample.group.num_waiting += 1
        longest = max((pages_needed(group, page_size) for group in self._groups), default=0)
        assert longest <= num_pages, f"a sequence needs {longest} pages, the cache has {num_pages}"

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.active)

    # -- joining -------------------------------------------------------------------------------------------------------

    def add(self, samples: Sequence[Sample]) -> None:
        """The samples of one new group join the end of the queue."""
        group = samples[0].group
        assert all(sample.group is group for sample in samples), "one group at a time"
        assert group.num_waiting + group.num_active == 0, "the group is new"
        assert pages_needed(group, self.page_size) <= self.pages.num_pages, "the caller has looked at the length"
        self._groups.append(group)
        group.num_waiting = len(samples)
        self.waiting.extend(samples)

    def admit(self) -> Admission:
        """Start as many waiting samples as slots and pages allow, in the order of the queue."""
        admission = Admission()
        while self.waiting and len(self.active) < self.max_batch_size and self._fits(self.waiting[0]):
            sample = self.waiting.popleft()
            group = sample.group
            group.num_waiting -= 1
            group.num_active += 1
            if group.pages is None:
                group.pages = self.pages.take(pages_for(group.prompt_length, self.page_size))
                # A copy of the list: the last sample to start takes the list over and lets it grow.
                admission.prompts.append(Prefill(group.task.prompt_ids, 0, tuple(group.pages), group))
            self._start(sample, admission)
            sample.admission = self._num_admissions
            self._num_admissions += 1
            self.active.append(sample)
            admission.samples.append(sample)
        return admission

    def _fits(self, sample: Sample) -> bool:
        """Whether the sample can start and leave a page for everybody's next step. Alone, it must be able to."""
        if not self.active:
            while self._pages_to_start(sample) > self.pages.num_free:
                dropped = self._drop_prompt(spare=sample.group)
                assert dropped, "the cache was checked to hold any sequence alone"
            return True
        return self._pages_to_start(sample) + len(self.active) + 1 <= self.pages.num_free

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
        else:
            num_full = group.prompt_length // self.page_size
            shared, partial = group.pages[:num_full], group.pages[num_full:]
            self.pages.share(shared)
            own = self.pages.take(len(partial))
            admission.copies.extend(zip(partial, own, strict=True))
            sample.pages = shared + own
        if len(sample.token_ids) > 1:
            missing = pages_for(sample.num_cached, self.page_size) - len(sample.pages)
            sample.pages += self.pages.take(max(missing, 0))
            admission.resumed.append(Prefill(sample.token_ids[:-1], group.prompt_length, tuple(sample.pages)))

    # -- running -------------------------------------------------------------------------------------------------------

    @property
    def may_run_short(self) -> bool:
        """Whether the next step could need more pages than are free, so that somebody would have to leave."""
        return self.pages.num_free < len(self.active)

    def reserve_step(self) -> None:
        """Give every active sample a page for its next token; those for whom there is none wait again."""
        for sample in sorted(self.active, key=lambda sample: sample.admission):
            while sample.admission >= 0 and sample.num_cached >= len(sample.pages) * self.page_size:
                if self.pages.num_free:
                    sample.pages += self.pages.take(1)
                else:
                    self._make_room()

    def _make_room(self) -> None:
        if self._drop_prompt(idle=True):
            return
        if len(self.active) > 1:
            self._preempt(max(self.active, key=lambda sample: sample.admission))
            return
        dropped = self._drop_prompt()
        assert dropped, "the cache was checked to hold any sequence alone"

    def _drop_prompt(self, *, idle: bool = False, spare: PromptGroup | None = None) -> bool:
        """Let go of the youngest prompt that is kept for samples still waiting."""
        for group in reversed(self._groups):
            if group.pages is not None and group is not spare and not (idle and group.num_active):
                self.pages.release(group.pages)
                group.pages = None
                return True
        return False

    def _preempt(self, sample: Sample) -> None:
        self.leave(sample)
        sample.group.num_waiting += 1
        self.waiting.appendleft(sample)
        self.num_preemptions += 1

    # -- leaving -------------------------------------------------------------------------------------------------------

    def leave(self, sample: Sample) -> None:
        """The sample is finished, or has to wait again: its pages are free for others at once."""
        self.pages.release(sample.pages)
        sample.pages = []
        sample.admission = -1
        sample.group.num_active -= 1
        # The last row takes the place of the one that leaves, so that all others stay where they are.
        place = next(row for row, other in enumerate(self.active) if other is sample)
        last = self.active.pop()
        if last is not sample:
            self.active[place] = last

    def cancel(self, sample: Sample) -> None:
        """Nobody wants the sample any more, wherever it stands."""
        if sample.admission >= 0:
            self.leave(sample)
            return
        self.waiting.remove(sample)
        group = sample.group
        group.num_waiting -= 1
        if group.num_waiting == 0 and group.pages is not None:  # kept for the one that has just gone
            self.pages.release(group.pages)
            group.pages = None

    def forget(self, group: PromptGroup) -> None:
        """All samples of the group have left for good. A queue that lives long would remember every prompt."""
        assert group.num_waiting + group.num_active == 0, "somebody of the group is still here"
        assert group.pages is None, "the pages of a prompt go with its last sample"
        self._groups.remove(group)


def pages_needed(group: PromptGroup, page_size: int) -> int:
    """Pages with which one sample of the group can run to its end: its own, and the prompt's last one while it is copied."""
    return pages_for(group.prompt_length + group.max_new_tokens, page_size) + 1
