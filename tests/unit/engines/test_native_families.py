"""Families of models: greedy tokens equal those of `transformers.generate` with its own cache and eager attention."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from fused_references import trainer_logprobs
from tiny_models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, byte_tokenizer, randomise, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.errors import InputError
from posttrain.models.attention_interface import ATTENTION
from posttrain.policy.head import UnsupportedModelError
from posttrain.types import NoiseKey, Sampling, Task

NEW_TOKENS = 14
GREEDY = Sampling(NEW_TOKENS, temperature=0.0, ignore_eos=True)


def tasks() -> list[Task]:
    """Shorter and longer than a page and than the sliding window."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in (1, 4, 7, 21)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def phi3(attention: str, **extra: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=SLIDING_WINDOW, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.3, **extra,
    )  # fmt: skip
    return Phi3ForCausalLM._from_config(config, attn_implementation=attention).eval()


def assert_greedy_tokens_equal(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    engine = NativeEngine(ours, byte_tokenizer(), NativeSettings(page_size=4, max_batch_size=6))
    completions = engine.generate(tasks(), 2, GREEDY, NoiseKey(0, 0))
    seen: set[int] = set()
    for task, group in zip(tasks(), completions, strict=True):
        ids = torch.tensor([task.prompt_ids])
        full = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None,
            pad_token_id=0, use_cache=True,
        )  # fmt: skip
        expected = tuple(full[0, len(task.prompt_ids) :].tolist())
        assert [completion.token_ids for completion in group] == [expected, expected]
        seen.update(expected)
    assert len(seen) > 10, "the same token over and over would prove little"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str) -> None:
    # With random weights and tied embeddings a model repeats its last token: true, but too easy.
    untied = {"tie_word_embeddings": False}
    assert_greedy_tokens_equal(tiny_model(family, **untied), tiny_model(family, attention="eager", **untied))


# Without phi: torch's LayerNorm on a CPU takes no fp32 states beside weights in bf16.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phi"])
def test_logprobs_of_bf16_samples_are_those_of_the_trainer(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    engine = NativeEngine(model, byte_tokenizer(), NativeSettings(page_size=4, max_batch_size=6))
    groups = engine.generate(tasks(), 2, Sampling(NEW_TOKENS), NoiseKey(0, 0))
    answers = [answer for group in groups for answer in group]
    of_prompt = [place for place, group in enumerate(groups) for _ in group]
    prompts, responses = [task.prompt_ids for task in tasks()], [answer.token_ids for answer in answers]
    sampled = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    difference = (sampled - trainer_logprobs(model, prompts, responses, of_prompt).cpu()).abs()
    assert difference.exp().mean() <= 1.02


def test_greedy_tokens_equal_transformers_phi3() -> None:
    assert_greedy_tokens_equal(phi3(ATTENTION), phi3("eager"))


def test_models_with_an_unknown_recurrence_are_refused() -> None:
    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(config).eval()
    model.config._attn_implementation = ATTENTION
    engine = NativeEngine(model, byte_tokenizer())
    with pytest.raises(InputError, match="decays every number of its state"):
        engine.generate(tasks(), 1, GREEDY, NoiseKey(0, 0))


@pytest.mark.parametrize(
    ("family", "extra", "words"),
    [
        # Mamba of the first kind: a decay for every number of its state.
        ("jamba", {"num_experts": 1, "mamba_d_state": 8}, "decays every number of its state"),
        ("doge", {}, "doge: layer 0, DogeAttention, builds its own attention mask"),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 5}, r"config\.sliding_window is 5, and layer 0"),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 256}, None),  # as long as the context
    ],
)
def test_layers_with_state_beside_attention_are_refused(family: str, extra: dict[str, int], words: str | None) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    randomise(model, 0)
    with nullcontext() if words is None else pytest.raises(InputError, match=words):
        assert NativeEngine(model, byte_tokenizer()).generate(tasks(), 1, GREEDY, NoiseKey(0, 0))


def test_batch_dependent_rope_is_refused() -> None:
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": 32}  # fmt: skip
    model = phi3(ATTENTION, rope_parameters=rope, original_max_position_embeddings=32)
    engine = NativeEngine(model, byte_tokenizer())
    with pytest.raises(UnsupportedModelError, match=r"longer than 32 tokens; this call may reach 35"):
        engine.generate(tasks(), 1, GREEDY, NoiseKey(0, 0))
    assert engine.generate(tasks()[:3], 1, GREEDY, NoiseKey(0, 0))


def test_model_with_stock_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="load it with attn_implementation='posttrain'"):
        NativeEngine(tiny_model(attention="sdpa"), byte_tokenizer())
