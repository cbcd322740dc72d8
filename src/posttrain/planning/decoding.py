"""How a batch of answers is decoded: how many rows are active for how many steps, over how much context.

Rows are filled as the scheduler does it (engines/native/scheduler.py): whoever is finished leaves, the next in the queue
takes the place. How long real answers become is not known before a run. Their lengths are taken from a constant chance of
ending at each token, up to the limit, with the mean that is assumed or measured.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_GOLDEN = 0.6180339887498949  # scatters quantiles over the queue, always in the same way


@dataclass(frozen=True)
class Stretch:
    """Decode steps during which the same number of rows is active."""

    steps: int
    rows: int
    own_tokens: float  # of a row, on average over rows and steps: what it has written itself


def stretches(lengths: Sequence[int], max_rows: int) -> Iterator[Stretch]:
    """Answers of these lengths, in this order, at most `max_rows` at a time. The first token comes with the prompt."""
    queue = [length - 1 for length in lengths if length > 1]
    active: list[tuple[int, int]] = []  # (step at which it ends, step at which it began)
    now, next_up, begun = 0, 0, 0
    while active or next_up < len(queue):
        while next_up < len(queue) and len(active) < max_rows:
            heapq.heappush(active, (now + queue[next_up], now))
            begun += now
            next_up += 1
        until = active[0][0]
        own = 1 + (now + until - 1) / 2 - begun / len(active)
        yield Stretch(until - now, len(active), own)
        now = until
        while active and active[0][0] == now:
            begun -= heapq.heappop(active)[1]


def answer_lengths(count: int, mean: float, longest: int) -> list[int]:
    """`count` lengths with this mean, none above `longest`, in an order without trend."""
    if mean >= 0.98 * longest:
        return [longest] * count
    rate = _rate(mean, longest)
    lengths = []
    for index in range(count):
        quantile = (index * _GOLDEN + 0.5) % 1.0
        drawn = math.log(1 / (1 - quantile)) / rate if rate > 0 else quantile * longest
        lengths.append(max(1, min(longest, round(drawn))))
    return lengths


def _rate(mean: float, longest: int) -> float:
    """Of an exponential distribution that is cut at `longest` and has this mean then."""
    low, high = 1e-9, 10.0 / mean + 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if (1 - math.exp(-middle * longest)) / middle > mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def batch_sizes(max_rows: int) -> list[int]:
    """For which a step is recorded (engines/native/graphs.py): a batch costs as much as the next of these."""
    sizes = [size for size in (8, 16, 32, 64, 128, 192, 256) if size < max_rows]
    sizes += range(320, max_rows, 64)
    return [*sizes, -(-max_rows // 8) * 8]


def prompt_reads(group_size: int, heads_per_kv_head: int, element: int) -> int:
    """How often a step reads a prompt that `group_size` rows share (engines/native/kernels/shared_prefix.py)."""
    if group_size < 4:
        return group_size
    most = max(1, (128 if element == 2 else 32) // heads_per_kv_head)
    tile = min(1 << (group_size - 1).bit_length(), 1 << (most.bit_length() - 1))
    return -(-group_size // tile)
