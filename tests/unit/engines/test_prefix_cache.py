"""Pages that are cached by their tokens, simulated without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from posttrain.engines.native.kv_cache import NOT_CACHED, PrefixCache
from posttrain.engines.native.scheduler import PromptGroup, Sample, Scheduler
from posttrain.types import Task

SIZE = 2


def test_pages_are_found_by_all_tokens_before_them_and_by_the_adapter() -> None:
    pages = PrefixCache(8, SIZE)
    held = pages.take(3)
    pages.insert("", (1, 2, 3, 4, 5), held)
    assert pages.find("", (1, 2, 3, 4, 5, 6)) == (held[:2], 4), "the third page is not full, and is being written to"
    assert pages.find("", (1, 2, 3, 9)) == (held[:1], 2)
    assert pages.find("", (3, 4)) == NOT_CACHED
    assert pages.find("other", (1, 2, 3, 4)) == NOT_CACHED
    pages.release(held)
    assert pages.num_free == 8
    assert pages.find("", (1, 2, 3, 4)) == (held[:2], 4), "cached until they are evicted"
    pages.share(held[:2])
    assert (pages.num_free, pages.holders(held[0])) == (6, 1)
    pages.release(held[:2])
    pages.clear()
    assert (pages.num_free, pages.find("", (1, 2))) == (8, NOT_CACHED)


def test_who_continues_a_sequence_gets_its_partly_filled_page() -> None:
    pages = PrefixCache(8, 4)
    held = pages.take(2)
    pages.insert_and_release("", (1, 2, 3, 4, 5, 6), held)
    assert pages.find("", (1, 2, 3, 4, 5)) == (held[:1], 4), "it holds a token that the sequence does not have"
    found = pages.find("", (1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert found == (held, 6)
    pages.hold(found)
    assert (pages.num_free, pages.holders(held[1])) == (6, 1)
    assert pages.find("", (1, 2, 3, 4, 5, 6, 7)) == (held[:1], 4), "its holder writes to it"
    pages.insert_and_release("", (1, 2, 3, 4, 5, 6, 7, 8), held)
    assert pages.find("", (1, 2, 3, 4, 5, 6, 7, 8)) == (held, 8)
    pages.take(8)
    assert pages.find("", (1, 2, 3, 4, 5, 6, 7, 8)) == NOT_CACHED


def test_pages_after_one_that_is_cached_already_are_cached_behind_it() -> None:
    """Two answers that begin alike and go on differently."""
    pages = PrefixCache(8, SIZE)
    first, second = pages.take(2), pages.take(3)
    pages.insert_and_release("", (1, 2, 3, 4), first)
    pages.insert_and_release("", (1, 2, 5, 6, 7), second)
    assert pages.num_free == 8
    assert pages.find("", (1, 2, 3, 4)) == (first, 4)
    assert pages.find("", (1, 2, 5, 6, 7, 8)) == ([first[0], *second[1:]], 5)
    pages.take(7)  # the page that both share is the last to go
    assert pages.find("", (1, 2, 5, 6)) == (first[:1], 2)


def test_pages_held_while_weights_change_are_not_cached_later() -> None:
    pages = PrefixCache(8, SIZE)
    released, held = pages.take(2), pages.take(2)
    pages.insert_and_release("", (1, 2, 3, 4), released)
    pages.insert("", (5, 6, 7, 8), held)
    pages.forget()
    pages.insert_and_release("", (5, 6, 7, 8), held)
    assert pages.num_free == 8
    assert pages.find("", (1, 2)) == pages.find("", (5, 6)) == NOT_CACHED
    pages.insert_and_release("", (5, 6), again := pages.take(1))
    assert pages.find("", (5, 6)) == (again, 2), "the same page is cached once it is written anew"


def test_a_larger_cache_keeps_its_pages() -> None:
    pages = PrefixCache(4, SIZE)
    held = pages.take(2)
    pages.insert_and_release("", (1, 2, 3), held)
    assert sorted(pages.unheld) == sorted(held)
    pages.grow(6)
    assert (pages.num_pages, pages.num_free) == (6, 6)
    pages.hold(pages.find("", (1, 2, 3, 4)))
    assert sorted([*held, *pages.take(4)]) == list(range(6))


def test_pages_are_cached_only_while_they_are_held() -> None:
    pages = PrefixCache(8, SIZE, only_held=4)
    first = pages.take(3)
    pages.insert("", (1, 2, 3, 4, 5, 6), first)
    assert pages.find("", (1, 2, 9, 9)) == NOT_CACHED, "too short to be worth it"
    found = pages.find("", (1, 2, 3, 4, 9))
    pages.hold(found)
    pages.release(first)
    assert (pages.find("", (1, 2, 3, 4, 5, 6)), pages.num_free) == (found, 6)
    pages.release(found.pages)
    assert (pages.find("", (1, 2, 3, 4)), pages.num_free, pages.unheld) == (NOT_CACHED, 8, [])


def test_prompts_of_one_admission_share_what_they_have_in_common() -> None:
    scheduler = Scheduler(40, SIZE, 8, prefixes=PrefixCache(40, SIZE))
    for number, prompt in enumerate([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7), (1, 2, 9), (8, 8)]):
        scheduler.add([Sample(PromptGroup(Task(number, str(number), "", prompt), 2), 0, 0)])
    jobs = list(scheduler.admit().prompts.values())
    assert [(job.start, tuple(job.token_ids)) for job in jobs] == [
        (0, (1, 2, 3, 4, 5)),
        (4, (6, 7)),
        (2, (9,)),
        (0, (8, 8)),
    ]
    assert jobs[0].pages[0] == jobs[1].pages[0] == jobs[2].pages[0]
    assert (scheduler.num_prefilled_tokens, scheduler.num_reused_tokens) == (10, 6)


def test_pages_are_taken_from_the_end_of_the_sequence_that_was_released_first() -> None:
    pages = PrefixCache(4, SIZE)
    old, new = pages.take(2), pages.take(2)
    pages.insert("", (1, 2, 3, 4), old)
    pages.insert("", (5, 6, 7, 8), new)
    pages.release(old)
    pages.release(new)
    assert pages.take(1) == [old[1]]
    assert pages.find("", (1, 2, 3, 4)) == (old[:1], 2)
    pages.take(1)
    assert pages.find("", (1, 2)) == NOT_CACHED
    assert pages.find("", (5, 6, 7, 8)) == (new, 4)


def test_known_pages_of_a_prompt_do_not_count_in_the_limit_of_a_prefill_step() -> None:
    scheduler = Scheduler(40, SIZE, 8, prefixes=PrefixCache(40, SIZE))

    def add(number: int, prompt: tuple[int, ...]) -> None:
        scheduler.add([Sample(PromptGroup(Task(number, str(number), "", prompt), 2), 0, 0)])

    add(0, tuple(range(8)))
    scheduler.admit(3)
    for number in (1, 2, 3):
        add(number, (*range(8), 10 + number))  # one token each beyond the known pages
    add(4, tuple(range(20, 24)))
    assert [sample.group.task.id for sample in scheduler.admit(3).samples] == ["1", "2", "3"]


def test_short_prompts_are_counted_when_their_pages_are_held() -> None:
    """The pages of one prompt evict cached ones of the next, which then has more to compute."""
    scheduler = Scheduler(40, SIZE, 4, prefixes=PrefixCache(40, SIZE))

    def finished(number: int, prompt: tuple[int, ...]) -> None:
        scheduler.add([Sample(PromptGroup(Task(number, str(number), "", prompt), 2), 0, 0)])
        admission = scheduler.admit()
        for sample in admission.samples:
            scheduler.leave(sample)

    old, recent, new = tuple(range(16)), tuple(range(100, 140)), tuple(range(200, 228))
    finished(0, old)
    finished(1, recent)
    room = len(new) + SIZE  # of `old`, all but the last page is known
    for number, prompt in ((2, new), (3, old)):
        scheduler.add([Sample(PromptGroup(Task(number, str(number), "", prompt), 2), 0, 0)])
    assert sum(scheduler._num_to_prefill(sample.group) for sample in scheduler.waiting) <= room
    admission = scheduler.admit_short(room)
    assert [sample.group.task.id for sample in admission.samples] == ["2"]
    free = scheduler.pages.num_free
    [waiting] = scheduler.admit().samples
    assert waiting.group.task.id == "3"
    scheduler.leave(waiting)
    assert scheduler.pages.num_free == free, "no page stays held"


def test_short_prompts_end_at_the_first_sample_that_is_not_one() -> None:
    scheduler = Scheduler(40, SIZE, 8)

    def add(number: int, length: int, num_samples: int = 1) -> None:
        group = PromptGroup(Task(number, str(number), "", tuple(range(length))), 2)
        scheduler.add([Sample(group, index, 0) for index in range(num_samples)])

    add(0, 4)
    add(1, 3)
    add(2, 6)
    assert [sample.group.task.id for sample in scheduler.admit_short(8).samples] == ["0", "1"]
    assert [sample.group.task.id for sample in scheduler.admit_short(6).samples] == ["2"]
    add(3, 2, num_samples=2)
    add(4, 2)
    assert scheduler.admit_short(8).samples == []


@pytest.mark.parametrize(("seed", "size"), [(seed, 2 + seed % 3) for seed in range(9)])
def test_known_pages_always_hold_the_tokens_of_the_prompt(seed: int, size: int) -> None:
    """Requests of three letters and two adapters come, finish, are continued, cancelled and preempted, in few pages.
    Keys and values of a token depend on all tokens before it and on the adapter.
    """
    rng, num_pages = random.Random(seed), 28 // size
    scheduler = Scheduler(num_pages, size, 5, prefixes=PrefixCache(num_pages, size))
    ended: list[tuple[int, ...]] = []
    contents: dict[int, list[object]] = {page: [None] * size for page in range(num_pages)}

    def compute(group: PromptGroup, token_ids: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """What is there before `start` must be right; the rest is written."""
        for position in range(len(token_ids)):
            page, value = contents[pages[position // size]], (group.adapter, *token_ids[: position + 1])
            if position >= start:
                page[position % size] = value
            assert page[position % size] == value

    for number in range(300):
        prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 9)))
        if ended and rng.random() < 0.3:
            prompt = (*rng.choice(ended), *prompt)[:12]
        group = PromptGroup(Task(number, str(number), "", prompt), rng.randrange(1, 6), rng.choice(["", "a"]))
        scheduler.add([Sample(group, index, 0) for index in range(rng.choice([1, 1, 2]))])
        for _ in range(rng.randrange(1, 4)):
            admission = scheduler.admit()
            for group, job in admission.prompts.items():
                compute(group, group.task.prompt_ids, job.start, job.pages)
            for source, target in admission.copies:
                contents[target] = list(contents[source])
            for sample, job in admission.resumed.items():
                compute(sample.group, (*sample.group.task.prompt_ids, *job.token_ids), job.start, job.pages)
            for sample in admission.samples:
                if not sample.token_ids:
                    sample.token_ids.append(rng.randrange(3))
            scheduler.reserve_step()
            for sample in list(scheduler.active):
                tokens = (*sample.group.task.prompt_ids, *sample.token_ids)
                compute(sample.group, tokens, sample.num_cached, sample.pages)
                sample.token_ids.append(rng.randrange(3))
                if len(sample.token_ids) > sample.group.max_new_tokens:
                    scheduler.leave(sample)
                    ended = [*ended[-5:], (*sample.group.task.prompt_ids, *sample.token_ids)]
                elif rng.random() < 0.05:
                    scheduler.cancel(sample)
    for sample in [*scheduler.active, *scheduler.waiting]:
        scheduler.cancel(sample)
    assert scheduler.pages.num_free == num_pages
    assert scheduler.num_reused_tokens > 50
    assert scheduler.num_preemptions > 0 or size == 4
