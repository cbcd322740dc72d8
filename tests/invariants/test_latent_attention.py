"""Latent attention: the cache holds latent vectors, and everything that uses it computes what it did with heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from float64 import TOLERANCE
from peft import LoraConfig, get_peft_model
from test_sampler_equals_trainer import (
    eager_logprobs,
    largest_difference,
    make_tasks,
    packed_logprobs,
    sample,
    sampled_logprobs,
    trainer_logprobs,
)
from tiny_models import VOCAB_SIZE, byte_tokenizer, randomise, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.engines.native import NativeEngine, NativeSettings, fp8
from posttrain.engines.native.attention import DenseDecode
from posttrain.engines.native.fp8 import cache_layers
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.models.attention_interface import ATTENTION
from posttrain.policy.latent import Absorbed
from posttrain.types import NoiseKey, Sampling, Task

RANK, ROTATED, HEADS = 12, 4, 4
_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attention_dropout": 0.0,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "kv_lora_rank": RANK, "qk_nope_head_dim": 8, "qk_rope_head_dim": ROTATED, "v_head_dim": 6, "head_dim": ROTATED,
}  # fmt: skip
_NO_RANK = {"q_lora_rank": None}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", {"q_lora_rank": 16}),
    "DeepSeek-V3, queries whole": ("deepseek_v3", _NO_RANK),
    "DeepSeek-V2": ("deepseek_v2", {"q_lora_rank": 16}),
    "DeepSeek-V2, queries whole": ("deepseek_v2", _NO_RANK),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"q_lora_rank": 16}),
}
EVERY_KIND = [pytest.param(kind, marks=pytest.mark.full if at else (), id=kind) for at, kind in enumerate(KINDS)]


def model_of(kind: str, attention: str = ATTENTION, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model_type, extra = KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **extra})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    model.config.use_cache = False
    randomise(model, 0)
    return model.to(dtype).eval()


def engine(model: nn.Module, **settings: Any) -> NativeEngine:
    return NativeEngine(model, byte_tokenizer(), NativeSettings(**{"page_size": 4, "max_batch_size": 5, **settings}))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sampled_logprobs_equal_the_trainers(kind: str) -> None:
    model = model_of(kind)
    completions = sample(model)  # shared prompts, copied pages, samples that leave and join
    ours = sampled_logprobs(completions)
    assert ours.min() < -1, "logits that are nearly one-hot would prove little"
    assert largest_difference(ours, trainer_logprobs(model, completions)) <= TOLERANCE
    assert largest_difference(ours, packed_logprobs(model, completions)) <= TOLERANCE
    assert largest_difference(ours, eager_logprobs(model_of(kind, "eager"), completions)) <= TOLERANCE
    stored = NativeEngine(model, byte_tokenizer()).forward.shapes().layers
    assert [each.expanded is not None for each in stored.values()] == [True] * 2


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Views of one memory count once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_token_takes_the_bytes_of_its_latent_vectors(kind: str) -> None:
    native = engine(model_of(kind, dtype=torch.float32))
    layers = cache_layers(native.forward, native.settings)
    assert [shape.bytes_per_token for shape in layers.values()] == [(RANK + ROTATED) * 4] * 2
    cache = PagedKvCache(layers, 8, 4, torch.device("cpu"))
    assert storage_bytes([*cache.keys.values(), *cache.values.values()]) == 8 * 4 * 2 * (RANK + ROTATED) * 4
    assert storage_bytes(list(cache._pools())) == cache.num_bytes == 8 * 4 * 2 * (RANK + ROTATED) * 4
    native.generate(make_tasks(), 3, Sampling(4), NoiseKey(0, 0))
    dense = DenseDecode(cache, 32)
    dense._grow(2, 8)
    assert storage_bytes([*dense.keys.values(), *dense.values.values()]) == 2 * 2 * 32 * (RANK + ROTATED) * 4


class _Expanded(NativeEngine):
    """Its cache holds the heads that are made of the latent vectors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        shapes = self.forward.shapes()
        heads = {layer: shape.expanded for layer, shape in shapes.layers.items() if shape.expanded is not None}
        assert len(heads) == 2
        self.forward.shapes = lambda: replace(shapes, layers=heads)  # type: ignore[method-assign]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "settings",
    [
        {"max_prefill_tokens": 5},  # a prompt in chunks: they read what earlier ones wrote
        {"kv_cache_gib": 40 * 2 * 4 * 2 * (RANK + ROTATED) * 8 / 2**30, "max_batch_size": 12},  # 40 pages: preemption
        {"num_speculative_tokens": 3},  # several rows of one sequence, over pages
    ],
    ids=["chunks", "preemption", "drafts"],
)
def test_answers_are_those_with_a_cache_of_heads(settings: dict[str, Any]) -> None:
    model = model_of("DeepSeek-V2")
    sampling = Sampling(24, temperature=0.8, stop_token_ids=(11, 23))
    whole = {"page_size": 4, "max_batch_size": 12}
    expected = _Expanded(model, byte_tokenizer(), NativeSettings(**whole))
    native = engine(model, **settings)
    groups = [one.generate(make_tasks(), 3, sampling, NoiseKey(4, 2)) for one in (native, expected)]
    for answers, others in zip(*groups, strict=True):
        for answer, other in zip(answers, others, strict=True):
            assert answer.token_ids == other.token_ids
            assert answer.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
    assert (native.num_preemptions > 0) == ("kv_cache_gib" in settings)
    assert (native.drafted[0] > 0) == ("num_speculative_tokens" in settings)


@pytest.mark.usefixtures("in_float64")
def test_a_turn_continues_the_latent_vectors_of_the_last() -> None:
    model = model_of("GLM-4.7-Flash")
    sampling = Sampling(9, temperature=1.3)
    native = engine(model)
    native.keep_prefixes(True)
    [[first]] = native.generate(make_tasks()[1:2], 1, sampling, NoiseKey(3, 5))
    longer = Task(7, "t:7", "", (*make_tasks()[1].prompt_ids, *first.token_ids, 5, 9, 17))
    [[found]] = native.generate([longer], 1, sampling, NoiseKey(3, 5))
    _, reused = native.keep_prefixes(False)
    assert reused >= 20
    [[expected]] = engine(model).generate([longer], 1, sampling, NoiseKey(3, 5))
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


ADAPTERS = {
    "all projections": {"target_modules": "all-linear"},
    "the up-projection": {"target_modules": ["kv_b_proj"], "lora_dropout": 0.3},
    "DoRA, with a cache of heads": {"target_modules": ["kv_b_proj"], "use_dora": True},
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("adapters", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_of_the_up_projection_take_part(adapters: dict[str, Any]) -> None:
    torch.manual_seed(1)
    kind = "DeepSeek-V2, queries whole"
    config = LoraConfig(init_lora_weights=False, **adapters)
    model = get_peft_model(model_of(kind), config, autocast_adapter_dtype=False).train()
    completions = sample(model)
    model.eval()
    ours = sampled_logprobs(completions)
    assert largest_difference(ours, trainer_logprobs(model, completions)) <= TOLERANCE
    assert largest_difference(ours, eager_logprobs(model_of(kind, "eager"), completions)) > 0.1
    with model.disable_adapter():
        without = sample(model)
        assert largest_difference(sampled_logprobs(without), trainer_logprobs(model, without)) <= TOLERANCE
    stored = engine(model).forward.shapes().layers
    assert {shape.expanded is None for shape in stored.values()} == {"use_dora" in adapters}
    assert largest_difference(sampled_logprobs(without), eager_logprobs(model_of(kind, "eager"), without)) <= TOLERANCE


@pytest.mark.usefixtures("in_float64")
def test_the_next_call_samples_with_new_weights() -> None:
    model = model_of("DeepSeek-V3")
    native = engine(model, max_prefill_tokens=16)
    sampling = Sampling(9, temperature=0.8)
    before = native.generate(make_tasks(), 2, sampling, NoiseKey(1, 1))
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.kv_b_proj.weight.mul_(-0.7)
    native.take_weights(1)
    after = native.generate(make_tasks(), 2, sampling, NoiseKey(1, 1))
    assert sampled_logprobs(after).tolist() != sampled_logprobs(before).tolist()
    assert largest_difference(sampled_logprobs(after), trainer_logprobs(model, after)) <= TOLERANCE


def test_products_in_another_order_round_elsewhere_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer rounds keys and values of each head, which decode steps do not make. So it is on a GPU; on a CPU the
    cache holds heads in 16 bits.
    """
    gaps = {}
    for kept in (False, True):
        if kept:
            monkeypatch.setattr(fp8, "attends_to_latents", lambda *_: True)
        model = tiny_model("deepseek-v3", dtype=torch.bfloat16)
        native = engine(model)
        stored = cache_layers(native.forward, native.settings)
        assert [shape.expanded is not None for shape in stored.values()] == [kept] * 2
        completions = native.generate(make_tasks(), 3, Sampling(12, temperature=0.8), NoiseKey(0, 0))
        difference = (sampled_logprobs(completions) - trainer_logprobs(model, completions)).abs()
        gaps[kept] = float(difference.exp().mean())
    print(f"mean of exp|difference|: {gaps[False]:.4f} with heads, {gaps[True]:.4f} with latent vectors")
    assert gaps[False] <= 1.02
    assert gaps[True] <= 1.1


def test_small_adapters_are_not_lost_in_the_weights() -> None:
    """Added to a matrix in bf16, they would be."""
    up = nn.Linear(64, 4 * 12, bias=False)
    model = get_peft_model(nn.Sequential(up), LoraConfig(target_modules=["0"], init_lora_weights=False), "a")
    adapted = model.base_model.model[0].to(torch.bfloat16)
    with torch.no_grad():
        adapted.lora_B["a"].weight.mul_(1e-3)
        adapted.base_layer.weight.fill_(1.0)
    own, other = Absorbed.of(adapted, 4, 6), Absorbed.of(adapted.base_layer, 4, 6)
    query = torch.randn(8, 4, 6).bfloat16()
    delta = adapted.lora_B["a"].weight @ adapted.lora_A["a"].weight * adapted.scaling["a"]
    assert delta.abs().max() < 2**-8 / 2, "less than half of a step of bf16 at 1"
    ((down, by_head, scaling),) = own.adapters
    assert not other.adapters
    found = torch.einsum("thn,hnk->thk", query, by_head[:, :6]) @ down * scaling
    expected = torch.einsum("thn,hnr->thr", query, delta.unflatten(0, (4, -1))[:, :6])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-4)
