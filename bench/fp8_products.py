#!/usr/bin/env python3
"""The matrix products of a layer in bf16 and in FP8, for few and many rows: an 8B Llama shape on one GPU. Microseconds.

    python bench/fp8_products.py --out products.json

Launches are captured in a CUDA graph and go round among weights that together are larger than L2. `rows`: a factor for
each row of activations, as in training and for prompts; `tensor`: without, as in the steps of a sampler, where the next
kernel applies the factors of the rows (`src/posttrain/policy/fused/fp8.py`). Needs a GPU with FP8 matrix units.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import facts
from tables import table, write_json
from torch import Tensor

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}  # outputs, inputs
_BYTES_OF_ALL_WEIGHTS = 300 * 2**20
_REPLAYS = 5


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


def scaled(x: Any, weight: Any, scales: tuple[Tensor, Tensor]) -> Tensor:
    return torch._scaled_mm(
        x.values, weight.values.T, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def time_product(name: str, rows: int) -> dict[str, float]:
    from posttrain.policy.fused.fp8_kernels import quantise, quantise_weight

    outputs, inputs = PRODUCTS[name]
    count = max(3, _BYTES_OF_ALL_WEIGHTS // (outputs * inputs))
    weights = [quantise_weight(torch.randn(outputs, inputs, device="cuda").bfloat16()) for _ in range(count)]
    x, one = quantise(torch.randn(rows, inputs, device="cuda").bfloat16()), torch.ones((), device="cuda")
    plain, x_plain = [weight.values.bfloat16() for weight in weights], x.values.bfloat16()
    ways: dict[str, list[Callable[[], Any]]] = {
        "bf16": [lambda w=w: x_plain @ w.T for w in plain],
        "rows": [lambda w=w: scaled(x, w, (x.factors[:, None], w.factors[None, :])) for w in weights],
        "tensor": [lambda w=w: scaled(x, w, (one, w.factors[0])) for w in weights],
    }
    return {way: microseconds(launches) for way, launches in ways.items()}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256, 512, 8192], metavar="M")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("fp8_products.py needs a CUDA device", file=sys.stderr)
        return 64
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    report: dict[str, Any] = {"rows": {}}
    lines = []
    for rows in args.rows:
        found = report["rows"][rows] = {name: time_product(name, rows) for name in PRODUCTS}
        for way in found["qkv"]:
            times = [found[name][way] for name in PRODUCTS]
            lines.append([f"{rows} {way}", *times, sum(times)])
    print(table(["rows, way", *PRODUCTS, "a layer"], lines))
    write_json(args.out, {**facts("cuda"), "benchmark": "fp8_products", **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
