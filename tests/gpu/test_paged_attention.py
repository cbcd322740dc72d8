"""The Triton kernel, and its stand-in in torch, against attention written out in float64."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from posttrain.generation.native.attention import gathered_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from posttrain.generation.native import kernels

    return kernels


def slow_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """One row and one head at a time, position by position."""
    query, keys, values = query.double().cpu(), keys.double().cpu(), values.double().cpu()
    table, page_size, group = table.cpu(), keys.shape[1], query.shape[1] // keys.shape[2]
    out = torch.zeros_like(query)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - window)
        places = [(int(table[row, p // page_size]), p % page_size) for p in range(first, length)]
        for head in range(query.shape[1]):
            k = torch.stack([keys[page, place, head // group] for page, place in places])
            v = torch.stack([values[page, place, head // group] for page, place in places])
            scores = k @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ v
    return out


def random_cache(
    lengths: list[int], heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 1000 + dim)
    most = max(math.ceil(length / page_size) for length in lengths)
    num_pages = len(lengths) * most + 3
    shape = (num_pages, page_size, kv_heads, dim)
    query = torch.randn((len(lengths), heads, dim), generator=generator).to(DEVICE, dtype)
    keys = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    values = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    pages = torch.randperm(num_pages, generator=generator)[: len(lengths) * most]
    table = pages.view(len(lengths), most).to(DEVICE, torch.int32)
    return query, keys, values, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


CASES = {
    "llama, 4 query heads per key head": {"heads": 8, "kv_heads": 2, "dim": 64},
    "one key head per query head": {"heads": 4, "kv_heads": 4, "dim": 128},
    "odd group, odd dim": {"heads": 9, "kv_heads": 3, "dim": 80},
    "more queries than a tile has rows": {"heads": 40, "kv_heads": 2, "dim": 64},
    "widest head": {"heads": 4, "kv_heads": 1, "dim": 256},
    "sliding window": {"heads": 8, "kv_heads": 2, "dim": 64, "window": 37},
    "window of one token": {"heads": 8, "kv_heads": 2, "dim": 64, "window": 1},
    "soft cap": {"heads": 8, "kv_heads": 4, "dim": 128, "softcap": 5.0},
    "soft cap in a window": {"heads": 4, "kv_heads": 2, "dim": 256, "softcap": 50.0, "window": 64},
    "pages of one block": {"heads": 8, "kv_heads": 2, "dim": 64, "page_size": 64},
    "pages of four tokens": {"heads": 8, "kv_heads": 2, "dim": 64, "page_size": 4},
}
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130, 257]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_attention_written_out(kernels: ModuleType, case: dict, dtype: torch.dtype) -> None:
    shape = {"page_size": 16, **case}
    window, softcap = shape.pop("window", None), shape.pop("softcap", None)
    query, keys, values, table, lengths = random_cache(LENGTHS, dtype=dtype, **shape)
    scale = shape["dim"] ** -0.5
    assert kernels.supports(query, keys, values)
    expected = slow_attention(query, keys, values, table, lengths, scale, window, softcap)
    out = kernels.paged_attention(query, keys, values, table, lengths, scale=scale, window=window, softcap=softcap)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_torch_stand_in_equals_attention_written_out(case: dict) -> None:
    shape = {"page_size": 16, **case}
    window, softcap = shape.pop("window", None), shape.pop("softcap", None)
    query, keys, values, table, lengths = random_cache(LENGTHS, dtype=torch.float32, **shape)
    scale = shape["dim"] ** -0.5
    expected = slow_attention(query, keys, values, table, lengths, scale, window, softcap)
    out = gathered_attention(query, keys, values, table, lengths, scale=scale, window=window, softcap=softcap)
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-4, rtol=1e-4)


def test_kernel_reads_only_visible_pages(kernels: ModuleType) -> None:
    query, keys, values, table, lengths = random_cache([20, 5], 8, 2, 64, 16, torch.bfloat16)
    used = torch.zeros(len(keys), dtype=torch.bool)
    used[table[0, :2].long().cpu()] = True
    used[table[1, :1].long().cpu()] = True
    options = {"scale": 0.125, "window": None, "softcap": None}
    clean = kernels.paged_attention(query, keys, values, table, lengths, **options)
    keys[~used], values[~used] = float("nan"), float("nan")
    torch.testing.assert_close(kernels.paged_attention(query, keys, values, table, lengths, **options), clean)


def test_kernel_declines_what_it_cannot_do(kernels: ModuleType) -> None:
    query, keys, values, *_ = random_cache([3], 2, 1, 64, 16, torch.bfloat16)
    assert not kernels.supports(query, keys, values[..., :32])
    assert not kernels.supports(query.float(), keys, values)
    wide = torch.zeros(1, 2, 512, device=DEVICE, dtype=torch.bfloat16)
    pool = torch.zeros(4, 16, 1, 512, device=DEVICE, dtype=torch.bfloat16)
    assert not kernels.supports(wide, pool, pool)
