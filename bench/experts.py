#!/usr/bin/env python3
"""One layer of routed experts on a GPU: our kernels, the forward of `transformers`, and the roof of bytes and FLOPs.

    python bench/experts.py                                  decode with 512 rows, training with 8192, Qwen3-30B-A3B
    python bench/experts.py --shape gpt-oss-20b --rows 512 64 8
    python bench/experts.py --tiles --rows 512 64            which tile is fastest; the best belongs into `TILES`

Launches are captured in a CUDA graph, so Python takes no part; passes of training are timed as they are launched.
Routing is random: each token takes the experts of its largest random scores. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from machine import matrix_roof, seconds_of
from tables import table
from torch import Tensor
from tune_decode_kernels import copy_roof, seconds_per_launch

from posttrain.policy.experts import SortedRows, expert_outputs, weighted_sum
from posttrain.policy.fused import expert_kernels as kernels
from posttrain.policy.fused.expert_kernels import ExpertTile
from posttrain.policy.fused.experts import FusedExperts, fuse_experts

# experts, experts of a token, hidden size, inner size
SHAPES = {"qwen-30b-a3b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880), "tiny": (8, 2, 128, 64)}
# (columns, depth, warps, stages)
_CANDIDATES = (
    (128, 64, 4, 3),
    (128, 64, 4, 4),
    (128, 64, 4, 5),
    (128, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 64, 4, 6),
    (128, 64, 8, 4),
    (256, 64, 8, 3),
    (128, 128, 8, 3),
)
DEVICE, DTYPE = "cuda", torch.bfloat16


def make_module(shape: str) -> Any:
    from transformers import AutoConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, _, hidden, inner = SHAPES[shape]
    if shape == "gpt-oss-20b":
        sizes = {"num_local_experts": experts, "intermediate_size": inner}
        config, kind = AutoConfig.for_model("gpt_oss", hidden_size=hidden, **sizes), GptOssExperts
    else:
        sizes = {"num_experts": experts, "moe_intermediate_size": inner}
        config, kind = AutoConfig.for_model("qwen3_moe", hidden_size=hidden, **sizes), Qwen3MoeExperts
    config._experts_implementation = "grouped_mm"
    with torch.device(DEVICE):
        module = kind(config).to(DTYPE)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    fuse_experts(module)
    assert isinstance(module.forward, FusedExperts), "the module is of a known kind"
    return module


def inputs_of(shape: str, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    experts, top_k, hidden, _ = SHAPES[shape]
    generator = torch.Generator(DEVICE).manual_seed(0)
    scores, chosen = torch.rand(rows, experts, device=DEVICE, generator=generator).topk(top_k)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=DTYPE, generator=generator)
    return x, chosen, scores.softmax(1).to(DTYPE)


def present_path(module: Any) -> Callable[..., Tensor]:
    """What experts with adapters take without the kernels; those without take `own_forward`."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        pairs = SortedRows.of(chosen.flatten(), module.num_experts)
        rows = hidden.index_select(0, pairs.order // chosen.shape[1])
        return weighted_sum(pairs.back(expert_outputs(module, rows, pairs.num_rows)), weights, hidden.dtype)

    return forward


def tried(launch: Callable[[], Any]) -> float:
    try:
        with torch.no_grad():
            return seconds_per_launch(lambda _: launch())
    except (RuntimeError, torch.OutOfMemoryError) as error:
        print(f"    not possible: {str(error).splitlines()[0][:100]}")
        torch.cuda.synchronize()
        return float("inf")


def time_sampling(shape: str, rows: int, module: Any, bytes_per_s: float, flops_per_s: float) -> None:
    x, chosen, weights = inputs_of(shape, rows)
    top_k = chosen.shape[1]
    used = len(chosen.unique())
    weight_bytes = used * sum(p[0].nbytes for p in module.parameters())
    flops = 2 * chosen.numel() * sum(p[0].numel() for p in module.parameters() if p.dim() == 3)
    roof = max(weight_bytes / bytes_per_s, flops / flops_per_s)
    pairs = kernels.sort_pairs(chosen, module.num_experts)
    factors, gate = weights.contiguous(), module.forward.gate
    gate_up, down = (module.forward._weight(name) for name in ("gate_up_proj", "down_proj"))
    biases = [module._parameters.get(name) for name in ("gate_up_proj_bias", "down_proj_bias")]

    def first() -> Tensor:
        return kernels.grouped_product(x, gate_up, pairs, top_k, factors=factors, gate=gate, bias=biases[0])

    inner = first()

    def second() -> Tensor:
        return kernels.grouped_product(inner, down, pairs, top_k, factors=factors)

    out = second()
    of_pairs = None if biases[1] is None else kernels.WeighedBias(biases[1], chosen, factors)
    works: dict[str, Callable[[], Any]] = {
        "kernels, all": lambda: module(x, chosen, weights),
        "  sorting": lambda: kernels.sort_pairs(chosen, module.num_experts),
        "  gate and up": first,
        "  down": second,
        "  sums": lambda: kernels.sum_pairs(out, top_k, DTYPE, bias=of_pairs),
        "transformers": lambda: module.forward.own_forward(x, chosen, weights),
        "sorted rows, torch": lambda: present_path(module)(x, chosen, weights),
    }
    seconds = {name: tried(work) for name, work in works.items()}
    print(f"\n{shape}, {rows} rows without gradients: tile of {pairs.tile.rows} rows, roof {1e6 * roof:.0f} us")
    print(
        table(
            ["", "a launch", "of the roof"],
            [[name, f"{1e6 * s:.1f} us", f"{100 * roof / s:.0f} %"] for name, s in seconds.items()],
        )
    )
    with torch.no_grad():
        ours, theirs = module(x, chosen, weights).float(), module.forward.own_forward(x, chosen, weights).float()
    print(f"largest difference from transformers {float((ours - theirs).abs().max() / theirs.abs().max()):.1e}")


def time_training(shape: str, rows: int, module: Any, flops_per_s: float) -> None:
    x, chosen, weights = inputs_of(shape, rows)
    flops = 2 * chosen.numel() * sum(p[0].numel() for p in module.parameters() if p.dim() == 3)
    upstream = torch.randn_like(x)
    lines = []
    for trains, factor in ((False, 2), (True, 3)):
        module.requires_grad_(trains)
        for name, forward in (("kernels", module), ("transformers", module.forward.own_forward)):

            def step(forward: Any = forward) -> None:
                leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
                forward(leaves[0], chosen, leaves[1]).backward(upstream)
                module.zero_grad(set_to_none=True)

            try:
                step()
                seconds = min(seconds_of(step) for _ in range(4))
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"    not possible: {str(error).splitlines()[0][:100]}")
                continue
            roof = factor * flops / flops_per_s
            what = "weights trained" if trains else "weights frozen"
            lines.append([f"{name}, {what}", f"{1e3 * seconds:.2f} ms", f"{100 * roof / seconds:.0f} %"])
    module.requires_grad_(False)
    print(f"\n{shape}, {rows} rows, forward and backward; share of the FLOPs of plain products")
    print(table(["", "a pass", "of the roof"], lines))


def sweep_tiles(shape: str, rows: int, module: Any) -> None:
    given = inputs_of(shape, rows)
    now = kernels.tile_of(given[1].numel(), module.num_experts)
    lines = []
    for size in (size for size in (now.rows // 2, now.rows, now.rows * 2) if 16 <= size <= 128):
        for width, depth, warps, stages in _CANDIDATES:
            tile = ExpertTile(size, width, depth, warps, stages, now.group)
            try:
                first, second = seconds_of_products(module, tile, *given)
            except Exception as error:  # too much shared memory
                print(f"    {tile}: {str(error).splitlines()[0][:80]}")
                continue
            words = f"{size} x {width} x {depth}, {warps} warps, {stages} stages{', now' if tile == now else ''}"
            lines.append((first + second, [words, f"{1e6 * first:.1f} us", f"{1e6 * second:.1f} us"]))
    print(f"\n{shape}, {rows} rows")
    print(table(["tile", "gate and up", "down"], [line for _, line in sorted(lines)]))


def seconds_of_products(module: Any, tile: ExpertTile, x: Tensor, chosen: Tensor, weights: Tensor) -> list[float]:
    pairs = kernels.sort_pairs(chosen, module.num_experts, tile)
    seconds = []
    for name, gate in (("gate_up_proj", module.forward.gate), ("down_proj", None)):
        bias = module._parameters.get(f"{name}_bias") if gate is not None else None
        weight = module.forward._weight(name)

        def launch(x: Tensor = x, weight: Tensor = weight, bias: Tensor | None = bias, gate: Any = gate) -> Tensor:
            return kernels.grouped_product(x, weight, pairs, chosen.shape[1], factors=weights, gate=gate, bias=bias)

        x = launch()
        seconds.append(tried(launch))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen-30b-a3b"], choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[512], help="rows of a pass without gradients")
    parser.add_argument("--trained-rows", nargs="*", type=int, default=[8192], help="rows of a pass of training")
    parser.add_argument("--tiles", action="store_true", help="time candidates of tiles instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("experts.py times kernels on a GPU: a CUDA device is needed and there is none", file=sys.stderr)
        return 64
    bytes_per_s, flops_per_s = copy_roof(), matrix_roof(DEVICE)
    print(
        f"{torch.cuda.get_device_name()}: copy {bytes_per_s / 1e12:.2f} TB/s, product {flops_per_s / 1e12:.0f} TFLOP/s"
    )
    for shape in options.shape:
        module = make_module(shape).requires_grad_(False)
        for rows in options.rows:
            if options.tiles:
                sweep_tiles(shape, rows, module)
            else:
                time_sampling(shape, rows, module, bytes_per_s, flops_per_s)
        for rows in [] if options.tiles else options.trained_rows:
            time_training(shape, rows, module, flops_per_s)
        del module
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
