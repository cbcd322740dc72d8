"""The two sides of `learn.py`: posttrain and TRL train on the same problems until their minutes are over."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import problems

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Changes of posttrain's config that a search for a better recipe tries; `--set` adds any other.
RECIPES: dict[str, list[str]] = {
    "plain": [],
    "dynamic": ["grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=8"],
    "groups-of-16": ["grpo.num_generations_per_prompt=16", "grpo.num_prompts_per_step=32"],
    "hot": ["policy.generation.temperature=1.2"],
    "clip-higher": ["loss_fn.ratio_clip_max=0.28"],
    "two-updates": ["policy.train_global_batch_size=256"],
}
Curve = list[dict[str, Any]]


class TimeUp(Exception):
    """The minutes are over."""


class Stopwatch:
    """Seconds since the first step began, without those in which weights were written; keeps them at equally distant
    times.
    """

    def __init__(self, minutes: float, marks: int, save: Callable[[Path], None], out: Path) -> None:
        self.limit_s, self.out, self._save = 60 * minutes, out, save
        self._due = [self.limit_s * (mark + 1) / marks for mark in range(marks)]
        self._began: float | None = None
        self._not_counted = 0.0
        self.num_tokens = self.num_steps = 0
        self.rewards: list[float] = []
        self.curve: Curve = []

    def begin(self) -> None:
        self._began = self._began or time.perf_counter()

    @property
    def seconds(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began - self._not_counted

    @property
    def is_over(self) -> bool:
        return self.seconds >= self.limit_s

    def stepped(self, num_tokens: int, reward: float) -> None:
        """After each step: `num_tokens` were generated in it."""
        self.num_tokens, self.num_steps = self.num_tokens + num_tokens, self.num_steps + 1
        self.rewards.append(reward)
        if not self._due or self.seconds < self._due[0]:
            return
        seconds, begun = self.seconds, time.perf_counter()
        while self._due and self._due[0] <= seconds:
            self._due.pop(0)
        folder = self.out / f"step_{self.num_steps}"
        self._save(folder)
        recent = self.rewards[-10:]
        self.curve.append({
            "seconds": seconds, "step": self.num_steps, "tokens": self.num_tokens, "weights": str(folder),
            "reward": sum(recent) / len(recent),
        })  # fmt: skip
        self._not_counted += time.perf_counter() - begun


# -- posttrain ---------------------------------------------------------------------------------------------------------


def posttrain_settings(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    policy = {
        "model_name": str(args.model),
        "device": args.device,
        "precision": "bfloat16" if args.device == "cuda" else "float32",
        "max_total_sequence_length": args.longest_prompt + args.new_tokens,
        "train_global_batch_size": args.prompts * args.samples,
        "train_micro_batch_size": args.micro_batch,
        "optimizer": {"kwargs": {"lr": args.lr, "weight_decay": 0.0}},
        "scheduler": None,
        "generation": {
            "max_new_tokens": args.new_tokens,
            "temperature": args.temperature,
            "native_cfg": {"max_batch_size": 512},
        },
    }
    train = {"dataset_name": "ResponseDataset", "data_path": str(data), "input_key": "question"}
    return {
        "grpo": {
            "num_prompts_per_step": args.prompts,
            "num_generations_per_prompt": args.samples,
            "use_leave_one_out_baseline": False,
            "max_num_epochs": 1000,
            "max_num_steps": 1_000_000,
            "val_period": 0,
            "val_at_start": False,
            "seed": args.seed,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": policy,
        "data": {
            "shuffle": False,
            "train": {**train, "output_key": "final_answer", "env_name": "gsm8k"},
            "validation": None,
        },
        "env": {"gsm8k": {"function": f"{problems.__file__}:right_answer", "num_workers": 4}},
        "checkpointing": {"enabled": False, "checkpoint_dir": str(args.out / "run")},
    }


def train_posttrain(args: argparse.Namespace, rows: Sequence[dict[str, str]]) -> tuple[Stopwatch, str]:
    from transformers import AutoTokenizer

    from posttrain import __version__
    from posttrain.build import TrainingRun
    from posttrain.config import load_config
    from posttrain.run import quieten_libraries

    if args.vllm:
        raise SystemExit("learn: --vllm is for TRL; posttrain samples with its own engine")
    quieten_libraries()
    data, config = args.out / "train.jsonl", args.out / "config.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(json.dumps(posttrain_settings(args, data)))  # JSON is YAML
    run = TrainingRun(load_config("grpo", config, [*RECIPES[args.recipe], *args.set]), quiet=True)
    algorithm: Any = run.loop.algorithm

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        algorithm.policy.save(folder, optimizer=False)
        AutoTokenizer.from_pretrained(args.model).save_pretrained(folder / "policy/weights/model")

    watch = Stopwatch(args.minutes, args.marks, save, args.out)

    class Watched:
        def step(self, step: int) -> Any:
            watch.begin()
            if watch.is_over:
                raise TimeUp
            report = algorithm.step(step)
            rollouts = [rollout for group in report.groups for rollout in group.rollouts]
            rewards = [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]
            tokens = sum(len(rollout.completion.token_ids) for rollout in rollouts)
            # Groups that dynamic sampling has thrown away were generated too.
            tokens = int(report.metrics.get("num_generated_tokens", tokens))
            watch.stepped(tokens, sum(rewards) / max(1, len(rewards)))
            return report

        def __getattr__(self, name: str) -> Any:
            return getattr(algorithm, name)

    run.loop.algorithm = Watched()
    with contextlib.suppress(TimeUp):
        run.execute()
    return watch, f"posttrain {__version__}"


# -- TRL ---------------------------------------------------------------------------------------------------------------


def trl_settings(args: argparse.Namespace) -> dict[str, Any]:
    batch = args.prompts * args.samples
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.vllm_memory,
        "vllm_max_model_length": args.longest_prompt + args.new_tokens,
    }
    return {
        "output_dir": str(args.out / "run"),
        "max_steps": 1_000_000,
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": batch // args.micro_batch,
        "num_generations": args.samples,
        "max_completion_length": args.new_tokens,
        "temperature": args.temperature,
        "beta": 0.0,
        "bf16": args.device == "cuda",
        "use_cpu": args.device == "cpu",
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1_000_000,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "seed": args.seed,
        **(vllm if args.vllm else {}),
    }


def train_trl(args: argparse.Namespace, rows: Sequence[dict[str, str]]) -> tuple[Stopwatch, str]:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if args.recipe != "plain" or args.set:
        raise SystemExit("learn: --recipe and --set are for posttrain")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    state: dict[str, float] = {"tokens": 0, "rewards": 0.0, "answers": 0}

    def save(folder: Path) -> None:
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        target = folder / "policy/weights/model"
        model.save_pretrained(target, state_dict=weights)
        tokenizer.save_pretrained(target)

    watch = Stopwatch(args.minutes, args.marks, save, args.out)

    def reward(completions: Any, completion_ids: Any, final_answer: Any, **columns: Any) -> list[float]:
        state["tokens"] += sum(len(ids) for ids in completion_ids)
        texts = [completion[0]["content"] for completion in completions]
        found = [problems.right_answer("", text, right) for text, right in zip(texts, final_answer, strict=True)]
        state["rewards"], state["answers"] = state["rewards"] + sum(found), state["answers"] + len(found)
        return found

    class Watch(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin()

        def on_step_end(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
            watch.stepped(int(state["tokens"]), state["rewards"] / max(1, state["answers"]))
            state.update(tokens=0, rewards=0.0, answers=0)
            control.should_training_stop = watch.is_over

    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "final_answer": row["final_answer"]}
            for row in rows
        ]
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**trl_settings(args)),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    sampler = f" with vLLM {importlib.metadata.version('vllm')}, colocated" if args.vllm else ""
    return watch, f"TRL {trl.__version__}{sampler}"


SIDES = {"posttrain": train_posttrain, "trl": train_trl}
