"""Run folders made by hand, as a run would write them, for the dashboard: no model is trained for them."""

from __future__ import annotations

import gzip
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.reporting.token_files import write_tokens
from posttrain.types import TokenTrace

Row = dict[str, Any]
HEADLINE = {
    "metric": "train/reward",
    "name": "Reward",
    "lower_is_better": False,
    "chart": {
        "title": "Reward",
        "curves": [["train/reward", "training"], ["validation/accuracy", "validation accuracy"]],
        "note": "Mean reward of the scored answers.",
    },
}
NAMES = ("Mia", "Omar", "Lena", "Tariq", "Ines", "Noah")
THINGS = ("apples", "pencils", "marbles", "stickers", "coins", "shells")


def metrics_row(step: int, *, noise: random.Random, is_sick: bool = False) -> Row:
    """A step of GRPO that learns; a sick one runs away after step 30."""
    away = max(0.0, step - 30) / 40 if is_sick else 0.0
    jitter = noise.gauss(0, 1)
    row = {
        "step": step,
        "train/reward": min(1.0, 0.25 + 0.6 * (1 - math.exp(-step / 40)) + 0.04 * jitter),
        "train/reward/correct": min(1.0, 0.2 + 0.55 * (1 - math.exp(-step / 40)) + 0.04 * jitter),
        "train/reward/format": 0.05 + 0.05 * (1 - math.exp(-step / 15)),
        "train/reward_std": 0.3,
        "train/loss": 0.02 * noise.gauss(0, 1),
        "train/grad_norm": abs(0.8 + 0.2 * noise.gauss(0, 1) + 8 * away),
        "train/lr": 1e-6 * min(1.0, step / 10),
        "train/kl_penalty": 0.002 + 0.0004 * step**0.5 + 0.9 * away,
        "train/approx_entropy": max(0.001, 0.62 * math.exp(-step / 400) - 0.5 * away + 0.01 * noise.gauss(0, 1)),
        "train/groups_with_signal": max(0.05, 0.85 - 0.002 * step + 0.05 * noise.gauss(0, 1)),
        "train/truncation_rate": min(1.0, max(0.0, 0.08 - 0.0005 * step + 0.01 * noise.gauss(0, 1) + away)),
        "train/mean_generation_length": 180 - 20 * math.exp(-step / 50) + 4 * noise.gauss(0, 1) + 300 * away,
        "train/token_mult_prob_error": 1.004 + 0.001 * abs(noise.gauss(0, 1)),
        "train/num_samples": 32,
        "train/unscored": 0,
        "performance/tokens_per_sec_per_gpu": 9000 + 300 * noise.gauss(0, 1),
        "performance/generation_tokens_per_sec_per_gpu": 15000 + 500 * noise.gauss(0, 1),
        "timing/train/generation": 3.1 + 0.1 * noise.gauss(0, 1),
        "timing/train/policy_training": 2.2,
        "timing/train/reward_calculation": 0.3,
        "timing/train/total_step_time": 5.9,
    }
    if step % 10 == 0:
        row |= {"validation/accuracy": min(1.0, 0.2 + 0.5 * (1 - math.exp(-step / 45))), "validation/reward": 0.5}
    return row


def question(number: int) -> tuple[str, str]:
    noise = random.Random(number)
    name, thing = noise.choice(NAMES), noise.choice(THINGS)
    first, second = noise.randrange(4, 40), noise.randrange(3, 30)
    text = f"{name} has {first} {thing} and finds {second} more. How many {thing} does {name} have now?"
    return text, str(first + second)


def answer(number: int, step: int, sample: int) -> Row:
    prompt, expected = question(number)
    noise = random.Random(f"{number} {step} {sample}")
    is_right = noise.random() < 0.3 + 0.5 * (1 - math.exp(-step / 40))
    value = expected if is_right else str(int(expected) + noise.randrange(1, 9))
    words = prompt.split()
    text = (
        f"Let me think step by step.\n{words[0]} starts with {words[2]} and finds {words[6]} more, so we add: "
        f"{words[2]} + {words[6]} = {value}.\n\nThe answer is \\boxed{{{value}}}."
    )
    is_cut = noise.random() < 0.06
    return {
        "text": text[: len(text) // 2] if is_cut else text,
        "reward": float(is_right and not is_cut) + (0.0 if is_cut else 0.1),
        "parts": {"correct": float(is_right and not is_cut), "format": 0.0 if is_cut else 0.1},
        "advantage": 0.0,
        "error": None,
        "finish_reason": "length" if is_cut else "stop",
        "num_tokens": noise.randrange(60, 240),
        "versions": [[0, step - 1]],
    }


def group(step: int, place: int, *, per_step: int = 6, num_prompts: int = 24, num_samples: int = 4) -> Row:
    number = ((step - 1) * per_step + place) % num_prompts
    prompt, expected = question(number)
    answers = [answer(number, step, sample) for sample in range(num_samples)]
    mean = sum(one["reward"] for one in answers) / num_samples
    return {
        "draw": (step - 1) * per_step + place,
        "id": f"sums:{number}",
        "prompt": f"<|im_start|>user\n{prompt} Put the answer in \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n",
        "reference": expected,
        "completions": [one | {"advantage": round(one["reward"] - mean, 4)} for one in answers],
    }


def write_groups(folder: Path, step: int, groups: Sequence[Row], *, kind: str = "step") -> None:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in groups)
    (folder / "rollouts" / f"{kind}_{step}.jsonl.gz").write_bytes(
        gzip.compress(text.encode("utf-8", "backslashreplace"), 5, mtime=0)
    )


def append(path: Path, *rows: Row) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def traces_of(step: int, groups: Sequence[Row]) -> list[TokenTrace]:
    """One token per word, with made-up numbers."""
    found = []
    for row in groups:
        for sample, one in enumerate(row["completions"]):
            noise, count = random.Random(f"{row['id']} {sample} {step}"), len(words_of(one["text"]))
            sampler = tuple(-(abs(noise.gauss(0, 0.9)) ** 1.6) for _ in range(count))
            trainer = tuple(value + noise.gauss(0, 0.01) for value in sampler)
            found.append(
                TokenTrace(
                    draw=row["draw"],
                    sample=sample,
                    token_ids=tuple(range(count)),
                    trained=(True,) * count,
                    sampler_logprobs=sampler,
                    trainer_logprobs=trainer,
                    advantages=(one["advantage"],) * count,
                    reference_logprobs=tuple(value - abs(noise.gauss(0, 0.2)) for value in trainer),
                )
            )
    return found


def words_of(text: str) -> list[str]:
    return [word + " " for word in text.split(" ")]


def write_step(folder: Path, step: int, *, is_sick: bool = False, with_tokens: bool = False) -> None:
    noise = random.Random(f"{folder.name} {step}")
    groups = [group(step, place) for place in range(6)]
    write_groups(folder, step, groups)
    if with_tokens:
        texts = iter([words_of(one["text"]) for row in groups for one in row["completions"]])
        path = folder / "rollouts" / f"step_{step}.tokens.npz"
        write_tokens(path, traces_of(step, groups), lambda ids: next(texts))
    append(folder / "metrics.jsonl", metrics_row(step, noise=noise, is_sick=is_sick))


def write_info(folder: Path, *, title: str, status: str, max_steps: int, **more: Any) -> None:
    info = {
        "title": title,
        "algorithm": "grpo",
        "headline": HEADLINE,
        "max_steps": max_steps,
        "device_word": "GPU",
        "num_devices": 2,
        "started_at": "2026-11-16T08:00:00+00:00",
        "resumed_at_steps": [],
        "config_changes": [],
        "status": status,
        "reason": "",
        "updated_at": "2026-11-16T09:00:00+00:00",
        "wall_s": 5.9 * max_steps,
        "warnings": [],
        **more,
    }
    (folder / "run.json").write_text(json.dumps(info))


def write_attempt(folder: Path, *, ended: bool, heartbeat: float | None = None) -> None:
    (folder / "attempts").mkdir(exist_ok=True)
    holder = {"host": "node-a", "pid": 4242, "machine": "m", "created": 1.0, "command": "posttrain grpo"}
    record = {
        "number": 1,
        "token": "t",
        "holder": {**holder, "since": "2026-11-16T08:00:00+00:00"},
        "heartbeat": time.time() if heartbeat is None else heartbeat,
        "first_checkpoint": 20,
        "last_checkpoint": 40,
        "ended": "2026-11-16T09:00:00+00:00" if ended else None,
        "exit_code": 0 if ended else None,
    }
    (folder / "attempts" / "0001.json").write_text(json.dumps(record))


def write_workers(folder: Path, step: int, *, now: float) -> None:
    ranks = [
        {
            "rank": rank,
            "host": f"node-{'ab'[rank % 2]}",
            "pid": 5000 + rank,
            "device": f"cuda:{rank // 2}",
            "allocated_bytes": (20 + rank) * 2**30,
            "reserved_bytes": (61 + 4 * rank) * 2**30,
            "total_bytes": 80 * 2**30,
        }
        for rank in range(4)
    ]
    rows: list[Row] = []
    for index, phase in enumerate(
        ("Generating responses", "Computing rewards", "Computing logprobs", "Training policy")
    ):
        rows.append({"step": step, "time": now - 12 + 3 * index, "phase": phase})
    append(folder / "workers.jsonl", {"step": step - 1, "time": now - 13, "phase": "step done", "ranks": ranks}, *rows)


CONFIG = """\
policy:
  model_name: Qwen/Qwen3-0.6B
  optimizer:
    kwargs:
      lr: {lr}
loss_fn:
  reference_policy_kl_penalty: 0.01
grpo:
  num_prompts_per_step: 6
  num_generations_per_prompt: 4
"""
FINDING = {
    "step": 42,
    "rule": "kl-runaway",
    "severity": "error",
    "metric": "train/kl_penalty",
    "value": 0.62,
    "text": "the KL to the starting model is 0.62 per token: the policy is diverging from it (0.01 to 0.1 is usual)",
    "fixes": ["policy.optimizer.kwargs.lr=1e-6", "loss_fn.reference_policy_kl_penalty=0.05"],
    "source": "the health table of the GRPO guide",
    "answers": [{"id": "sums:4", "text": "\\boxed{\\boxed{\\boxed{", "reward": 1.0, "num_tokens": 128}],
    "last_step": 60,
}


def make_run(
    folder: Path, *, title: str = "GRPO of Qwen3-0.6B", steps: int = 60, status: str = "finished", sick: bool = False
) -> Path:
    """A run of GRPO with rollouts of every step and tokens of every tenth."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(lr=1e-4 if sick else 1e-6))
    for step in range(1, steps + 1):
        write_step(folder, step, is_sick=sick, with_tokens=step % 10 == 0)
    for step in range(20, steps + 1, 20):
        (folder / f"step_{step}").mkdir()
    if sick:
        append(folder / "findings.jsonl", FINDING)
    write_info(
        folder,
        title=title,
        status=status,
        max_steps=max(steps, 80 if status == "running" else 0),
        resumed_at_steps=[20],
    )
    write_attempt(folder, ended=status != "running")
    write_workers(folder, steps, now=time.time())
    return folder


def conversation_group(draw: int = 9000) -> Row:
    """Several turns with a tool, and an answer that tries to be markup."""
    attack = '<img src=x onerror="window.attacked = true"><script>window.attacked = true</script>'
    turns = [
        {"role": "assistant", "text": "I will use the calculator.\n<tool>12 + 30</tool>", "num_tokens": 14},
        {"role": "tool", "text": "42", "num_tokens": 2},
        {"role": "assistant", "text": f"The answer is \\boxed{{42}}. {attack}", "num_tokens": 20},
    ]
    base = {"parts": {}, "advantage": 0.5, "error": None, "finish_reason": "stop", "num_tokens": 34, "versions": []}
    spoken = {**base, "text": f"\\boxed{{42}} {attack}", "turns": turns, "counts": {"tool_calls": 1}, "reward": 1.0}
    failed = {**base, "text": attack, "reward": None, "error": f"ValueError: {attack}"}
    prompt = f"What is 12 + 30? {attack}"
    return {"draw": draw, "id": f"tools:{attack}", "prompt": prompt, "reference": "42", "completions": [spoken, failed]}
