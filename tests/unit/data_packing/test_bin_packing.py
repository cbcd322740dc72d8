"""Bin packing: nothing lost, nothing over the brim, and not many more bins than the theorems allow."""

import math
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.data.bin_packing import PackingStatistics, pack
from posttrain.data.row_dataset import keyed_order

ALGORITHMS = ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)

sizes_of_items = st.lists(st.integers(1, 130), max_size=40)
few_items_that_fit = st.lists(st.integers(1, 24), min_size=1, max_size=9)


def smallest_possible(sizes: list[int], capacity: int) -> int:
    """The least number of bins, by trying every subset as the next bin. Slow and exact."""

    @cache
    def bins_for(left: int) -> int:
        if left == 0:
            return 0
        first = left & -left  # the lowest item must go somewhere: fix it in this bin
        others, best, subset = left ^ first, math.inf, left ^ first
        while True:
            chosen = subset | first
            if sum(size for i, size in enumerate(sizes) if chosen >> i & 1) <= capacity:
                best = min(best, 1 + bins_for(left ^ chosen))
            if subset == 0:
                return int(best)
            subset = (subset - 1) & others

    return bins_for((1 << len(sizes)) - 1)


@every_algorithm
@given(sizes=sizes_of_items)
@example(sizes=[])
@example(sizes=[100] * 5)
@example(sizes=[101, 100, 99, 1])
def test_every_item_is_packed_exactly_once(algorithm: str, sizes: list[int]) -> None:
    packed = [index for chosen in pack(sizes, 100, algorithm) for index in chosen]
    assert sorted(packed) == list(range(len(sizes)))


@every_algorithm
@given(sizes=sizes_of_items)
@example(sizes=[50, 50, 51, 49, 34, 33, 33])
@example(sizes=[101, 1, 1, 1, 34, 40])
def test_no_bin_is_overfull_but_that_of_a_single_oversize_item(algorithm: str, sizes: list[int]) -> None:
    for chosen in pack(sizes, 100, algorithm):
        assert chosen, "an empty bin"
        assert sum(sizes[i] for i in chosen) <= 100 or len(chosen) == 1


@every_algorithm
@given(sizes=sizes_of_items)
def test_packing_is_a_function_of_its_input(algorithm: str, sizes: list[int]) -> None:
    assert pack(sizes, 100, algorithm) == pack(list(sizes), 100, algorithm)


@given(sizes=sizes_of_items)
def test_concatenation_keeps_the_order(sizes: list[int]) -> None:
    packed = [index for chosen in pack(sizes, 100, "concatenative") for index in chosen]
    assert packed == list(range(len(sizes)))


@pytest.mark.parametrize("algorithm", ["first_fit_decreasing", "first_fit_shuffle"])
@given(sizes=st.lists(st.integers(1, 100), max_size=40))
def test_first_fit_leaves_at_most_one_bin_half_empty(algorithm: str, sizes: list[int]) -> None:
    loads = [sum(sizes[i] for i in chosen) for chosen in pack(sizes, 100, algorithm)]
    assert sum(load <= 50 for load in loads) <= 1


@given(sizes=few_items_that_fit)
@settings(max_examples=60)
@example(sizes=[12, 12, 11, 11, 7, 6, 6, 7])
@example(sizes=[9, 8, 8, 8, 8, 5, 5])
def test_the_number_of_bins_stays_within_the_proven_bounds(sizes: list[int]) -> None:
    optimum = smallest_possible(sizes, 24)
    bounds = {
        "concatenative": 2 * optimum,  # next fit
        "first_fit_shuffle": math.floor(1.7 * optimum),  # Dosa and Sgall
        "first_fit_decreasing": math.floor(11 / 9 * optimum + 6 / 9),  # Dosa
        "modified_first_fit_decreasing": math.floor(71 / 60 * optimum + 1),  # Yue and Zhang
    }
    for algorithm, bound in bounds.items():
        assert optimum <= len(pack(sizes, 24, algorithm)) <= bound, algorithm


def test_modified_first_fit_beats_first_fit_where_it_should() -> None:
    """Six large items, each of which leaves room for two small ones that first-fit-decreasing would waste."""
    sizes = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    capacity = 101
    modified = len(pack(sizes, capacity, "modified_first_fit_decreasing"))
    assert modified <= len(pack(sizes, capacity, "first_fit_decreasing"))
    assert modified <= math.ceil(71 / 60 * math.ceil(sum(sizes) / capacity) + 1)


# -- the plain definitions, without any search structure ---------------------------------------------------------------


def slow_first_fit(sizes: list[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in order:
        for chosen in bins:
            if sum(sizes[i] for i in chosen) + sizes[index] <= capacity:
                chosen.append(index)
                break
        else:
            bins.append([index])
    return bins


def slow_next_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index, size in enumerate(sizes):
        if bins and sum(sizes[i] for i in bins[-1]) + size <= capacity:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def slow_modified_first_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Johnson and Garey, step by step, over lists that shrink."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    bins = [[i] for i in order if sizes[i] > capacity / 2]
    medium = [i for i in order if capacity / 3 < sizes[i] <= capacity / 2]
    small = [i for i in order if sizes[i] <= capacity / 3]

    def room(chosen: list[int]) -> int:
        return capacity - sum(sizes[i] for i in chosen)

    def move_largest(pool: list[int], chosen: list[int]) -> bool:
        for item in pool:
            if sizes[item] <= room(chosen):
                pool.remove(item)
                chosen.append(item)
                return True
        return False

    unpaired = [chosen for chosen in bins if not move_largest(medium, chosen)]
    for chosen in reversed(unpaired):
        if len(small) >= 2 and sizes[small[-1]] + sizes[small[-2]] <= room(chosen):
            chosen.append(small.pop())
            move_largest(small, chosen)
    rest = sorted(medium + small, key=lambda i: -sizes[i])
    for chosen in bins:
        while move_largest(rest, chosen):
            pass
    return bins + slow_first_fit(sizes, rest, capacity)


@given(sizes=st.lists(st.integers(1, 130), max_size=60), seed=st.integers(0, 3))
@example(sizes=[60, 58, 55, 20, 20, 20, 15, 15, 12], seed=0)
@example(sizes=[101, 70, 34, 34, 33, 33, 16, 16, 1, 1], seed=1)
@settings(max_examples=200)
def test_bins_are_those_of_the_plain_definitions(sizes: list[int], seed: int) -> None:
    decreasing = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    shuffled = keyed_order(len(sizes), seed, 0).tolist()
    assert pack(sizes, 100, "concatenative") == slow_next_fit(sizes, 100)
    assert pack(sizes, 100, "first_fit_decreasing") == slow_first_fit(sizes, decreasing, 100)
    assert pack(sizes, 100, "first_fit_shuffle", seed) == slow_first_fit(sizes, shuffled, 100)
    assert pack(sizes, 100, "modified_first_fit_decreasing") == slow_modified_first_fit(sizes, 100)


def test_the_seed_decides_the_shuffled_order_and_nothing_else() -> None:
    sizes = [7 + 13 * i % 60 for i in range(50)]
    packed = {seed: pack(sizes, 100, "first_fit_shuffle", seed) for seed in range(3)}
    assert packed[0] != packed[1] != packed[2]
    assert pack(sizes, 100, "first_fit_shuffle", 1) == packed[1]
    for algorithm in ALGORITHMS:
        if algorithm != "first_fit_shuffle":
            assert pack(sizes, 100, algorithm, 1) == pack(sizes, 100, algorithm, 2)


def test_many_items_are_packed_without_comparing_each_with_every_bin() -> None:
    """Half a million comparisons with bins would be 5 * 10^9 if each item looked at each bin: this would not end."""
    sizes = [1 + 7919 * i % 2000 for i in range(100_000)]
    for algorithm in ALGORITHMS:
        bins = pack(sizes, 2048, algorithm)
        assert sum(map(len, bins)) == len(sizes)
        assert len(bins) >= sum(sizes) / 2048


def test_statistics_are_nemos() -> None:
    numbers = PackingStatistics.of(loads=[90, 60], counts=[3, 1], largest=60, capacity=100)
    assert (numbers.packing_factor, numbers.packing_efficiency) == (2.0, 75.0)
    assert (numbers.dataset_max_seqlen, numbers.max_samples_per_bin) == (60, 3)
    assert (numbers.pack_size, numbers.min_packed_seqlen) == (100, 60)


def test_a_bin_with_an_oversize_item_is_full_and_no_bins_are_not_full() -> None:
    assert PackingStatistics.of([150, 50], [1, 1], 150, 100).packing_efficiency == 80.0
    assert PackingStatistics.of([], [], 0, 100).packing_efficiency == 0.0
