#!/usr/bin/env python3
"""The planner's simulation of GRPO steps beside real runs on CPUs: shared and dedicated, synchronous and asynchronous.

    python bench/simulated_steps.py --steps 12 --out simulated.json
    python bench/simulated_steps.py --steps 4 --hidden 32 --layers 2      in two minutes, to see that it runs

A small model of random weights is trained with a learning rate of next to nothing, so the lengths of answers keep their
distribution. Three ratios of simulated to measured seconds of a step for each run:

    own stages         the stages that the run logged: what overlaps, and what waits for what
    simulated rounds   its training and its lengths, drawn anew; decode steps fitted to the seconds of its rounds
    from synchronous   the same, of the synchronous run on the same GPUs: a prediction

A busy machine spoils the third: a run is then compared with another minute of the machine. Dedicated engines need Ray.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tables import ratio, table, write_json
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.apps.demo.arithmetic import build_tokenizer
from posttrain.apps.plan.simulation import EngineSpeed, SimulatedEngine, Training, simulate, step_seconds

HANDOVER = "prepare_for_generation/transfer_and_update_weights"
DEDICATED = ["cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
REWARD = "def odd(prompt, response, reference):\n    return sum(ord(c) % 2 for c in response) / max(1, len(response))\n"
MEAN, LONGEST = 24, 112  # tokens of answers
Row = dict[str, Any]
WAYS = ("own_stages", "simulated_rounds", "from_synchronous")


def in_rounds(age: int) -> list[str]:
    return ["grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={age}"]


# name -> settings, the oldest answers, and whether rounds run beside training
RUNS: dict[str, tuple[list[str], int, bool]] = {
    "shared": ([], 0, False),
    "shared, age 1": (in_rounds(1), 1, False),
    "dedicated": (DEDICATED, 0, False),
    "dedicated, age 1": ([*DEDICATED, *in_rounds(1)], 1, True),
    "dedicated, age 2": ([*DEDICATED, *in_rounds(2)], 2, True),
}


def train(name: str, args: argparse.Namespace, inputs: Path) -> list[Row]:
    """The rows of metrics.jsonl, each with the lengths of the answers of its groups."""
    folder = inputs / name.replace(", ", "-").replace(" ", "-")
    words = [
        f"policy.model_name={inputs / 'model'}",
        "policy.precision=float32",
        "policy.device=cpu",
        "policy.num_threads=1",
        "policy.max_total_sequence_length=128",
        f"policy.generation.max_new_tokens={LONGEST}",
        f"policy.generation.stop_token_ids={stop_tokens(inputs)}",
        f"checkpointing.checkpoint_dir={folder}",
        "checkpointing.enabled=false",
        "policy.optimizer.kwargs.lr=1e-12",
        f"grpo.max_num_steps={args.steps}",
        "grpo.max_num_epochs=1000",
        "grpo.val_period=0",
        f"grpo.num_prompts_per_step={args.prompts}",
        f"grpo.num_generations_per_prompt={args.samples}",
        f"policy.train_global_batch_size={args.prompts * args.samples}",
        f"data.train={{dataset_name: ResponseDataset, data_path: {inputs / 'questions.jsonl'}}}",
        "data.default.env_name=mine",
        f"env.mine.function={inputs / 'rewards.py'}:odd",
        "env.mine.num_workers=1",
    ]
    command = [sys.executable, "-m", "posttrain", "grpo", *words, *RUNS[name][0], "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "timing/train/total_step_time" in row]
    for row in rows:
        with gzip.open(folder / "rollouts" / f"step_{row['step']}.jsonl.gz", "rt") as lines:
            groups = [json.loads(line) for line in lines]
        row["answers"] = [group["completions"] for group in groups]
    return rows


def stop_tokens(inputs: Path) -> list[int]:
    """So many that answers end by chance, after MEAN tokens on average: a tail as of real ones."""
    vocab_size = json.loads((inputs / "model" / "config.json").read_text())["vocab_size"]
    return sorted(random.Random(0).sample(range(vocab_size), max(1, round(vocab_size / MEAN))))


def stage(row: Row, name: str) -> float:
    return float(row.get(f"timing/train/{name}") or 0.0)


def stages(rows: Sequence[Row]) -> tuple[list[float], list[Training]]:
    """The round of each step, and what the step does beside it. The last step of a run has no round after it."""
    rounds, parts = [], []
    for index, row in enumerate(rows):
        sampling, rewards, handover = stage(row, "generation"), stage(row, "reward_calculation"), stage(row, HANDOVER)
        train_s = stage(row, "total_step_time") - sampling - rewards - handover
        waited = stage(rows[index + 1], "generation_ahead_wait") if index + 1 < len(rows) else 0.0
        rounds.append(sampling or stage(row, "generation_ahead"))
        parts.append(Training(rewards, train_s, handover - waited))
    return rounds, parts


def tokens_by_version(rows: Sequence[Row]) -> dict[int, list[int]]:
    """Tokens that each version of the weights sampled, by answer."""
    found: dict[int, list[int]] = {}
    for answer in (answer for row in rows for group in row["answers"] for answer in group):
        ends = [first for first, _ in answer["versions"][1:]] + [answer["num_tokens"]]
        for (first, version), end in zip(answer["versions"], ends, strict=True):
            found.setdefault(version, []).append(end - first)
    return found


def fitted_speed(rows: Sequence[Row], age: int, *, ahead: bool) -> EngineSpeed:
    """Seconds of a round as a part for each decode step and one for each token. The first and last rounds are left out:
    their version sampled two rounds, or answers that no step was left to train.
    """
    tokens, rounds = tokens_by_version(rows), stages(rows)[0]
    used = range(1 + ahead, len(rows) - age)
    counts = np.array([[max(tokens[step - ahead]), sum(tokens[step - ahead])] for step in used])
    seconds = np.array([rounds[step] for step in used])
    per_step, per_token = (float(value) for value in np.linalg.lstsq(counts, seconds, rcond=None)[0])
    if min(per_step, per_token) < 0:  # noise, or too few steps
        per_step, per_token = float(seconds.sum() / counts[:, 0].sum()), 0.0
    return EngineSpeed(10**6, 10, lambda rows, _: per_step + rows * per_token, lambda tokens: per_token * tokens)


def endless(rows: Sequence[Row]) -> Iterator[Sequence[int]]:
    groups = [[answer["num_tokens"] for answer in group] for row in rows for group in row["answers"]]
    chance = random.Random(0)
    while True:
        yield chance.choice(groups)


def from_own_stages(rows: Sequence[Row], *, ahead: bool) -> float:
    rounds, parts = stages(rows)
    return statistics.fmean(step_seconds(rounds, parts, ahead=ahead)[1:-1])


def simulated(name: str, speed: EngineSpeed, rows: Sequence[Row], num_prompts: int) -> float:
    """With the training and the lengths of `rows`."""
    _, age, ahead = RUNS[name]
    parts = stages(rows)[1][1:-1]
    typical = Training(*(statistics.fmean(getattr(part, field) for part in parts) for field in vars(parts[0])))
    in_flight = int(num_prompts * (1 + (age - ahead) / 2))
    engine = SimulatedEngine(speed, endless(rows), num_prompts, in_flight, age)
    return statistics.fmean(simulate([engine], typical, 200, ahead=ahead)[age + 1 :])


def compared(name: str, measured: Mapping[str, list[Row]], num_prompts: int) -> dict[str, Any]:
    """Seconds of a step: the mean of those measured, and simulated in three ways."""
    (_, age, ahead), rows = RUNS[name], measured[name]
    base = measured.get(name.partition(",")[0])
    ways = (
        from_own_stages(rows, ahead=ahead),
        simulated(name, fitted_speed(rows, age, ahead=ahead), rows, num_prompts),
        None if base is None else simulated(name, fitted_speed(base, 0, ahead=False), base, num_prompts),
    )
    seconds = statistics.fmean(stage(row, "total_step_time") for row in rows[1:-1])
    return {"run": name, "measured": seconds, **dict(zip(WAYS, ways, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=12, help="of each run (default 12); the first and last do not count"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    args = parser.parse_args()
    measured: dict[str, list[Row]] = {}
    report = []
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), args)
        for name in args.only:
            measured[name] = train(name, args, Path(folder))
            report.append(compared(name, measured, args.prompts))
            print(report[-1], flush=True)
    cells = [
        [one["run"], f"{one['measured']:.3f}", *[ratio(one[way], one["measured"]) for way in WAYS]] for one in report
    ]
    print(table(["run", "s a step", *[way.replace("_", " ") for way in WAYS]], cells))
    write_json(args.out, {"runs": report, "args": {key: str(value) for key, value in vars(args).items()}})


def write_inputs(folder: Path, args: argparse.Namespace) -> None:
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, max_position_embeddings=256, **sizes, **ends)
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    questions = [{"input": f"{a} + {b} = ?", "output": str(a + b)} for a in range(10, 26) for b in range(10, 26)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))


if __name__ == "__main__":
    main()
