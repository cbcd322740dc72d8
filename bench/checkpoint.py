#!/usr/bin/env python3
"""How long a checkpoint holds up training: written at once, and written in the background.

    python bench/checkpoint.py --shape 8b --out checkpoint.json        random weights on a GPU
    python bench/checkpoint.py --shape 8b --state-dtype int8 --folder /data
    python bench/checkpoint.py                                         tiny, on a CPU, in seconds: does it all run?

A model of the shape gets the state of an optimizer that has taken a step, and is saved several times each way, with
matrix products and an update after each save, as in a run. "Held up" is the time for which the loop stands still: the
call that saves, and in the background also the time for which the update waits for the copy. The first save in the
background is shown apart: it takes the memory. The two ways must write the same bytes. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from machine import GIB, facts, resolve_device, synchronise
from shapes import SHAPES, make_model, make_tokenizer, vocab_size_of
from tables import ratio, table, write_json

from posttrain.checkpointing import BackgroundWrite, CheckpointStore
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import InputError
from posttrain.policy.checkpoint.writer import CheckpointWriter
from posttrain.policy.optimizer import make_optimizer

SYNCHRONOUS, BACKGROUND = "at once", "in the background"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help=f"one of {', '.join(SHAPES)} (default: llama-8b on a GPU, tiny on a CPU)")
    parser.add_argument("--saves", type=int, default=3, metavar="N", help="saves each way (default: 3)")
    parser.add_argument("--step-s", type=float, metavar="S", help="seconds of work after a save (default: 5; CPU: 0.2)")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "int8"], default="bfloat16")
    parser.add_argument("--master-weights", choices=["float32", "none"], default="none")
    parser.add_argument("--offload-states", action="store_true", help="keep the optimizer's state in host memory")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--folder", type=Path, help="where checkpoints go while it runs; room for one is needed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    args = parser.parse_args(words)
    args.device = resolve_device(args.device)
    on_gpu = args.device == "cuda"
    args.shape = args.shape or ("llama-8b" if on_gpu else "tiny")
    if args.shape not in SHAPES and f"llama-{args.shape}" in SHAPES:
        args.shape = f"llama-{args.shape}"
    args.step_s = args.step_s or (5.0 if on_gpu else 0.2)
    if args.saves < 1:
        parser.error("--saves is at least 1")
    return args


@dataclass
class Measured:
    """Seconds of every save of one way, the first included."""

    held_up_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)  # of that, the update for the copy
    write_s: list[float] = field(default_factory=list)
    products_per_s: list[float] = field(default_factory=list)  # while files are written
    digests: list[Any] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        return min(self.held_up_s[1:] or self.held_up_s)


class Training:
    """What a run has at the time of a save, and a step to follow it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.step_s = torch.device(args.device), args.step_s
        self.model = make_model(args.shape, args.device, getattr(torch, args.dtype))
        config = OptimizerConfig(
            kwargs={"lr": 1e-5},
            state_dtype=args.state_dtype,
            master_weights=args.master_weights,
            offload_states=args.offload_states,
        )
        self.optimizer = make_optimizer(self.model, config, None, seed=0)
        self.writer = CheckpointWriter(
            self.model, make_tokenizer(vocab_size_of(args.shape)), self.optimizer, self.device
        )
        size = 4096 if self.device.type == "cuda" else 256
        self._factor = torch.randn(size, size, device=self.device, dtype=getattr(torch, args.dtype)) / size
        self.update()

    def update(self) -> None:
        """One parameter at a time: gradients of the whole model would need memory that has nothing to do
        with saving.
        """
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
            self.optimizer.collect_gradients()
            self.optimizer.step(None)
        synchronise()

    def compute(self) -> float:
        """Work for the time of a step; matrix products per second."""
        synchronise()
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < self.step_s:
            for _ in range(10):
                self._factor @ self._factor
            synchronise()
            count += 10
        return count / elapsed


def save_at_once(training: Training, store: CheckpointStore, step: int, measured: Measured) -> None:
    start = time.perf_counter()
    with store.writing(step) as folder:
        training.writer.save(folder, optimizer=True)
    measured.held_up_s.append(time.perf_counter() - start)


def save_in_background(training: Training, store: CheckpointStore, step: int, measured: Measured) -> None:
    background = BackgroundWrite()
    start = time.perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(store.writing(step))
        training.writer.begin(folder, optimizer=True)
        completion = stack.pop_all()

        def write(_: Callable[[], bool]) -> None:
            with completion:
                training.writer.write()

        background.start(write)
    held_up_s = time.perf_counter() - start
    measured.products_per_s.append(training.compute())
    training.update()
    waited_s = training.writer.take_waited_s()
    background.wait()
    measured.held_up_s.append(held_up_s + waited_s)
    measured.waited_s.append(waited_s)
    measured.write_s.append(background.take_write_s() or 0.0)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    training = Training(args)
    training.optimizer.before_change = training.writer.wait_until_copied
    if obstacle := training.writer.obstacle(optimizer=True):
        raise InputError(f"nothing to compare: {obstacle}; choose fewer bits with --state-dtype, or another machine")
    idle = training.compute()
    start = time.perf_counter()
    while not training.writer.prepare(optimizer=True):
        time.sleep(0.01)
    preparation_s = time.perf_counter() - start
    ways = {SYNCHRONOUS: Measured(), BACKGROUND: Measured()}
    checkpoint_bytes = 0
    for step in range(1, args.saves + 1):
        # Both save the same state, and one after the other has the disk.
        for name, save in ((SYNCHRONOUS, save_at_once), (BACKGROUND, save_in_background)):
            store = CheckpointStore(folder, say=print)
            start = time.perf_counter()
            save(training, store, step, ways[name])
            took = f"held up {ways[name].held_up_s[-1]:.2f} s, all of it {time.perf_counter() - start:.1f} s"
            print(f"save {step} of {args.saves}, {name}: {took}", file=sys.stderr, flush=True)
            files = json.loads((folder / f"step_{step}" / "checksums.json").read_text())["files"]
            # DCP's index names the folder, which differs; it is read when a checkpoint is loaded, and has no state.
            digests = {path: entry["sha256"] for path, entry in files.items() if not path.endswith(".metadata")}
            ways[name].digests.append(digests)
            checkpoint_bytes = sum(entry["size"] for entry in files.values())
            shutil.rmtree(folder / f"step_{step}")
    return {
        "shape": args.shape,
        "dtype": args.dtype,
        "state_dtype": args.state_dtype,
        "master_weights": args.master_weights,
        "offload_states": args.offload_states,
        "checkpoint_bytes": checkpoint_bytes,
        "preparation_s": preparation_s,
        "same_bytes": ways[SYNCHRONOUS].digests == ways[BACKGROUND].digests,
        "idle_products_per_s": idle,
        "ways": {
            name: {k: v for k, v in vars(way).items() if k != "digests"} | {"best_s": way.best_s}
            for name, way in ways.items()
        },
        "ratio": ways[SYNCHRONOUS].best_s / ways[BACKGROUND].best_s,
        "machine": facts(args.device),
    }


def show(report: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for name, way in report["ways"].items():
        speed = max(way["products_per_s"], default=None)
        share = f"{speed / report['idle_products_per_s']:.0%}" if speed else None
        waited, write = (min(way[key], default=None) for key in ("waited_s", "write_s"))
        rows.append([name, way["held_up_s"][0], way["best_s"], waited, write, share])
    header = [
        "checkpoint",
        "first, held up s",
        "held up s",
        "of it the update",
        "written in s",
        "compute speed meanwhile",
    ]
    held = [report["ways"][name]["best_s"] for name in (SYNCHRONOUS, BACKGROUND)]
    return "\n".join(
        [
            f"{report['shape']}, {report['dtype']}, moments {report['state_dtype']}, masters "
            f"{report['master_weights']}: "
            f"{report['checkpoint_bytes'] / GIB:.2f} GiB a checkpoint, on {report['machine']['device']}",
            f"memory for the copy was ready after {report['preparation_s']:.2f} s",
            table(header, rows),
            f"in the background training is held up for 1/{ratio(*held).removesuffix('x')} of the time",
        ]
    )


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=args.folder) as folder:
            report = measure(args, Path(folder))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    print(show(report))
    write_json(args.out, report)
    if not report["same_bytes"]:
        print("The two ways wrote different bytes.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
