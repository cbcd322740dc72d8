#!/usr/bin/env python3
"""Loss curves of training in FP8 (`policy.fp8`) and in bf16: the same SFT run in both, and in bf16 with another seed.

    python bench/fp8_curves.py --model models/smollm2-135m-instruct --data data/gsm8k/train.jsonl.gz --out curves.json

The run is configs/sft_smollm2_gsm8k.yaml. FP8 and bf16 see the same batches, so their losses are compared step by step;
the other seed sees other batches, so of it only the means over many steps mean something: they are the noise level.
`--set` changes any setting of the three runs. On an H200 it should take about a minute; it has not run on one yet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from machine import facts, resolve_device
from tables import table, write_json

CONFIG = Path(__file__).parents[1] / "configs" / "sft_smollm2_gsm8k.yaml"
LAST = 20
BF16, FP8, OTHER = "bf16", "FP8", "bf16, another seed"


def losses(args: argparse.Namespace, folder: Path, *, fp8: bool, seed: int) -> list[float]:
    """Of each step."""
    from posttrain.cli.main import main as posttrain

    words = {
        "policy.model_name": args.model,
        "policy.fp8": str(fp8).lower(),
        "sft.seed": seed,
        "sft.max_num_steps": args.steps,
        "data.train.data_path": args.data,
        "checkpointing.enabled": "false",
        "checkpointing.checkpoint_dir": folder,
    }
    settings = [f"{key}={value}" for key, value in words.items()]
    if code := posttrain(["sft", "--config", str(args.config), *settings, *args.set, "--quiet"]):
        raise SystemExit(code)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def difference(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Mean of the absolute differences of steps, difference of the means, and of the means of the last steps."""
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    last = gaps[-LAST:]
    return {
        "mean_abs": sum(map(abs, gaps)) / len(gaps),
        "mean": sum(gaps) / len(gaps),
        "last": sum(last) / len(last),
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--data", type=Path, required=True, help="rows with question and answer")
    parser.add_argument("--config", type=Path, default=CONFIG, help="of an SFT run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all losses to this JSON file")
    args = parser.parse_args(words)
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fp8-curves-") as scratch:
        for name, fp8, seed in ((BF16, False, 42), (FP8, True, 42), (OTHER, False, 43)):
            print(f"{name} …", file=sys.stderr, flush=True)
            curves[name] = losses(args, Path(scratch) / str(len(curves)), fp8=fp8, seed=seed)
    found = {name: difference(curves[name], curves[BF16]) for name in (FP8, OTHER)}
    rows = [
        [name, *gaps.values(), sum(curves[name][-LAST:]) / len(curves[name][-LAST:])] for name, gaps in found.items()
    ]
    header = ["less bf16", "mean of |steps|", "all steps", f"last {LAST}", f"loss, last {LAST}"]
    print(table(header, [[name, *(f"{value:+.5f}" for value in values)] for name, *values in rows]))
    report = {**facts(resolve_device("auto")), "benchmark": "fp8_curves", "steps": args.steps}
    write_json(args.out, {**report, "losses": curves, "differences": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
