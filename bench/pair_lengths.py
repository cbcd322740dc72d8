"""Preference pairs of random tokens with the lengths of real ones: UltraFeedback's, or those of a file."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from shapes import EOS, FIRST_WORD

from posttrain.errors import InputError
from posttrain.types import Pair

# Tokens of the prompt (with its template), the chosen and the rejected answer (with the end of the turn) in 994 pairs
# of UltraFeedback, as SmolLM2's tokenizer counts them: the lengths below which these shares of the pairs lie.
SHARES = (0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
PROMPT = (34, 39, 42, 52, 111, 246, 502, 694, 1188, 1500)
CHOSEN = (2, 10, 19, 61, 219, 456, 659, 789, 1018, 1242)
REJECTED = (2, 11, 22, 67, 195, 395, 562, 702, 943, 1013)
ANSWERS_CORRELATE = 0.5  # a question with a long good answer has a long bad one


@dataclass(frozen=True)
class PairLengths:
    prompt: int
    chosen: int
    rejected: int

    @property
    def longest(self) -> int:
        return self.prompt + max(self.chosen, self.rejected)


def like_ultrafeedback(count: int, max_tokens: int, seed: int, scale: float = 1.0) -> list[PairLengths]:
    """Pairs whose longer sequence has at most `max_tokens`. `scale` makes all of them shorter, for tests."""
    rng, normal = random.Random(seed), NormalDist()
    found: list[PairLengths] = []
    while len(found) < count:
        first, second = rng.gauss(0, 1), rng.gauss(0, 1)
        second = ANSWERS_CORRELATE * first + math.sqrt(1 - ANSWERS_CORRELATE**2) * second
        lengths = (
            _at(PROMPT, rng.random()) * scale,
            _at(CHOSEN, normal.cdf(first)) * scale,
            _at(REJECTED, normal.cdf(second)) * scale,
        )
        pair = PairLengths(*(max(2, round(length)) for length in lengths))
        if pair.longest <= max_tokens:
            found.append(pair)
    return found


def _at(quantiles: Sequence[int], share: float) -> float:
    """The length below which `share` of the pairs lie, on a straight line between the known ones."""
    above = next(i for i, known in enumerate(SHARES) if known >= share)
    if above == 0:
        return float(quantiles[0])
    low, high = SHARES[above - 1], SHARES[above]
    return quantiles[above - 1] + (share - low) / (high - low) * (quantiles[above] - quantiles[above - 1])


def from_file(path: Path, tokenizer: Any, count: int, max_tokens: int) -> list[PairLengths]:
    """Those of the first pairs of a .jsonl or .jsonl.gz file with prompt, chosen and rejected that are not too long."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else "\n".join(str(message["content"]) for message in value)

    found: list[PairLengths] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            row = json.loads(line)
            counts = (len(tokenizer(text(row[name]))["input_ids"]) + 1 for name in ("prompt", "chosen", "rejected"))
            pair = PairLengths(*counts)
            if pair.longest <= max_tokens:
                found.append(pair)
            if len(found) == count:
                return found
    raise InputError(f"{path}: {len(found)} pairs of at most {max_tokens} tokens, and {count} are needed")


def random_pairs(lengths: Sequence[PairLengths], vocab_size: int, seed: int) -> list[Pair]:
    """Random tokens of these lengths; answers end with the end of the sequence."""
    rng = random.Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_WORD, vocab_size) for _ in range(count))

    return [
        Pair(i, str(i), words(pair.prompt), (*words(pair.chosen - 1), EOS), (*words(pair.rejected - 1), EOS))
        for i, pair in enumerate(lengths)
    ]
