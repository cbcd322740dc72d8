"""Pages and scheduling, simulated without a model: holders of pages, active and waiting samples."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.engines.native.kv_cache import PageAllocator
from posttrain.engines.native.scheduler import (
    Admission,
    PromptGroup,
    Sample,
    Scheduler,
    pages_for,
    pages_needed,
)
from posttrain.types import Task


def group_of(prompt_length: int, max_new_tokens: int, draw: int = 0) -> PromptGroup:
    return PromptGroup(Task(draw, f"t:{draw}", "", tuple(range(prompt_length))), max_new_tokens)


def samples_of(shapes: list[tuple[int, int]], num_samples: int) -> list[Sample]:
    groups = [group_of(prompt, new, draw) for draw, (prompt, new) in enumerate(shapes)]
    return [Sample(group, index, noise_key=0) for group in groups for index in range(num_samples)]


def scheduler_of(samples: list[Sample], num_pages: int, page_size: int, max_batch_size: int) -> Scheduler:
    scheduler = Scheduler(num_pages, page_size, max_batch_size)
    scheduler.add(samples)
    return scheduler


class Simulation:
    """Plays the engine: pretends to compute prompts and tokens, and checks the bookkeeping at every turn."""

    def __init__(self, samples: list[Sample], num_pages: int, page_size: int, max_batch_size: int) -> None:
        self.samples = samples
        self.scheduler = scheduler_of(samples, num_pages, page_size, max_batch_size)
        self.num_prompts_computed = 0
        self.largest_batch = 0
        self.contents: dict[int, list[object]] = {page: [None] * page_size for page in range(num_pages)}

    def run(self) -> None:
        for _ in range(100_000):
            if not self.scheduler.unfinished:
                break
            self._start(self.scheduler.admit())
            self.scheduler.reserve_step()
            self._check()
            for sample in list(self.scheduler.active):
                self._write(sample.pages, sample.num_cached, (sample, sample.token_ids[-1]))
                self._append(sample)
            self.largest_batch = max(self.largest_batch, len(self.scheduler.active))
        assert not self.scheduler.unfinished, "the simulation does not come to an end"
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_pages

    def _start(self, admission: Admission) -> None:
        for prefill in admission.prompts.values():
            self.num_prompts_computed += 1
            for position in range(len(prefill.token_ids)):
                self._write(prefill.pages, position, (prefill.group, position))
        for source, target in admission.copies:
            self.contents[target] = list(self.contents[source])
        for sample, prefill in admission.resumed.items():
            assert prefill.token_ids == sample.token_ids[:-1]
            for offset, token in enumerate(prefill.token_ids):
                self._write(prefill.pages, prefill.start + offset, (sample, token))
        for sample in admission.samples:
            if not sample.token_ids:
                self._append(sample)

    def _append(self, sample: Sample) -> None:
        self._read_all(sample)
        sample.token_ids.append(len(sample.token_ids))
        if len(sample.token_ids) == sample.group.max_new_tokens:
            sample.finish_reason = "length"
            self.scheduler.leave(sample)

    def _write(self, pages: list[int], position: int, what: object) -> None:
        size = self.scheduler.page_size
        self.contents[pages[position // size]][position % size] = what

    def _read_all(self, sample: Sample) -> None:
        """Everything a sample attends to is its own: its prompt, then its tokens."""
        size, prompt = self.scheduler.page_size, sample.group.prompt_length
        for position in range(prompt + len(sample.token_ids)):
            found = self.contents[sample.pages[position // size]][position % size]
            expected = (sample.group, position) if position < prompt else (sample, sample.token_ids[position - prompt])
            assert found == expected

    def _check(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.active) <= scheduler.max_batch_size
        held = Counter(page for sample in scheduler.active for page in sample.pages)
        held.update(page for group in {s.group for s in self.samples} for page in group.pages or ())
        for page in range(scheduler.pages.num_pages):
            assert scheduler.pages.holders(page) == held[page]
        assert scheduler.pages.num_free == scheduler.pages.num_pages - len(held)
        for sample in scheduler.active:
            assert len(sample.pages) * scheduler.page_size > sample.num_cached
            # The page that is about to be written belongs to this sample alone.
            assert held[sample.pages[sample.num_cached // scheduler.page_size]] == 1


@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15)), min_size=1, max_size=6),
    num_samples=st.integers(1, 5),
    page_size=st.integers(1, 8),
    max_batch_size=st.integers(1, 12),
    spare_pages=st.integers(0, 25),
)
def test_every_sample_finishes_and_sees_only_its_own_tokens(
    shapes: list[tuple[int, int]], num_samples: int, page_size: int, max_batch_size: int, spare_pages: int
) -> None:
    samples = samples_of(shapes, num_samples)
    least = max(pages_needed(sample.group, page_size) for sample in samples)
    Simulation(samples, least + spare_pages, page_size, max_batch_size).run()
    assert all(len(sample.token_ids) == sample.group.max_new_tokens for sample in samples)


def test_each_prompt_is_computed_once_with_enough_pages() -> None:
    simulation = Simulation(samples_of([(17, 9), (8, 4), (3, 30)], 8), num_pages=400, page_size=4, max_batch_size=5)
    simulation.run()
    assert simulation.num_prompts_computed == 3
    assert simulation.scheduler.num_preemptions == 0


def test_full_prompt_pages_are_shared_and_the_last_one_is_copied() -> None:
    samples = samples_of([(10, 5)], 3)
    scheduler = scheduler_of(samples, num_pages=50, page_size=4, max_batch_size=8)
    admission = scheduler.admit()
    first, second, third = (sample.pages for sample in samples)
    assert first[:2] == second[:2] == third[:2]
    assert [scheduler.pages.holders(page) for page in third[:2]] == [3, 3]
    assert len({first[2], second[2], third[2]}) == 3
    # The last to start takes the original, so two samples out of three need a copy.
    assert admission.copies == [(third[2], first[2]), (third[2], second[2])]
    assert 50 - scheduler.pages.num_free == 2 + 3


def test_nothing_is_copied_when_the_prompt_fills_its_pages() -> None:
    samples = samples_of([(8, 5)], 3)
    scheduler = scheduler_of(samples, num_pages=50, page_size=4, max_batch_size=8)
    assert scheduler.admit().copies == []
    assert 50 - scheduler.pages.num_free == 2
    scheduler.reserve_step()


def test_finished_samples_free_their_slots_at_once() -> None:
    samples = samples_of([(4, 5)] * 4, 1)
    scheduler = scheduler_of(samples, num_pages=100, page_size=4, max_batch_size=2)
    assert scheduler.admit().samples == samples[:2]
    assert scheduler.admit().samples == []
    scheduler.leave(samples[0])
    assert scheduler.admit().samples == [samples[2]]
    assert scheduler.active == [samples[1], samples[2]]


def test_newest_sample_is_preempted_and_keeps_its_tokens() -> None:
    samples = samples_of([(4, 8), (4, 8)], 1)
    scheduler = scheduler_of(samples, num_pages=5, page_size=4, max_batch_size=2)
    scheduler.admit()
    for sample in samples:
        sample.token_ids = [1]
    scheduler.reserve_step()
    assert scheduler.pages.num_free == 1
    for sample in samples:
        sample.token_ids = [1, 2, 3, 4, 5]
    scheduler.reserve_step()  # one free page, two samples that need one
    assert scheduler.active == [samples[0]]
    assert list(scheduler.waiting) == [samples[1]]
    assert samples[1].token_ids == [1, 2, 3, 4, 5]
    assert scheduler.num_preemptions == 1
    scheduler.leave(samples[0])
    admission = scheduler.admit()
    assert list(admission.prompts) == [samples[1].group]
    assert [(prefill.token_ids, prefill.start) for prefill in admission.resumed.values()] == [([1, 2, 3, 4], 4)]


def test_idle_prompt_is_dropped_before_an_active_sample_is_preempted() -> None:
    samples = samples_of([(8, 12), (8, 12)], 2)
    scheduler = scheduler_of(samples, num_pages=12, page_size=4, max_batch_size=3)
    scheduler.admit()
    idle = samples[2].group
    for sample in samples:
        sample.token_ids = [1]
    scheduler.leave(samples[2])  # one sample of this group is finished, the other one waits: the prompt is idle
    assert idle.pages is not None
    taken = scheduler.pages.take(scheduler.pages.num_free)
    scheduler.reserve_step()
    assert idle.pages is None
    assert scheduler.active == samples[:2]
    scheduler.pages.release(taken)


def test_queue_is_served_in_order() -> None:
    samples = samples_of([(5, 3)] * 5, 2)
    scheduler = scheduler_of(samples, num_pages=100, page_size=4, max_batch_size=3)
    started: list[Sample] = []
    while scheduler.unfinished:
        started += scheduler.admit().samples
        scheduler.leave(scheduler.active[0])
    assert started == samples


def test_page_allocator_counts_holders() -> None:
    allocator = PageAllocator(3)
    pages = allocator.take(2)
    allocator.share(pages)
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 3
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages[:1])
    with pytest.raises(AssertionError, match="requested"):
        allocator.take(4)
    with pytest.raises(AssertionError, match="is free"):
        allocator.share([0])


@given(st.integers(0, 1000), st.integers(1, 64))
def test_pages_for_rounds_up(tokens: int, page_size: int) -> None:
    assert (
        (pages_for(tokens, page_size) - 1) * page_size
        < max(tokens, 1)
        <= max(pages_for(tokens, page_size), 1) * page_size
    )
