"""Rewards by how long a completion is and how much it repeats itself. Run inside a worker process.

`math_cosine` and the repetition measure are those of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373,
appendix C) as TRL has them. Deviation: repetition is 1 minus the repeated share, not a negative penalty, so that it is
between 0 and 1 like every other rule; with a suitable weight both give the same advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.environments.math_answers import math_scorer
from posttrain.files.json_files import JsonMapping


def length_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """1.0 up to the limit or at the target, falling to 0.0 over the tolerance (or, as a cosine, from 0 to the limit)."""
    unit, tolerance = setup["unit"], setup["tolerance"]

    def score(item: ScoringItem) -> float:
        length = len(units(item, unit))
        if setup["shape"] == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(length / setup["limit"], 1.0)))
        excess = abs(length - setup["target"]) if setup["target"] is not None else length - setup["limit"]
        if excess <= 0:
            return 1.0
        return max(0.0, 1.0 - excess / tolerance) if tolerance else 0.0

    return score


def repetition_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """The number of different n-grams over the number of n-grams; 1.0 for a completion too short to have any."""
    size, unit = setup["ngram_size"], setup["unit"]

    def score(item: ScoringItem) -> float:
        pieces = units(item, unit)
        if len(pieces) < size:
            return 1.0
        ngrams = [tuple(pieces[start : start + size]) for start in range(len(pieces) - size + 1)]
        return len(set(ngrams)) / len(ngrams)

    return score


def cosine_math_scorer(setup: JsonMapping) -> Callable[[ScoringItem], Mapping[str, float]]:
    """TRL's `get_cosine_scaled_reward` over our verifier. Correctness is a separate part of the reward."""
    verify = math_scorer(setup)
    right = (setup["max_value_correct"], setup["min_value_correct"])
    wrong = (setup["min_value_wrong"], setup["max_value_wrong"])

    def score(item: ScoringItem) -> Mapping[str, float]:
        progress = min(len(units(item, "tokens")) / setup["max_length"], 1.0)
        correct = verify(item)
        short, long = right if correct else wrong
        return {"reward": long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * progress)), "correct": correct}

    return score


def units(item: ScoringItem, unit: str) -> Sequence[object]:
    """The completion in pieces: tokens, words, characters."""
    if unit == "words":
        return item.response.split()
    if unit == "characters":
        return item.response
    if item.token_ids is None:
        raise Unscored("the sample does not say what its tokens are; count words or characters, or name a tokenizer")
    return item.token_ids
