"""The sampler's log-probabilities are the trainer's: same modules, other attention, other batches.

Three judges: the trainer itself, a packed forward pass written out here, and `transformers` with its own eager attention on one
sequence at a time.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.attention_interface import attention_context
from posttrain.policy.attention import PackedAttention, Segment
from posttrain.policy.head import OutputHead
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch

CPU = torch.device("cpu")
TOLERANCE = 1e-5
TEMPERATURE = 0.8
NUM_SAMPLES = 3
# top-p and top-k choose among tokens; they do not enter the log-probability.
SAMPLING = Sampling(18, temperature=TEMPERATURE, top_k=40, top_p=0.97, stop_token_ids=(11, 23, 42, 57))
# Small pages and batches: shared pages, copies, members that leave and join while others decode.
SETTINGS = NativeSettings(page_size=4, max_batch_size=5, max_prefill_tokens=16)


def make_tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (6, 20, 8, 1)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def sample(model: nn.Module, settings: NativeSettings = SETTINGS) -> list[list[Completion]]:
    completions = NativeEngine(model, byte_tokenizer(), settings).generate(
        make_tasks(), NUM_SAMPLES, SAMPLING, NoiseKey(4, 2)
    )
    lengths = {len(completion.token_ids) for group in completions for completion in group}
    assert len(lengths) > 1, "some end early, or nobody would ever leave the batch"
    return completions


def sampled_logprobs(completions: list[list[Completion]]) -> Tensor:
    return torch.tensor([logprob for group in completions for c in group for logprob in c.logprobs])


@torch.no_grad()
def trainer_logprobs(model: nn.Module, completions: list[list[Completion]]) -> Tensor:
    responses = [completion.token_ids for group in completions for completion in group]
    mask = torch.ones(sum(len(response) for response in responses))
    prompt_of = [prompt for prompt, group in enumerate(completions) for _ in group]
    batch = TokenBatch.build([task.prompt_ids for task in make_tasks()], responses, prompt_of, {"mask": mask})
    row = PackedRow.build(batch, CPU)
    with attention_context(row.attention):
        return TokenLogprobs(model)(row, TEMPERATURE)


@torch.no_grad()
def packed_logprobs(model: nn.Module, completions: list[list[Completion]]) -> Tensor:
    """Every prompt and every whole response in one row, without any code of the trainer but the attention."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    predicts: list[tuple[int, int]] = []  # place in the row -> token that follows
    for task, group in zip(make_tasks(), completions, strict=True):
        start, end = len(ids), len(ids) + len(task.prompt_ids)
        ids += task.prompt_ids
        positions += range(end - start)
        segments.append(Segment(start, end))
        for completion in group:
            at = len(ids)
            ids += completion.token_ids
            positions += range(end - start, end - start + len(completion.token_ids))
            segments.append(Segment(at, len(ids), start, end))
            places = [end - 1, *range(at, len(ids) - 1)]
            predicts += zip(places, completion.token_ids, strict=True)
    head = OutputHead(model)
    with attention_context(PackedAttention(segments, CPU)):
        hidden = head.decoder(
            input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=False
        ).last_hidden_state[0]
    places, tokens = torch.tensor(predicts).T
    logprobs = (head.logits(hidden[places]).float() / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1)


@torch.no_grad()
def eager_logprobs(model: nn.Module, completions: list[list[Completion]]) -> Tensor:
    pieces = []
    for task, group in zip(make_tasks(), completions, strict=True):
        for completion in group:
            ids = torch.tensor([task.prompt_ids + completion.token_ids])
            logits = model(ids).logits[0, len(task.prompt_ids) - 1 : -1]
            logprobs = (logits.float() / TEMPERATURE).log_softmax(-1)
            pieces.append(logprobs.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1))
    return torch.cat(pieces)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers(family: str) -> None:
    model = tiny_model(family)
    completions = sample(model)
    ours = sampled_logprobs(completions)
    assert ours.min() < -1, "logits that are nearly one-hot would prove little"
    for name, theirs in {
        "the trainer": trainer_logprobs(model, completions),
        "a packed row": packed_logprobs(model, completions),
        "eager attention": eager_logprobs(tiny_model(family, attention="eager"), completions),
    }.items():
        difference = (ours - theirs).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: {difference}"


def test_a_padded_vocabulary_has_the_trainers_logprobs() -> None:
    model = tiny_model("llama", vocab_size=400)  # 140 rows of the head have no token
    completions = sample(model)
    assert (sampled_logprobs(completions) - trainer_logprobs(model, completions)).abs().max() <= TOLERANCE


def test_with_adapters_sampled_logprobs_are_the_trainers() -> None:
    torch.manual_seed(1)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3)
    adapted = get_peft_model(tiny_model("qwen3"), config).train()
    completions = sample(adapted)
    ours = sampled_logprobs(completions)
    adapted.eval()  # the trainer's side without dropout; the sampler has turned it off by itself
    assert (ours - trainer_logprobs(adapted, completions)).abs().max() <= TOLERANCE
    base = eager_logprobs(tiny_model("qwen3", attention="eager"), completions)
    assert (ours - base).abs().max() > 0.1, "the adapters took part"


def test_after_running_out_of_pages_sampled_logprobs_are_the_trainers() -> None:
    model = tiny_model("gemma3")
    few_pages = NativeSettings(page_size=4, max_batch_size=12, kv_cache_gib=40e3 / 2**30)
    engine = NativeEngine(model, byte_tokenizer(), few_pages)
    completions = engine.generate(make_tasks(), NUM_SAMPLES, SAMPLING, NoiseKey(4, 2))
    assert engine.num_preemptions > 0
    assert (sampled_logprobs(completions) - trainer_logprobs(model, completions)).abs().max() <= TOLERANCE


def test_in_bf16_sampler_and_trainer_agree_to_the_rounding_of_bf16() -> None:
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    completions = sample(model)
    difference = (sampled_logprobs(completions) - trainer_logprobs(model, completions)).abs()
    assert difference.exp().mean() <= 1.02
