"""Drawing tokens: the distribution, the candidates, and the log-probability that goes with a token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_references import chi_square_excess
from torch import Tensor

from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.sampler import TokenSampler, block_size
from posttrain.types import Sampling


def keys(rows: int, draw: int = 0) -> tuple[Tensor, Tensor]:
    """Noise keys of `rows` samples of one task, all at their first token."""
    first = torch.zeros(rows, dtype=torch.long)
    return torch.tensor([sequence_key(11, 0, draw, sample) for sample in range(rows)]), first


def draw_many(logits: Tensor, sampling: Sampling, rows: int, vocab_size: int | None = None) -> Tensor:
    sampler = TokenSampler(sampling, vocab_size or len(logits))
    return sampler.draw(logits.expand(rows, -1), *keys(rows))[0]


@pytest.mark.parametrize("vocab_size", [2, 5, 64, 257, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_draws_follow_the_softmax(vocab_size: int, temperature: float) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    tokens = draw_many(logits, Sampling(1, temperature=temperature), rows=20_000)
    assert chi_square_excess(tokens, (logits / temperature).softmax(0)) < 5


def test_chi_square_notices_a_wrong_temperature() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 2
    tokens = draw_many(logits, Sampling(1, temperature=1.0), rows=20_000)
    assert chi_square_excess(tokens, (logits / 1.1).softmax(0)) > 20


def test_tokens_of_one_sample_follow_the_softmax() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 2
    sequence_keys, _ = keys(1)
    sampler = TokenSampler(Sampling(1), 300)
    tokens, _ = sampler.draw(logits.expand(20_000, -1), sequence_keys.expand(20_000), torch.arange(20_000))
    assert chi_square_excess(tokens, logits.softmax(0)) < 5


def test_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2)) * 3
    sequence_keys, index = keys(40)
    sampler = TokenSampler(Sampling(1, temperature=0.9), 500)
    together, logprobs = sampler.draw(logits, sequence_keys, index)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    shuffled, _ = sampler.draw(logits[order], sequence_keys[order], index[order])
    assert torch.equal(shuffled, together[order])
    for row in range(40):
        alone, logprob = sampler.draw(logits[row : row + 1], sequence_keys[row : row + 1], index[row : row + 1])
        assert alone.item() == together[row].item()
        assert logprob.item() == pytest.approx(logprobs[row].item(), abs=1e-6)


def test_rounding_of_the_logits_hardly_ever_changes_a_token() -> None:
    # 60 % of the mass lies in a tail of tokens of 1e-5 each: what shifts a distribution function shifts all of them.
    logits = torch.cat([torch.tensor([9.0, 8.0, 7.0]), torch.zeros(20_000)])
    noise = torch.randn(2_000, len(logits), generator=torch.Generator().manual_seed(4)) * 1e-5
    sequence_keys, index = keys(2_000)
    sampler = TokenSampler(Sampling(1), len(logits))
    exact, _ = sampler.draw(logits.expand(2_000, -1), sequence_keys, index)
    rounded, _ = sampler.draw(logits + noise, sequence_keys, index)
    assert (exact > 2).float().mean() > 0.4
    assert (exact != rounded).sum() <= 1


def test_greedy_takes_the_best_token_of_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 9.0], [5.0, 3.0, 1.0, 9.0]])
    tokens, logprobs = TokenSampler(Sampling(1, temperature=0.0), vocab_size=3).draw(logits, *keys(2))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], tokens])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabulary_padding_is_never_drawn(temperature: float) -> None:
    logits = torch.zeros(40)
    logits[30:] = 20.0
    tokens = draw_many(logits, Sampling(1, temperature=temperature), rows=2_000, vocab_size=30)
    assert tokens.max().item() < 30


def slow_candidates(logits: Tensor, top_k: int, top_p: float) -> set[int]:
    order = logits.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    probabilities = logits[order].double().softmax(0).tolist()
    kept, mass = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probability
    return set(kept)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (0, 0.3), (0, 0.9), (8, 0.8), (500, 1.0), (50, 0.95)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_only_candidates_are_drawn_and_in_proportion(top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(5)) * 2
    tokens = draw_many(logits, Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p), rows=20_000)
    candidates = slow_candidates(logits / temperature, min(top_k, 60), top_p)
    assert set(tokens.tolist()) <= candidates
    allowed = torch.full((60,), float("-inf"))
    allowed[list(candidates)] = 0.0
    if len(candidates) > 1:
        assert chi_square_excess(tokens, (logits / temperature + allowed).softmax(0)) < 5


@pytest.mark.parametrize("spread", [0.01, 2.0])
def test_nucleus_of_a_large_vocabulary(spread: float) -> None:
    """A flat row has a nucleus larger than the first guess, a peaked one a small nucleus."""
    logits = torch.randn(5_000, generator=torch.Generator().manual_seed(6)) * spread
    tokens = draw_many(logits, Sampling(1, top_p=0.7), rows=1_000)
    assert set(tokens.tolist()) <= slow_candidates(logits, 0, 0.7)
    assert len(set(tokens.tolist())) > 10


def test_tokens_with_equal_scores_are_kept_together() -> None:
    tokens = draw_many(torch.tensor([1.0, 1.0, 1.0, 0.0]), Sampling(1, top_k=2), rows=3_000)
    assert set(tokens.tolist()) == {0, 1, 2}


@given(st.floats(0.1, 3.0), st.integers(0, 20), st.floats(0.05, 1.0), st.integers(2, 90))
def test_logprob_is_that_of_the_full_row(temperature: float, top_k: int, top_p: float, vocab_size: int) -> None:
    logits = torch.randn(7, 90, generator=torch.Generator().manual_seed(8)) * 3
    sampler = TokenSampler(Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p), vocab_size)
    tokens, logprobs = sampler.draw(logits, *keys(7))
    expected = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((200,), float("-inf"))
    logits[[3, 150]] = 1.0
    tokens = draw_many(logits, Sampling(1), rows=500)
    assert set(tokens.tolist()) == {3, 150}


def test_bf16_logits_are_sampled_in_fp32() -> None:
    logits = (torch.randn(4, 64, generator=torch.Generator().manual_seed(9)) * 4).bfloat16()
    tokens, logprobs = TokenSampler(Sampling(1), 64).draw(logits, *keys(4))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


@given(st.integers(1, 300_000))
def test_blocks_are_about_the_square_root_of_the_vocabulary(vocab_size: int) -> None:
    size = block_size(vocab_size)
    assert size * size >= vocab_size
    assert size * size <= 4 * vocab_size
