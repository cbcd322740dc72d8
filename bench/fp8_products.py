#!/usr/bin/env python3
"""The matrix products of a decode step in bf16 and in FP8, and what quantising costs: an 8B Llama shape on one GPU.

    python bench/fp8_products.py --out fp8.json                     under 150 s on an H200
    python bench/fp8_products.py --rows 16 64 --skip elementwise    less of it
    python bench/fp8_products.py --tiny                             on a CPU, in Triton's interpreter: does it all run?

Sections: `quantise` all weights from bf16 to FP8, a factor per output channel; `tune` the tiles of our own kernel for few rows;
`errors` of every product against fp64; `products` one by one, weights going round so that none is in L2; `elementwise`: norm and
SwiGLU with and without quantising what they write; `step`: all products of all layers and the head in one CUDA graph, without
and with what stands between them (there is no attention). A section that fails is shown, and the others go on.
Kernels: fp8_kernels.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from fp8_kernels import (
    FP8,
    LARGEST,
    Scratch,
    Tile,
    add_norm,
    compile_product,
    compile_quantisation,
    compile_without_gpu,
    fits,
    product,
    quantise_rows,
    swiglu,
)
from machine import facts, seconds_of
from tables import table, write_json
from torch import Tensor

BF16 = torch.bfloat16
SECTIONS = ("quantise", "tune", "errors", "products", "elementwise", "step")
OWN, ROWWISE, PER_TENSOR, PLAIN = "own fp8", "scaled_mm rows", "scaled_mm tensor", "bf16"
_MOST_ROWS_OF_OWN = 128
_RING_BYTES = 400 * 2**20  # weights that go round are together larger than L2
_PROGRAMS = (100, 1100)  # of a launch: at least most multiprocessors, at most some waves
_SPLITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    inner: int = 14336
    qkv: int = (32 + 2 * 8) * 128
    attended: int = 32 * 128
    layers: int = 32
    vocab: int = 128256

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each product of a layer, in order."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.attended),
            "gate+up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def all_products(self) -> dict[str, tuple[int, int]]:
        return {**self.products, "head": (self.vocab, self.hidden)}

    @property
    def layer_weights(self) -> int:
        return sum(n * k for n, k in self.products.values())

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.vocab * self.hidden


TINY = Sizes(hidden=128, inner=256, qkv=64, attended=128, layers=1, vocab=64)

# (columns, depth, warps, stages, copy engine); the first operand are the weights.
_TILES = (
    (64, 128, 4, 4, False), (64, 128, 4, 6, False), (64, 256, 4, 3, False), (64, 256, 4, 4, False),
    (128, 128, 4, 4, False), (128, 128, 8, 4, False), (128, 256, 8, 3, False),
    (64, 128, 4, 4, True), (64, 128, 4, 6, True), (64, 256, 4, 3, True), (64, 256, 4, 5, True),
    (128, 128, 4, 4, True), (128, 128, 8, 6, True), (128, 256, 8, 3, True),
)  # fmt: skip
_QUANTISE = {4096: ((1, 4), (1, 8), (2, 8), (4, 8)), 14336: ((1, 8), (1, 16), (2, 16))}  # rows a program, warps
_ROWS_OF_TILES = (16, 32, 64, 128)


def tiles_for(rows: int) -> list[Tile]:
    """Candidates for `rows` rows: all of them in one tile."""
    height = next(height for height in _ROWS_OF_TILES if height >= min(rows, _ROWS_OF_TILES[-1]))
    found = [Tile(True, height, *rest) for rest in _TILES]
    # For comparison: rows as the first operand. Below 64 of them Triton converts to fp16 and takes the older instructions.
    return [*found, Tile(False, height, 64, 128, 4, 5), Tile(False, height, 128, 128, 4, 4)]


TINY_TILES = [Tile(True, 16, 64, 64, 4, 3), Tile(True, 16, 64, 64, 4, 3, True), Tile(False, 16, 64, 64, 4, 3)]


@dataclass
class Scene:
    """What all sections share, and what they have found."""

    sizes: Sizes
    device: str
    rows: list[int]
    ends: float
    bf16: dict[str, list[Tensor]] = field(default_factory=dict)
    fp8: dict[str, list[Tensor]] = field(default_factory=dict)
    factors: dict[str, list[Tensor]] = field(default_factory=dict)
    roof: float = 4.29e12
    chosen: dict[tuple[str, int], tuple[Tile, int]] = field(default_factory=dict)  # by product and height of the tile
    times: dict[tuple[str, str, int], float] = field(default_factory=dict)  # by way, product and rows: microseconds
    report: dict[str, Any] = field(default_factory=dict)
    compilers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    scratch: Scratch | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def ring(self, name: str, weights: dict[str, list[Tensor]]) -> list[Tensor]:
        """Enough of the layers' weights that none is in L2 when its turn comes again."""
        found = weights[name]
        size = found[0].numel() * found[0].element_size()
        return found[: max(1, min(len(found), -(-_RING_BYTES // size)))]

    def tile(self, name: str, rows: int) -> tuple[Tile, int] | None:
        heights = sorted(height for product_name, height in self.chosen if product_name == name)
        return next((self.chosen[name, height] for height in heights if height >= rows), None)


def microseconds(scene: Scene, launches: Sequence[Callable[[], Any]], replays: int = 9) -> float:
    """Per launch: the median over replays of one CUDA graph that holds them all."""
    if not scene.on_gpu:
        return seconds_of(launches[0]) * 1e6  # the interpreter is slow; the value is not used
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3 / len(launches)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels compute, by torch's operators."""
    largest = x.float().abs().amax(1).clamp_min(1e-12)
    return (x.float() * (LARGEST / largest)[:, None]).clamp(-LARGEST, LARGEST).to(FP8), largest / LARGEST


def error_of(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# -- sections --------------------------------------------------------------------------------------------------------


def make_weights(scene: Scene) -> None:
    generator = torch.Generator(scene.device).manual_seed(0)
    for name, (n, k) in scene.sizes.all_products.items():
        count = 1 if name == "head" else scene.sizes.layers
        made = [torch.empty(n, k, dtype=BF16, device=scene.device) for _ in range(count)]
        for weight in made:
            weight.normal_(0.0, k**-0.5, generator=generator)
        scene.bf16[name] = made
        scene.fp8[name] = [torch.empty(n, k, dtype=FP8, device=scene.device) for _ in made]
        scene.factors[name] = [torch.empty(n, dtype=torch.float32, device=scene.device) for _ in made]
    largest = max(n for n, _ in scene.sizes.products.values())
    scene.scratch = Scratch.on(scene.device, max(_SPLITS) * _MOST_ROWS_OF_OWN * largest)


def measure_roof(scene: Scene) -> None:
    """Bytes read and written per second by a device copy."""
    if not scene.on_gpu:
        return
    sources = [torch.empty(2**30, dtype=torch.uint8, device="cuda").random_() for _ in range(2)]
    target = torch.empty_like(sources[0])
    us = microseconds(scene, [lambda s=source: target.copy_(s) for source in sources])
    scene.roof = scene.report["copy_bytes_per_s"] = 2 * target.numel() / us * 1e6


def quantise_section(scene: Scene) -> dict[str, Any]:
    """Every weight once; correct before it is timed. Leaves the FP8 weights for the other sections."""
    found: dict[str, Any] = {"candidates": {}}
    best: dict[int, tuple[int, int]] = {}
    for width in sorted({k for _, k in scene.sizes.all_products.values()}):
        name = max((n, name) for name, (n, k) in scene.sizes.products.items() if k == width)[1]
        ring = range(len(scene.ring(name, scene.bf16)))
        timed = {}
        for rows_each, warps in _QUANTISE.get(width, ((1, 4), (2, 4))):
            scene.fp8[name][0].view(torch.uint8).fill_(0xFF)  # not a number
            scene.factors[name][0].fill_(float("nan"))
            launches = [
                lambda i=i, r=rows_each, w=warps, name=name: quantise_rows(
                    scene.bf16[name][i], scene.fp8[name][i], scene.factors[name][i], r, w
                )
                for i in ring
            ]
            launches[0]()
            wanted, factor = quantised(scene.bf16[name][0])
            off = (scene.fp8[name][0].view(torch.uint8) != wanted.view(torch.uint8)).float().mean().item()
            back = scene.fp8[name][0].float() * scene.factors[name][0][:, None]
            # The last bit of 448 / largest may differ from torch's, so a value in a thousand may round the other way.
            error = error_of(back, scene.bf16[name][0])
            if off > 2e-3 or error > 0.04 or not torch.allclose(scene.factors[name][0], factor, rtol=1e-5):
                raise AssertionError(
                    f"{width} wide, {rows_each} rows, {warps} warps: {off:.2g} differ, error {error:.3g}"
                )
            timed[rows_each, warps] = microseconds(scene, launches)
            found["candidates"][f"{width} wide, {rows_each} rows, {warps} warps"] = {
                "us": timed[rows_each, warps], "differ": off, "error": error,
                "tb_per_s": 3 * wanted.numel() / timed[rows_each, warps] / 1e6,
            }  # fmt: skip
        best[width] = min(timed, key=lambda key: timed[key])

    def everything() -> None:
        for name, weights in scene.bf16.items():
            for i, weight in enumerate(weights):
                quantise_rows(weight, scene.fp8[name][i], scene.factors[name][i], *best[weight.shape[1]])

    eager = median(seconds_of(everything) for _ in range(5 if scene.on_gpu else 1)) * 1e3
    ms = microseconds(scene, [everything], replays=7) / 1e3
    num_bytes = 3 * scene.sizes.weights
    return {
        **found, "best": {str(k): v for k, v in best.items()}, "ms_in_a_graph": ms, "ms_launched_one_by_one": eager,
        "bytes": num_bytes, "floor_ms": num_bytes / scene.roof * 1e3, "goal_ms": 15.0,
    }  # fmt: skip


def start_compilers() -> list[subprocess.Popen[bytes]]:
    """Compiles all candidates into Triton's cache in processes without a GPU, while other sections run."""
    count = max(1, min(12, (os.cpu_count() or 2) - 3))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--compile"]
    return [
        subprocess.Popen([*command, str(i), str(count)], env=environment, stdout=subprocess.DEVNULL)
        for i in range(count)
    ]


def compile_part(index: int, count: int) -> int:
    compile_without_gpu()
    work: list[Callable[[], Any]] = [
        lambda w=width, c=candidate: compile_quantisation(w, *c)
        for width, candidates in _QUANTISE.items()
        for candidate in candidates
    ]
    for height in _ROWS_OF_TILES:
        work += [lambda t=tile: compile_product(t) for tile in tiles_for(height)]
    failed = 0
    for each in work[index::count]:
        try:
            each()
        except Exception as error:  # the candidate will be left out
            failed += 1
            print(f"not compiled: {str(error).splitlines()[-1][:200]}", file=sys.stderr)
    return failed


def wait_for_compilers(scene: Scene) -> None:
    until = time.monotonic() + min(45.0, scene.seconds_left / 2)
    for process in scene.compilers:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print("a compiler was too slow and was stopped; the rest is compiled when it is needed")
    scene.compilers = []


def splits_for(tile: Tile, rows: int, n: int, k: int, tiny: bool) -> list[int]:
    tiles = -(-rows // tile.rows) * (n // tile.columns)
    possible = [s for s in _SPLITS if s <= k // tile.depth]
    if tiny:
        return possible[:3]
    within = [s for s in possible if _PROGRAMS[0] <= tiles * s <= _PROGRAMS[1]]
    return within or [1]


def tune_section(scene: Scene) -> dict[str, Any]:
    """The fastest correct tile and number of splits of each product, for 16, 32, 64 and 128 rows."""
    start = time.monotonic()
    wait_for_compilers(scene)
    waited, found = time.monotonic() - start, {}
    heights = (
        [h for h in _ROWS_OF_TILES if any(_height_for(rows) == h for rows in scene.rows)] if scene.on_gpu else [16]
    )
    until = time.monotonic() + 0.45 * scene.seconds_left
    failures: dict[str, str] = {}
    for height in heights:
        for name in scene.sizes.all_products:
            if time.monotonic() > until:
                failures[f"{name}, {height} rows"] = "not tuned: no time left"
                continue
            found[f"{name}, {height} rows"] = _tune(scene, name, height, failures)
    return {"waited_for_compilers_s": waited, "seconds": time.monotonic() - start, "best": found, "failures": failures}


def _height_for(rows: int) -> int | None:
    return next((height for height in _ROWS_OF_TILES if height >= rows), None)


def _tune(scene: Scene, name: str, rows: int, failures: dict[str, str]) -> list[dict[str, Any]]:
    n, k = scene.sizes.all_products[name]
    x, x_factor = quantised(torch.randn(rows, k, device=scene.device))
    weights, factors = scene.ring(name, scene.fp8), scene.factors[name]
    wanted = (x.float() * x_factor[:, None]) @ (weights[0].float() * factors[0][:, None]).t()
    y = torch.empty(rows, n, dtype=BF16, device=scene.device)
    assert scene.scratch is not None
    scratch = scene.scratch
    timed: dict[tuple[Tile, int], float] = {}

    def attempt(tile: Tile, splits: int) -> None:
        if (tile, splits) in timed or splits * rows * n > scratch.pieces.numel() * (1 if splits > 1 else 10**6):
            return
        try:
            y.fill_(float("nan"))
            product(x, x_factor, weights[0], factors[0], y, tile, splits, scratch)
            error = error_of(y, wanted)
            if not error < 2e-2:  # sums in the matrix units have few bits
                raise AssertionError(f"error {error:.3g}")
            timed[tile, splits] = microseconds(
                scene,
                [
                    lambda i=i: product(x, x_factor, weights[i], factors[i], y, tile, splits, scratch)
                    for i in range(len(weights))
                ],
                replays=5,
            )
        except Exception as error:
            failures[f"{name}, {rows} rows: {tile.name}, {splits} splits"] = f"{type(error).__name__}: {error}"[:200]
            scratch.counters.zero_()

    candidates = [tile for tile in (tiles_for(rows) if scene.on_gpu else TINY_TILES) if fits(tile, n, k)]
    for tile in candidates:
        possible = splits_for(tile, rows, n, k, not scene.on_gpu)
        for splits in {possible[0], possible[len(possible) // 2]}:
            attempt(tile, splits)
    for tile in list(dict.fromkeys(tile for tile, _ in sorted(timed, key=lambda key: timed[key])))[:3]:
        for splits in splits_for(tile, rows, n, k, not scene.on_gpu):
            attempt(tile, splits)
    ranked = sorted(timed, key=lambda key: timed[key])
    if ranked:
        scene.chosen[name, rows] = ranked[0]
        precise = Tile(**{**ranked[0][0].__dict__, "precise": True})
        attempt(precise, ranked[0][1])
    shown = [*ranked[:4], *(key for key in timed if key[0].precise), *(key for key in ranked if not key[0].swapped)][:7]
    return [
        {"tile": t.name, "splits": s, "us": timed[t, s], "tb_per_s": n * k / timed[t, s] / 1e6}
        for t, s in dict.fromkeys(shown)
    ]


def ways_for(scene: Scene, rows: int) -> list[str]:
    return [PLAIN, ROWWISE, PER_TENSOR, *([OWN] if rows <= _MOST_ROWS_OF_OWN else [])]


def launcher(
    scene: Scene, way: str, name: str, inputs: tuple[Tensor, Tensor, Tensor], y: Tensor, precise: bool = False
) -> Callable[[int], Any]:
    """A product by its number in the ring. `inputs`: in bf16, in FP8 and the factors of its rows."""
    plain, x, x_factor = inputs
    if way == PLAIN:
        return lambda i: torch.mm(plain, scene.bf16[name][i].t(), out=y)
    weights, factors = scene.fp8[name], scene.factors[name]
    if way == ROWWISE:
        return lambda i: torch._scaled_mm(
            x, weights[i].t(), scale_a=x_factor[:, None], scale_b=factors[i][None, :], out_dtype=BF16,
            use_fast_accum=not precise, out=y,
        )  # fmt: skip
    if way == PER_TENSOR:  # not the same result: how fast a product would be whose factors are applied elsewhere
        one = torch.ones((), device=scene.device)
        return lambda i: torch._scaled_mm(
            x, weights[i].t(), scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=not precise, out=y
        )
    chosen = scene.tile(name, x.shape[0])
    if chosen is None or scene.scratch is None:
        raise LookupError(f"no tile was found for {name}, {x.shape[0]} rows")
    tile, splits = Tile(**{**chosen[0].__dict__, "precise": precise}), chosen[1]
    scratch = scene.scratch
    return lambda i: product(x, x_factor, weights[i], factors[i], y, tile, splits, scratch)


def random_inputs(scene: Scene, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    plain = torch.randn(rows, k, device=scene.device).to(BF16)
    return plain, *quantised(plain)


def errors_section(scene: Scene) -> dict[str, Any]:
    """Against fp64: `all` from the bf16 values, `product` from the quantised ones. The largest of several numbers of rows."""
    found: dict[str, Any] = {}
    for name, (n, k) in scene.sizes.all_products.items():
        for rows in [rows for rows in (16, 64, 128, 512) if rows in scene.rows] or scene.rows[:1]:
            for kind in ("normal", "outliers"):
                plain = torch.randn(rows, k, device=scene.device)
                if kind == "outliers":  # one channel in a hundred is thirty times as large
                    plain[:, torch.randperm(k, device=scene.device)[: k // 100 + 1]] *= 30.0
                plain = plain.to(BF16)
                inputs = (plain, *quantised(plain))
                some = slice(0, min(n, 4096))
                exact = plain.double() @ scene.bf16[name][0][some].double().t()
                weight = scene.fp8[name][0][some].double() * scene.factors[name][0][some].double()[:, None]
                dequantised = (inputs[1].double() * inputs[2].double()[:, None]) @ weight.t()
                for way in ways_for(scene, rows):
                    for precise in (False, True) if way in (ROWWISE, OWN) else (False,):
                        if way == PER_TENSOR:
                            continue
                        label = f"{name}, {kind}, {way}{', fp32 sums' if precise else ''}"
                        try:
                            y = torch.full((rows, n), float("nan"), dtype=BF16, device=scene.device)
                            launcher(scene, way, name, inputs, y, precise)(0)
                            got = y[:, some]
                            entry = found.setdefault(label, {"all": 0.0, "product": 0.0})
                            wanted = exact if way == PLAIN else dequantised
                            # A NaN must not be lost in max().
                            entry["all"] = _larger(entry["all"], error_of(got, exact))
                            entry["product"] = _larger(entry["product"], error_of(got, wanted))
                        except Exception as error:
                            found[f"{label}, {rows} rows"] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return found


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a


def products_section(scene: Scene) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in scene.rows:
        for name, (n, k) in scene.sizes.all_products.items():
            inputs = random_inputs(scene, rows, k)
            y = torch.empty(rows, n, dtype=BF16, device=scene.device)
            for way in ways_for(scene, rows):
                try:
                    launch = launcher(scene, way, name, inputs, y)
                    ring = scene.ring(name, scene.bf16 if way == PLAIN else scene.fp8)
                    us = microseconds(scene, [lambda i=i, f=launch: f(i) for i in range(len(ring))])
                    scene.times[way, name, rows] = us
                    found[f"{rows} rows, {name}, {way}"] = {"us": us, "tb_per_s": ring[0].nbytes / us / 1e6}
                except Exception as error:
                    found[f"{rows} rows, {name}, {way}"] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return found


def elementwise_section(scene: Scene) -> dict[str, Any]:
    """Microseconds of a launch, its inputs in L2 as they are in a decode step."""
    found: dict[str, Any] = {}
    for rows in scene.rows:
        between = Between(scene, rows)
        between.check()
        launches: dict[str, Callable[[], Any]] = {
            "norm": lambda b=between: b.norm(False),
            "norm + quantise": lambda b=between: b.norm(True),
            "swiglu": lambda b=between: b.swiglu(False),
            "swiglu + quantise": lambda b=between: b.swiglu(True),
            "quantise what attention wrote": lambda b=between: b.quantise_attended(),
        }
        found[str(rows)] = {name: microseconds(scene, [launch] * 32) for name, launch in launches.items()}
    return found


class Between:
    """What stands between the products of a layer, with buffers of its own."""

    def __init__(self, scene: Scene, rows: int) -> None:
        sizes, device = scene.sizes, scene.device

        def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        self.stream, self.total = (
            random(rows, sizes.hidden, dtype=torch.float32),
            empty(rows, sizes.hidden, dtype=torch.float32),
        )
        self.delta, self.weight = random(rows, sizes.hidden), random(sizes.hidden)
        self.attended, self.gate_up = random(rows, sizes.attended), random(rows, 2 * sizes.inner)
        self.qkv = empty(rows, sizes.qkv, dtype=BF16)
        self.normed, self.acted = empty(rows, sizes.hidden, dtype=BF16), empty(rows, sizes.inner, dtype=BF16)
        self.normed8, self.acted8 = empty(rows, sizes.hidden, dtype=FP8), empty(rows, sizes.inner, dtype=FP8)
        self.attended8 = empty(rows, sizes.attended, dtype=FP8)
        self.factors = {name: empty(rows, dtype=torch.float32) for name in ("normed", "acted", "attended")}
        self.logits = empty(rows, sizes.vocab, dtype=BF16)
        self.norm(True), self.norm(False), self.swiglu(True), self.swiglu(False), self.quantise_attended()

    def norm(self, quantise: bool) -> None:
        y, factor = (self.normed8, self.factors["normed"]) if quantise else (self.normed, None)
        add_norm(self.stream, self.delta, self.weight, self.total, y, factor)

    def swiglu(self, quantise: bool) -> None:
        swiglu(self.gate_up, *((self.acted8, self.factors["acted"]) if quantise else (self.acted, None)))

    def quantise_attended(self) -> None:
        quantise_rows(self.attended, self.attended8, self.factors["attended"], 1, 8)

    def inputs(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        kind = {"o": "attended", "down": "acted"}.get(name, "normed")
        return getattr(self, kind), getattr(self, f"{kind}8"), self.factors[kind]

    def output(self, name: str) -> Tensor:
        return {"qkv": self.qkv, "gate+up": self.gate_up, "head": self.logits}.get(name, self.delta)

    def check(self) -> None:
        stream = self.stream.double() + self.delta.double()
        normed = stream * torch.rsqrt(stream.square().mean(1, keepdim=True) + 1e-5) * self.weight.double()
        gate, up = self.gate_up.double().chunk(2, dim=1)
        acted = gate * torch.sigmoid(gate) * up
        pairs = {"normed": normed, "acted": acted, "attended": self.attended.double()}
        for name, wanted in pairs.items():
            got = getattr(self, f"{name}8").double() * self.factors[name].double()[:, None]
            error, plain = error_of(got, wanted), error_of(getattr(self, name), wanted)
            if not (error < 0.05 and plain < 0.005):
                raise AssertionError(f"{name}: error {error:.3g} in FP8, {plain:.3g} in bf16")


def step_section(scene: Scene) -> dict[str, Any]:
    """Milliseconds of a replay: every layer and the head, weights all different."""
    found: dict[str, Any] = {}
    for rows in scene.rows:
        between = Between(scene, rows)
        for way in (PLAIN, ROWWISE, OWN, "fp8 best"):
            if way == OWN and rows > _MOST_ROWS_OF_OWN:
                continue
            for whole in (False, True):
                label = f"{rows} rows, {way}{', with norms' if whole else ''}"
                try:
                    if scene.seconds_left < 8:
                        raise TimeoutError("no time left")
                    work = step_of(scene, between, way, rows, whole)
                    found[label] = {"ms": microseconds(scene, [work], replays=9) / 1e3}
                except Exception as error:
                    found[label] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return found


def step_of(scene: Scene, between: Between, way: str, rows: int, whole: bool) -> Callable[[], None]:
    in_fp8 = way != PLAIN

    def chosen_way(name: str) -> str:
        if way != "fp8 best":
            return way
        known = {w: scene.times[w, name, rows] for w in (ROWWISE, OWN) if (w, name, rows) in scene.times}
        return min(known, key=lambda w: known[w])

    launches = {
        name: launcher(scene, chosen_way(name), name, between.inputs(name), between.output(name))
        for name in scene.sizes.all_products
    }

    def work() -> None:
        for layer in range(scene.sizes.layers):
            if whole:
                between.norm(in_fp8)
            launches["qkv"](layer)
            if whole and in_fp8:
                between.quantise_attended()
            launches["o"](layer)
            if whole:
                between.norm(in_fp8)
            launches["gate+up"](layer)
            if whole:
                between.swiglu(in_fp8)
            launches["down"](layer)
        if whole:
            between.norm(in_fp8)
        launches["head"](0)

    return work


# -- around them -----------------------------------------------------------------------------------------------------


def show(scene: Scene) -> None:
    sections, sizes = scene.report["sections"], scene.sizes
    print(f"\ndevice copy {scene.roof / 1e12:.2f} TB/s read and written; floors are bytes of weights at that rate")
    quantise = sections.get("quantise", {})
    if "ms_in_a_graph" in quantise:
        print(
            f"quantising all weights: {quantise['ms_in_a_graph']:.2f} ms in a graph, {quantise['ms_launched_one_by_one']:.2f} ms "
            f"launched one by one (floor {quantise['floor_ms']:.2f}, goal {quantise['goal_ms']:.0f}); best {quantise['best']}"
        )
    errors = {label: entry for label, entry in sections.get("errors", {}).items() if isinstance(entry, dict)}
    if errors:
        print("\nrelative error, largest over numbers of rows")
        rows_of_errors = [[label, e.get("all"), e.get("product"), e.get("error", "")] for label, e in errors.items()]
        print(
            table(
                ["product, inputs, way", "all", "product", ""], [r for r in rows_of_errors if "gate+up" in r[0] or r[3]]
            )
        )
    tuned = sections.get("tune", {}).get("best", {})
    if tuned:
        print("\ntiles: the best of each product; * the same with fp32 sums, ** rows as the first operand")
        lines = []
        for label, entries in tuned.items():
            shown = entries[:1] + [e for e in entries[1:] if "fp32" in e["tile"] or e["tile"].startswith("x")][:2]
            for entry in shown:
                mark = "" if entry is entries[0] else " *" if "fp32" in entry["tile"] else " **"
                lines.append([label + mark, entry["tile"], entry["splits"], entry["us"], entry["tb_per_s"]])
        print(table(["product", "tile", "splits", "us", "TB/s"], lines))
    if scene.times:
        print("\nmicroseconds of a product, weights going round")
        names = list(sizes.all_products)
        lines = [
            [f"{rows} {way}", *(scene.times.get((way, name, rows)) for name in names), layer_us(scene, way, rows)]
            for rows in scene.rows
            for way in ways_for(scene, rows)
        ]
        print(table(["rows, way", *names, "a layer"], lines))
    elementwise = sections.get("elementwise", {})
    if any(isinstance(entry, dict) for entry in elementwise.values()):
        names = list(next(iter(elementwise.values())))
        print(
            "\nmicroseconds of what stands between (two norms, one SwiGLU, one quantising of what attention wrote per layer)"
        )
        print(
            table(["rows", *names], [[rows, *(entry[name] for name in names)] for rows, entry in elementwise.items()])
        )
    steps = sections.get("step", {})
    if steps and "error" not in steps:
        print(f"\nmilliseconds of {sizes.layers} layers and the head in one graph; us of a layer's products beside it")
        floors = [sizes.weights * size / scene.roof * 1e3 for size in (2, 1)]
        lines = []
        for rows in scene.rows:
            cells: list[Any] = [str(rows)]
            cells += [layer_us(scene, way, rows) for way in (PLAIN, ROWWISE, OWN)]
            for ending in ("", ", with norms"):
                cells += [
                    steps.get(f"{rows} rows, {way}{ending}", {}).get("ms") for way in (PLAIN, ROWWISE, OWN, "fp8 best")
                ]
            lines.append(cells)
        header = ["rows", "bf16 us", "scaled us", "own us", "bf16 ms", "scaled", "own", "best fp8"]
        print(table([*header, "bf16 +norms", "scaled +norms", "own +norms", "best +norms"], lines))
        per_layer = [sizes.layer_weights * size / scene.roof * 1e6 for size in (2, 1)]
        print(
            f"floors: bf16 {floors[0]:.2f} ms, FP8 {floors[1]:.2f} ms; a layer {per_layer[0]:.1f} and {per_layer[1]:.1f} us"
        )
    for name, section in sections.items():
        if "error" in section:
            print(f"section {name} failed: {section['error']}")


def layer_us(scene: Scene, way: str, rows: int) -> float | None:
    found = [scene.times.get((way, name, rows)) for name in scene.sizes.products]
    return None if None in found else sum(us for us in found if us is not None)


def mend_interpreter() -> None:
    """Triton 3.6's interpreter takes loop bounds that numpy refuses, and rounds to FP8 without a carry into the exponent."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_with_item(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_by_torch(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            return torch.from_numpy(numpy.ascontiguousarray(values)).to(FP8).view(torch.uint8).numpy()
        return convert(values, source, target, rounding)

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_with_item, convert_by_torch


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512], metavar="M")
    parser.add_argument("--skip", nargs="+", default=[], choices=SECTIONS[1:], help="sections to leave out")
    parser.add_argument("--seconds", type=float, default=130.0, help="after which nothing new begins (default: 130)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.compile:
        return compile_part(*options.compile)
    if not options.tiny and not torch.cuda.is_available():
        print("fp8_products.py needs a CUDA device, or --tiny to be tried on a CPU", file=sys.stderr)
        return 64
    device = "cpu" if options.tiny else "cuda"
    scene = Scene(TINY if options.tiny else Sizes(), device, options.rows, time.monotonic() + options.seconds)
    if options.tiny:
        mend_interpreter()
        scene.rows = [1, 5]
    else:
        scene.compilers = start_compilers()
        torch.set_grad_enabled(False)
    torch.manual_seed(0)
    scene.report = {"machine": machine(device), "sizes": scene.sizes.__dict__, "sections": {}}
    sections: dict[str, Callable[[Scene], dict[str, Any]]] = {
        "quantise": quantise_section, "tune": tune_section, "errors": errors_section, "products": products_section,
        "elementwise": elementwise_section, "step": step_section,
    }  # fmt: skip
    try:
        make_weights(scene)
        measure_roof(scene)
        for name, section in sections.items():
            if name not in options.skip:
                run_section(scene, name, section, options.out)
    finally:
        for process in scene.compilers:
            process.kill()
    show(scene)
    write_json(options.out, scene.report)
    return 1 if any("error" in section for section in scene.report["sections"].values()) else 0


def run_section(scene: Scene, name: str, section: Callable[[Scene], dict[str, Any]], out: Path | None) -> None:
    start = time.monotonic()
    try:
        if scene.seconds_left < 5:
            raise TimeoutError("no time left")
        scene.report["sections"][name] = section(scene)
    except Exception as error:
        traceback.print_exc()
        scene.report["sections"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    scene.report.setdefault("seconds", {})[name] = time.monotonic() - start
    print(f"[{name}: {time.monotonic() - start:.1f} s]", flush=True)
    if out is not None:
        write_json(out, scene.report)


def machine(device: str) -> dict[str, Any]:
    try:
        return facts(device)
    except Exception as error:  # posttrain may not be installed where only kernels are timed
        return {"error": str(error), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
