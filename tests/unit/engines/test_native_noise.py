"""Keyed noise: the right bits, the right distribution, and nothing but the key decides."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.engines.native.noise import gumbel, sequence_key, token_keys, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def slow_mix(x: int) -> int:
    """SplitMix64's finaliser with Python's unbounded integers."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def slow_uniform(seed: int, step: int, draw: int, sample: int, token: int, index: int) -> float:
    key = 0
    for part in (seed, step, draw, sample, token, index):
        key = slow_mix(key ^ ((part + 1) * GOLDEN & MASK))
    return ((key >> 12) + 0.5) / 2**52


def test_mixing_function_is_splitmix64() -> None:
    # The first outputs of the generator with seed 0, as published with it.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [slow_mix((n + 1) * GOLDEN & MASK) for n in range(3)] == published


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
    st.integers(0, 4096),
    st.integers(0, 10**5),
    st.integers(0, 2**41),
)
def test_tensor_arithmetic_equals_unbounded_integers(
    seed: int, step: int, draw: int, sample: int, token: int, index: int
) -> None:
    keys = token_keys(torch.tensor([sequence_key(seed, step, draw, sample)]), torch.tensor([token]))
    assert uniform(keys, torch.tensor([index])).item() == slow_uniform(seed, step, draw, sample, token, index)


def test_every_part_of_the_key_matters() -> None:
    base = (1, 2, 3, 4, 5, 6)
    variants = {base}
    for place in range(6):
        variants.add(tuple(value + (1 if at == place else 0) for at, value in enumerate(base)))
    variants.add((2, 1, 3, 4, 5, 6))
    assert len({slow_uniform(*key) for key in variants}) == len(variants)


def test_noise_of_a_row_does_not_depend_on_the_other_rows() -> None:
    sequence_keys = torch.tensor([sequence_key(0, 0, draw, sample) for draw in range(5) for sample in range(3)])
    index = torch.arange(15)
    columns = torch.arange(100)
    together = uniform(token_keys(sequence_keys, index)[:, None], columns)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    for row in order.tolist():
        alone = uniform(token_keys(sequence_keys[row : row + 1], index[row : row + 1])[:, None], columns)
        assert torch.equal(alone[0], together[row])


def test_uniforms_are_uniform_and_never_the_ends() -> None:
    keys = token_keys(torch.tensor([sequence_key(7, 0, 0, 0)]), torch.tensor([0]))
    values = uniform(keys, torch.arange(200_000))
    assert values.min() > 0
    assert values.max() < 1
    counts = torch.histc(values, bins=100, min=0, max=1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum().item()
    assert chi_square < 99 + 5 * math.sqrt(2 * 99)


def test_neighbouring_keys_are_uncorrelated() -> None:
    sequence_keys = torch.tensor([sequence_key(0, 0, 0, sample) for sample in range(2)])
    tokens = torch.arange(50_000)
    first = uniform(token_keys(sequence_keys[0], tokens), torch.tensor(0))
    for other in (
        uniform(token_keys(sequence_keys[1], tokens), torch.tensor(0)),  # another sample
        uniform(token_keys(sequence_keys[0], tokens + 1), torch.tensor(0)),  # the next token
        uniform(token_keys(sequence_keys[0], tokens), torch.tensor(1)),  # the next word of the vocabulary
    ):
        correlation = torch.corrcoef(torch.stack([first, other]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(50_000)


def test_gumbel_noise_has_the_moments_of_a_gumbel() -> None:
    keys = token_keys(torch.tensor([sequence_key(3, 1, 4, 1)]), torch.tensor([5]))
    values = gumbel(keys, torch.arange(200_000))
    assert torch.isfinite(values).all()
    assert abs(values.mean().item() - 0.5772157) < 0.015
    assert abs(values.var().item() - math.pi**2 / 6) < 0.04
