"""Rotation into the cache and the draw of tokens, on a GPU: against torch's operators and the torch sampler."""

from __future__ import annotations

import pytest
import torch
from kernel_references import assert_steps_like_torch, chi_square_excess, torch_norm, torch_rotation
from torch import Tensor

from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.sampler import TokenSampler
from posttrain.types import Sampling

pytest.importorskip("triton")
NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def projections(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, rotated: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(heads)
    product = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=generator).to("cuda", dtype)
    query, key, value = product.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    angles = torch.randn(rows, rotated // 2, generator=generator).mul(3).cuda()
    angles = torch.cat((angles, angles), dim=1)
    cache = torch.full((2, rows, 16, kv_heads, dim), NAN, dtype=dtype, device="cuda")
    slots = torch.randperm(rows * 16, generator=generator)[:rows]
    slots[rows // 2] = -1
    return {
        "query": query, "key": key, "value": value, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype),
        "key_cache": cache[0], "value_cache": cache[1], "slots": slots.cuda(),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("angles_in_fp32", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(32, 8, 128, 128), (9, 3, 64, 64), (4, 4, 80, 32), (8, 1, 256, 256)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_rotation_has_the_bits_of_torch(
    heads: int, kv_heads: int, dim: int, rotated: int, dtype: torch.dtype, angles_in_fp32: bool, in_place: bool
) -> None:
    from posttrain.engines.native import kernels

    given = projections(65, heads, kv_heads, dim, dtype, rotated)
    if angles_in_fp32:
        given |= {"cos": given["cos"].float() * 1.001, "sin": given["sin"].float() * 1.001}
    query, key = given["query"].unflatten(1, (heads, dim)).clone(), given["key"].unflatten(1, (kv_heads, dim)).clone()
    expected_query = torch_rotation(query, given["cos"], given["sin"]).to(dtype)
    expected_key = torch_rotation(key, given["cos"], given["sin"]).to(dtype)
    out = kernels.write_kv_rope(**given, out=given["query"] if in_place else None)
    assert torch.equal(out, expected_query)
    kept = given["slots"] >= 0
    keys, values = given["key_cache"].flatten(0, 1), given["value_cache"].flatten(0, 1)
    assert torch.equal(keys[given["slots"][kept]], expected_key[kept])
    assert torch.equal(values[given["slots"][kept]], given["value"].unflatten(1, (kv_heads, dim))[kept])
    written = torch.zeros(len(keys), dtype=torch.bool, device="cuda")
    written[given["slots"][kept]] = True
    assert keys[~written].isnan().all()
    assert values[~written].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [False, True], ids=["weight", "1 + weight"])
def test_heads_are_normed_before_the_rotation(dtype: torch.dtype, offset: bool) -> None:
    from posttrain.engines.native import kernels

    given = projections(40, 16, 8, 128, dtype, 128)
    weights = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    out = kernels.write_kv_rope(**given, query_norm=weights[0], key_norm=weights[1], norm_offset=offset)
    expected = torch_rotation(
        torch_norm(given["query"].unflatten(1, (16, 128)), weights[0], 1e-6, offset), given["cos"], given["sin"]
    )
    if dtype != torch.float32:
        assert (out == expected).float().mean() > 0.99
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


# -- drawing -----------------------------------------------------------------------------------------------------------


def keys(rows: int) -> tuple[Tensor, Tensor]:
    sequence_keys = torch.tensor([sequence_key(11, 0, 3, sample) for sample in range(rows)])
    return sequence_keys.cuda(), (torch.arange(rows) % 5).cuda()


def at_temperature(temperature: float, rows: int) -> Tensor:
    return torch.full((rows,), TokenSampler(Sampling(1, temperature), 1).inverse_temperature, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "vocab_size", "temperature"),
    [(49_152, 49_152, 1.0), (128_256, 128_256, 0.7), (151_936, 151_669, 1.0), (50_257, 50_257, 1.2), (33, 30, 1.0)],
)
def test_draws_equal_the_torch_sampler(width: int, vocab_size: int, temperature: float, dtype: torch.dtype) -> None:
    from posttrain.engines.native import kernels

    rows = 300
    generator = torch.Generator(device="cuda").manual_seed(width)
    logits = (torch.randn(rows, width, device="cuda", generator=generator) * 3).to(dtype)
    # On a CPU the sampler is plain torch.
    sampler = TokenSampler(Sampling(1, temperature=temperature), vocab_size)
    expected, expected_logprobs = (x.cuda() for x in sampler.draw(logits.cpu(), *(x.cpu() for x in keys(rows))))
    tokens, logprobs = kernels.sample_rows(
        logits, *keys(rows), at_temperature(temperature, rows), vocab_size=vocab_size
    )
    # At most a near-tie may go the other way.
    assert (tokens != expected).sum() <= 1
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], atol=2e-5, rtol=1e-5)


def test_greedy_is_the_argmax_of_the_vocabulary() -> None:
    from posttrain.engines.native import kernels

    logits = torch.randn(200, 128_256, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    tokens, logprobs = kernels.sample_rows(logits, *keys(200), at_temperature(0.0, 200), vocab_size=128_000)
    assert torch.equal(tokens, logits[:, :128_000].argmax(-1))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-5, rtol=1e-5)


def test_each_row_is_drawn_at_its_own_temperature() -> None:
    """The bits of a draw in which all rows have that temperature."""
    from posttrain.engines.native import kernels

    temperatures, rows = (0.0, 0.3, 1.0, 1.7), 240
    logits = torch.randn(rows, 128_256, device="cuda", generator=torch.Generator(device="cuda").manual_seed(2)) * 3
    mixed = torch.stack([at_temperature(temperatures[row % 4], 1)[0] for row in range(rows)])
    tokens, logprobs = kernels.sample_rows(logits, *keys(rows), mixed, vocab_size=128_000)
    for place, temperature in enumerate(temperatures):
        alike, expected = kernels.sample_rows(
            logits, *keys(rows), at_temperature(temperature, rows), vocab_size=128_000
        )
        assert torch.equal(tokens[place::4], alike[place::4])
        assert torch.equal(logprobs[place::4], expected[place::4])


@pytest.mark.parametrize("vocab_size", [64, 1000, 5_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_softmax(vocab_size: int, temperature: float) -> None:
    from posttrain.engines.native import kernels

    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul(2).cuda()
    rows = 60_000
    sequence_keys = torch.tensor([sequence_key(7, 0, 0, sample) for sample in range(rows)]).cuda()
    tokens, _ = kernels.sample_rows(
        logits.expand(rows, -1), sequence_keys, torch.zeros_like(sequence_keys), at_temperature(temperature, rows),
        vocab_size=vocab_size,
    )  # fmt: skip
    assert chi_square_excess(tokens, (logits / temperature).softmax(0)) < 5
    assert chi_square_excess(tokens, (logits / (temperature * 1.1)).softmax(0)) > 20


def test_nan_logits_give_nan_logprobs() -> None:
    from posttrain.engines.native import kernels

    logits = torch.zeros(4, 128_256, device="cuda", dtype=torch.bfloat16)
    logits[0, 77_777], logits[1], logits[2, 5] = NAN, NAN, float("inf")
    for temperature in (0.0, 1.0):
        tokens, logprobs = kernels.sample_rows(logits, *keys(4), at_temperature(temperature, 4), vocab_size=128_256)
        assert logprobs.isnan().tolist() == [True, True, True, False]
        assert ((tokens >= 0) & (tokens < 128_256)).all()


@pytest.mark.parametrize("rows", [0, 1, 5, 128, 300])
def test_stepping_kernels_equal_torch(rows: int) -> None:
    from posttrain.engines.native import kernels

    assert_steps_like_torch(kernels, rows, "cuda")
