"""Compiles the kernels for a Hopper GPU, without one: what would be launched, with the sizes it would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_without_gpu import WITHOUT_TRITON, Compiled, only_compile

pytest.importorskip("triton", reason=WITHOUT_TRITON)

SHARED_MEMORY_BYTES = 232_448  # that one program may have on Hopper
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    from posttrain.engines.native.kernels import paged, rope_write, sampling

    for module in (paged, rope_write, sampling):
        monkeypatch.setattr(module, "runs_here", lambda tensor: True)
    return only_compile(monkeypatch, tmp_path)


def attention_inputs(heads: int, kv_heads: int, dim: int, rows: int = 16) -> tuple[Tensor, ...]:
    pool = torch.zeros(4, 16, kv_heads, dim, dtype=BF16)
    table, lengths = torch.zeros(rows, 64, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    return torch.zeros(rows, heads, dim, dtype=BF16), pool, pool, table, lengths


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "options"),
    [
        (32, 8, 128, {"window": None, "softcap": None}),  # Llama
        (14, 2, 64, {"window": None, "softcap": None}),  # Qwen
        (8, 4, 256, {"window": 512, "softcap": 50.0}),  # Gemma
        (64, 8, 64, {"window": None, "softcap": None, "sinks": torch.zeros(64, dtype=BF16)}),  # gpt-oss
    ],
)
def test_decode_attention_pipelines_loads_and_allows_three_programs(
    compiled: Compiled, heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    from posttrain.engines.native import kernels

    kernels.paged_attention(*attention_inputs(heads, kv_heads, dim), scale=0.1, **options)
    assert set(compiled) == {"paged_attention_kernel", "combine_pieces_kernel"}
    kernel = compiled["paged_attention_kernel"]
    assert 3 * kernel.metadata.shared <= SHARED_MEMORY_BYTES
    # All stages but two, of keys and of values each, are on their way when one is used.
    assert "ttg.async_wait" in kernel.asm["ttgir"]
    assert kernel.asm["ttgir"].count(f"{{num = {2 * (kernel.metadata.num_stages - 2)} : i32}}") >= 1
    assert "tt.dot" in kernel.asm["ttgir"]


def test_shared_prefixes_use_the_matrix_units(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    tiles = kernels.PrefixTiles.empty(16, kernels.samples_per_tile(4, 2, 16))
    kernels.shared_prefix_attention(
        *attention_inputs(32, 8, 128), tiles, scale=0.1, window=None, softcap=None, splits=1
    )
    # Rows that are not cut need no pass of their own to be put together.
    assert set(compiled) == {"shared_prefix_kernel", "paged_attention_kernel"}
    assert compiled["shared_prefix_kernel"].metadata.shared <= SHARED_MEMORY_BYTES // 2
    assert "warp_group_dot" in compiled["shared_prefix_kernel"].asm["ttgir"]


def test_fp8_is_brought_to_the_matrix_units_in_pairs(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    query, pool, _, table, lengths = attention_inputs(32, 8, 128)
    pool, factors = pool.to(torch.float8_e4m3fn), torch.zeros(4, 16, 8)
    options: dict[str, Any] = {"scale": 0.1, "window": None, "softcap": None, "factors": (factors, factors)}
    kernels.paged_attention(query, pool, pool, table, lengths, **options, splits=1)
    kernel = compiled["paged_attention_kernel"]
    assert 3 * kernel.metadata.shared <= SHARED_MEMORY_BYTES
    assert "cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in kernel.asm["ptx"], "values are turned as they are loaded"
    assert "ld.shared.b8" not in kernel.asm["ptx"]


def test_latent_attention_fits_a_program(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    query, pool = torch.zeros(16, 128, 576, dtype=BF16), torch.zeros(4, 16, 1, 576, dtype=BF16)
    table, lengths = torch.zeros(16, 64, dtype=torch.int32), torch.ones(16, dtype=torch.int32)
    kernels.latent_attention(query, pool, 512, table, lengths, scale=0.1, splits=32)
    assert set(compiled) == {"latent_attention_kernel", "combine_pieces_kernel"}
    kernel = compiled["latent_attention_kernel"]
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES
    assert "tt.dot" in kernel.asm["ttgir"]


def test_stepping_kernels_compile(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    state = torch.zeros(5, 8, dtype=torch.int64)
    kernels.places(torch.zeros(8, 4, dtype=torch.int32), state[1], 16)
    kernels.move_on(state[0], state[1], state[2], state[3], state[4], torch.zeros(8))
    assert set(compiled) == {"_places", "_move_on"}


def test_drafting_kernels_compile(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    text, state = torch.zeros(100, dtype=torch.int32), torch.zeros(7, 9, dtype=torch.int64)[:, :8]
    rows = kernels.plan_rows(text, state, torch.zeros(8, 4, dtype=torch.int32), 6, 16, 3)
    kernels.accept(text, state, rows, torch.zeros(48, dtype=torch.int64), torch.zeros(48))
    assert set(compiled) == {"_plan_rows", "_accept"}


def test_rotation_and_draw_compile(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    query, key, value = torch.zeros(2, 48 * 128, dtype=BF16).split([32 * 128, 8 * 128, 8 * 128], dim=1)
    pool, angles, weight = torch.zeros(2, 16, 8, 128, dtype=BF16), torch.zeros(2, 128, dtype=BF16), torch.ones(128)
    slots = torch.zeros(2, dtype=torch.int64)
    kernels.write_kv_rope(query, key, value, angles, angles, pool, pool, slots, query_norm=weight, key_norm=weight)
    # No multiply-add where torch rounds between the two.
    assert "fma.rn.f32" not in compiled["_write_kv_rope_kernel"].asm["ptx"]
    logits = torch.zeros(1, 151_936, dtype=BF16)
    kernels.sample_rows(logits, slots[:1], slots[:1], torch.ones(1), vocab_size=151_669)
    # Sixteen bytes at a time.
    assert "ld.global.v4.b32" in compiled["_block_masses_kernel"].asm["ptx"]
    assert "_draw_kernel" in compiled
