"""What the engine promises beyond the engine contract: its settings change nothing, and the model is left as it was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_decode_ahead import KEY, PAGE_BYTES, TOKENIZER, assert_same, make_tasks
from tiny_models import tiny_model
from torch import nn

import posttrain.engines.native.engine as engine_module
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.forward import packed_rows
from posttrain.engines.native.kv_cache import GIB, PagedKvCache
from posttrain.engines.native.scheduler import Prefill
from posttrain.errors import InputError
from posttrain.models.attention_interface import attention_context
from posttrain.policy.packed import PackedAttention, Segment
from posttrain.types import Completion, Sampling, Task

SAMPLING = Sampling(20, temperature=1.0, ignore_eos=True)


def token_ids(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in completions]


@pytest.fixture(scope="module")
def expected(model: nn.Module) -> list[list[Completion]]:
    return NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY)


@pytest.mark.parametrize(
    "settings",
    [
        NativeSettings(page_size=1),
        NativeSettings(page_size=7),
        NativeSettings(page_size=64),
        NativeSettings(max_batch_size=1),
        NativeSettings(max_batch_size=3),
        NativeSettings(max_prefill_tokens=8),
        NativeSettings(max_prefill_tokens=1, page_size=4),
        NativeSettings(max_total_tokens=50),
    ],
    ids=str,
)
def test_settings_do_not_change_what_is_sampled(
    model: nn.Module, expected: list[list[Completion]], settings: NativeSettings
) -> None:
    assert_same(NativeEngine(model, TOKENIZER, settings).generate(make_tasks(), 4, SAMPLING, KEY), expected)


@pytest.mark.parametrize("num_pages", [14, 20, 31])
def test_preemption_does_not_change_completions(
    model: nn.Module, expected: list[list[Completion]], num_pages: int
) -> None:
    settings = NativeSettings(page_size=4, kv_cache_gib=num_pages * PAGE_BYTES / GIB)
    engine = NativeEngine(model, TOKENIZER, settings)
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)
    assert engine.num_preemptions > 0


def test_order_and_batch_do_not_change_what_is_sampled(model: nn.Module, expected: list[list[Completion]]) -> None:
    engine = NativeEngine(model, TOKENIZER)
    tasks = make_tasks()
    assert_same(engine.generate(tasks[::-1], 4, SAMPLING, KEY)[::-1], expected)
    assert_same([engine.generate([task], 4, SAMPLING, KEY)[0] for task in tasks], expected)
    assert_same(engine.generate(tasks, 2, SAMPLING, KEY), [group[:2] for group in expected])


def test_reading_pages_in_place_equals_the_dense_copy(
    model: nn.Module, expected: list[list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "DenseDecode", lambda cache, longest: PagedDecode(cache, 20, longest))
    engine = NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, max_batch_size=7))
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)


def test_cache_too_small_for_one_sequence_is_refused(model: nn.Module) -> None:
    engine = NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, kv_cache_gib=10 * PAGE_BYTES / GIB))
    with pytest.raises(InputError, match="kv_cache_gib"):
        engine.generate(make_tasks(), 1, SAMPLING, KEY)


def test_cache_memory_is_freed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[PagedKvCache]] = []

    class Watched(PagedKvCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(engine_module, "PagedKvCache", Watched)
    engine = NativeEngine(model, TOKENIZER)
    engine.generate(make_tasks(), 2, SAMPLING, KEY)
    gc.collect()
    assert len(alive) == 1
    assert alive[0]() is None


def test_model_is_unchanged_after_sampling() -> None:
    model = tiny_model("llama", attention_dropout=0.5).train()
    frozen = model.get_decoder().layers[0]
    frozen.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    NativeEngine(model, TOKENIZER).generate(make_tasks(), 2, SAMPLING, KEY)
    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad
        assert parameter.grad is None
        assert not parameter.is_inference()
    # It can be trained right away.
    ids = torch.tensor([[4, 5, 6]])
    with attention_context(PackedAttention([Segment(0, 3)], torch.device("cpu"))):
        model(ids, position_ids=torch.arange(3)[None], use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_training_mode_is_restored_after_an_error(model: nn.Module) -> None:
    model = tiny_model("llama").train()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="task 't:0'"):
        NativeEngine(model, TOKENIZER).generate(make_tasks(), 1, SAMPLING, KEY)
    assert all(module.training for module in model.modules())


def test_weights_changed_in_place_are_sampled() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model, TOKENIZER)
    before = engine.generate(make_tasks(), 2, SAMPLING, KEY)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    after = engine.generate(make_tasks(), 2, SAMPLING, KEY)
    fresh = NativeEngine(model, TOKENIZER).generate(make_tasks(), 2, SAMPLING, KEY)
    assert token_ids(after) == token_ids(fresh)
    assert token_ids(after) != token_ids(before)


def test_adapters_are_active_and_can_be_turned_off(expected: list[list[Completion]]) -> None:
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_model("llama"), config).train()
    engine = NativeEngine(adapted, TOKENIZER)
    with_adapters = engine.generate(make_tasks(), 4, SAMPLING, KEY)
    assert token_ids(with_adapters) != token_ids(expected)
    assert token_ids(engine.generate(make_tasks(), 4, SAMPLING, KEY)) == token_ids(with_adapters)
    with adapted.disable_adapter():
        assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)
    merged = adapted.merge_and_unload()
    assert_same(NativeEngine(merged, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY), with_adapters)


def test_bf16_runs_in_bf16() -> None:
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    engine = NativeEngine(model, TOKENIZER)
    completions = engine.generate(make_tasks(), 2, SAMPLING, KEY)
    assert {shape.dtype for shape in engine.forward.shapes().layers.values()} == {torch.bfloat16}
    assert all(len(completion.token_ids) == 20 for group in completions for completion in group)


def test_vocabulary_padding_is_never_sampled() -> None:
    model = tiny_model("llama", vocab_size=400)  # the tokenizer has 260
    completions = NativeEngine(model, TOKENIZER).generate(make_tasks(), 8, SAMPLING, KEY)
    highest = max(max(completion.token_ids) for group in completions for completion in group)
    assert 200 < highest < len(TOKENIZER)


def test_total_length_is_limited(model: nn.Module, expected: list[list[Completion]]) -> None:
    engine = NativeEngine(model, TOKENIZER, NativeSettings(max_total_tokens=35))
    completions = engine.generate(make_tasks(), 4, SAMPLING, KEY)
    assert [len(group[0].token_ids) for group in completions] == [20, 19, 20, 5, 20]
    assert {completion.finish_reason for group in completions for completion in group} == {"length"}
    assert completions[3][0].token_ids == expected[3][0].token_ids[:5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-300}, "temperature is 1e-300"),
        ({"top_p": 0.0}, "top_p is 0.0: above 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"stop_strings": ("",)}, "stop_strings"),
    ],
)
def test_impossible_requests_are_refused_by_name(model: nn.Module, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NativeEngine(model, TOKENIZER).generate(make_tasks(), 1, Sampling(**{"max_new_tokens": 4, **change}), KEY)


def test_impossible_prompts_are_refused_by_name(model: nn.Module) -> None:
    engine = NativeEngine(model, TOKENIZER, NativeSettings(max_total_tokens=8))
    for prompt, words in (((), "task 'x' has 0"), ((1,) * 8, "task 'x' has 8"), ((1, 96), "vocabulary of 96")):
        with pytest.raises(InputError, match=words):
            engine.generate([Task(0, "x", "", prompt)], 1, SAMPLING, KEY)
    with pytest.raises(InputError, match="num_samples is 0"):
        engine.generate(make_tasks(), 0, SAMPLING, KEY)


@pytest.mark.parametrize("settings", [{"page_size": 0}, {"max_batch_size": 0}, {"kv_cache_gib": 0.0}])
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        NativeSettings(**settings)


def test_prefill_rows_are_filled_and_only_long_prompts_are_split() -> None:
    jobs = [Prefill(list(range(length)), 0, ()) for length in (3, 4, 5, 23, 2)]
    rows = [[(jobs.index(job), begin, end) for job, begin, end in row] for row in packed_rows(jobs, 10)]
    assert rows == [[(0, 0, 3), (1, 0, 4)], [(2, 0, 5)], [(3, 0, 10)], [(3, 10, 20)], [(3, 20, 23), (4, 0, 2)]]
