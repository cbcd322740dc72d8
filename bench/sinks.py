#!/usr/bin/env python3
"""Times attention with sinks in the shapes of gpt-oss (64 heads, 8 key heads, 64 dims) on a GPU, with the paths that it
replaced: training forward and backward, and one layer of a decode step.

    python bench/sinks.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from posttrain.engines.native import kernels
from posttrain.engines.native.attention import gathered_attention
from posttrain.policy import packed
from posttrain.policy.packed import PackedAttention, Segment

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


def milliseconds(compute: Callable[[], object], repeats: int) -> float:
    compute()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        compute()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def graphed(compute: Callable[[], object]) -> float:
    """Of one launch in a captured graph of 20."""
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            compute()
    return milliseconds(graph.replay, 5) / 20


def training(window: int | None, *, with_sinks: bool) -> Callable[[], None]:
    segments = []
    for start in range(0, 16_384, 4096):  # a prompt of 1,024 tokens with three responses of 1,024, four times
        segments.append(Segment(start, start + 1024))
        segments += [Segment(start + at, start + at + 1024, start, start + 1024) for at in (1024, 2048, 3072)]
    attention = PackedAttention(segments, CUDA)
    q, k, v = (torch.randn(16_384, heads, 64, device=CUDA, dtype=BF16, requires_grad=True) for heads in (64, 8, 8))
    options: dict[str, Any] = {"scale": 0.125, "window": window, "softcap": None}
    if with_sinks:
        options["sinks"] = torch.zeros(64, device=CUDA, dtype=BF16, requires_grad=True)
    grad = torch.randn_like(q)

    def step() -> None:
        attention.attend(0, q, k, v, **options).backward(grad)

    return step


def decode(window: int | None, rows: int, length: int) -> None:
    """Groups of 16 samples with prompts of a quarter of the length."""
    pages = -(-length // 16)
    keys, values = (torch.randn(rows * pages, 16, 8, 64, device=CUDA, dtype=BF16) for _ in range(2))
    table = torch.randperm(rows * pages, device=CUDA).view(rows, pages).int()
    prefix = length // 64 * 16
    for first in range(0, rows, 16):
        table[first : first + 16, : prefix // 16] = table[first, : prefix // 16]
    query = torch.randn(rows, 64, 64, device=CUDA, dtype=BF16)
    lengths = torch.full((rows,), length, device=CUDA, dtype=torch.int32)
    samples = kernels.samples_per_tile(8, 2, 16)
    host, tiles = (kernels.PrefixTiles.empty(rows, samples, device=where) for where in ("cpu", "cuda"))
    host.plan([list(range(first, first + 16)) for first in range(0, rows, 16)], [prefix] * (rows // 16))
    tiles.copy_(host)
    sinks = torch.zeros(64, device=CUDA, dtype=BF16)
    given = (query, keys, values, table, lengths)
    options: dict[str, Any] = {"scale": 0.125, "window": window, "softcap": None}
    found = {
        "plain": graphed(lambda: kernels.paged_attention(*given, **options)),
        "sinks": graphed(lambda: kernels.paged_attention(*given, **options, sinks=sinks)),
        "shared, sinks": graphed(lambda: kernels.shared_prefix_attention(*given, tiles, **options, sinks=sinks)),
        "gathered, sinks": milliseconds(lambda: gathered_attention(*given, **options, sinks=sinks), 3),
    }
    seen = min(length, window or length)
    print(
        f"decode, {rows} rows of {length}, window {window}:",
        ", ".join(f"{name} {ms * 1e3:.0f} us" for name, ms in found.items()),
        f"({rows * seen * 8 * 64 * 2 * 2 / found['sinks'] / 1e9:.2f} TB/s)",
    )


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for window in (None, 128):
        plain, sinks = (milliseconds(training(window, with_sinks=with_sinks), 5) for with_sinks in (False, True))
        runs: Callable[..., bool] = packed._varlen_runs
        packed._varlen_runs = lambda *_: False
        try:
            masked = milliseconds(training(window, with_sinks=True), 2)
        finally:
            packed._varlen_runs = runs
        print(f"training, 16,384 tokens, window {window}: plain {plain:.1f} ms, sinks {sinks:.1f}, masked {masked:.1f}")
    for rows, length in ((512, 512), (64, 4096)):
        for window in (None, 128):
            decode(window, rows, length)


if __name__ == "__main__":
    main()
