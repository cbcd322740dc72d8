#!/usr/bin/env python3
"""Times the kernels of recurrent layers on a GPU, with the sizes of Qwen3.5 4B: a decoded token against the bytes of
its states, a packed row against plain torch and against the products of a layer.

    python bench/recurrence.py                 # as the engine and the trainer run them
    python bench/recurrence.py --tune          # other tiles too

Decode steps are captured in a CUDA graph that cycles over several layers' states, which together are larger than L2.
Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from machine import seconds_of
from torch import Tensor

from posttrain.engines.native.kernels import recurrent
from posttrain.policy import recurrence as plain
from posttrain.policy.fused import recurrence
from posttrain.policy.fused.gated_norm import GatedNorm
from posttrain.policy.recurrence import PackedRecurrence, RowPiece, in_exact_types

KEY_HEADS, HEADS, WIDTH, HIDDEN, INNER = 16, 32, 128, 2560, 9216
CHANNELS = (2 * KEY_HEADS + HEADS) * WIDTH
ROWS, LAYERS = 512, 4
NUM_PIECES, LENGTH = 9, 900
BF16 = torch.bfloat16


def median_ms(work: Callable[[], Any], repeats: int = 7) -> float:
    for _ in range(2):
        work()
    return sorted(seconds_of(work) for _ in range(repeats))[repeats // 2] * 1e3


def graph_ms(launch: Callable[[], Any], launches: int) -> float:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    return median_ms(graph.replay) / launches


def inputs(tokens: int) -> list[Tensor]:
    mixed = torch.randn(tokens, CHANNELS, device="cuda", dtype=BF16)
    parts = mixed.split([KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * WIDTH], dim=1)
    q, k, v = (part.unflatten(1, (-1, WIDTH)) for part in parts)
    decay = -torch.rand(tokens, HEADS, device="cuda")
    return [q, k, v, decay, torch.rand(tokens, HEADS, device="cuda").to(BF16)]


def decode(tune: bool) -> None:
    pools = [torch.zeros(ROWS + 1, HEADS, WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
    windows = [torch.zeros(ROWS + 1, 3, CHANNELS, device="cuda", dtype=BF16) for _ in range(LAYERS)]
    slots, given = torch.randperm(ROWS, device="cuda"), inputs(ROWS)
    copied = torch.empty_like(pools[1])
    roof = 2 * pools[0].nbytes / (median_ms(lambda: copied.copy_(pools[0])) * 1e-3)
    moved = 2 * ROWS * HEADS * WIDTH * WIDTH * 4
    print(f"a copy moves {roof / 1e12:.2f} TB/s: states of a layer, {ROWS} rows, take {moved / roof * 1e3:.3f} ms")
    tiles = [(16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 4), (128, 8)]
    for block, warps in tiles if tune else [(recurrent.STEP_BLOCK, recurrent.STEP_WARPS)]:
        turn = cycle(pools)

        def step(turn: Any = turn, block: int = block, warps: int = warps) -> None:
            recurrent.recurrence_step(next(turn), slots, *given, unit=True, block=block, warps=warps)

        ms = graph_ms(step, 4 * LAYERS)
        print(f"  recurrence, {block:3} columns {warps} warps: {ms:.3f} ms, {moved / roof / ms * 1e3:.0%} of the roof")
    turn = cycle(windows)
    x, weight = torch.randn(ROWS, CHANNELS, device="cuda", dtype=BF16), torch.randn(CHANNELS, 4, device="cuda").to(BF16)
    ms = graph_ms(lambda: recurrent.convolution_step(next(turn), slots, x, weight, None, silu=True), 16)
    print(f"  convolution with SiLU: {ms * 1e3:.1f} us")

    def in_torch() -> None:
        exact = in_exact_types(*given, unit=True)
        _, after = plain.recurrence_step(pools[0].index_select(0, slots), *exact)
        pools[0].index_copy_(0, slots, after)

    print(f"  recurrence in plain torch: {median_ms(in_torch):.3f} ms")


def passes(compute: Callable[..., Tensor], given: list[Tensor]) -> tuple[float, float]:
    """Milliseconds forward, and forward and backward."""
    leaves = [x.detach().requires_grad_() for x in given]
    grad = torch.randn_like(compute(*leaves))

    def both() -> None:
        compute(*leaves).backward(grad)
        for leaf in leaves:
            leaf.grad = None

    with torch.no_grad():
        forward = median_ms(lambda: compute(*leaves))
    return forward, median_ms(both)


def row(tune: bool) -> None:
    tokens = NUM_PIECES * LENGTH
    pieces = [RowPiece(n * LENGTH, (n + 1) * LENGTH) for n in range(NUM_PIECES)]
    packed = PackedRecurrence(pieces, torch.device("cuda"))
    numbers = {"in_proj": HIDDEN * (CHANNELS + HEADS * WIDTH), "out": HEADS * WIDTH * HIDDEN, "mlp": 3 * HIDDEN * INNER}
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
    wide = torch.randn(sum(numbers.values()) // HIDDEN, HIDDEN, device="cuda", dtype=BF16)
    dense = median_ms(lambda: x @ wide.T)
    print(f"{tokens} tokens ({NUM_PIECES} x {LENGTH}): the products of a layer take {dense:.2f} ms forward, about "
          f"{3 * dense:.2f} ms forward and backward")  # fmt: skip
    given, channels = inputs(tokens), torch.randn(tokens, CHANNELS, device="cuda", dtype=BF16)
    weight = torch.randn(CHANNELS, 4, device="cuda").to(BF16)

    def show(name: str, compute: Callable[..., Tensor], of: list[Tensor]) -> None:
        forward, both = passes(compute, of)
        print(f"  {name:44} {forward:7.2f} ms forward, {both:7.2f} ms forward and backward")

    def recur(*of: Tensor) -> Tensor:
        return recurrence.recur(packed.chunks, *of, None, unit=True)[0]

    settings = [(4, 2, 32), (4, 2, 64), (4, 1, 32), (4, 3, 32), (8, 2, 64), (2, 2, 32)] if tune else []
    for warps, stages, columns in [(recurrence.WARPS, recurrence.STAGES, recurrence.PASS_COLUMNS), *settings]:
        recurrence.WARPS, recurrence.STAGES, recurrence.PASS_COLUMNS = warps, stages, columns
        show(f"recurrence, {warps} warps {stages} stages {columns} columns", recur, given)
    show("convolution with SiLU", lambda x, w: packed.convolve(x, w, None, silu=True), [channels, weight])
    rows = [torch.randn(tokens * HEADS, WIDTH, device="cuda", dtype=BF16) for _ in range(2)]
    rows.append(torch.randn(WIDTH, device="cuda", dtype=BF16))
    show("norm with a gate", lambda *of: GatedNorm.apply(*of, 1e-6), rows)
    plain._has_kernels = lambda _: False
    show("convolution in plain torch", lambda x, w: packed.convolve(x, w, None, silu=True), [channels, weight])
    show("recurrence in plain torch", lambda *of: packed.recur(*of, None, unit=True)[0].to(BF16), given)
    if tune:
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        passes(recur, given)
    for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:16]:
        print(f"    {event.key[:44]:44} {event.device_time_total / event.count:9.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    options = parser.parse_args()
    decode(options.tune)
    row(options.tune)
