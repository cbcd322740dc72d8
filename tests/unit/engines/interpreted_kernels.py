"""The kernels against slow references, in Triton's interpreter on a CPU. Run by `test_kernels_interpreted.py`, in a
process of its own: whether kernels are interpreted is decided when Triton is imported.

The interpreter has no matrix product and no correct rounding for bf16; fp16 is used instead, bf16 is tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_references import (
    CASES,
    SINKS,
    Case,
    assert_drafts_like_torch,
    assert_equal_to_rounding,
    assert_steps_like_torch,
    in_fp8,
    mend_interpreter,
    random_cache,
    slow_attention,
    torch_norm,
    torch_rotation,
)
from torch import Tensor

from posttrain.engines.native import kernels
from posttrain.engines.native import sampler as torch_sampler
from posttrain.engines.native.kernels import AttentionTile, DecodeShape, PrefixTiles, latent
from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.sampler import TokenSampler
from posttrain.types import Sampling

mend_interpreter()
NAN = float("nan")
# Small blocks: several to a short sequence.
TILE = AttentionTile(block=16, num_warps=4, num_stages=2)
SHORT = (1, 32, 51)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """numpy warns of -inf minus -inf in places that are masked afterwards."""
    with np.errstate(all="ignore"):
        yield


def poisoned(case: Case, dtype: torch.dtype) -> Tensor:
    return torch.full((len(case.lengths), case.heads, case.value_dim or case.dim), NAN, dtype=dtype)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_equals_reference(case: Case) -> None:
    case = replace(case, lengths=SHORT)
    cache = random_cache(case, torch.float32, "cpu")
    out = kernels.paged_attention(
        *cache.tensors, **case.options, out=poisoned(case, torch.float32), tile=TILE, splits=1
    )
    assert_equal_to_rounding(out, slow_attention(cache, **case.options))


@pytest.mark.parametrize("sinks", [(), SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 150])
def test_split_sequences_equal_reference(window: int | None, sinks: tuple[float, ...]) -> None:
    case = Case(heads=4, kv_heads=1, dim=32, lengths=(1, 128, 129, 300), window=window, sinks=sinks)
    cache = random_cache(case, torch.float32, "cpu")
    expected = slow_attention(cache, **case.options)
    for splits in (2, 4):
        out = kernels.paged_attention(*cache.tensors, **case.options, out=poisoned(case, torch.float32), splits=splits)
        assert_equal_to_rounding(out, expected)


def test_sizes_chosen_by_shape_give_the_same_result() -> None:
    case = Case(heads=4, kv_heads=1, dim=32, lengths=(300, 7), page_size=64)
    cache = random_cache(case, torch.float32, "cpu")
    assert kernels.num_splits(2, cache.table.shape[1] * 64, 132) == 2
    out = kernels.paged_attention(*cache.tensors, **case.options)
    assert_equal_to_rounding(out, slow_attention(cache, **case.options))


def test_half_precision_and_exact_weights() -> None:
    case = Case(heads=4, kv_heads=1, dim=64, lengths=(40, 90))
    cache = random_cache(case, torch.float16, "cpu")
    expected = slow_attention(cache, **case.options)
    errors = {}
    for exact in (False, True):
        tile = replace(TILE, exact_weights=exact)
        out = kernels.paged_attention(*cache.tensors, **case.options, out=poisoned(case, torch.float16), tile=tile)
        assert_equal_to_rounding(out, expected)
        errors[exact] = (out.double() - expected).abs().mean().item()
    assert errors[True] < 0.9 * errors[False]


def test_queries_may_be_a_view_of_a_wider_product() -> None:
    case = Case(heads=4, kv_heads=1, dim=32, lengths=(20, 3))
    cache = random_cache(case, torch.float32, "cpu")
    wide = torch.full((2, 4 * 32 + 64), NAN)
    wide[:, :128] = cache.query.flatten(1)
    out = kernels.paged_attention(wide[:, :128].unflatten(1, (4, 32)), *cache.tensors[1:], **case.options, tile=TILE)
    assert_equal_to_rounding(out, slow_attention(cache, **case.options))


def test_row_without_tokens_gives_zeros() -> None:
    case = Case(heads=2, kv_heads=1, dim=16, lengths=(5, 3))
    cache = random_cache(case, torch.float32, "cpu")
    cache.lengths[0] = 0
    for splits, sinks in ((1, None), (2, None), (1, torch.zeros(2)), (2, torch.zeros(2))):
        out = kernels.paged_attention(*cache.tensors, **case.options, sinks=sinks, splits=splits)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out[1].isfinite().all()


def test_unsupported_shapes_are_declined() -> None:
    query, pool = torch.zeros(1, 4, 64), torch.zeros(2, 16, 2, 64)
    assert kernels.supports(query, pool, pool)
    assert kernels.supports(query, pool, torch.zeros(2, 16, 2, 32))
    assert not kernels.supports(query, pool, pool[..., :32])  # values that are not contiguous
    assert not kernels.supports(query.half(), pool, pool)
    assert not kernels.supports(torch.zeros(1, 3, 64), pool, pool)
    assert not kernels.supports(torch.zeros(1, 4, 512), torch.zeros(2, 16, 2, 512), torch.zeros(2, 16, 2, 512))


LATENT_CASES = {
    "few heads, pages of four tokens": {"heads": 5, "rank": 32, "width": 48, "page_size": 4},
    "more heads than a program has": {"heads": 20, "rank": 48, "width": 64, "page_size": 16},
}


@pytest.mark.parametrize("case", LATENT_CASES.values(), ids=LATENT_CASES)
def test_latent_vectors_are_keys_and_values(case: dict[str, int]) -> None:
    """What runs before the kernel is used, with one piece to a sequence and with several."""
    assert latent.TRIAL.passes(torch.device("cpu"), torch.float16, **case)


@pytest.mark.parametrize("splits", [1, 8])
def test_a_key_that_is_read_at_the_wrong_place_fails_the_trial(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kernels.latent_attention

    def one_token_less(query: Tensor, keys: Tensor, rank: int, table: Tensor, lengths: Tensor, **how: Any) -> Tensor:
        return whole(query, keys, rank, table, lengths - int(how["splits"] == splits), **how)

    monkeypatch.setattr(latent, "latent_attention", one_token_less)
    case = {"heads": splits, "rank": 16, "width": 32, "page_size": 8}
    with pytest.warns(UserWarning, match="decode steps of latent attention are computed by torch"):
        assert not latent.TRIAL.passes(torch.device("cpu"), torch.float16, **case)


def test_latent_attention_reads_no_place_that_a_row_cannot_see() -> None:
    case = Case(heads=6, kv_heads=1, dim=48, lengths=(1, 17, 300), page_size=8)
    cache = random_cache(case, torch.float16, "cpu")
    meant = replace(cache, values=cache.keys[..., :32])
    for splits in (1, 2):
        out = torch.full((3, 6, 32), NAN, dtype=torch.float16)
        kernels.latent_attention(cache.query, cache.keys, 32, *cache.tensors[3:], scale=0.2, out=out, splits=splits)
        assert_equal_to_rounding(out, slow_attention(meant, scale=0.2, window=None, softcap=None))


def test_latent_vectors_of_other_sizes_are_declined() -> None:
    cpu = torch.device("cpu")
    assert not kernels.latent_fits(cpu, torch.float32, 16, 512, 576, 16)
    assert not kernels.latent_fits(cpu, torch.float16, 16, 1024, 1088, 16)
    assert not kernels.latent_fits(cpu, torch.float16, 4, 12, 16, 16)


FP8_CASES = {
    "4 query heads per key head": Case(lengths=SHORT),
    "odd group, odd dim": Case(heads=9, kv_heads=3, dim=80, lengths=SHORT),
    "soft cap in a window": Case(heads=4, kv_heads=2, dim=32, softcap=50.0, window=37, lengths=SHORT),
    "values narrower than keys": Case(heads=4, kv_heads=2, dim=48, value_dim=16, lengths=SHORT),
    "sinks in a window": Case(heads=16, kv_heads=2, dim=32, window=37, lengths=SHORT, sinks=SINKS),
}


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("case", FP8_CASES.values(), ids=FP8_CASES.keys())
def test_attention_over_a_cache_in_fp8_equals_reference(case: Case, splits: int) -> None:
    if splits == 2:
        case = replace(case, lengths=(1, 129, 160))
    cache, meant = in_fp8(random_cache(case, torch.float16, "cpu"))
    options = {**case.options, "factors": cache.factors, "tile": TILE, "splits": splits}
    out = kernels.paged_attention(*cache.tensors, **options, out=poisoned(case, torch.float16))
    assert_equal_to_rounding(out, slow_attention(meant, **case.options))


@pytest.mark.parametrize("sinks", [(), SINKS], ids=["plain", "sinks"])
def test_shared_prefix_in_fp8_equals_reference(sinks: tuple[float, ...]) -> None:
    case = Case(heads=6, kv_heads=2, dim=16, lengths=SHARED_LENGTHS, sinks=sinks)
    cache, meant = in_fp8(random_cache(case, torch.float16, "cpu", GROUPS, PREFIXES))
    tiles = PrefixTiles.empty(6, samples=2, min_rows=1)
    tiles.plan(GROUPS, PREFIXES)
    out = kernels.shared_prefix_attention(
        *cache.tensors, tiles, **case.options, factors=cache.factors, out=poisoned(case, torch.float16), tile=TILE,
        prefix_tile=TILE, splits=1, prefix_splits=1,
    )  # fmt: skip
    assert_equal_to_rounding(out, slow_attention(meant, **case.options))


def test_keys_and_values_in_fp8_need_their_factors() -> None:
    cache, _ = in_fp8(random_cache(Case(lengths=SHORT), torch.float16, "cpu"))
    with pytest.raises(AssertionError, match="have factors"):
        kernels.paged_attention(*cache.tensors, **Case().options)


# -- shared prefixes ---------------------------------------------------------------------------------------------------

GROUPS = [[4, 0, 2], [1, 5], [3]]
PREFIXES = [48, 16, 0]
SHARED_LENGTHS = (49, 17, 70, 5, 64, 30)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sinks", [(), SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 20])
def test_shared_prefix_equals_reference(window: int | None, sinks: tuple[float, ...], splits: int) -> None:
    case = Case(heads=6, kv_heads=2, dim=16, lengths=SHARED_LENGTHS, window=window, softcap=20.0, sinks=sinks)
    cache = random_cache(case, torch.float32, "cpu", GROUPS, PREFIXES)
    tiles = PrefixTiles.empty(6, samples=2, min_rows=1)
    # Two tiles for the group of three, one for the pair; the rest of the room is unused.
    assert tiles.plan(GROUPS, PREFIXES) == 3
    out = kernels.shared_prefix_attention(
        *cache.tensors, tiles, **case.options, out=poisoned(case, torch.float32), tile=TILE, prefix_tile=TILE,
        splits=splits, prefix_splits=splits,
    )  # fmt: skip
    assert_equal_to_rounding(out, slow_attention(cache, **case.options))


def test_prefix_of_several_pieces() -> None:
    case = Case(heads=2, kv_heads=1, dim=16, lengths=(300, 289))
    cache = random_cache(case, torch.float32, "cpu", [[0, 1]], [288])
    tiles = PrefixTiles.empty(2, samples=16, min_rows=2)
    assert tiles.plan([[0, 1]], [288]) == 1
    for splits in (1, 2):
        out = kernels.shared_prefix_attention(
            *cache.tensors, tiles, **case.options, out=poisoned(case, torch.float32), splits=splits, prefix_splits=4
        )
        assert_equal_to_rounding(out, slow_attention(cache, **case.options))


def test_prefix_is_read_per_tile_and_not_per_row() -> None:
    """The rows' own tables lead nowhere in the shared part: only the first row of the tile has it."""
    case = Case(heads=2, kv_heads=1, dim=16, lengths=(40, 35, 33))
    cache = random_cache(case, torch.float32, "cpu", [[1, 0, 2]], [32])
    expected = slow_attention(cache, **case.options)
    tiles = PrefixTiles.empty(3, samples=4, min_rows=2)
    tiles.plan([[1, 0, 2]], [32])
    cache.table[[0, 2], :2] = 10_000_000
    out = kernels.shared_prefix_attention(*cache.tensors, tiles, **case.options, tile=TILE, prefix_tile=TILE)
    assert_equal_to_rounding(out, expected)


def test_plan_replaces_the_previous_one() -> None:
    tiles = PrefixTiles.empty(8, samples=4, min_rows=2)
    assert tiles.plan([[0, 1, 2, 3, 4], [5, 6]], [16, 32]) == 2  # the fifth of a group is alone: it reads for itself
    assert tiles.starts.tolist() == [16, 16, 16, 16, 0, 32, 32, 0]
    assert tiles.plan([[7, 3]], [48]) == 1
    assert tiles.starts.tolist() == [0, 0, 0, 48, 0, 0, 0, 48]
    assert tiles.tile_rows[0].tolist() == [7, 3, -1, -1]
    assert tiles.tile_lengths.tolist() == [48, 0, 0, 0]


def test_sharing_pays_for_long_prompts_of_large_groups() -> None:
    shape = DecodeShape(heads=32, kv_heads=8, key_dim=128, value_dim=128)
    assert kernels.shared_prefix_pays(shape, [16] * 32, [512] * 32)
    assert not kernels.shared_prefix_pays(shape, [16] * 32, [16] * 32)  # one page: its piece costs as much
    assert not kernels.shared_prefix_pays(shape, [2] * 256, [512] * 256)  # pairs are too small for a tile
    assert not kernels.shared_prefix_pays(shape, [4], [64])  # the launch costs more than there is to save
    assert not kernels.shared_prefix_pays(shape, [], [])
    in_fp8 = replace(shape, itemsize=1)
    assert kernels.shared_prefix_pays(shape, [32] * 16, [128] * 16)
    assert not kernels.shared_prefix_pays(in_fp8, [32] * 16, [128] * 16)
    assert kernels.shared_prefix_pays(in_fp8, [32] * 16, [512] * 16)
    assert kernels.samples_per_tile(4, 2, 16) == 16
    assert kernels.samples_per_tile(8, 2, 64) == 16


# -- rotation and writing ----------------------------------------------------------------------------------------------


def projections(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, rotated: int) -> dict[str, Tensor]:
    """Three rows, queries, keys and values views of one product, and a cache of three pages of NaN."""
    generator = torch.Generator().manual_seed(heads)
    product = torch.randn(3, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    query, key, value = product.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    angles = torch.randn(3, rotated // 2, generator=generator) * 3
    angles = torch.cat((angles, angles), dim=1)
    cache = torch.full((2, 3, 4, kv_heads, dim), NAN, dtype=dtype)
    return {
        "query": query, "key": key, "value": value, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype),
        "key_cache": cache[0], "value_cache": cache[1], "slots": torch.tensor([9, -1, 2]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(9, 3, 32, 32), (4, 4, 80, 80), (2, 1, 96, 96), (10, 1, 24, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rotation_has_the_bits_of_torch(heads: int, kv_heads: int, dim: int, rotated: int, dtype: torch.dtype) -> None:
    given = projections(heads, kv_heads, dim, dtype, rotated)
    out = torch.full((3, heads, dim), NAN, dtype=dtype)
    result = kernels.write_kv_rope(**given, out=out)
    assert result.data_ptr() == out.data_ptr()
    query, key = given["query"].unflatten(1, (heads, dim)), given["key"].unflatten(1, (kv_heads, dim))
    assert torch.equal(out, torch_rotation(query, given["cos"], given["sin"]))
    keys, values = (given[name].flatten(0, 1) for name in ("key_cache", "value_cache"))
    expected = torch_rotation(key, given["cos"], given["sin"])
    assert torch.equal(keys[[9, 2]], expected[[0, 2]])
    assert torch.equal(values[[9, 2]], given["value"].unflatten(1, (kv_heads, dim))[[0, 2]])
    untouched = [slot for slot in range(12) if slot not in (9, 2)]
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(9, 3, 32, 32), (10, 9, 24, 8)])
def test_keys_and_values_are_quantised_as_they_are_written(heads: int, kv_heads: int, dim: int, rotated: int) -> None:
    given = projections(heads, kv_heads, dim, torch.float16, rotated)
    plain = projections(heads, kv_heads, dim, torch.float16, rotated)
    queries = kernels.write_kv_rope(**plain, exact_like_torch=False)
    factors = torch.full((2, 3, 4, kv_heads), NAN)
    for name in ("key_cache", "value_cache"):
        given[name] = given[name].to(torch.float8_e4m3fn)
    out = kernels.write_kv_rope(**given, exact_like_torch=False, factors=(factors[0], factors[1]))
    assert torch.equal(out, queries), "queries are not quantised"
    for name, factor in zip(("key_cache", "value_cache"), factors, strict=True):
        wide = (given[name].double() * factor.double()[..., None]).flatten(0, 1)
        expected = plain[name].flatten(0, 1).double()
        largest = expected[[9, 2]].abs().amax(-1)
        torch.testing.assert_close(factor.flatten(0, 1)[[9, 2]].double() * 448, largest, rtol=2e-3, atol=0.0)
        assert ((wide - expected)[[9, 2]].abs() <= 0.04 * largest[..., None]).all()
        untouched = [slot for slot in range(12) if slot not in (9, 2)]
        assert factor.flatten(0, 1)[untouched].isnan().all()
        assert wide[untouched].isnan().all()


def test_rotation_in_place_and_angles_in_fp32() -> None:
    given = projections(4, 2, 16, torch.float16, 16)
    given |= {"cos": given["cos"].float() * 1.001, "sin": given["sin"].float() * 1.001}
    expected = torch_rotation(given["query"].unflatten(1, (4, 16)).clone(), given["cos"], given["sin"])
    assert expected.dtype == torch.float32
    key, value = given["key"].clone(), given["value"].clone()
    out = kernels.write_kv_rope(**given, out=given["query"])
    assert out.data_ptr() == given["query"].data_ptr()
    assert torch.equal(given["query"].unflatten(1, (4, 16)), expected.half())
    assert torch.equal(given["key"], key)
    assert torch.equal(given["value"], value)


@pytest.mark.parametrize("offset", [False, True], ids=["weight", "1 + weight"])
def test_heads_are_normed_before_the_rotation(offset: bool) -> None:
    given = projections(4, 2, 32, torch.float16, 32)
    weights = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).half()
    out = kernels.write_kv_rope(**given, query_norm=weights[0], key_norm=weights[1], norm_eps=1e-5, norm_offset=offset)
    for raw, weight, result in (
        (given["query"].unflatten(1, (4, 32)), weights[0], out),
        (given["key"].unflatten(1, (2, 32))[[0, 2]], weights[1], given["key_cache"].flatten(0, 1)[[9, 2]]),
    ):
        rows = slice(None) if len(raw) == 3 else [0, 2]
        expected = torch_rotation(torch_norm(raw, weight, 1e-5, offset), given["cos"][rows], given["sin"][rows])
        # The same bits but where another order of the sum of squares tips a rounding.
        assert (result == expected).float().mean() > 0.98
        torch.testing.assert_close(result, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed heads"])
def test_rows_of_a_product_are_multiplied_with_their_factors(normed: bool) -> None:
    """Powers of two: the same bits as with factors that were applied before."""
    factors = torch.tensor([4.0, 0.25, 16.0])
    given, applied = (projections(9, 3, 32, torch.float16, 8) for _ in range(2))
    for name in ("query", "key", "value"):
        applied[name] = applied[name] * factors[:, None].half()
    options: dict[str, Any] = {"exact_like_torch": False}
    if normed:
        weights = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).half()
        options |= {"query_norm": weights[0], "key_norm": weights[1]}
    expected = kernels.write_kv_rope(**applied, **options)
    assert torch.equal(kernels.write_kv_rope(**given, **options, row_factors=factors), expected)
    for name in ("key_cache", "value_cache"):
        assert torch.equal(given[name].flatten(0, 1)[[9, 2]], applied[name].flatten(0, 1)[[9, 2]])


def test_normed_heads_are_rounded_where_training_rounds_them() -> None:
    from posttrain.policy.fused import kernels as training_kernels

    given = projections(4, 2, 32, torch.float16, 32)
    weight = torch.randn(32, generator=torch.Generator().manual_seed(1)).half()
    rows = given["query"].reshape(-1, 32).contiguous()
    normed = training_kernels.norm_forward(rows, None, weight, 1e-5, torch.float16)[1].view(3, -1)
    expected = training_kernels.rotate(normed, given["cos"], given["sin"], 4, out=normed)
    out = kernels.write_kv_rope(**given, exact_like_torch=False, query_norm=weight, key_norm=weight, norm_eps=1e-5)
    assert (out.flatten(1) == expected).float().mean() > 0.98
    torch.testing.assert_close(out.flatten(1), expected, atol=4e-3, rtol=4e-3)


def test_one_rounding_is_closer_to_the_true_rotation_than_three() -> None:
    given = projections(16, 1, 64, torch.float16, 64)
    wide = {name: given[name].double() for name in ("query", "cos", "sin")}
    true = torch_rotation(wide["query"].unflatten(1, (16, 64)), wide["cos"], wide["sin"])
    errors = [
        (kernels.write_kv_rope(**given, exact_like_torch=exact).double() - true).abs().mean().item()
        for exact in (True, False)
    ]
    assert errors[1] < 0.8 * errors[0]


# -- drawing -----------------------------------------------------------------------------------------------------------


def keys(rows: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([sequence_key(11, 0, 3, sample) for sample in range(rows)]), torch.arange(rows) % 3


def draw(logits: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    inverse = torch.full((len(logits),), TokenSampler(Sampling(1, temperature), vocab_size).inverse_temperature)
    return kernels.sample_rows(logits, *keys(len(logits)), inverse, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("width", "vocab_size", "temperature"),
    [(500, 500, 1.0), (700, 700, 0.6), (1000, 901, 1.3), (640, 512, 1.0), (50, 33, 1.0), (7, 1, 1.0), (300, 257, 0.0)],
)
def test_draws_equal_the_torch_sampler(width: int, vocab_size: int, temperature: float) -> None:
    rows = 6
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 3 + 50
    expected = TokenSampler(Sampling(1, temperature=temperature), vocab_size).draw(logits, *keys(rows))
    tokens, logprobs = draw(logits, temperature, vocab_size)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], atol=1e-5, rtol=1e-5)


def test_each_row_is_drawn_at_its_own_temperature() -> None:
    """With greedy rows, columns of padding and a damaged row among them."""
    temperatures, vocab_size = [1.0, 0.0, 0.6, 1.3, 0.0, 0.05, 1.0], 257
    samplers = [TokenSampler(Sampling(1, temperature), vocab_size) for temperature in temperatures]
    inverse = torch.tensor([sampler.inverse_temperature for sampler in samplers])
    rows = len(samplers)
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, vocab_size:] += 4
    logits[3, 90] = NAN
    tokens, logprobs = kernels.sample_rows(logits, *keys(rows), inverse, vocab_size=vocab_size)
    together = torch_sampler.draw_plain(logits, *keys(rows), inverse, vocab_size)
    sequence_keys, index = keys(rows)
    for row, sampler in enumerate(samplers):
        at = slice(row, row + 1)
        token, logprob = sampler.draw(logits[at], sequence_keys[at], index[at])
        assert torch.equal(together[1][at], logprob) or row == 3
        if row == 3:
            assert logprobs[row].isnan()
            assert together[1][row].isnan()
            assert 0 <= int(tokens[row]) < vocab_size
        else:
            assert tokens[row] == together[0][row] == token[0]
            torch.testing.assert_close(logprobs[at], logprob, atol=1e-5, rtol=1e-5)


def test_logprob_is_that_of_the_whole_row_also_where_padding_outweighs_it() -> None:
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(5))
    logits[:, 80:] += 30
    tokens, logprobs = draw(logits, 0.5, 80)
    expected = (logits.double() / 0.5).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert (tokens < 80).all()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-6)


def test_half_logits_and_strided_rows_are_drawn_in_fp32() -> None:
    wide = (torch.randn(4, 300, generator=torch.Generator().manual_seed(6)) * 4).half()
    expected = TokenSampler(Sampling(1), 200).draw(wide[:, :200].float(), *keys(4))
    tokens, logprobs = draw(wide[:, :200], 1.0, 200)
    assert logprobs.dtype == torch.float32
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], atol=1e-5, rtol=1e-5)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((10, 200), float("-inf"))
    logits[:, [3, 150]] = 1.0
    tokens, logprobs = draw(logits, 1.0, 200)
    assert set(tokens.tolist()) == {3, 150}
    torch.testing.assert_close(logprobs, torch.full((10,), 0.5).log(), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("bad", [[NAN], [float("inf")]])
def test_nan_logits_give_nan_logprobs(bad: list[float]) -> None:
    logits = torch.zeros(3, 100)
    logits[0, 40] = bad[0]
    logits[1] = bad[0]
    for temperature in (0.0, 1.0):
        tokens, logprobs = draw(logits, temperature, 90)
        assert logprobs.isnan().tolist() == [True, True, False]
        assert ((tokens >= 0) & (tokens < 90)).all()


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [70, 71, 200]] = 5.0
    logits[1, 299] = 9.0  # padding
    tokens, _ = draw(logits, 0.0, 250)
    assert tokens.tolist() == [70, 0]


# -- besides the model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 5, 128, 300])
def test_stepping_kernels_equal_torch(rows: int) -> None:
    assert_steps_like_torch(kernels, rows, "cpu")


# -- all of them, in the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "top_p"), [("llama", 1.0), ("qwen3", 1.0), ("llama", 0.8), ("gpt-oss", 1.0)])
def test_engine_with_kernels_equals_engine_without(family: str, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step ahead of the host, with fused layers and all kernels; CUDA graphs are simulated by computing again. With
    top-p, tokens are drawn after the graph."""
    from test_decode_ahead import SimulatedGraphs, assert_same
    from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model

    import posttrain.engines.native.attention as attention_module
    import posttrain.engines.native.graphs as graphs_module
    from posttrain.engines.native import NativeEngine, NativeSettings
    from posttrain.types import NoiseKey, Task

    generator = torch.Generator().manual_seed(1)
    tasks = [
        Task(draw, f"t:{draw}", "", tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()))
        for draw, length in enumerate((3, 16, 9))
    ]
    sampling = Sampling(5, temperature=1.0, top_p=top_p, stop_token_ids=tuple(range(0, VOCAB_SIZE, 40)))
    key = NoiseKey(3, 5)
    expected = NativeEngine(tiny_model(family), byte_tokenizer()).generate(tasks, 2, sampling, key)

    used: list[str] = []
    for name in ("places", "move_on", "write_kv_rope", "paged_attention"):
        function = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, _f=function, _n=name, **options: (used.append(_n), _f(*args, **options))[1]
        )
    monkeypatch.setattr(attention_module, "_load_kernel", lambda device: kernels)
    monkeypatch.setattr(graphs_module, "CudaGraphCache", SimulatedGraphs)
    engine = NativeEngine(tiny_model(family), byte_tokenizer(), NativeSettings(page_size=4, max_batch_size=5))
    engine._keeps_workspace = engine._use_graphs = True
    assert_same(engine.generate(tasks, 2, sampling, key), expected)
    assert set(used) == {"places", "move_on", "write_kv_rope", "paged_attention"}


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_drafts_and_their_acceptance_equal_the_reference(seed: int) -> None:
    assert_drafts_like_torch(seed, torch.device("cpu"))
