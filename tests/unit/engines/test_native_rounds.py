"""Rounds of the native engine: an answer that several rounds sample equals the one that a single call samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.types import Completion, NoiseKey, OpenGroup, Quota, Sampling, Task, Unfinished

TOKENIZER = byte_tokenizer()
NUM_SAMPLES, SEED = 3, 5
STOPS = tuple(range(3, VOCAB_SIZE, 12))  # answers have many lengths
SAMPLING = Sampling(40, temperature=1.2, stop_token_ids=STOPS)


def engine(**settings: int) -> NativeEngine:
    model = tiny_model("llama").double()  # so that prefill and decoding do not differ by what rounding can change
    return NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, max_batch_size=8, **settings))


def tasks(count: int) -> list[Task]:
    return [Task(draw, f"t:{draw}", "?", tuple(range(5, 9 + draw % 4))) for draw in range(count)]


def opened(tasks: list[Task], born: int = 1) -> list[OpenGroup]:
    return [OpenGroup(task, born, (Unfinished(),) * NUM_SAMPLES) for task in tasks]


def completions(groups: list[OpenGroup]) -> list[list[Completion]]:
    found = [[answer for answer in group.answers if isinstance(answer, Completion)] for group in groups]
    assert all(len(answers) == NUM_SAMPLES for answers in found)
    return found


def in_rounds(native: NativeEngine, groups: list[OpenGroup], num_groups: int, sampling: Sampling) -> list[OpenGroup]:
    """All groups, sampled to their ends by round after round."""
    num_rounds = 0
    while not all(group.is_whole for group in groups):
        num_whole = sum(group.is_whole for group in groups)
        groups = native.sample_round(groups, sampling, SEED, Quota(num_whole + num_groups, 1, max_age=100))
        num_rounds += 1
    assert num_rounds > 2
    return groups


@pytest.mark.parametrize("stop_strings", [(), ("ab", "c")])
def test_answers_of_several_rounds_equal_those_of_one_call(stop_strings: tuple[str, ...]) -> None:
    sampling, native = replace(SAMPLING, stop_strings=stop_strings), engine()
    expected = native.generate(tasks(6), NUM_SAMPLES, sampling, NoiseKey(SEED, 1))
    assert len({len(answer.token_ids) for group in expected for answer in group}) > 4, "lengths differ"
    found = completions(in_rounds(native, opened(tasks(6)), 1, sampling))
    for ours, theirs in zip(found, expected, strict=True):
        for answer, whole in zip(ours, theirs, strict=True):
            for field in ("token_ids", "text", "finish_reason"):
                assert getattr(answer, field) == getattr(whole, field)
            assert answer.logprobs == pytest.approx(whole.logprobs, abs=1e-9)


def test_a_small_cache_changes_no_answer() -> None:
    found = completions(in_rounds(engine(), opened(tasks(6)), 2, SAMPLING))
    small = engine()
    small.settings = NativeSettings(page_size=4, max_batch_size=2)
    again = completions(in_rounds(small, opened(tasks(6)), 2, SAMPLING))
    assert [[a.token_ids for a in group] for group in again] == [[a.token_ids for a in group] for group in found]


def test_a_round_ends_when_its_quota_is_met() -> None:
    native = engine()
    groups = native.sample_round(opened(tasks(6)), SAMPLING, SEED, Quota(2, 1, max_age=100))
    assert 2 <= sum(group.is_whole for group in groups) < 6
    assert any(isinstance(answer, Unfinished) and answer.token_ids for group in groups for answer in group.answers), (
        "unfinished answers keep their tokens"
    )


def test_a_quota_that_is_met_already_samples_nothing() -> None:
    native = engine()
    groups = native.sample_round(opened(tasks(4)), SAMPLING, SEED, Quota(2, 1, max_age=100))
    num_whole = sum(group.is_whole for group in groups)
    assert native.sample_round(groups, SAMPLING, SEED, Quota(num_whole, 2, max_age=100)) == groups


def test_a_group_at_the_age_limit_is_waited_for() -> None:
    groups = [*opened(tasks(1), born=1), *opened(tasks(6)[1:], born=3)]
    due = engine().sample_round(groups, SAMPLING, SEED, Quota(1, 3, max_age=2))
    assert due[0].is_whole


def test_noise_is_keyed_by_the_step_of_birth() -> None:
    first = engine().sample_round(opened(tasks(2), born=1), SAMPLING, SEED, Quota(2, 1, 0))
    later = engine().sample_round(opened(tasks(2), born=2), SAMPLING, SEED, Quota(2, 2, 0))
    assert completions(first) != completions(later)


def test_versions_are_kept() -> None:
    begun = (Unfinished((9, 10), (-1.0, -1.0), ((0, 4),)), Unfinished(), Unfinished())
    (group,) = engine().sample_round([OpenGroup(tasks(1)[0], 1, begun)], SAMPLING, SEED, Quota(1, 1, 0))
    answer = group.answers[0]
    assert answer.token_ids[:2] == (9, 10)
    assert answer.versions == ((0, 4),)
