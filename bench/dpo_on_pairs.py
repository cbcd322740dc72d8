#!/usr/bin/env python3
"""DPO on real preference pairs, with posttrain (packed and unpacked) and with TRL: pairs per second, memory, accuracy.

    python bench/dpo_on_pairs.py --train hh_train.jsonl.gz --test hh_test.jsonl.gz --model models/smollm2-135m-instruct
    python bench/dpo_on_pairs.py … --sides posttrain-packed trl --epochs 2 --json result.json

Each side trains on the same pairs for the same number of steps with the same settings, in a process of its own, one
after the other. Then one judge, the same for all, compares each trained model with the model it started from on the
test pairs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SIDES = ("trl", "posttrain-unpacked", "posttrain-packed")
WARM_UP_STEPS = 5  # left out of the speed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="pairs: prompt (messages), chosen, rejected")
    parser.add_argument("--test", type=Path, required=True, help="the same, to judge by")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--pairs", type=int, default=32, help="pairs in an optimizer step (default 32)")
    parser.add_argument("--micro", type=int, default=16, help="pairs in a forward pass, unpacked (default 16)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=512, help="longer pairs are left out on every side")
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # a side, in its own process
    return parser.parse_args()


def read_rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def short_rows(path: Path, tokenizer: Any, max_length: int) -> list[dict[str, Any]]:
    """Pairs whose longer side fits, as every side is to see them."""

    def length(messages: list[dict[str, str]]) -> int:
        return len(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"])

    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in read_rows(path)]
    answer = [{"role": "assistant", "content": ""}]
    kept = []
    for row in rows:
        sides = [[*row["prompt"], {**answer[0], "content": row[name]}] for name in ("chosen", "rejected")]
        if max(map(length, sides)) <= max_length:
            kept.append(row)
    return kept


def run_trl(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    times: list[float] = []
    losses: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    answer = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    rows = [
        {"prompt": row["prompt"], "chosen": answer(row["chosen"]), "rejected": answer(row["rejected"])}
        for row in job["rows"]
    ]
    dtype = getattr(torch, job["precision"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    # fp32 weights under bf16 autocast, as posttrain's fp32 masters: otherwise small updates are rounded away.
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    config = DPOConfig(
        output_dir=job["out"],
        per_device_train_batch_size=job["micro"],
        gradient_accumulation_steps=job["pairs"] // job["micro"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=job["beta"],
        max_length=job["max_length"],
        bf16=dtype is torch.bfloat16,
        use_cpu=job["device"] == "cpu",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    trainer = DPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    trainer.save_model(job["out"] + "/model")
    return {"times": times, "losses": losses, "model": job["out"] + "/model"}


def run_posttrain(job: dict[str, Any], packed: bool) -> dict[str, Any]:
    from posttrain.build import TrainingRun
    from posttrain.config import load_config

    folder = Path(job["out"])
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in job["rows"]))
    overrides = [
        f"policy.model_name={job['model']}",
        f"policy.precision={job['precision']}",
        f"policy.device={job['device']}",
        f"policy.train_global_batch_size={job['pairs']}",
        f"policy.train_micro_batch_size={job['micro']}",
        f"policy.logprob_batch_size={job['micro']}",
        f"policy.max_total_sequence_length={job['max_length'] + 8}",
        f"policy.sequence_packing.enabled={str(packed).lower()}",
        f"policy.sequence_packing.train_mb_tokens={job['micro'] * job['max_length']}",
        f"policy.sequence_packing.logprob_mb_tokens={job['micro'] * job['max_length']}",
        f"policy.optimizer.kwargs={{lr: {job['lr']}, weight_decay: 0.0, betas: [0.9, 0.999], eps: 1.0e-8}}",
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.001, total_iters: 10}}]",
        f"dpo.reference_policy_kl_penalty={job['beta']}",
        f"dpo.max_num_steps={job['steps']}",
        "dpo.max_num_epochs=1000",
        "dpo.val_period=0",
        "dpo.val_at_start=false",
        f"data.train={{dataset_name: PreferenceDataset, data_path: {data}}}",
        "data.validation=null",
        f"checkpointing.checkpoint_dir={folder / 'run'}",
        "checkpointing.save_period=1000000",
        "checkpointing.save_optimizer=false",
        "checkpointing.metric_name=null",
    ]
    run = TrainingRun(load_config("dpo", None, overrides), quiet=True)
    times: list[float] = []
    algorithm = run.loop.algorithm
    step = algorithm.step

    class Watched:
        def step(self, number: int) -> Any:
            report = step(number)
            times.append(time.perf_counter())
            return report

        def validate(self, number: int) -> Any:
            return None

    run.loop.algorithm = Watched()
    code = run.execute()
    assert code == 0, f"the run ended with exit code {code}"
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    model = folder / f"run/step_{job['steps']}/policy/weights/model"
    found = {"times": times, "losses": [row["train/loss"] for row in rows], "model": str(model)}
    # Each phase of a step is measured by itself, so what torch counts at the end is that of the last one.
    peaks = [value for row in rows for name, value in row.items() if name.startswith("performance/peak_gib_")]
    return {**found, "peak_gib": max(peaks)} if peaks else found


def run_side(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    name = job["side"]
    result = run_trl(job) if name == "trl" else run_posttrain(job, packed=name == "posttrain-packed")
    if job["device"] == "cuda" and name == "trl":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def accuracy(model: str, base: str, rows: list[dict[str, Any]], device: str) -> float:
    """Share of pairs whose chosen answer gained more log-probability than its rejected one; fp32, a tie counts half."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.algorithms.batches import pair_batch
    from posttrain.data.chat import ChatFormat
    from posttrain.models.attention_interface import attention_context
    from posttrain.policy.logprobs import TokenLogprobs
    from posttrain.policy.packed import PackedRow
    from posttrain.types import Pair

    chat = ChatFormat(AutoTokenizer.from_pretrained(base))
    pairs = []
    for index, row in enumerate(rows):
        (prompt, chosen), (_, rejected) = (chat.turn(row["prompt"], row[name]) for name in ("chosen", "rejected"))
        pairs.append(Pair(index, str(index), tuple(prompt), tuple(chosen), tuple(rejected)))

    @torch.no_grad()
    def scores(folder: str) -> torch.Tensor:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="posttrain")
        forward = TokenLogprobs(loaded.to(device).eval())
        found = []
        for start in range(0, len(pairs), 8):
            batch = pair_batch(pairs[start : start + 8])
            row = PackedRow.build(batch, torch.device(device))
            with attention_context(row.attention):
                logprobs = forward(row, 1.0).cpu().double()
            found += [part.sum() for part in logprobs.split(batch.response_lengths)]
        return torch.stack(found)

    gain = scores(model) - scores(base)
    margin = gain[0::2] - gain[1::2]
    return float((margin > 0).double().mean() + 0.5 * (margin == 0).double().mean())


def measure(args: argparse.Namespace, side: str, rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    out = folder / side
    out.mkdir()
    names = ("pairs", "micro", "max_length", "lr", "beta", "device", "precision")
    job = {name: getattr(args, name) for name in names}
    steps = args.epochs * len(rows) // args.pairs
    job.update(side=side, model=str(args.model.absolute()), rows=rows, steps=steps, out=str(out))
    (folder / f"{side}.json").write_text(json.dumps(job))
    command = [sys.executable, __file__, *sys.argv[1:], "--job", str(folder / f"{side}.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-4000:]}")
    result = json.loads((folder / f"{side}.result.json").read_text())
    times = result["times"]
    first = min(WARM_UP_STEPS, len(times) - 2)
    result["pairs_per_s"] = args.pairs * (len(times) - 1 - first) / (times[-1] - times[first])
    return result


def main() -> int:
    args = arguments()
    if args.job:
        job = json.loads(args.job.read_text())
        result = run_side(job)
        args.job.with_suffix(".result.json").write_text(json.dumps(result))
        return 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train, test = (short_rows(path, tokenizer, args.max_length) for path in (args.train, args.test))
    steps = args.epochs * len(train) // args.pairs
    print(
        f"{args.train.name}: {len(train)} training pairs, {len(test)} test pairs, {steps} steps of {args.pairs} pairs"
    )
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="dpo-on-pairs-") as scratch:
        for side in args.sides:
            print(f"{side} …", flush=True)
            result = results[side] = measure(args, side, train, Path(scratch))
            result["accuracy"] = accuracy(result["model"], str(args.model), test, args.device)
            del result["times"], result["model"]
    print(
        f"\n{'':20}{'pairs/s':>10}{'of TRL':>9}{'GPU GiB':>9}{'first loss':>12}{'last loss':>11}{'test accuracy':>15}"
    )
    peer = results.get("trl", {}).get("pairs_per_s")
    for side, result in results.items():
        ratio = f"{result['pairs_per_s'] / peer:.2f}x" if peer else ""
        peak = f"{result['peak_gib']:.1f}" if "peak_gib" in result else ""
        losses = result["losses"]
        print(
            f"{side:20}{result['pairs_per_s']:10.1f}{ratio:>9}{peak:>9}"
            f"{losses[0]:12.4f}{losses[-1]:11.4f}{result['accuracy']:15.3f}"
        )
    if {"posttrain-packed", "posttrain-unpacked"} <= results.keys():
        curves = (results["posttrain-packed"]["losses"], results["posttrain-unpacked"]["losses"])
        print(f"largest difference of the two curves: {max(abs(a - b) for a, b in zip(*curves, strict=True)):.2g}")
    print(
        f"accuracy before training is .5 by definition; its standard error after: {0.5 / len(test) ** 0.5:.3f} at most"
    )
    if args.json:
        args.json.write_text(json.dumps({"steps": steps, "test_pairs": len(test), **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
