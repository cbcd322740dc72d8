"""Bin packing: which items share a bin. Works on sizes only.

`concatenative` is next fit: a bin is closed when the next item does not fit. The others keep every bin open and take
the first one with room, over items in a seeded random order or from the largest down. `modified_first_fit_decreasing`
is that of Johnson and Garey ("A 71/60 theorem for bin packing", 1985). All of them take O(n log n) steps.

The bins equal those of the plain definitions, item for item; only the search is faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.config.policy import PackingAlgorithm
from posttrain.data.row_dataset import keyed_order

Bins = list[list[int]]


def pack(sizes: Sequence[int], capacity: int, algorithm: PackingAlgorithm, seed: int = 0) -> Bins:
    """Indices of the items in each bin. An item larger than the capacity gets a bin of its own.

    `seed` sets the order of `first_fit_shuffle`; others ignore it.
    """
    order = list(range(len(sizes)))
    if algorithm == "concatenative":
        return _next_fit(sizes, order, capacity)
    if algorithm == "first_fit_shuffle":
        return _first_fit(sizes, keyed_order(len(sizes), seed, 0).tolist(), capacity)
    order.sort(key=lambda i: -sizes[i])
    if algorithm == "first_fit_decreasing":
        return _first_fit(sizes, order, capacity)
    return _modified_first_fit(sizes, order, capacity)


@dataclass(frozen=True)
class PackingStatistics:
    """How well items were packed. The names are those of NeMo's packing metadata."""

    dataset_max_seqlen: int  # the largest item
    max_samples_per_bin: int
    packing_factor: float  # items per bin, on average
    packing_efficiency: float  # percentage of the bins' capacity that is filled
    pack_size: int
    min_packed_seqlen: int  # the load of the emptiest bin

    @classmethod
    def of(cls, loads: Sequence[int], counts: Sequence[int], largest: int, capacity: int) -> PackingStatistics:
        """`loads` and `counts` are the tokens and the items of each bin that is not empty."""
        # A bin with one oversize item counts as full.
        room = sum(max(capacity, load) for load in loads)
        return cls(
            dataset_max_seqlen=largest,
            max_samples_per_bin=max(counts, default=0),
            packing_factor=sum(counts) / len(counts) if counts else 0.0,
            packing_efficiency=100.0 * sum(loads) / room if room else 0.0,
            pack_size=capacity,
            min_packed_seqlen=min(loads, default=0),
        )


def _next_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    bins: Bins = []
    free = 0
    for index in order:
        if not bins or sizes[index] > free:
            bins.append([])
            free = capacity
        bins[-1].append(index)
        free -= sizes[index]
    return bins


def _first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    bins: Bins = []
    room = _RoomTree(len(order), capacity)
    for index in order:
        # Unopened bins have the full capacity, so the leftmost fitting bin is an open one or the next.
        place = room.leftmost(sizes[index]) if sizes[index] <= capacity else len(bins)
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        room.take(place, sizes[index])
    return bins


class _RoomTree:
    """The free space of bins: a tree whose nodes hold the maximum free space below them."""

    def __init__(self, num_bins: int, capacity: int) -> None:
        self._num_leaves = 1 << max(0, num_bins - 1).bit_length()
        self._most = [capacity] * (2 * self._num_leaves)

    def leftmost(self, size: int) -> int:
        """The first bin with space for `size`; there must be one."""
        most, node = self._most, 1
        while node < self._num_leaves:
            node *= 2
            if most[node] < size:
                node += 1
        return node - self._num_leaves

    def take(self, place: int, size: int) -> None:
        most, node = self._most, place + self._num_leaves
        most[node] -= size
        while node > 1:
            node //= 2
            larger = max(most[2 * node], most[2 * node + 1])
            if most[node] == larger:
                break
            most[node] = larger


def _modified_first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    """Gives each item over half a bin the partner that fills it best, then packs the rest first-fit-decreasing."""
    large = [i for i in order if 2 * sizes[i] > capacity]
    medium = _Descending(sizes, [i for i in order if 2 * sizes[i] <= capacity < 3 * sizes[i]])
    small = _Descending(sizes, [i for i in order if 3 * sizes[i] <= capacity])
    bins = [[i] for i in large]
    free = [capacity - sizes[i] for i in large]

    def place(bin_index: int, item: int) -> None:
        bins[bin_index].append(item)
        free[bin_index] -= sizes[item]

    with_medium = set()
    for b in range(len(bins)):
        if (item := medium.take_largest(free[b])) is not None:
            place(b, item)
            with_medium.add(b)
    for b in reversed([b for b in range(len(bins)) if b not in with_medium]):
        if small.two_smallest() > free[b]:
            break  # the following bins have even less space
        place(b, small.take_smallest())
        if (item := small.take_largest(free[b])) is not None:
            place(b, item)
    rest = _Descending(sizes, sorted(medium.left() + small.left(), key=lambda i: -sizes[i]))
    for b in range(len(bins)):
        while (item := rest.take_largest(free[b])) is not None:
            place(b, item)
    return bins + _first_fit(sizes, rest.left(), capacity)


class _Descending:
    """Items from the largest to the smallest, of which one can take the largest that fits, and the smallest."""

    def __init__(self, sizes: Sequence[int], items: list[int]) -> None:
        self._items = items
        self._sizes = [sizes[i] for i in items]
        self._negative = [-size for size in self._sizes]  # ascending, for bisection
        self._taken = [False] * len(items)
        # From each position, one at or after it with nothing left in between: paths are halved as they are walked.
        self._next = list(range(len(items) + 1))
        self._last = len(items) - 1  # the smallest that is left

    def left(self) -> list[int]:
        return [item for item, taken in zip(self._items, self._taken, strict=True) if not taken]

    def two_smallest(self) -> float:
        """The sizes of the two smallest together; larger than any bin if there are fewer."""
        self._settle_last()
        second = self._last - 1
        while second >= 0 and self._taken[second]:
            second -= 1
        return self._sizes[self._last] + self._sizes[second] if second >= 0 else float("inf")

    def take_smallest(self) -> int:
        self._settle_last()
        return self._take(self._last)

    def take_largest(self, room: int) -> int | None:
        """The first of the largest items of at most `room`."""
        position = self._find(bisect_left(self._negative, -room))
        return None if position == len(self._items) else self._take(position)

    def _take(self, position: int) -> int:
        self._taken[position] = True
        self._next[position] = position + 1
        return self._items[position]

    def _find(self, position: int) -> int:
        while self._next[position] != position:
            self._next[position] = self._next[self._next[position]]
            position = self._next[position]
        return position

    def _settle_last(self) -> None:
        while self._last >= 0 and self._taken[self._last]:
            self._last -= 1
