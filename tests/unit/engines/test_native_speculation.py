"""Decoding with drafts: the same tokens as without, wherever drafts come from, and only while they pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_decode_ahead import PAGE_BYTES, FailingGraphs, ahead, assert_same
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings, drafting
from posttrain.engines.native.cuda_graph_cache import GraphCaptureError
from posttrain.engines.native.kv_cache import GIB
from posttrain.engines.native.speculation import DrawnWithDrafts, Payoff, Speculation
from posttrain.types import Completion, NoiseKey, OpenGroup, Quota, Sampling, Task, Unfinished

TOKENIZER = byte_tokenizer()
KEY = NoiseKey(seed=3, step=5)
# At a low temperature a random model repeats itself: many drafts are right.
SAMPLING = Sampling(40, temperature=0.2, stop_token_ids=tuple(range(0, VOCAB_SIZE, 60)))
NUM_SAMPLES = 4


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each sample drew, step by step."""
    counts: list[int] = []
    read = Speculation.read

    def counting(self: Speculation, drawn: DrawnWithDrafts) -> list[list[tuple[int, float]]]:
        several = read(self, drawn)
        counts.extend(map(len, several))
        return several

    monkeypatch.setattr(Speculation, "read", counting)
    return counts


def make_tasks(count: int) -> list[Task]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB_SIZE, (3 + draw % 9,), generator=generator) for draw in range(count)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def sampled(model: nn.Module, num_drafts: int, sampling: Sampling, count: int = 5, **sizes: Any) -> Any:
    settings = NativeSettings(page_size=4, num_speculative_tokens=num_drafts, **sizes)
    return NativeEngine(model, TOKENIZER, settings).generate(make_tasks(count), NUM_SAMPLES, sampling, KEY)


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        replace(SAMPLING, temperature=1.3),
        replace(SAMPLING, temperature=0.0),
        replace(SAMPLING, top_p=0.7, temperature=0.9),
        replace(SAMPLING, top_k=5, temperature=0.9),
        replace(SAMPLING, stop_token_ids=(), stop_strings=("ab", "c")),
        replace(SAMPLING, ignore_eos=True, max_new_tokens=17),
    ],
    ids=lambda sampling: f"T={sampling.temperature} {sampling.stop_strings} {sampling.max_new_tokens}",
)
def test_drafts_change_no_token(model: nn.Module, counted: list[int], sampling: Sampling) -> None:
    assert_same(sampled(model, 3, sampling), sampled(model, 0, sampling))
    assert max(counted) > 1 or sampling.temperature > 1, "some draft was right"


@pytest.mark.parametrize("family", ["qwen2-sliding", "gemma2"])
def test_windows_and_soft_caps(family: str, counted: list[int]) -> None:
    other = tiny_model(family)
    assert_same(sampled(other, 7, SAMPLING, 2), sampled(other, 0, SAMPLING, 2))
    assert max(counted) > 1


@pytest.mark.parametrize(("num_drafts", "batch"), [(1, 64), (7, 64), (3, 6), (15, 1)])
def test_steps_ahead_of_the_host_with_drafts(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, counted: list[int], num_drafts: int, batch: int
) -> None:
    engine = ahead(model, monkeypatch, max_batch_size=batch, num_speculative_tokens=num_drafts)
    expected = sampled(model, 0, SAMPLING)
    for _ in range(2):  # the second call finds the workspace of the first
        assert_same(engine.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)
    assert max(counted) > 1


@pytest.mark.parametrize("num_pages", [15, 40, 80])
def test_a_small_cache_changes_no_token(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, counted: list[int], num_pages: int
) -> None:
    expected = sampled(model, 0, SAMPLING)
    sizes: dict[str, Any] = {"kv_cache_gib": num_pages * PAGE_BYTES / GIB, "num_speculative_tokens": 5}
    engine = ahead(model, monkeypatch, **sizes)
    assert_same(engine.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)
    in_step = NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, **sizes))
    assert_same(in_step.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)
    assert counted, "there were drafts once few answers were left"


def test_limits_of_single_tasks(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, limits = replace(SAMPLING, ignore_eos=True), [1, 40, 5, 30, 2]
    tasks = [replace(task, max_new_tokens=limit) for task, limit in zip(make_tasks(5), limits, strict=True)]
    plain = NativeEngine(model, TOKENIZER, NativeSettings(num_speculative_tokens=0))
    expected = plain.generate(tasks, 2, sampling, KEY)
    engine = ahead(model, monkeypatch, num_speculative_tokens=7)
    assert_same(engine.generate(tasks, 2, sampling, KEY), expected)


def test_answers_that_continue_draft_from_finished_ones(model: nn.Module, counted: list[int]) -> None:
    whole = sampled(model, 0, SAMPLING)

    def engine(num_drafts: int) -> NativeEngine:
        return NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, num_speculative_tokens=num_drafts))

    groups = [
        OpenGroup(
            task, KEY.step,
            tuple(Unfinished(c.token_ids[:3], c.logprobs[:3]) if at else c for at, c in enumerate(answers)),
        )
        for task, answers in zip(make_tasks(5), whole, strict=True)
    ]  # fmt: skip
    groups = [group for group in groups if all(len(answer.token_ids) >= 3 for answer in group.answers)]
    after = engine(4).sample_round(groups, SAMPLING, KEY.seed)
    assert [group.answers for group in after] != [group.answers for group in groups]
    found = [[answer for answer in group.answers if isinstance(answer, Completion)] for group in after]
    assert_same(found, [whole[group.task.draw] for group in groups])
    assert max(counted) > 1


def test_a_round_with_a_quota_ends_where_it_ends_without_drafts(model: nn.Module, counted: list[int]) -> None:
    """Which answers are cut, and where, decides which weights draw their next tokens."""
    groups = [OpenGroup(task, 1, (Unfinished(),) * NUM_SAMPLES) for task in make_tasks(5)]
    sampling = replace(SAMPLING, stop_token_ids=tuple(range(3, VOCAB_SIZE, 12)), temperature=0.8)

    def tokens(num_drafts: int) -> list[list[tuple[int, ...]]]:
        settings = NativeSettings(page_size=4, num_speculative_tokens=num_drafts)
        after = NativeEngine(model, TOKENIZER, settings).sample_round(groups, sampling, 3, Quota(2, 1, max_age=100))
        assert not all(group.is_whole for group in after)
        return [[answer.token_ids for answer in group.answers] for group in after]

    assert tokens(7) == tokens(0)


def test_auto_is_off_where_runs_repeat_bit_for_bit(model: nn.Module) -> None:
    engine = NativeEngine(model, TOKENIZER, NativeSettings())
    assert engine.settings.num_speculative_tokens == "auto"
    engine._keeps_workspace = True
    engine.generate(make_tasks(1), 1, Sampling(2), KEY)
    assert engine._workspace is not None
    assert engine._workspace.speculation is None


def test_steps_that_cannot_be_captured_are_computed_without_drafts(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ahead(model, monkeypatch, num_speculative_tokens=3)
    expected = sampled(model, 0, SAMPLING)
    failed = GraphCaptureError("a layer synchronises with the device")
    monkeypatch.setattr(Speculation, "step", Mock(side_effect=failed))
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert_same(engine.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)
    engine = ahead(model, monkeypatch, FailingGraphs, num_speculative_tokens=3)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert_same(engine.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)


def test_switching_drafts_on_and_off_changes_no_token(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    """As when they stop to pay: after every third step the other way of decoding continues."""
    expected, calls = sampled(model, 0, SAMPLING), [0]

    def by_turns(self: Speculation, num_samples: int) -> int:
        calls[0] += 1
        return (0, 3, 7)[calls[0] // 3 % 3]

    monkeypatch.setattr(Speculation, "drafts_for", by_turns)
    engine = ahead(model, monkeypatch, num_speculative_tokens=3)
    assert_same(engine.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)
    in_step = NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, num_speculative_tokens=3))
    assert_same(in_step.generate(make_tasks(5), NUM_SAMPLES, SAMPLING, KEY), expected)
    assert counted


# -- whether it pays ---------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(payoff: Payoff, clock: Clock, size: int, drafts: int, seconds: float, tokens: float = 1.0) -> None:
    for _ in range(8):
        clock.now += seconds
        payoff.launched(size, drafts)
        if drafts:
            payoff.accepted(drafts, round(tokens * size), size)


def test_drafts_are_tried_once_plain_steps_were_timed_and_stop_when_they_do_not_pay() -> None:
    clock = Clock()
    payoff = Payoff(clock)
    assert not payoff.pays(8, 7), "nothing was timed"
    steps(payoff, clock, 8, 0, 1.0)
    assert payoff.pays(8, 7), "worth a try"
    steps(payoff, clock, 8, 7, seconds=1.2, tokens=1.5)
    assert payoff.pays(8, 7)
    steps(payoff, clock, 8, 7, seconds=1.2, tokens=1.0)
    steps(payoff, clock, 8, 7, seconds=1.2, tokens=1.0)
    steps(payoff, clock, 8, 7, seconds=1.2, tokens=1.0)
    assert not payoff.pays(8, 7), "too few drafts are right"
    for _ in range(40):
        steps(payoff, clock, 8, 0, 1.0)
    assert payoff.pays(8, 7), "tried again after a while"
    steps(payoff, clock, 8, 7, seconds=3.0, tokens=2.0)
    steps(payoff, clock, 8, 7, seconds=3.0, tokens=2.0)
    assert not payoff.pays(8, 7), "the step takes too long"
    payoff.begin()
    assert not payoff.pays(8, 7), "step times hold for the next call"


def test_drafts_are_not_tried_where_plain_steps_of_as_many_rows_were_too_slow() -> None:
    clock = Clock()
    payoff = Payoff(clock)
    steps(payoff, clock, 512, 0, 4.0)
    steps(payoff, clock, 64, 0, 1.0)
    assert not payoff.pays(64, 7)
    assert payoff.pays(32, 7), "a step of 256 rows was not timed; 32 take what 64 do"


# -- drafts ------------------------------------------------------------------------------------------------------------


def scene(answers: list[list[int]], others: list[list[int]], room: int = 4) -> tuple[Tensor, Tensor]:
    """One group: its texts and the state of its unfinished answers."""
    texts = [(text, 0) for text in others] + [(text, room) for text in answers]
    numbers, starts, ranges = drafting.lay_out([texts])
    state = torch.zeros(drafting.NUM_FIELDS, len(answers), dtype=torch.long)
    for at, answer in enumerate(answers):
        start = starts[0][len(others) + at]
        state[:, at] = torch.tensor([start + len(answer) - 1, 0, at, len(answer), room, *ranges[0]])
    return torch.from_numpy(numbers), state


def drafts_of(answer: list[int], others: list[list[int]], width: int = 4) -> list[int]:
    text, state = scene([answer], others, room=8)
    rows = drafting.plan_rows(text, state, torch.zeros(1, 4, dtype=torch.int32), width, 16, 9)
    return rows.tokens[0, 1 : int(rows.num_rows)].tolist()


def test_what_is_drafted() -> None:
    assert drafts_of([5, 1, 2], [[1, 2, 7, 8, 9, 3]]) == [7, 8, 9]
    assert drafts_of([5, 1, 2], [[1, 2, 7]]) == [7], "not beyond the end of a text"
    assert drafts_of([5, 1, 2], [[4, 2, 7, 8]]) == [7, 8], "one equal token is enough"
    assert drafts_of([5, 1, 2], [[4, 3, 7, 8]]) == []
    assert drafts_of([5, 1, 2], [[5, 1, 2, 6], [9, 1, 2, 7]]) == [6], "the longest match"
    assert drafts_of([5, 1, 2], [[9, 1, 2, 6], [8, 1, 2, 7]]) == [7], "the last of equally long ones"
    assert drafts_of([1, 2, 3, 1, 2], []) == [3, 1, 2], "from the answer itself"
    assert drafts_of([5], [[5, 6, 7], [3, 5, 8, 9]]) == [6, 7], "answers that begin alike"


def test_rows_end_with_the_limit_and_with_the_pages() -> None:
    text, state = scene([[1, 2], [1, 2], [1, 2]], [[1, 2, 3, 4, 5, 6, 7]])
    state[drafting.POSITION] = torch.tensor([2, 2, 8])
    state[drafting.LEFT] = torch.tensor([2, 4, 0])
    table = torch.tensor([[0, 1, 9], [0, 9, 9], [0, 1, 2]], dtype=torch.int32)
    rows = drafting.plan_rows(text, state, table, 5, 4, 9)
    assert rows.num_rows.tolist() == [2, 2, 0], "two tokens are left; the second page is not there; none is left"
    assert rows.slots[0].tolist()[:2] == [2, 3]
    assert all(slot // 4 == 9 for slot in rows.slots[2].tolist()), "what does not count is written to the scratch page"
    assert rows.lengths[0].tolist() == [3, 4, 1, 1, 1]


def test_acceptance_ends_at_the_first_wrong_draft() -> None:
    text, state = scene([[1, 2], [1, 2], [1, 2]], [[1, 2, 3, 4, 5]])
    rows = drafting.plan_rows(text, state, torch.zeros(3, 4, dtype=torch.int32), 4, 16, 9)
    assert rows.tokens.tolist() == [[2, 3, 4, 5]] * 3
    drawn = torch.tensor([[3, 4, 5, 6], [3, 9, 5, 6], [8, 4, 5, 6]])
    before = state.clone()
    values = drafting.accept(text, state, rows, drawn.flatten(), torch.arange(12.0))
    assert values[0].tolist() == [4, 2, 1]
    assert values[2:6].T.tolist() == drawn.tolist()
    assert values[6:].T.flatten().tolist() == list(range(12))
    for field, sign in ((drafting.END, 1), (drafting.POSITION, 1), (drafting.INDEX, 1), (drafting.LEFT, -1)):
        assert (state[field] - before[field]).tolist() == [4 * sign, 2 * sign, sign]
    end = int(before[drafting.END, 1])
    assert text[end + 1 : end + 4].tolist() == [3, 9, -1]
