#!/usr/bin/env python3
"""The matrix products of a layer in bf16 and in FP8, for few and many rows: an 8B Llama shape on one GPU. Microseconds.

    python bench/fp8_products.py --out products.json
    python bench/fp8_products.py --rows 16 64 --tune        also tiles of the kernel for few rows, the fastest first

Launches are captured in a CUDA graph and go round among weights that together are larger than L2. `rows`: `torch._scaled_mm` with
a factor per row and per output; `tensor`: the same library with one factor for all, for comparison; `own`: the kernel for few
rows with the tile that the engine would choose. What is fastest for how many rows is `_MOST_FEW_ROWS` and `tile_and_splits` of
`src/posttrain/policy/fused/fp8.py`. Needs a GPU with FP8 matrix units.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from machine import facts
from tables import table, write_json
from torch import Tensor

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}  # outputs, inputs
TILES = (
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 256, 4, 3),
    (64, 256, 4, 4),
    (64, 256, 4, 5),
    (128, 128, 4, 4),
    (128, 128, 8, 5),
)
_BYTES_OF_ALL_WEIGHTS = 300 * 2**20
_REPLAYS, _MOST_OWN = 5, 128


def microseconds(launches: Sequence[Callable[[], Any]]) -> float:
    """Of one launch."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / _REPLAYS / len(launches)


def in_fp8(rows: int, width: int) -> Any:
    from posttrain.policy.fused.fp8_kernels import quantise

    return quantise(torch.randn(rows, width, device="cuda").bfloat16())


def scaled(x: Any, weight: Any, scales: tuple[Tensor, Tensor]) -> Tensor:
    return torch._scaled_mm(
        x.values, weight.values.T, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def weights_of(name: str) -> list[Any]:
    outputs, inputs = PRODUCTS[name]
    return [in_fp8(outputs, inputs) for _ in range(max(3, _BYTES_OF_ALL_WEIGHTS // (outputs * inputs)))]


def time_product(name: str, rows: int) -> dict[str, float]:
    from posttrain.policy.fused.fp8 import tile_and_splits
    from posttrain.policy.fused.fp8_kernels import few_rows_product

    counters, one = torch.zeros(8192, dtype=torch.int32, device="cuda"), torch.ones((), device="cuda")
    weights, x = weights_of(name), in_fp8(rows, PRODUCTS[name][1])
    plain, x_plain = [weight.values.bfloat16() for weight in weights], x.values.bfloat16()
    ways: dict[str, list[Callable[[], Any]]] = {
        "bf16": [lambda w=w: x_plain @ w.T for w in plain],
        "rows": [lambda w=w: scaled(x, w, (x.factors[:, None], w.factors[None, :])) for w in weights],
        "tensor": [lambda w=w: scaled(x, w, (one, one)) for w in weights],
    }
    if rows <= _MOST_OWN:
        tile = tile_and_splits(rows, PRODUCTS[name], x.values.device)
        ways["own"] = [lambda w=w: few_rows_product(x, w, torch.bfloat16, counters, *tile) for w in weights]
    return {way: microseconds(launches) for way, launches in ways.items()}


def tune(name: str, rows: int) -> list[tuple[float, str]]:
    """The five fastest tiles: (microseconds, columns x depth, warps, stages, splits)."""
    from posttrain.policy.fused.fp8_kernels import ProductTile, few_rows_product

    counters = torch.zeros(8192, dtype=torch.int32, device="cuda")
    height = next(height for height in (16, 32, 64, 128) if rows <= height)
    (outputs, inputs), weights, timed = PRODUCTS[name], weights_of(name), []
    x = in_fp8(rows, inputs)
    for (columns, depth, warps, stages), splits in product(TILES, (1, 2, 3, 4)):
        if not 100 <= outputs // columns * splits <= 1100:
            continue
        tile = ProductTile(height, columns, depth, warps, stages)
        launches = [
            lambda w=w, t=tile, s=splits: few_rows_product(x, w, torch.bfloat16, counters, t, s) for w in weights
        ]
        timed.append((microseconds(launches), f"{columns}x{depth} w{warps} s{stages} /{splits}"))
    return sorted(timed)[:5]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256, 512, 8192], metavar="M")
    parser.add_argument("--tune", action="store_true", help="also tiles of the kernel, for up to 128 rows")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("fp8_products.py needs a CUDA device", file=sys.stderr)
        return 64
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    report: dict[str, Any] = {"rows": {}, "tiles": {}}
    lines = []
    for rows in args.rows:
        found = report["rows"][rows] = {name: time_product(name, rows) for name in PRODUCTS}
        for way in found["qkv"]:
            times = [found[name][way] for name in PRODUCTS]
            lines.append([f"{rows} {way}", *times, sum(times)])
        if args.tune and rows <= _MOST_OWN:
            report["tiles"][rows] = {name: tune(name, rows) for name in PRODUCTS}
            print(rows, report["tiles"][rows], flush=True)
    print(table(["rows, way", *PRODUCTS, "a layer"], lines))
    write_json(args.out, {**facts("cuda"), "benchmark": "fp8_products", **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
