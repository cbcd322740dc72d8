"""Bin packing: nothing lost, nothing over the brim, and not many more bins than the theorems allow."""

import math
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.data.packing import pack

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
