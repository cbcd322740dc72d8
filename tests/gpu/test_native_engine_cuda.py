"""The native engine on a GPU: a CPU's samples, the trainer's log-probabilities in bf16, memory that comes back."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.noise import sequence_key, token_keys, uniform
from posttrain.engines.native.sampler import TokenSampler
from posttrain.models.attention_interface import attention_context
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.policy.parallel.fsdp import shard, whole_parameters
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch

TOKENIZER = byte_tokenizer()
KEY = NoiseKey(2, 3)
SAMPLING = Sampling(20, temperature=0.9, stop_token_ids=(11, 12, 13))
SETTINGS = NativeSettings(page_size=4, max_batch_size=7, max_prefill_tokens=16)


def make_tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (6, 20, 8, 1)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def trainer_logprobs(model: nn.Module, completions: list[list[Completion]], temperature: float) -> torch.Tensor:
    responses = [completion.token_ids for group in completions for completion in group]
    mask = torch.ones(sum(len(response) for response in responses))
    prompt_of = [prompt for prompt, group in enumerate(completions) for _ in group]
    batch = TokenBatch.build([task.prompt_ids for task in make_tasks()], responses, prompt_of, {"mask": mask})
    row = PackedRow.build(batch, torch.device("cuda"))
    with torch.no_grad(), attention_context(row.attention):
        return TokenLogprobs(model)(row, temperature).float().cpu()


def test_noise_is_the_same_bit_for_bit() -> None:
    keys = torch.tensor([sequence_key(1, 2, draw, 3) for draw in range(50)])
    index = torch.arange(50)
    columns = torch.arange(1000)
    cpu = uniform(token_keys(keys, index)[:, None], columns)
    cuda = uniform(token_keys(keys.cuda(), index.cuda())[:, None], columns.cuda())
    assert torch.equal(cpu, cuda.cpu())


@pytest.mark.parametrize(
    "sampling", [Sampling(1), Sampling(1, temperature=0.0), Sampling(1, top_k=20), Sampling(1, top_p=0.8)], ids=str
)
def test_equal_logits_give_equal_tokens(sampling: Sampling) -> None:
    logits = torch.randn(256, 5000, generator=torch.Generator().manual_seed(0)) * 3
    keys = torch.tensor([sequence_key(1, 2, 3, sample) for sample in range(256)])
    index = torch.arange(256)
    sampler = TokenSampler(sampling, 4990)
    tokens, logprobs = sampler.draw(logits, keys, index)
    on_gpu, gpu_logprobs = sampler.draw(logits.cuda(), keys.cuda(), index.cuda())
    assert (tokens != on_gpu.cpu()).sum() <= 1  # an exact tie to rounding is possible, two are not
    same = tokens == on_gpu.cpu()
    torch.testing.assert_close(gpu_logprobs.cpu()[same], logprobs[same], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2-sliding", "qwen3", "gemma", "gemma2", "gemma3", "gpt-oss", "deepseek-v3"]
)
def test_fp32_samples_equal_the_cpu(family: str) -> None:
    cpu = NativeEngine(tiny_model(family), TOKENIZER, SETTINGS).generate(make_tasks(), 3, SAMPLING, KEY)
    cuda = NativeEngine(tiny_model(family).cuda(), TOKENIZER, SETTINGS).generate(make_tasks(), 3, SAMPLING, KEY)
    for one, other in zip(cpu, cuda, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3", "gemma2", "gemma3"])
def test_bf16_logprobs_equal_the_trainers(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16).cuda()
    completions = NativeEngine(model, TOKENIZER, SETTINGS).generate(make_tasks(), 8, SAMPLING, KEY)
    ours = torch.tensor([logprob for group in completions for c in group for logprob in c.logprobs])
    difference = (ours - trainer_logprobs(model, completions, SAMPLING.temperature)).abs()
    assert difference.exp().mean() <= 1.02


def test_preemption_does_not_change_completions() -> None:
    model = tiny_model("llama").cuda()
    roomy = NativeEngine(model, TOKENIZER, SETTINGS).generate(make_tasks(), 3, SAMPLING, KEY)
    page_bytes = 4 * 2 * 2 * 2 * 8 * 4
    tight = NativeSettings(page_size=4, kv_cache_gib=16 * page_bytes / 2**30)
    engine = NativeEngine(model, TOKENIZER, tight)
    few = engine.generate(make_tasks(), 3, SAMPLING, KEY)
    assert engine.num_preemptions > 0
    assert [[c.token_ids for c in group] for group in few] == [[c.token_ids for c in group] for group in roomy]


def test_cache_memory_is_freed() -> None:
    model = tiny_model("llama").cuda()
    engine = NativeEngine(model, TOKENIZER)
    engine.generate(make_tasks(), 2, SAMPLING, KEY)
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine.generate(make_tasks(), 2, SAMPLING, KEY)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_sharded_model_is_captured_and_samples_the_same_tokens() -> None:
    """By FSDP over one rank, as on several GPUs that train. Parameters have other addresses in the second call."""
    plain = NativeEngine(tiny_model("llama").cuda(), TOKENIZER, SETTINGS).generate(make_tasks(), 3, SAMPLING, KEY)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model("llama").cuda()
        fuse_layers(model.get_decoder(), may_join=False)  # as a trainer does, before sharding
        shard(model, list(model.get_decoder().layers), init_device_mesh("cuda", (1,)))
        model._get_fsdp_state()._lazy_init()  # what a first forward pass does
        engine = NativeEngine(model, TOKENIZER, SETTINGS)
        for _ in range(2):
            with whole_parameters(model):
                found = engine.generate(make_tasks(), 3, SAMPLING, KEY)
            assert engine._use_graphs, "no capture failed"
            assert [[c.token_ids for c in group] for group in found] == [
                [c.token_ids for c in group] for group in plain
            ]
    finally:
        dist.destroy_process_group()
