"""From rewards to preference pairs: which two answers to a prompt are compared, by their rewards only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from posttrain.data.traces.grouping import UNITS_AT_ONCE, GroupedPart
from posttrain.data.traces.report import PairReport
from posttrain.data.traces.values import PairRules
from posttrain.files.json_files import JsonObject

PairRow = JsonObject
COLUMNS = ("prompt", "chosen_response", "rejected_response", "chosen_reward", "rejected_reward")
ONE_ANSWER = "only one answer"
SAME_REWARD = "all rewards are equal"
SAME_TEXT = "the two answers are the same text"
TOO_CLOSE = "no two rewards differ by min_margin"
# Tolerance for binary floating point: 0.7 - 0.4 is slightly less than 0.3, but counts as a margin of 0.3.
ROUNDING = 1e-9


def pair_rows(part: GroupedPart, rules: PairRules, counts: PairReport) -> Iterator[tuple[int, PairRow]]:
    """The pairs of a part, prompts by first appearance, each with the first row of its prompt."""
    units, chosen, rejected = paired_rows(part, rules, counts)
    for begin in range(0, len(units), UNITS_AT_ONCE):  # only the texts that are needed leave Arrow
        window = slice(begin, begin + UNITS_AT_ONCE)
        first_rows = part.first_rows[units[window]].tolist()
        prompts = part.texts("prompt", part.starts[units[window]])
        answers = part.texts("response", chosen[window]), part.texts("response", rejected[window])
        rewards = part.rewards[chosen[window]].tolist(), part.rewards[rejected[window]].tolist()
        for first_row, *values in zip(first_rows, prompts, *answers, *rewards, strict=True):
            yield first_row, dict(zip(COLUMNS, values, strict=True))


def paired_rows(
    part: GroupedPart, rules: PairRules, counts: PairReport
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The unit, the preferred row and the rejected row of every pair of a part, in the order of the pairs."""
    rewards, identities, starts = part.rewards.tolist(), part.response_codes.tolist(), part.starts.tolist()
    best, worst, clear = clear_best_worst(part.rewards, part.response_codes, part.starts, rules)
    found: list[tuple[int, int, int]] = []
    for unit in part.in_order.tolist():
        if clear[unit]:
            counts.prompts_with_pairs += 1
            found.append((unit, best[unit], worst[unit]))
            continue
        start, stop = starts[unit], starts[unit + 1]
        choice = choose_pairs(rewards[start:stop], identities[start:stop], rules)
        counts.over_the_cap += choice.over_the_cap
        if choice.pairs:
            counts.prompts_with_pairs += 1
        else:
            counts.none[choice.why_none] += 1
        found += [(unit, start + good, start + bad) for good, bad in choice.pairs]
    units, chosen, rejected = np.array(found, dtype=np.int64).reshape(-1, 3).T
    counts.prompts += len(part)
    counts.pairs += len(found)
    counts.margin_sum += float((part.rewards[chosen] - part.rewards[rejected]).sum())
    return units, chosen, rejected


class Choice(NamedTuple):
    """The pairs of one prompt as (chosen, rejected) indices; without any, why."""

    pairs: list[tuple[int, int]]
    why_none: str = ""
    over_the_cap: int = 0


def choose_pairs(rewards: Sequence[float], identities: Sequence[int], rules: PairRules) -> Choice:
    """`identities` are equal for equal answers: an answer is never preferred to itself, whatever its labels say."""
    if len(rewards) == 1:
        return Choice([], ONE_ANSWER)
    if min(rewards) == max(rewards):
        return Choice([], SAME_REWARD)
    candidates: Iterator[tuple[int, int]]
    if rules.strategy == "by_margin":
        candidates = ((i, j) for i, high in enumerate(rewards) for j, low in enumerate(rewards) if high > low)
    else:
        # Best first and worst first; sorting is stable, so of equals the earlier one comes first.
        preferred = sorted((i for i, r in enumerate(rewards) if r >= rules.preferred), key=lambda i: -rewards[i])
        rejected = sorted((i for i, r in enumerate(rewards) if r < rules.rejected_below), key=lambda i: rewards[i])
        if not preferred or not rejected:
            return Choice([], _why_no_side(bool(preferred), bool(rejected), rules))
        candidates = _candidates(preferred, rejected, identities, rules)

    num_far = num_pairs = 0

    def pairs() -> Iterator[tuple[int, int]]:
        """Never held all at once: of thousands of answers to one prompt there are millions."""
        nonlocal num_far, num_pairs
        for i, j in candidates:
            if rewards[i] - rewards[j] >= rules.min_margin - ROUNDING:
                num_far += 1
                if identities[i] != identities[j]:
                    num_pairs += 1
                    yield i, j

    def widest_first(pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return rewards[pair[1]] - rewards[pair[0]], pair

    cap = 1 if rules.strategy == "best_worst" else rules.max_pairs_per_prompt
    kept = sorted(pairs(), key=widest_first) if cap is None else nsmallest(cap, pairs(), key=widest_first)
    if not kept:
        return Choice([], SAME_TEXT if num_far else TOO_CLOSE)
    return Choice(kept, over_the_cap=0 if rules.strategy == "best_worst" else num_pairs - len(kept))


def clear_best_worst(
    rewards: NDArray[np.float64], identities: NDArray[np.int64], starts: NDArray[np.int64], rules: PairRules
) -> tuple[list[int], list[int], list[bool]]:
    """The best and the worst row of many prompts at once, and where these are what `choose_pairs` would say.

    Prompt n has the rows from `starts[n]` to `starts[n + 1]`. Only a short cut: nearly all prompts of a large file need
    no more.
    """
    if rules.strategy != "best_worst" or len(starts) < 2:
        nothing = [False] * (len(starts) - 1)
        return [0] * len(nothing), [0] * len(nothing), nothing
    begins, sizes = starts[:-1], np.diff(starts)
    places = np.arange(len(rewards))

    def first_with(extreme: NDArray[np.float64]) -> NDArray[np.int64]:
        found = np.where(rewards == np.repeat(extreme, sizes), places, len(rewards))
        return np.asarray(np.minimum.reduceat(found, begins))

    best = first_with(np.maximum.reduceat(rewards, begins))
    worst = first_with(np.minimum.reduceat(rewards, begins))
    clear = (rewards[best] >= rules.preferred) & (rewards[worst] < rules.rejected_below)
    clear &= rewards[best] - rewards[worst] >= rules.min_margin - ROUNDING
    clear &= identities[best] != identities[worst]
    return best.tolist(), worst.tolist(), clear.tolist()


def _candidates(
    preferred: Sequence[int], rejected: Sequence[int], identities: Sequence[int], rules: PairRules
) -> Iterator[tuple[int, int]]:
    if rules.strategy == "one_per_preferred":
        for place, good in enumerate(preferred):
            # Rejected answers take turns; one with the same text as the preferred answer is skipped.
            turns = (rejected[(place + step) % len(rejected)] for step in range(len(rejected)))
            others = (bad for bad in turns if identities[bad] != identities[good])
            yield good, next(others, rejected[place % len(rejected)])
    elif rules.strategy == "best_worst" and identities[preferred[0]] != identities[rejected[0]]:
        yield preferred[0], rejected[0]
    else:
        yield from product(preferred, rejected)


def _why_no_side(has_preferred: bool, has_rejected: bool, rules: PairRules) -> str:
    if has_rejected:
        return f"no answer with a reward of {rules.preferred:g} or more"
    if has_preferred:
        return f"no answer with a reward below {rules.rejected_below:g}"
    return f"all rewards lie between {rules.rejected_below:g} and {rules.preferred:g}"
