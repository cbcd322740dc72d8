"""Splits an optimizer batch into micro-batches and assigns them to ranks.

Works on token counts only. Because losses are sums with global denominators (see `TokenBatch`), every
choice made here changes speed and memory, never the loss.

The unit is a *bundle*: one prompt with some of its responses, which costs the prompt once. A group that does not fit
the budget is split into several bundles, each of which repeats the prompt. Pairs that come from a file of precomputed
packs (the column `pack`) are bundled as in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from posttrain.data.bin_packing import PackingAlgorithm, PackingStatistics, pack
from posttrain.types import TokenBatch

PACK = "pack"  # the column with the precomputed pack that a response belongs to


@dataclass(frozen=True)
class MicroBatching:
    """How large a micro-batch may be: a token budget (packing), or else a fixed number of responses."""

    max_tokens: int | None = None
    num_responses: int = 1
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    seed: int = 0  # of first_fit_shuffle


@dataclass(frozen=True)
class Bundle:
    rows: tuple[int, ...]  # responses of one prompt, or of one precomputed pack
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
            for chosen in pack(
                [bundle.num_tokens for bundle in bundles], batching.max_tokens, batching.algorithm, batching.seed
            )
        ]
    return _deal(batch, bins, num_ranks)


def packing_metrics(
    batch: TokenBatch, batching: MicroBatching, plan: Sequence[Sequence[Sequence[int]]], *, keep_groups_whole: bool
) -> dict[str, float]:
    """How full the micro-batches of a plan are; nothing where they are not cut by tokens, or have none.

    The bins are made before they are dealt to ranks, so these numbers do not depend on how many ranks there are.
    """
    bins = [rows for rank in plan for rows in rank if rows]
    if batching.max_tokens is None or not bins:
        return {}
    counts = [len({batch.prompt_of[row] for row in rows}) if keep_groups_whole else len(rows) for rows in bins]
    loads = [cost(batch, rows) for rows in bins]
    statistics = PackingStatistics.of(loads, counts, max(loads), batching.max_tokens)
    return {
        "packing_factor": statistics.packing_factor,
        "packing_efficiency": statistics.packing_efficiency,
    }


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
    if PACK in batch.columns:
        return _precomputed(batch, max_tokens)
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


def _precomputed(batch: TokenBatch, max_tokens: int) -> list[Bundle]:
    """Pairs of one precomputed pack stay together; a pack that a step boundary has cut may share with another."""
    groups = _groups(batch)
    places = [int(part[0]) if len(part) else -1 for part in batch.column_parts(PACK)]
    bundles: list[Bundle] = []
    for place, members in groupby(groups, key=lambda group: places[group[0]]):
        rows: tuple[int, ...] = ()
        for group in members:
            # Two passes over the data may meet here with the same pack.
            if rows and (place < 0 or cost(batch, (*rows, *group)) > max_tokens):
                bundles.append(Bundle(rows, cost(batch, rows)))
                rows = ()
            rows += tuple(group)
        bundles.append(Bundle(rows, cost(batch, rows)))
    return bundles


def _deal(batch: TokenBatch, bins: list[tuple[int, ...]], num_ranks: int) -> list[list[tuple[int, ...]]]:
    """The heaviest first, to the lightest rank; equal counts, because every rank takes part in every collective."""
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
