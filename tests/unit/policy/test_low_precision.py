"""Numbers in fewer bits: rounding by chance is right on average and keyed, 8-bit codes keep what Adam needs."""

import math

import pytest
import torch
from torch import Tensor

from posttrain.policy.optimizer.low_precision import (
    block_size,
    decode_first_moment,
    decode_second_moment,
    encode_first_moment,
    encode_second_moment,
    noise_key,
    random_words,
    round_to_bf16,
)


def words(shape: tuple[int, ...], *key: int | str, start: int = 0) -> Tensor:
    index = start + torch.arange(math.prod(shape)).view(shape)
    return random_words(torch.tensor(noise_key(*key)), index)


# -- noise -------------------------------------------------------------------------------------------------------------


def test_every_bit_of_a_word_is_a_fair_coin() -> None:
    count = 2**18
    drawn = words((count,), "bits")
    assert drawn.dtype == torch.int32
    for bit in range(32):
        share = float(((drawn >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(count), f"bit {bit}"


def test_words_of_neighbours_and_of_neighbouring_keys_are_unrelated() -> None:
    count = 2**16
    one = words((count,), 0, "a", 1).double()
    others = {
        "the next index": words((count,), 0, "a", 1, start=1),
        "the next step": words((count,), 0, "a", 2),
        "another parameter": words((count,), 0, "b", 1),
        "another seed": words((count,), 1, "a", 1),
        "4 billion numbers further": words((count,), 0, "a", 1, start=2**32),
    }
    for what, other in others.items():
        correlation = float(torch.corrcoef(torch.stack([one, other.double()]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(count), what


def test_a_word_depends_on_its_key_and_index_alone() -> None:
    whole = words((1000,), 7)
    assert torch.equal(words((300,), 7, start=700), whole[700:])


# -- bf16 --------------------------------------------------------------------------------------------------------------


def test_stochastic_rounding_to_bf16_is_unbiased() -> None:
    values = torch.tensor([1.0 + 2**-10, 3.14159, -2.71828, 1e-30, -6.02e23, 0.3])
    count = 2**16
    rounded = round_to_bf16(values.repeat(count, 1), words((count, len(values)), "mean")).double()
    exact = values.double()
    spacing = 2.0 ** (torch.floor(torch.log2(exact.abs())) - 7)
    error = (rounded.mean(0) - exact).abs() / spacing
    assert (error < 5 * 0.5 / math.sqrt(count)).all(), error
    # …and each is one of the two neighbours.
    assert ((rounded - exact).abs() < spacing).all()


def test_what_bf16_can_hold_is_not_changed() -> None:
    values = torch.cat([torch.randn(10_000).bfloat16().float(), torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf])])
    assert torch.equal(round_to_bf16(values, words(tuple(values.shape), 0)).float(), values)
    assert round_to_bf16(torch.tensor([math.nan]), words((1,), 0)).isnan().all()


def test_a_slow_decay_happens_where_rounding_to_the_nearest_would_stand_still() -> None:
    nearest = by_chance = torch.ones(4096)
    for step in range(700):
        nearest = (nearest * 0.999).bfloat16().float()
        by_chance = round_to_bf16(by_chance * 0.999, words((4096,), step)).float()
    assert float(nearest.mean()) == 1.0
    assert float(by_chance.mean()) == pytest.approx(0.999**700, rel=0.01)


# -- 8 bits ------------------------------------------------------------------------------------------------------------


def blocks(seed: int = 0, count: int = 64, size: int = 256) -> Tensor:
    """Numbers over some orders of magnitude, as moments are, and one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, size, generator=generator) * torch.exp(
        2 * torch.randn(count, size, generator=generator)
    )
    values[3] = 0
    return values


def test_first_moments_in_8_bits_are_near_and_right_on_average() -> None:
    values = blocks()
    total = torch.zeros_like(values)
    for draw in range(400):
        codes, scales = encode_first_moment(values, words(tuple(values.shape), draw))
        assert codes.dtype == torch.int8
        total += decode_first_moment(codes, scales)
    scale = values.abs().amax(-1, keepdim=True)
    assert torch.equal(scales, scale.squeeze(-1))
    # The gap between two codes is at most 2/127 of the scale.
    assert ((decode_first_moment(codes, scales) - values).abs() <= scale * 2 / 127 + 1e-12).all()
    assert ((total / 400 - values).abs() <= scale * 5 * (1 / 127) / math.sqrt(400) + 1e-6 * scale).all()
    assert (decode_first_moment(codes, scales)[3] == 0).all()


def test_the_largest_of_a_block_is_exact() -> None:
    values = blocks()
    row = values.abs().argmax(-1, keepdim=True)
    first = decode_first_moment(*encode_first_moment(values, words(tuple(values.shape), 0)))
    assert torch.equal(first.gather(-1, row), values.gather(-1, row))
    second = decode_second_moment(*encode_second_moment(values.square(), words(tuple(values.shape), 0)))
    assert torch.equal(second.gather(-1, row), values.square().gather(-1, row))


def test_second_moments_in_8_bits_are_right_on_average_and_never_zero() -> None:
    values = blocks().square()
    total = torch.zeros_like(values)
    for draw in range(400):
        codes, scales = encode_second_moment(values, words(tuple(values.shape), draw))
        assert codes.dtype == torch.uint8
        decoded = decode_second_moment(codes, scales)
        total += decoded
    positive = values > 0
    assert (decoded[positive] > 0).all(), "it is a divisor"
    assert (decoded[3] == 0).all(), "of a block of zeros all is zero"
    share = values / values.amax(-1, keepdim=True).clamp(min=1e-30)
    large = positive & (share > 1e-6)
    relative = (total / 400 - values).abs()[large] / values[large]
    # The relative gap between two codes at share s is about 4/(256·s^¼).
    allowed = 5 * (2 / (256 * share[large] ** 0.25)) / math.sqrt(400)
    assert (relative <= allowed).float().mean() > 0.999
    tiny = positive & (share < 256.0**-4)
    assert (decoded[tiny] >= values[tiny]).all(), "what has no code is stored too large: shorter steps, not longer ones"


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((4096, 14336), 256),
        ((10, 896), 224),
        ((10, 100), 100),
        ((4096, 8), 8),
        ((3, 2, 512), 256),
        ((10, 509), None),  # a prime: no block of a useful size
        ((4096,), None),
        ((), None),
    ],
)
def test_blocks_divide_the_rows(shape: tuple[int, ...], size: int | None) -> None:
    assert block_size(shape) == size
