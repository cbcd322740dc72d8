"""The attention kernels, and their stand-in in torch, against attention written out in float64."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kernel_references import CASES as CPU_CASES
from kernel_references import SINKS, Cache, Case, assert_equal_to_rounding, random_cache, slow_attention
from torch import Tensor

from posttrain.engines.native.attention import gathered_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {name: replace(case, device="cuda") for name, case in CPU_CASES.items()}


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from posttrain.engines.native import kernels

    return kernels


def poisoned(cache: Cache) -> Tensor:
    query, values = cache.query, cache.values
    return torch.full((*query.shape[:2], values.shape[-1]), float("nan"), dtype=query.dtype, device=query.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_reference(kernels: ModuleType, case: Case, dtype: torch.dtype) -> None:
    cache = random_cache(case, dtype, "cuda")
    assert kernels.supports(cache.query, cache.keys, cache.values)
    expected = slow_attention(cache, **case.options)
    for splits in (None, 1, 4):
        out = kernels.paged_attention(*cache.tensors, **case.options, out=poisoned(cache), splits=splits)
        assert_equal_to_rounding(out, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gathered_attention_equals_reference(case: Case) -> None:
    cache = random_cache(case, torch.float32, "cuda")
    expected = slow_attention(cache, **case.options)
    keys, values = cache.keys.nan_to_num(), cache.values.nan_to_num()  # it multiplies what is hidden by 0
    out = gathered_attention(cache.query, keys, values, cache.table, cache.lengths, **case.options)
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("sinks", [(), SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("splits", [1, 2])
def test_shared_prefix_equals_reference(
    kernels: ModuleType, dtype: torch.dtype, window: int | None, sinks: tuple[float, ...], splits: int
) -> None:
    groups, prefixes = [[8, 0, 2, 5], [1, 7, 3], [4, 6]], [160, 16, 0]
    lengths = (161, 17, 200, 40, 5, 300, 64, 33, 177)
    case = Case(heads=8, kv_heads=2, lengths=lengths, window=window, sinks=sinks, device="cuda")
    cache = random_cache(case, dtype, "cuda", groups, prefixes)
    host = kernels.PrefixTiles.empty(9, kernels.samples_per_tile(4, dtype.itemsize), min_rows=2)
    device = kernels.PrefixTiles.empty(9, kernels.samples_per_tile(4, dtype.itemsize), min_rows=2, device="cuda")
    assert host.plan(groups, prefixes) == 2
    device.copy_(host)
    out = kernels.shared_prefix_attention(
        *cache.tensors, device, **case.options, out=poisoned(cache), splits=splits, prefix_splits=splits
    )
    assert_equal_to_rounding(out, slow_attention(cache, **case.options))


def large_batch(rows: int, length: int, kv_heads: int, heads: int) -> Cache:
    """Too large for the slow reference: `fast_reference` has to do."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    pages = -(-length // 16)
    shape = (rows * pages, 16, kv_heads, 128)
    query = torch.randn(rows, heads, 128, device="cuda", generator=generator).bfloat16()
    keys = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    values = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    table = torch.randperm(rows * pages, device="cuda", generator=generator).view(rows, pages).int()
    lengths = torch.randint(1, length + 1, (rows,), device="cuda", generator=generator).int()
    return Cache(query, keys, values, table, lengths)


def fast_reference(cache: Cache, scale: float) -> Tensor:
    """float64, row by row, all heads at once."""
    out = torch.empty(cache.query.shape, dtype=torch.float64, device="cuda")
    group = cache.query.shape[1] // cache.keys.shape[2]
    for row, length in enumerate(cache.lengths.tolist()):
        pages = cache.table[row].long()
        k = cache.keys[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        v = cache.values[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        weights = torch.einsum("hd,lhd->hl", cache.query[row].double(), k).mul(scale).softmax(-1)
        out[row] = torch.einsum("hl,lhd->hd", weights, v)
    return out


@pytest.mark.parametrize(("rows", "length"), [(1, 20_000), (7, 3_000), (64, 1_024), (512, 700)])
def test_large_batches_and_long_sequences(kernels: ModuleType, rows: int, length: int) -> None:
    cache = large_batch(rows, length, kv_heads=8, heads=32)
    out = kernels.paged_attention(*cache.tensors, scale=128**-0.5, window=None, softcap=None, out=poisoned(cache))
    assert_equal_to_rounding(out, fast_reference(cache, 128**-0.5))


def test_pages_beyond_two_to_the_31_elements(kernels: ModuleType) -> None:
    """40,000 pages of 64 tokens, 8 heads and 128 dims hold 2.6e9 numbers: the last of them must be found."""
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of GPU memory")
    keys = torch.zeros(40_000, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    values[-1] = 3.0
    query = torch.ones(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[39_999]], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([64], device="cuda", dtype=torch.int32)
    out = kernels.paged_attention(query, keys, values, table, lengths, scale=0.1, window=None, softcap=None)
    assert torch.equal(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("splits", [1, 8])
def test_results_are_deterministic(kernels: ModuleType, splits: int) -> None:
    cache = large_batch(48, 2_000, kv_heads=8, heads=32)
    options = {"scale": 0.1, "window": None, "softcap": None, "splits": splits}
    first = kernels.paged_attention(*cache.tensors, **options)
    for _ in range(5):
        assert torch.equal(kernels.paged_attention(*cache.tensors, **options), first)


@pytest.mark.parametrize("shared", [False, True])
def test_captured_launch_follows_lengths_tables_and_groups(kernels: ModuleType, shared: bool) -> None:
    case = Case(heads=8, kv_heads=2, lengths=(33, 40, 161, 200))
    caches = [
        random_cache(case, torch.bfloat16, "cuda", [[0, 1]], [32]),
        random_cache(Case(heads=8, kv_heads=2, lengths=(200, 7, 177, 180)), torch.bfloat16, "cuda", [[3, 0, 2]], [160]),
    ]
    live = random_cache(case, torch.bfloat16, "cuda", [[0, 1]], [32])
    host = kernels.PrefixTiles.empty(4, 16, min_rows=2)
    tiles = kernels.PrefixTiles.empty(4, 16, min_rows=2, device="cuda")

    def compute() -> Tensor:
        if shared:
            return kernels.shared_prefix_attention(*live.tensors, tiles, **case.options)
        return kernels.paged_attention(*live.tensors, **case.options)

    compute()  # compiled before capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for cache, prefix in zip(caches, ([32], [160]), strict=True):
        for mine, new in zip(live.tensors, cache.tensors, strict=True):
            mine.copy_(new)
        host.plan(cache.groups, prefix)
        tiles.copy_(host)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal_to_rounding(out, slow_attention(cache, **case.options))


def test_exact_weights_are_closer_to_the_true_result(kernels: ModuleType) -> None:
    case = Case(heads=8, kv_heads=2, dim=128, lengths=(700, 900))
    cache = random_cache(case, torch.bfloat16, "cuda")
    expected = slow_attention(cache, **case.options)
    errors = [
        (kernels.paged_attention(*cache.tensors, **case.options, tile=tile).double().cpu() - expected).abs().mean()
        for tile in (kernels.AttentionTile(64, 4, 3), kernels.AttentionTile(64, 4, 3, exact_weights=True))
    ]
    assert errors[1] < 0.9 * errors[0]


def test_kernel_declines_what_it_cannot_do(kernels: ModuleType) -> None:
    query = torch.zeros(1, 2, 64, device="cuda", dtype=torch.bfloat16)
    pool = torch.zeros(4, 16, 1, 64, device="cuda", dtype=torch.bfloat16)
    assert kernels.supports(query, pool, pool)
    assert not kernels.supports(query.cpu(), pool.cpu(), pool.cpu())
    assert not kernels.supports(query, pool, pool[..., :32])
    assert not kernels.supports(query.float(), pool, pool)
    wide = torch.zeros(1, 2, 512, device="cuda", dtype=torch.bfloat16)
    wide_pool = torch.zeros(4, 16, 1, 512, device="cuda", dtype=torch.bfloat16)
    assert not kernels.supports(wide, wide_pool, wide_pool)
