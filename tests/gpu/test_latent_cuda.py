"""Latent attention on a GPU: the decode kernel, and models that sample from a cache of latent vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_references import Case, assert_equal_to_rounding, random_cache, slow_attention
from tiny_models import byte_tokenizer, tiny_model

from posttrain.engines.native import NativeEngine, NativeSettings, kernels
from posttrain.engines.native.fp8 import cache_layers
from posttrain.models.attention_interface import attention_context
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import NoiseKey, Sampling, Task, TokenBatch

BF16 = torch.bfloat16
WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


@pytest.mark.parametrize("splits", [None, 1, 8, 32])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
def test_the_kernel_computes_what_float64_does(heads: int, splits: int | None) -> None:
    case = Case(heads=heads, kv_heads=1, dim=576, lengths=(1, 17, 1200, 300))
    cache = random_cache(case, BF16, "cuda")
    assert kernels.latent_fits(torch.device("cuda"), BF16, heads, 512, 576, 16)
    out = kernels.latent_attention(cache.query, cache.keys, 512, *cache.tensors[3:], scale=0.05, splits=splits)
    meant = replace(cache, values=cache.keys[..., :512])
    assert_equal_to_rounding(out, slow_attention(meant, scale=0.05, window=None, softcap=None))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_model_samples_near_the_trainer_in_cuda_graphs(drafts: int) -> None:
    model = tiny_model("deepseek-v3", dtype=BF16, **WIDE).cuda()
    settings = NativeSettings(page_size=16, max_batch_size=7, max_prefill_tokens=32, num_speculative_tokens=drafts)
    engine = NativeEngine(model, byte_tokenizer(), settings)
    assert all(shape.expanded is not None for shape in cache_layers(engine.forward, settings).values())
    tasks = [Task(draw, f"t:{draw}", "", tuple(range(3, 9 + 11 * draw))) for draw in range(4)]
    for _ in range(2):
        groups = engine.generate(tasks, 8, Sampling(40, temperature=0.9, ignore_eos=True), NoiseKey(2, 3))
        assert engine._use_graphs, "no capture failed"
        answers = [answer for group in groups for answer in group]
        of_prompt = [place for place, group in enumerate(groups) for _ in group]
        responses = [answer.token_ids for answer in answers]
        mask = torch.ones(sum(map(len, responses)))
        batch = TokenBatch.build([task.prompt_ids for task in tasks], responses, of_prompt, {"mask": mask})
        row = PackedRow.build(batch, torch.device("cuda"))
        with torch.no_grad(), attention_context(row.attention):
            theirs = TokenLogprobs(model)(row, 0.9).cpu()
        gap = (torch.tensor([each for answer in answers for each in answer.logprobs]) - theirs).abs()
        print(f"mean of exp|difference| {gap.exp().mean():.4f}, median {gap.median():.1e}")
        assert gap.exp().mean() <= 1.1
        with torch.no_grad():
            for layer in model.get_decoder().layers:  # the next call uses the new weights
                layer.self_attn.kv_b_proj.weight.mul_(-0.7)
