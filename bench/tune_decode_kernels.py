#!/usr/bin/env python3
"""Times candidate tiles of the decode kernels on a GPU, for given shapes, in TB/s and as a share of what a plain copy
reaches.

    python bench/tune_decode_kernels.py  # attention: the 8B shape at several batch sizes
    python bench/tune_decode_kernels.py --shape qwen-1.5b --rows 64 --context 1024 --page-size 16 64
    python bench/tune_decode_kernels.py --what shared --group 16 --prefix 512
    python bench/tune_decode_kernels.py --what sampling rope attention shared --json tuning.json

Launches are captured in a CUDA graph and cycle over caches that together are larger than L2, so neither Python nor L2
takes part. Bytes are those that have to be read at least: keys and values of all tokens once. The line with * is the
fastest; the one marked "now" is what the engine takes by itself. The best tile of a shape belongs into `TILES` of
`src/posttrain/engines/native/kernels/shapes.py`. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import facts, seconds_of
from shapes import SHAPES, shape_of
from tables import table, write_json
from torch import Tensor

# Together larger than the L2 cache of any GPU of today.
_BYTES_OF_ALL_CACHES = 512 * 2**20
_LAUNCHES_PER_GRAPH = 32
_REPLAYS = 5
# (positions per block, warps, stages)
_CANDIDATES = (
    (32, 2, 3),
    (32, 2, 4),
    (32, 4, 3),
    (32, 4, 4),
    (32, 4, 5),
    (64, 2, 3),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (64, 8, 3),
    (128, 4, 2),
    (128, 4, 3),
    (128, 8, 2),
    (128, 8, 3),
)
_QUICK = ((32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2))


@dataclass(frozen=True)
class Job:
    """One attention layer and the batch that meets it."""

    shape: str
    rows: int
    context: int
    page_size: int
    spread: bool  # lengths from a tenth of the context to all of it; else all the same

    @property
    def name(self) -> str:
        lengths = f"{self.context // 10}-{self.context}" if self.spread else str(self.context)
        return f"{self.shape}, {self.rows} rows, {lengths} tokens, pages of {self.page_size}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        sizes = shape_of(self.shape).sizes
        return int(sizes["num_attention_heads"]), int(sizes["num_key_value_heads"]), int(sizes["head_dim"])


@dataclass
class Inputs:
    query: Tensor
    pools: list[tuple[Tensor, Tensor]]
    table: Tensor
    lengths: Tensor
    kv_bytes: int
    scale: float


def make_inputs(job: Job, dtype: torch.dtype, prefix_pages: int = 0, group: int = 1) -> Inputs:
    """Pages in random order. With `prefix_pages` the rows of each group of `group` have their first pages in common."""
    heads, kv_heads, dim = job.sizes
    generator = torch.Generator("cuda").manual_seed(0)
    width = -(-job.context // job.page_size)
    pages = torch.randperm(job.rows * width, device="cuda", generator=generator).view(job.rows, width).int()
    if prefix_pages:
        first = torch.arange(job.rows, device="cuda") // group * group
        pages[:, :prefix_pages] = pages[first, :prefix_pages]
    lengths = torch.full((job.rows,), job.context, device="cuda", dtype=torch.int32)
    if job.spread:
        lengths = torch.randint(
            job.context // 10, job.context + 1, (job.rows,), device="cuda", generator=generator
        ).int()
    shape = (job.rows * width, job.page_size, kv_heads, dim)
    pool_bytes = 2 * job.rows * width * job.page_size * kv_heads * dim * dtype.itemsize
    num_pools = min(_LAUNCHES_PER_GRAPH, max(2, -(-_BYTES_OF_ALL_CACHES // pool_bytes)))
    pools = [
        (torch.randn(shape, device="cuda", dtype=dtype), torch.randn(shape, device="cuda", dtype=dtype))
        for _ in range(num_pools)
    ]
    kv_bytes = int(lengths.sum()) * 2 * kv_heads * dim * dtype.itemsize
    return Inputs(
        torch.randn(job.rows, heads, dim, device="cuda", dtype=dtype), pools, pages.contiguous(), lengths, kv_bytes,
        dim**-0.5,
    )  # fmt: skip


def seconds_per_launch(launch: Callable[[int], Any]) -> float:
    """`launch(i)` is called with 0, 1, 2, …; captured, so that only the GPU is timed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(2):
            launch(index)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(_LAUNCHES_PER_GRAPH):
            launch(index)
    graph.replay()
    return min(seconds_of(graph.replay) for _ in range(_REPLAYS)) / _LAUNCHES_PER_GRAPH


def copy_roof() -> float:
    """Bytes read and written per second by a device copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)

    def copies() -> None:
        for _ in range(10):
            target.copy_(source)

    return 20 * source.numel() / min(seconds_of(copies) for _ in range(5))


@dataclass
class Timing:
    label: str
    seconds: float
    num_bytes: float
    note: str = ""


def report(title: str, timings: Sequence[Timing], roof: float) -> dict[str, Any]:
    best = min(timings, key=lambda timing: timing.seconds)
    rows = [
        [
            ("* " if timing is best else "  ") + timing.label,
            timing.seconds * 1e6,
            timing.num_bytes / timing.seconds / 1e12,
            f"{100 * timing.num_bytes / timing.seconds / roof:.0f} %",
            timing.note,
        ]
        for timing in timings
    ]
    print(f"\n{title}\n{table(['', 'µs', 'TB/s', 'of the copy roof', ''], rows)}", flush=True)
    return {
        "title": title,
        "timings": [{**vars(timing), "tb_per_s": timing.num_bytes / timing.seconds / 1e12} for timing in timings],
    }


def tried(label: str, launch: Callable[[int], Any], num_bytes: float, note: str = "") -> Timing | None:
    """None, with a word why, for a candidate that does not fit this GPU."""
    from triton.runtime.errors import OutOfResources

    try:
        return Timing(label, seconds_per_launch(launch), num_bytes, note)
    except OutOfResources as error:
        print(f"  {label} does not fit: {error}", file=sys.stderr)
        return None


def tune_attention(
    job: Job, dtype: torch.dtype, candidates: Sequence[tuple[int, int, int]], roof: float
) -> dict[str, Any]:
    from posttrain.engines.native import kernels

    inputs = make_inputs(job, dtype)
    options: dict[str, Any] = {"scale": inputs.scale, "window": None, "softcap": None}

    def attention(tile: Any, splits: int | None) -> Callable[[int], Tensor]:
        def launch(index: int) -> Tensor:
            keys, values = inputs.pools[index % len(inputs.pools)]
            return kernels.paged_attention(
                inputs.query, keys, values, inputs.table, inputs.lengths, **options, tile=tile, splits=splits
            )

        return launch

    heads, kv_heads, dim = job.sizes
    now = kernels.num_splits(job.rows * kv_heads, inputs.table.shape[1] * job.page_size, _num_sms())
    timings = [tried(f"as it is, {now} splits", attention(None, None), inputs.kv_bytes, "now")]
    tiles = [kernels.AttentionTile(*candidate) for candidate in candidates]
    timings += [tried(_name(tile, now), attention(tile, None), inputs.kv_bytes) for tile in tiles]
    done = [timing for timing in timings if timing is not None]
    fastest = min(done, key=lambda timing: timing.seconds)
    best = next((tile for tile in tiles if _name(tile, now) == fastest.label), None)
    for splits in sorted({1, max(1, now // 2), now * 2, now * 4} - {now}):
        timings.append(tried(_name(best, splits), attention(best, splits), inputs.kv_bytes))
    exact = best or kernels.attention_tile(1 << (dim - 1).bit_length(), dtype.itemsize, 16)
    exact = kernels.AttentionTile(exact.block, exact.num_warps, exact.num_stages, exact_weights=True)
    timings.append(tried(f"{_name(exact, now)}, exact weights", attention(exact, None), inputs.kv_bytes))
    return report(f"attention: {job.name}, {heads}/{kv_heads} heads of {dim}", [t for t in timings if t], roof)


def _name(tile: Any, splits: int) -> str:
    if tile is None:
        return f"as it is, {splits} splits"
    return f"block {tile.block}, {tile.num_warps} warps, {tile.num_stages} stages, {splits} splits"


def _num_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def tune_shared(job: Job, dtype: torch.dtype, group: int, prefix: int, roof: float) -> dict[str, Any]:
    from posttrain.engines.native import kernels

    prefix = min(prefix, job.context - 1) // job.page_size * job.page_size
    heads, kv_heads, dim = job.sizes
    inputs = make_inputs(job, dtype, prefix // job.page_size, group)
    samples = kernels.samples_per_tile(heads // kv_heads, dtype.itemsize, group)
    host, tiles = (kernels.PrefixTiles.empty(job.rows, samples, device=device) for device in ("cpu", "cuda"))
    groups = [list(range(begin, min(begin + group, job.rows))) for begin in range(0, job.rows, group)]
    host.plan(groups, [prefix] * len(groups))
    tiles.copy_(host)
    options: dict[str, Any] = {"scale": inputs.scale, "window": None, "softcap": None}

    def separate(index: int) -> Tensor:
        keys, values = inputs.pools[index % len(inputs.pools)]
        return kernels.paged_attention(inputs.query, keys, values, inputs.table, inputs.lengths, **options)

    def shared(tile: Any) -> Callable[[int], Tensor]:
        def launch(index: int) -> Tensor:
            keys, values = inputs.pools[index % len(inputs.pools)]
            return kernels.shared_prefix_attention(
                inputs.query, keys, values, inputs.table, inputs.lengths, tiles, **options, prefix_tile=tile
            )

        return launch

    token_bytes = 2 * kv_heads * dim * dtype.itemsize
    once = inputs.kv_bytes - (job.rows - len(groups)) * prefix * token_bytes
    shape = kernels.DecodeShape(heads, kv_heads, dim, dim, dtype.itemsize, roof)
    pays = kernels.shared_prefix_pays(shape, [len(rows) for rows in groups], [prefix] * len(groups))
    timings = [
        tried("each row on its own", separate, once),
        tried("prefix once per tile, as it is", shared(None), once, "now" if pays else "estimated not to pay"),
    ]
    for candidate in ((32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2)):
        tile = kernels.AttentionTile(*candidate)
        timings.append(
            tried(f"prefix: block {tile.block}, {tile.num_warps} warps, {tile.num_stages} stages", shared(tile), once)
        )
    title = f"shared prefix: {job.name}, groups of {group} share {prefix} tokens (bytes: shared ones once)"
    return report(title, [t for t in timings if t], roof)


def time_sampling(shape: str, rows: int, dtype: torch.dtype, roof: float) -> dict[str, Any]:
    from posttrain.engines.native.kernels import sample_rows, sampling

    width = int(shape_of(shape).sizes["vocab_size"])
    logits = [torch.randn(rows, width, device="cuda", dtype=dtype) * 3 for _ in range(4)]
    keys = torch.randint(0, 2**60, (rows,), device="cuda")
    index, inverse = torch.arange(rows, device="cuda"), torch.full((rows,), 1 / 0.7, device="cuda")
    num_bytes = logits[0].numel() * dtype.itemsize
    timings = []
    usual = sampling._LOGITS_PER_PROGRAM
    for count in sorted({1024, 2048, 4096, 8192, 16384, usual}):
        sampling._LOGITS_PER_PROGRAM = count
        timings.append(
            tried(
                f"one pass, {count} logits per program",
                lambda i: sample_rows(logits[i % 4], keys, index, inverse, vocab_size=width),
                num_bytes,
                "now" if count == usual else "",
            )
        )
    sampling._LOGITS_PER_PROGRAM = usual
    timings.append(tried("softmax of torch, for comparison", lambda i: logits[i % 4].softmax(-1), 2 * num_bytes))
    return report(f"sampling: {rows} rows of {width} logits, {dtype}", [t for t in timings if t], roof)


def time_rope(job: Job, dtype: torch.dtype, roof: float) -> dict[str, Any]:
    from posttrain.engines.native import kernels

    heads, kv_heads, dim = job.sizes
    rows, parts = job.rows, [heads * dim, kv_heads * dim, kv_heads * dim]
    products = [torch.randn(rows, sum(parts), device="cuda", dtype=dtype).split(parts, dim=1) for _ in range(16)]
    pages = -(-rows // job.page_size)
    keys = torch.zeros(pages, job.page_size, kv_heads, dim, device="cuda", dtype=dtype)
    values, slots = torch.zeros_like(keys), torch.randperm(rows, device="cuda")
    cos, sin = (torch.randn(rows, dim, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.ones(dim, device="cuda", dtype=dtype)

    def fused(norm: bool, exact: bool) -> Callable[[int], Tensor]:
        norms = {"query_norm": weight, "key_norm": weight} if norm else {}
        return lambda i: kernels.write_kv_rope(
            *products[i % 16], cos, sin, keys, values, slots, exact_like_torch=exact, **norms
        )

    def separate(index: int) -> None:
        query, key, value = (x.unflatten(1, (-1, dim)) for x in products[index % 16])
        for x in (query, key):
            half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
            x = x * cos[:, None] + half * sin[:, None]
        keys.flatten(0, 1).index_copy_(0, slots, key)
        values.flatten(0, 1).index_copy_(0, slots, value)

    num_bytes = 2 * rows * sum(parts) * dtype.itemsize
    timings = [
        tried("one launch, roundings of torch", fused(False, True), num_bytes),
        tried("one launch, one rounding", fused(False, False), num_bytes),
        tried("one launch, with head norms", fused(True, True), num_bytes),
        tried("torch, operator by operator", separate, num_bytes),
    ]
    return report(f"rotation and write: {job.shape}, {rows} rows", [t for t in timings if t], roof)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["attention"], choices=["attention", "shared", "sampling", "rope"])
    parser.add_argument("--shape", nargs="+", default=["llama-8b"], choices=list(SHAPES), help="(default llama-8b)")
    parser.add_argument("--rows", nargs="+", type=int, default=[512, 64, 8], help="batch sizes (default 512 64 8)")
    parser.add_argument("--context", nargs="+", type=int, default=[1024], help="tokens of a sequence (default 1024)")
    parser.add_argument("--page-size", nargs="+", type=int, default=[16], help="tokens of a page (default 16)")
    parser.add_argument("--spread", action="store_true", help="lengths from a tenth of the context to all of it")
    parser.add_argument("--group", type=int, default=16, help="samples that share a prompt (default 16)")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that they share (default 512)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--quick", action="store_true", help="six candidates instead of fourteen")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if not torch.cuda.is_available():
        print(
            "tune_decode_kernels.py times kernels on a GPU: a CUDA device is needed and there is none", file=sys.stderr
        )
        return 64
    dtype, roof = getattr(torch, options.dtype), copy_roof()
    print(f"{torch.cuda.get_device_name()}, {_num_sms()} SMs; device copy {roof / 1e12:.2f} TB/s read and written")
    candidates = _QUICK if options.quick else _CANDIDATES
    results = []
    for shape in options.shape:
        for rows in options.rows:
            jobs = [
                Job(shape, rows, context, size, options.spread)
                for context in options.context
                for size in options.page_size
            ]
            if "sampling" in options.what:
                results.append(time_sampling(shape, rows, dtype, roof))
            if "rope" in options.what:
                results.append(time_rope(jobs[0], dtype, roof))
            for job in jobs:
                if "attention" in options.what:
                    results.append(tune_attention(job, dtype, candidates, roof))
                if "shared" in options.what:
                    results.append(tune_shared(job, dtype, options.group, options.prefix, roof))
    write_json(options.json, {"machine": facts("cuda"), "copy_bytes_per_s": roof, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
