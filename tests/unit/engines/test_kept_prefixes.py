"""Conversations whose turns reuse what earlier calls of the engine have computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_decode_ahead import ahead
from tiny_models import LOGPROB_ROUNDING, VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.types import Completion, NoiseKey, PrefillTokens, Sampling, Task

TOKENIZER = byte_tokenizer()
KEY = NoiseKey(seed=3, step=5)
SAMPLING = Sampling(9, temperature=1.3, stop_token_ids=tuple(range(0, VOCAB_SIZE, 20)))
NUM_TURNS = 4
# A page of 4 tokens of the tiny model takes 4 KiB here: 2 layers, keys and values, 2 heads of 8, fp32, and the dense
# copy.
PAGE_GIB = 4 * 2 * 2 * 2 * 8 * 4 * 2 / 2**30


def engine_of(model: nn.Module, **settings: Any) -> NativeEngine:
    return NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, **settings))


def converse(engine: NativeEngine, num_samples: int = 3) -> tuple[list[list[Completion]], int]:
    """Two prompts, `num_samples` conversations of each. Returns the turns of each conversation, and how many different
    prompt tokens they had.
    """
    rng = random.Random(1)
    tasks = [Task(draw, f"t:{draw}", "", tuple(rng.choices(range(VOCAB_SIZE), k=7 + 6 * draw))) for draw in range(2)]
    num_tokens = sum(len(task.prompt_ids) for task in tasks)
    turns: list[list[Completion]] = []
    open_tasks: Sequence[Task] = tasks
    for turn in range(NUM_TURNS):
        sampled = engine.generate(open_tasks, num_samples if turn == 0 else 1, SAMPLING, KEY)
        rows = [
            (replace(task, first_sample=task.first_sample + sample), completion)
            for task, completions in zip(open_tasks, sampled, strict=True)
            for sample, completion in enumerate(completions)
        ]
        turns.append([completion for _, completion in rows])
        following = []
        for task, completion in rows:
            observed = rng.choices(range(VOCAB_SIZE), k=rng.randrange(1, 12))
            ids = (*completion.token_ids, *observed)
            following.append(
                replace(task, prompt_ids=(*task.prompt_ids, *ids), first_token=task.first_token + len(ids))
            )
            if turn < NUM_TURNS - 1:
                num_tokens += 1 + len(observed)  # the last token of an answer has not been through the model
        open_tasks = following
    return turns, num_tokens


def assert_same(turns: Sequence[Sequence[Completion]], expected: Sequence[Sequence[Completion]]) -> None:
    for row, other in zip(turns, expected, strict=True):
        for a, b in zip(row, other, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=LOGPROB_ROUNDING)


@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("kind", ["in step", "ahead", "drafts"])
def test_turns_compute_each_token_once_and_sample_the_same(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, kind: str, batch: int
) -> None:
    expected, num_tokens = converse(engine_of(model))
    settings: dict[str, Any] = {"max_batch_size": batch, "num_speculative_tokens": 2 if kind == "drafts" else 0}
    engine = ahead(model, monkeypatch, **settings) if kind == "ahead" else engine_of(model, **settings)
    engine.keep_prefixes(True)
    assert_same(converse(engine)[0], expected)
    computed, reused = engine.keep_prefixes(False)
    # One step ahead, the last token of an answer is computed too, or not known yet when it ends at its limit.
    assert computed == (pytest.approx(num_tokens, rel=0.1) if kind == "ahead" else num_tokens)
    assert reused > num_tokens
    assert engine.num_held_bytes == 0 or kind == "ahead"
    assert_same(converse(engine)[0], expected)
    assert engine.keep_prefixes(False).reused == 0


@pytest.mark.parametrize("num_pages", [24, 36])
def test_short_memory_costs_time_and_changes_nothing(model: nn.Module, num_pages: int) -> None:
    expected, num_tokens = converse(engine_of(model))
    found = []
    for _ in range(2):
        engine = engine_of(model, kv_cache_gib=num_pages * PAGE_GIB, max_total_tokens=100)
        engine.keep_prefixes(True)
        found.append(converse(engine)[0])
        assert engine.keep_prefixes(False).computed > num_tokens
    assert found[0] == found[1], "bit for bit"
    assert_same(found[0], expected)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_step_depends_on_nothing_before_it(model: nn.Module, monkeypatch: pytest.MonkeyPatch, is_ahead: bool) -> None:
    """Bit for bit: a resumed run begins where another one has sampled before."""
    settings: dict[str, Any] = {"max_batch_size": 4, "deterministic": is_ahead, "max_total_tokens": 128}
    engine = ahead(model, monkeypatch, **settings) if is_ahead else engine_of(model, **settings)
    engine.keep_prefixes(True)
    first, _ = converse(engine)
    prefilled = engine.keep_prefixes(True)
    assert (converse(engine)[0], engine.keep_prefixes(False)) == (first, prefilled)


@pytest.mark.parametrize("change", ["take_weights", "forget_weights", "make_room", "release"])
def test_nothing_is_reused_after_weights_have_changed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    model = tiny_model("llama")
    engine = ahead(model, monkeypatch)
    engine.keep_prefixes(True)
    before, _ = converse(engine)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    getattr(engine, change)(*([1] if change == "take_weights" else []))
    after, _ = converse(engine)
    assert before != after
    engine.keep_prefixes(False)
    assert_same(after, converse(engine)[0])


@pytest.mark.parametrize("kind", ["in step", "ahead"])
@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h", "lfm2"])
def test_turns_go_on_from_the_states_of_recurrent_layers(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    expected, num_tokens = converse(engine_of(model))
    engine = ahead(model, monkeypatch, max_batch_size=8) if kind == "ahead" else engine_of(model, max_batch_size=8)
    for _ in range(2):
        engine.keep_prefixes(True)
        assert_same(converse(engine)[0], expected)
        computed, reused = engine.keep_prefixes(False)
        # One step ahead, the last token of an answer is computed too: of six in each turn but the last.
        assert computed == num_tokens - (6 * (NUM_TURNS - 1) if kind == "ahead" else 0)
        assert reused > num_tokens
    assert_same(converse(engine)[0], expected)
    assert engine.keep_prefixes(False).reused == 0


def test_too_few_slots_for_states_cost_time_and_change_nothing() -> None:
    model = tiny_model("qwen3.5")
    expected, num_tokens = converse(engine_of(model), num_samples=6)
    found = []
    for _ in range(2):
        engine = engine_of(model, max_batch_size=2)  # ten slots for twelve conversations
        engine.keep_prefixes(True)
        found.append(converse(engine, num_samples=6)[0])
        assert engine.keep_prefixes(False).computed > num_tokens
    assert found[0] == found[1], "bit for bit"
    assert_same(found[0], expected)


def test_no_state_is_reused_after_weights_have_changed() -> None:
    model = tiny_model("qwen3.5")
    engine = engine_of(model)
    engine.keep_prefixes(True)
    before, _ = converse(engine)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    engine.take_weights(1)
    after, _ = converse(engine)
    assert before != after
    engine.keep_prefixes(False)
    assert_same(after, converse(engine)[0])


def test_answers_that_begin_alike_are_all_kept(model: nn.Module) -> None:
    """Greedy answers are equal; their observations are not."""
    engine = engine_of(model)
    prompt = tuple(range(5, 15))
    engine.keep_prefixes(True)
    [answers] = engine.generate([Task(0, "t", "", prompt)], 4, Sampling(20, temperature=0.0, ignore_eos=True), KEY)
    ids = (*prompt, *answers[0].token_ids)
    tasks = [Task(0, "t", "", (*ids, 60 + sample), first_sample=sample, first_token=20) for sample in range(4)]
    assert engine.keep_prefixes(True) == PrefillTokens(len(prompt), 0)
    engine.generate([Task(0, "t", "", prompt)], 4, Sampling(20, temperature=0.0, ignore_eos=True), KEY)
    engine.generate(tasks, 1, SAMPLING, KEY)
    computed, reused = engine.keep_prefixes(False)
    assert (computed, reused) == (len(prompt) + 4 * 31 - reused, 29 + 3 * 28), (
        "one of them has the page that is not full"
    )


@pytest.mark.parametrize("is_ahead", [False, True])
def test_prompts_of_one_call_share_what_they_have_in_common(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """Also where a pass is smaller than the common part, and pages are computed in the same pass."""
    begin = tuple(range(5, 35))
    tasks = [Task(draw, f"t:{draw}", "", (*begin, *range(40, 41 + draw))) for draw in range(5)]
    expected = engine_of(model).generate(tasks, 2, SAMPLING, KEY)
    for max_prefill_tokens in (16, 64):
        settings = {"max_prefill_tokens": max_prefill_tokens}
        engine = ahead(model, monkeypatch, **settings) if is_ahead else engine_of(model, **settings)
        engine.keep_prefixes(True)
        assert_same(engine.generate(tasks, 2, SAMPLING, KEY), expected)
        # Full pages of 4: 28 tokens in common, 32 of those prompts that continue one another.
        assert engine.keep_prefixes(False) == PrefillTokens(31 + 4 + 1 + 2 + 3, 28 + 32 + 32 + 32)


def test_conversations_that_are_not_in_a_call_are_kept(model: nn.Module) -> None:
    """Agents ask when they like, and with settings of their own."""
    tasks = [Task(draw, f"t:{draw}", "", tuple(range(9 * draw + 5, 9 * draw + 14))) for draw in range(3)]
    engine = engine_of(model)
    engine.keep_prefixes(True)
    for task in tasks:
        engine.generate([task], 1, SAMPLING, KEY)
    engine.generate([replace(task, prompt_ids=(*task.prompt_ids, 90)) for task in tasks], 1, SAMPLING, KEY)
    assert engine.keep_prefixes(False) == PrefillTokens(3 * 9 + 3 * 2, 3 * 8), "full pages of the prompts"


@pytest.mark.parametrize("batch", [2, 64])
def test_a_call_of_its_own_shares_long_beginnings_and_keeps_nothing(model: nn.Module, batch: int) -> None:
    rng = random.Random(2)
    begin = tuple(rng.choices(range(VOCAB_SIZE), k=301))
    tasks = [Task(draw, f"t:{draw}", "", (*begin, 7 + draw, 8)) for draw in range(6)]
    alone = [engine_of(model).generate([task], 2, SAMPLING, KEY)[0] for task in tasks]
    engine = engine_of(model, max_batch_size=batch)
    found = engine.generate(tasks, 2, SAMPLING, KEY)
    assert_same(found, alone)
    computed, reused = engine.keep_prefixes(False)
    assert (computed, reused) == (303 + 5 * 3, 5 * 300) if batch > 2 else computed <= 6 * 303
    assert engine.generate(tasks, 2, SAMPLING, KEY) == found, "bit for bit"
    assert engine.keep_prefixes(False) == (computed, reused)
    short = [replace(task, prompt_ids=task.prompt_ids[60:]) for task in tasks]
    engine.generate(short, 2, SAMPLING, KEY)
    assert engine.keep_prefixes(False) == (6 * 243, 0)
