"""Cuts an optimizer batch into micro-batches and deals them to ranks.

Knows token counts only: no model, no device. Because losses are sums with global denominators (see `TokenBatch`), every
choice made here changes speed and memory, never the loss.

The unit is a *bundle*: one prompt with some of its responses, which costs the prompt once. A group that does not fit the
budget is split into several bundles, each of which repeats the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.types import TokenBatch

PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


@dataclass(frozen=True)
class MicroBatching:
    """How large a micro-batch may be: a token budget (packing), or else a fixed number of responses."""

    max_tokens: int | None = None
    num_responses: int = 1
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"


@dataclass(frozen=True)
class Bundle:
    rows: tuple[int, ...]  # responses of one prompt
    num_tokens: int


def plan_micro_batches(
    batch: TokenBatch, batching: MicroBatching, num_ranks: int = 1, *, keep_groups_whole: bool = False
) -> list[list[tuple[int, ...]]]:
    """Rows of each micro-batch of each rank. All ranks get equally many micro-batches; the missing ones are empty."""
    if batching.max_tokens is None:
        bins = _in_order(batch, batching.num_responses, keep_groups_whole)
    else:
        bundles = _bundles(batch, batching.max_tokens, keep_groups_whole)
        bins = [
            tuple(row for index in chosen for row in bundles[index].rows)
            for chosen in pack([bundle.num_tokens for bundle in bundles], batching.max_tokens, batching.algorithm)
        ]
    return _deal(batch, bins, num_ranks)


def cost(batch: TokenBatch, rows: Sequence[int]) -> int:
    """Tokens that pass through the model for these rows: each response, and each prompt once."""
    prompts = {batch.prompt_of[row] for row in rows}
    return sum(len(batch.prompts[p]) for p in prompts) + sum(len(batch.responses[row]) for row in rows)


def _groups(batch: TokenBatch) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_of):
        groups.setdefault(prompt, []).append(row)
    return list(groups.values())


def _in_order(batch: TokenBatch, num_responses: int, keep_groups_whole: bool) -> list[tuple[int, ...]]:
    if not keep_groups_whole:
        rows = range(len(batch.responses))
        return [tuple(rows[start : start + num_responses]) for start in range(0, len(rows), num_responses)]
    bins: list[tuple[int, ...]] = []
    for group in _groups(batch):
        if bins and len(bins[-1]) + len(group) <= num_responses:
            bins[-1] += tuple(group)
        else:
            bins.append(tuple(group))
    return bins


def _bundles(batch: TokenBatch, max_tokens: int, keep_groups_whole: bool) -> list[Bundle]:
    bundles = []
    for group in _groups(batch):
        prompt_tokens = len(batch.prompts[batch.prompt_of[group[0]]])
        rows: list[int] = []
        tokens = prompt_tokens
        for row in group:
            length = len(batch.responses[row])
            if rows and tokens + length > max_tokens and not keep_groups_whole:
                bundles.append(Bundle(tuple(rows), tokens))
                rows, tokens = [], prompt_tokens
            rows.append(row)
            tokens += length
        bundles.append(Bundle(tuple(rows), tokens))
    return bundles


def _deal(batch: TokenBatch, bins: list[tuple[int, ...]], num_ranks: int) -> list[list[tuple[int, ...]]]:
    """Heaviest first to the lightest rank. Equal counts, because every rank takes part in every collective."""
    per_rank = max(1, -(-len(bins) // num_ranks))
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    weights = [cost(batch, rows) for rows in bins]
    order = range(len(bins)) if num_ranks == 1 else sorted(range(len(bins)), key=lambda i: -weights[i])
    for index in order:
        rank = min((r for r in range(num_ranks) if len(dealt[r]) < per_rank), key=lambda r: load[r])
        dealt[rank].append(bins[index])
        load[rank] += weights[index]
    return [rows + [()] * (per_rank - len(rows)) for rows in dealt]


def pack(sizes: Sequence[int], capacity: int, algorithm: PackingAlgorithm) -> list[list[int]]:
    """Indices of the items in each bin. An item larger than the capacity gets a bin of its own."""
    order = list(range(len(sizes)))
    if algorithm == "concatenative":
        return _next_fit(sizes, order, capacity)
    if algorithm == "first_fit_shuffle":
        random.Random(0).shuffle(order)
        return _first_fit(sizes, order, capacity)
    order.sort(key=lambda i: -sizes[i])
    if algorithm == "first_fit_decreasing":
        return _first_fit(sizes, order, capacity)
    return _modified_first_fit(sizes, order, capacity)


def _next_fit(sizes: Sequence[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free = 0
    for index in order:
        if not bins or sizes[index] > free:
            bins.append([])
            free = capacity
        bins[-1].append(index)
        free -= sizes[index]
    return bins


def _first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for index in order:
        place = next((b for b, room in enumerate(free) if sizes[index] <= room), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(capacity)
        bins[place].append(index)
        free[place] -= sizes[index]
    return bins


def _modified_first_fit(sizes: Sequence[int], order: list[int], capacity: int) -> list[list[int]]:
    """Johnson and Garey's MFFD ("A 71/60 theorem for bin packing"): pairs large items with what fills them best."""
    large = [i for i in order if sizes[i] > capacity / 2]
    medium = [i for i in order if capacity / 3 < sizes[i] <= capacity / 2]
    small = [i for i in order if sizes[i] <= capacity / 3]
    bins = [[i] for i in large]
    free = [capacity - sizes[i] for i in large]

    def place(bin_index: int, item: int, pool: list[int]) -> None:
        pool.remove(item)
        bins[bin_index].append(item)
        free[bin_index] -= sizes[item]

    def largest_that_fits(room: int, pool: list[int]) -> int | None:
        return next((item for item in pool if sizes[item] <= room), None)

    with_medium = set()
    for b in range(len(bins)):
        if (item := largest_that_fits(free[b], medium)) is not None:
            place(b, item, medium)
            with_medium.add(b)
    for b in reversed([b for b in range(len(bins)) if b not in with_medium]):
        if len(small) >= 2 and sizes[small[-1]] + sizes[small[-2]] <= free[b]:
            place(b, small[-1], small)
            if (item := largest_that_fits(free[b], small)) is not None:
                place(b, item, small)
    rest = sorted(medium + small, key=lambda i: -sizes[i])
    for b in range(len(bins)):
        while (item := largest_that_fits(free[b], rest)) is not None:
            place(b, item, rest)
    return bins + _first_fit(sizes, rest, capacity)
