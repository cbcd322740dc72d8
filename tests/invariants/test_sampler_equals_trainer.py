"""The sampler's log-probabilities are the trainer's: same modules, other attention, other batches.

Three references: the trainer itself, a packed forward pass written out here, and `transformers` with its own eager
attention on one sequence at a time. That they are the same function is tested in float64; how far float32 and bf16 may
separate them is tested against the size of their rounding.
"""

from __future__ import annotations

import pytest
import torch
from float64 import TOLERANCE
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, LOGPROB_ROUNDING, RECURRENT_FAMILIES, VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.attention_interface import attention_context
from posttrain.policy.head import OutputHead
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedAttention, PackedRow, Segment
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch

CPU = torch.device("cpu")
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
    assert len(lengths) > 1, "some must end early, so that the batch shrinks while others decode"
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


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def references(model: nn.Module, family: str, completions: list[list[Completion]]) -> dict[str, Tensor]:
    eager = tiny_model(family, attention="eager", dtype=model.dtype)
    return {
        "trainer": trainer_logprobs(model, completions),
        "packed row": packed_logprobs(model, completions),
        "eager attention": eager_logprobs(eager, completions),
    }


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_the_trainers(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    completions = sample(model)
    ours = sampled_logprobs(completions)
    assert ours.min() < -1, "logits that are nearly one-hot would prove little"
    for name, theirs in references(model, family, completions).items():
        assert theirs.dtype == torch.float64
        in_fp32 = family in RECURRENT_FAMILIES and name == "eager attention"
        assert largest_difference(ours, theirs) <= (LOGPROB_ROUNDING if in_fp32 else TOLERANCE), name


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_in_float32_differ_by_rounding_only(family: str) -> None:
    model = tiny_model(family)
    completions = sample(model)
    ours = sampled_logprobs(completions)
    # Sums on the way from one token to its log-probability: in each layer three projections to and one from attention,
    # its scores and weighted values, and the MLP; then the head. n additions err by at most n * eps of the largest
    # partial sum, which for scores is about the span between the most and the least probable token.
    config, longest = (
        model.config.get_text_config(),
        max(len(task.prompt_ids) for task in make_tasks()) + SAMPLING.max_new_tokens,
    )
    head_dim = config.hidden_size // 2  # no family has wider heads
    per_layer = 3 * config.hidden_size + head_dim + longest + config.intermediate_size
    additions = config.num_hidden_layers * per_layer + config.hidden_size
    bound = torch.finfo(torch.float32).eps * additions * float(ours.abs().max())
    assert bound < 1e-3
    for name, theirs in references(model, family, completions).items():
        assert largest_difference(ours, theirs) <= bound, name


@pytest.mark.usefixtures("in_float64")
def test_sampled_logprobs_with_a_padded_vocabulary_equal_the_trainers() -> None:
    model = tiny_model("llama", vocab_size=400, dtype=torch.float64)  # 140 rows of the head have no token
    completions = sample(model)
    assert largest_difference(sampled_logprobs(completions), trainer_logprobs(model, completions)) <= TOLERANCE


@pytest.mark.usefixtures("in_float64")
def test_sampled_logprobs_with_adapters_equal_the_trainers() -> None:
    torch.manual_seed(1)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3)
    adapted = get_peft_model(tiny_model("qwen3", dtype=torch.float64), config, autocast_adapter_dtype=False).train()
    completions = sample(adapted)
    ours = sampled_logprobs(completions)
    adapted.eval()  # the trainer's side without dropout; the sampler turns it off itself
    assert largest_difference(ours, trainer_logprobs(adapted, completions)) <= TOLERANCE
    base = eager_logprobs(tiny_model("qwen3", attention="eager", dtype=torch.float64), completions)
    assert largest_difference(ours, base) > 0.1, "the adapters took part"


@pytest.mark.usefixtures("in_float64")
def test_sampled_logprobs_after_preemption_equal_the_trainers() -> None:
    model = tiny_model("gemma3", dtype=torch.float64)
    few_pages = NativeSettings(page_size=4, max_batch_size=12, kv_cache_gib=80e3 / 2**30)
    engine = NativeEngine(model, byte_tokenizer(), few_pages)
    completions = engine.generate(make_tasks(), NUM_SAMPLES, SAMPLING, NoiseKey(4, 2))
    assert engine.num_preemptions > 0
    assert largest_difference(sampled_logprobs(completions), trainer_logprobs(model, completions)) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "falcon-h1", "gpt-oss"])
def test_sampler_and_trainer_in_bf16_agree_to_the_rounding_of_bf16(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    completions = sample(model)
    difference = (sampled_logprobs(completions) - trainer_logprobs(model, completions)).abs()
    assert difference.exp().mean() <= 1.02
