"""Decoding with drafts on a GPU: the tokens of decoding without, in CUDA graphs that are replayed, and its kernels."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from kernel_references import assert_drafts_like_torch
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.speculation import DrawnWithDrafts, Speculation
from posttrain.types import Completion, NoiseKey, Sampling, Task

TOKENIZER = byte_tokenizer()
KEY = NoiseKey(2, 3)
# At a low temperature a random model repeats itself: many drafts are right.
SAMPLING = Sampling(60, temperature=0.2, stop_token_ids=tuple(range(0, VOCAB_SIZE, 60)))
NUM_SAMPLES = 6
WIDE = {"hidden_size": 256, "intermediate_size": 528, "num_attention_heads": 8, "head_dim": 32}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    read = Speculation.read

    def counting(self: Speculation, drawn: DrawnWithDrafts) -> list[list[tuple[int, float]]]:
        several = read(self, drawn)
        counts.extend(map(len, several))
        return several

    monkeypatch.setattr(Speculation, "read", counting)
    return counts


def make_tasks(count: int = 6) -> list[Task]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB_SIZE, (1 + draw % 20,), generator=generator) for draw in range(count)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def engine_of(model: nn.Module, num_drafts: Any, **settings: Any) -> NativeEngine:
    return NativeEngine(model, TOKENIZER, NativeSettings(num_speculative_tokens=num_drafts, **settings))


def tokens(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in completions]


@pytest.mark.parametrize("seed", range(6))
def test_drafting_kernels_equal_torch(seed: int) -> None:
    assert_drafts_like_torch(seed, torch.device("cuda"))


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3", "gemma2"])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_fp32_tokens_equal_those_without_drafts(family: str, num_drafts: int, counted: list[int]) -> None:
    model = tiny_model(family).cuda()
    expected = engine_of(model, 0, page_size=4).generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)
    engine = engine_of(model, num_drafts, page_size=4)
    for _ in range(2):  # captured, then replayed
        found = engine.generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)
        assert tokens(found) == tokens(expected)
        for one, other in zip(found, expected, strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
    assert max(counted) > 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 7}], ids=str)
def test_other_ways_to_draw(sampling: dict[str, Any]) -> None:
    model, how = tiny_model("llama").cuda(), Sampling(40, **sampling)
    expected = engine_of(model, 0).generate(make_tasks(), NUM_SAMPLES, how, KEY)
    assert tokens(engine_of(model, 4).generate(make_tasks(), NUM_SAMPLES, how, KEY)) == tokens(expected)


def test_a_small_cache_and_batches_change_no_token(counted: list[int]) -> None:
    model = tiny_model("llama").cuda()
    expected = engine_of(model, 0).generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)
    page_bytes = 4 * 2 * 2 * 2 * 8 * 4
    for settings in ({"max_batch_size": 5}, {"page_size": 4, "kv_cache_gib": 60 * page_bytes / 2**30}):
        assert tokens(engine_of(model, 3, **settings).generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)) == tokens(
            expected
        )
    assert counted


def test_auto_changes_no_token_whatever_it_decides(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    model = tiny_model("llama").cuda()
    sampling = Sampling(300, temperature=0.2, ignore_eos=True)
    expected = engine_of(model, 0).generate(make_tasks(3), NUM_SAMPLES, sampling, KEY)
    engine = engine_of(model, "auto")
    assert tokens(engine.generate(make_tasks(3), NUM_SAMPLES, sampling, KEY)) == tokens(expected)
    assert counted, "drafts are tried"


def test_auto_is_off_in_deterministic_runs() -> None:
    engine = engine_of(tiny_model("llama").cuda(), "auto", deterministic=True)
    engine.generate(make_tasks(2), 2, Sampling(4), KEY)
    assert engine._workspace is not None
    assert engine._workspace.speculation is None


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_bf16_and_fp8_tokens_are_equal_to_rounding(precision: str, counted: list[int]) -> None:
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 matrix units")
    model = tiny_model("llama", dtype=torch.bfloat16, **WIDE).cuda()
    expected = engine_of(model, 0, precision=precision).generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)
    drafted = engine_of(model, 5, precision=precision).generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)
    other_batch = engine_of(model, 0, precision=precision, max_batch_size=5)
    rounded = other_batch.generate(make_tasks(), NUM_SAMPLES, SAMPLING, KEY)
    gaps, gaps_of_rounding = _common_gaps(drafted, expected), _common_gaps(rounded, expected)
    assert len(gaps) >= 0.5 * len(gaps_of_rounding), "answers part no earlier than by rounding"
    assert statistics.fmean(gaps) <= 2 * statistics.fmean(gaps_of_rounding) + 0.02
    assert max(counted) > 1


def _common_gaps(ours: list[list[Completion]], theirs: list[list[Completion]]) -> list[float]:
    """Differences of log-probabilities of the tokens that two answers have in common from the beginning."""
    gaps = []
    for group, other in zip(ours, theirs, strict=True):
        for a, b in zip(group, other, strict=True):
            pairs = zip(a.token_ids, b.token_ids, strict=False)
            common = next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
            gaps += [abs(x - y) for x, y in zip(a.logprobs[:common], b.logprobs[:common], strict=True)]
    return gaps
