"""Micro-batches of an optimizer batch: every response once, groups together where asked, the same count on every
rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.packing import PACK, MicroBatching, cost, packing_metrics, plan_micro_batches
from posttrain.types import TokenBatch

ALGORITHMS = ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]


def make_batch(groups: list[tuple[int, list[int]]]) -> TokenBatch:
    """One (prompt length, response lengths) per group."""
    lengths = [n for _, responses in groups for n in responses]
    return TokenBatch.build(
        [[7] * prompt for prompt, _ in groups],
        [[index + 10] * n for index, n in enumerate(lengths)],
        [g for g, (_, responses) in enumerate(groups) for _ in responses],
        {
            "mask": torch.ones(sum(lengths)),
            "row": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        }
        if lengths
        else {"mask": torch.zeros(0), "row": torch.zeros(0)},
    )


group = st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=5))
pair = st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=2, max_size=2))
batchings = st.one_of(
    st.builds(MicroBatching, max_tokens=st.integers(1, 150), algorithm=st.sampled_from(ALGORITHMS)),
    st.builds(MicroBatching, max_tokens=st.none(), num_responses=st.integers(1, 6)),
)


@given(groups=st.lists(group, max_size=8), batching=batchings, ranks=st.integers(1, 4), whole=st.booleans())
def test_every_response_is_in_exactly_one_micro_batch(
    groups: list[tuple[int, list[int]]], batching: MicroBatching, ranks: int, whole: bool
) -> None:
    batch = make_batch(groups)
    plan = plan_micro_batches(batch, batching, ranks, keep_groups_whole=whole)
    rows = [row for rank in plan for micro in rank for row in micro]
    assert sorted(rows) == list(range(len(batch.responses)))


@given(groups=st.lists(group, max_size=8), batching=batchings, ranks=st.integers(1, 4), whole=st.booleans())
def test_all_ranks_get_equally_many_micro_batches(
    groups: list[tuple[int, list[int]]], batching: MicroBatching, ranks: int, whole: bool
) -> None:
    plan = plan_micro_batches(make_batch(groups), batching, ranks, keep_groups_whole=whole)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    used = sum(bool(micro) for rank in plan for micro in rank)
    assert len(plan[0]) <= max(1, -(-used // ranks)), "no more rounds than the busiest rank needs"


@given(groups=st.lists(group, max_size=8), budget=st.integers(1, 150), algorithm=st.sampled_from(ALGORITHMS))
def test_no_micro_batch_is_over_budget_unless_a_single_response_is(
    groups: list[tuple[int, list[int]]], budget: int, algorithm: str
) -> None:
    batch = make_batch(groups)
    for micro in plan_micro_batches(batch, MicroBatching(max_tokens=budget, algorithm=algorithm))[0]:
        assert cost(batch, micro) <= budget or len(micro) == 1


@given(pairs=st.lists(pair, min_size=1, max_size=8), batching=batchings, ranks=st.integers(1, 4))
def test_the_two_answers_of_a_pair_stay_together_and_in_order(
    pairs: list[tuple[int, list[int]]], batching: MicroBatching, ranks: int
) -> None:
    plan = plan_micro_batches(make_batch(pairs), batching, ranks, keep_groups_whole=True)
    for micro in (micro for rank in plan for micro in rank):
        assert len(micro) % 2 == 0
        for chosen, rejected in zip(micro[0::2], micro[1::2], strict=True):
            assert chosen % 2 == 0
            assert rejected == chosen + 1


@given(pairs=st.lists(pair, min_size=1, max_size=8), budget=st.integers(1, 150), algorithm=st.sampled_from(ALGORITHMS))
def test_pairs_go_over_budget_only_alone(pairs: list[tuple[int, list[int]]], budget: int, algorithm: str) -> None:
    batch = make_batch(pairs)
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=budget, algorithm=algorithm), keep_groups_whole=True)
    for micro in plan[0]:
        assert cost(batch, micro) <= budget or len(micro) == 2


def test_a_shared_prompt_is_paid_once() -> None:
    batch = make_batch([(10, [1, 2, 3]), (5, [4])])
    assert cost(batch, [0, 1, 2]) == 16
    assert cost(batch, [0, 3]) == 20
    assert cost(batch, []) == 0


def test_a_group_that_fits_is_not_split() -> None:
    batch = make_batch([(10, [5, 5, 5]), (10, [5, 5, 5])])
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=25))
    assert sorted(plan[0]) == [(0, 1, 2), (3, 4, 5)]


def test_a_group_that_does_not_fit_is_split_and_repeats_its_prompt() -> None:
    batch = make_batch([(10, [5, 5, 5, 5])])
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=20))
    assert sorted(plan[0]) == [(0, 1), (2, 3)]
    assert sum(cost(batch, micro) for micro in plan[0]) == 40


def test_fixed_sizes_count_responses_in_order() -> None:
    batch = make_batch([(1, [1, 1, 1]), (1, [1, 1])])
    plan = plan_micro_batches(batch, MicroBatching(num_responses=2))
    assert plan == [[(0, 1), (2, 3), (4,)]]


def test_work_is_spread_over_the_ranks() -> None:
    batch = make_batch([(1, [40]), (1, [40]), (1, [1]), (1, [1])])
    plan = plan_micro_batches(batch, MicroBatching(num_responses=1), 2)
    assert [sum(cost(batch, micro) for micro in rank) for rank in plan] == [43, 43]


# -- precomputed packs -------------------------------------------------------------------------------------------------


def in_packs(batch: TokenBatch, packs: list[int]) -> TokenBatch:
    """`packs` names the pack of each pair."""
    per_token = [packs[batch.prompt_of[row]] for row, n in enumerate(batch.response_lengths) for _ in range(n)]
    return batch.with_columns(**{PACK: torch.tensor(per_token)})


def test_pairs_of_one_precomputed_pack_are_one_micro_batch() -> None:
    batch = in_packs(make_batch([(4, [10, 10]), (4, [20, 20]), (4, [30, 30]), (4, [8, 8])]), [5, 5, 3, 3])
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=90), keep_groups_whole=True)
    assert sorted(plan[0]) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_parts_of_packs_that_a_step_boundary_has_cut_share_a_micro_batch_if_they_fit() -> None:
    batch = in_packs(make_batch([(2, [10, 10]), (2, [30, 30]), (2, [10, 10])]), [1, 2, 3])
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=64), keep_groups_whole=True)
    assert sorted(sorted(micro) for micro in plan[0]) == [[0, 1, 4, 5], [2, 3]]


def test_the_same_pack_twice_in_a_row_does_not_overflow() -> None:
    batch = in_packs(make_batch([(4, [20, 20]), (4, [20, 20])]), [7, 7])
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=50), keep_groups_whole=True)
    assert sorted(plan[0]) == [(0, 1), (2, 3)]


@given(
    pairs=st.lists(st.tuples(pair, st.integers(-1, 2)), min_size=1, max_size=8),
    budget=st.integers(1, 300),
    ranks=st.integers(1, 3),
)
def test_nothing_is_lost_from_precomputed_packs(
    pairs: list[tuple[tuple[int, list[int]], int]], budget: int, ranks: int
) -> None:
    batch = in_packs(make_batch([lengths for lengths, _ in pairs]), [pack for _, pack in pairs])
    plan = plan_micro_batches(batch, MicroBatching(max_tokens=budget), ranks, keep_groups_whole=True)
    micro_batches = [micro for rank in plan for micro in rank if micro]
    assert sorted(row for micro in micro_batches for row in micro) == list(range(len(batch.responses)))
    assert all(cost(batch, micro) <= budget or len(micro) == 2 for micro in micro_batches)


# -- how full micro-batches are ----------------------------------------------------------------------------------------


@given(pairs=st.lists(pair, min_size=1, max_size=8), budget=st.integers(1, 150), ranks=st.integers(2, 4))
def test_how_full_micro_batches_are_does_not_depend_on_the_number_of_ranks(
    pairs: list[tuple[int, list[int]]], budget: int, ranks: int
) -> None:
    batch, batching = make_batch(pairs), MicroBatching(max_tokens=budget)
    measured = [
        packing_metrics(
            batch, batching, plan_micro_batches(batch, batching, n, keep_groups_whole=True), keep_groups_whole=True
        )
        for n in (1, ranks)
    ]
    assert measured[0] == pytest.approx(measured[1])
    assert 0 < measured[0]["packing_efficiency"] <= 100


def test_packing_factor_counts_pairs_where_pairs_stay_together_and_responses_elsewhere() -> None:
    batch, batching = make_batch([(2, [4, 4]), (2, [4, 4]), (2, [4, 4])]), MicroBatching(max_tokens=20)
    plan = plan_micro_batches(batch, batching, keep_groups_whole=True)
    pairs = packing_metrics(batch, batching, plan, keep_groups_whole=True)
    assert pairs == pytest.approx({"packing_factor": 1.5, "packing_efficiency": 75.0})
    assert packing_metrics(batch, batching, plan, keep_groups_whole=False)["packing_factor"] == 3.0


def test_micro_batches_of_a_fixed_number_have_no_room_to_fill() -> None:
    batch, batching = make_batch([(2, [4, 4])]), MicroBatching(num_responses=2)
    assert packing_metrics(batch, batching, plan_micro_batches(batch, batching), keep_groups_whole=True) == {}


# -- what is cut from a batch ------------------------------------------------------------------------------------------


def test_a_selection_carries_the_denominators_of_the_whole() -> None:
    batch = make_batch([(3, [2, 4]), (5, [6])])
    part = batch.select([2, 0])
    assert (part.num_tokens, part.num_sequences) == (12.0, 3.0)
    assert [len(prompt) for prompt in part.prompts] == [3, 5]
    assert part.prompt_of == (1, 0)
    assert part.columns["row"].tolist() == [2] * 6 + [0] * 2
    assert [response[0].item() for response in part.responses] == [12, 10]


def test_a_recounted_selection_is_a_batch_of_its_own() -> None:
    batch = make_batch([(3, [2, 4]), (5, [6])])
    part = batch.select([2, 0], recount=True)
    assert (part.num_tokens, part.num_sequences) == (8.0, 2.0)


def test_sequences_that_are_masked_altogether_are_not_counted() -> None:
    mask = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    batch = TokenBatch.build([[1]], [[2, 2], [3, 3], [4, 4]], [0, 0, 0], {"mask": mask})
    assert (batch.num_tokens, batch.num_sequences) == (3.0, 2.0)
    part = batch.select([0, 1], recount=True)
    assert (part.num_tokens, part.num_sequences) == (1.0, 1.0)


def test_an_empty_selection_keeps_its_columns() -> None:
    part = make_batch([(3, [2, 4])]).select([])
    assert part.responses == ()
    assert {name: len(column) for name, column in part.columns.items()} == {"mask": 0, "row": 0}


def test_a_column_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="one value per response token"):
        TokenBatch.build([[1]], [[2, 2]], [0], {"mask": torch.ones(3)})
