"""One GRPO run of `grpo_step.py`, in its own process: the real step of `algorithms/grpo.py` on random weights.

Prompts are random tokens, answers have a fixed length, the reward is trivial. With `share_prompts` off every sample has
a prompt of its own, in sampling and in training: the same tokens and the same noise, so the same answers, without the
sharing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from machine import GIB, resolve_dtype
from policy_around import SEED, WatchedWorker, common_settings, policy_around, run_config, tokenizer_folder
from profiling import cost_table, largest_costs
from shapes import FIRST_WORD, open_model
from torch import Tensor
from train_job import flops_of

from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.orchestration.sharded import ShardedEngine, ShardedTrainer, SharedWeights
from posttrain.policy.hardware import peak_flops
from posttrain.recipes.grpo import build_credit, build_objective
from posttrain.reporting.rows import Hardware, performance
from posttrain.roles import Engine, Objective, Progress, Trainer
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.types import Completion, NoiseKey, Sampling, Score, StepReport, Task, TokenBatch, UpdateReport


@dataclass(frozen=True)
class GrpoJob:
    model: str
    device: str
    dtype: str
    num_prompts: int
    num_samples: int
    prompt_tokens: int
    new_tokens: int
    micro_batch_tokens: int
    logprob_tokens: int
    max_batch_size: int
    warm_up_prompts: int
    steps: int
    kl_penalty: float
    lora: bool = False
    checkpointing: bool = False
    share_prompts: bool = True
    seed: int = 0
    profile: bool = False
    overrides: tuple[str, ...] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return resolve_dtype(self.dtype, self.device)


# -- what stands in for data and rewards -------------------------------------------------------------------------------


class RandomPrompts:
    """A stream of prompts that never ends and never repeats."""

    def __init__(self, num_tokens: int, vocab_size: int, seed: int) -> None:
        self.num_tokens, self.vocab_size = num_tokens, vocab_size
        self.rng = random.Random(seed)
        self.draw = 0

    def take(self, count: int) -> list[Task]:
        tasks = []
        for _ in range(count):
            ids = tuple(self.rng.randrange(FIRST_WORD, self.vocab_size) for _ in range(self.num_tokens))
            tasks.append(Task(self.draw, f"random:{self.draw}", "", ids))
            self.draw += 1
        return tasks


class EvenTokens:
    """Rewards the share of even token ids: costs nothing, and differs from answer to answer."""

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        return [Score(sum(token % 2 == 0 for token in c.token_ids) / len(c.token_ids)) for c in completions]

    def close(self) -> None:
        pass


# -- without sharing
# -----------------------------------------------------------------------------------------------------


class UnsharedPolicy:
    """Every response gets a prompt of its own."""

    def __init__(self, policy: ShardedTrainer) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        return self.policy.update(unshared(batch), objective)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        return self.policy.logprobs(unshared(batch))

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        return self.policy.reference_logprobs(unshared(batch))


def unshared(batch: TokenBatch) -> TokenBatch:
    return replace(
        batch,
        prompts=tuple(batch.prompts[prompt] for prompt in batch.prompt_of),
        prompt_of=tuple(range(len(batch.responses))),
    )


class UnsharedEngine:
    """Every sample is a task of its own. Noise is keyed by draw and sample, so the tokens are those of the
    shared run.
    """

    def __init__(self, generator: Engine) -> None:
        self.generator = generator

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        singles = [replace(task, first_sample=index) for task in tasks for index in range(num_samples)]
        done = [group[0] for group in self.generator.generate(singles, 1, sampling, key, progress)]
        return [done[start : start + num_samples] for start in range(0, len(done), num_samples)]

    def release(self) -> None:
        self.generator.release()


# -- the run
# -------------------------------------------------------------------------------------------------------------


def config_of(job: GrpoJob, folder: Path) -> Any:
    settings = {
        **common_settings(job.model, job.device, job.torch_dtype, folder),
        "grpo.num_prompts_per_step": job.num_prompts,
        "grpo.num_generations_per_prompt": job.num_samples,
        "grpo.val_period": 0,
        "policy.train_global_batch_size": job.num_prompts * job.num_samples,
        "policy.max_total_sequence_length": job.prompt_tokens + job.new_tokens,
        "policy.sequence_packing.train_mb_tokens": job.micro_batch_tokens,
        "policy.sequence_packing.logprob_mb_tokens": job.logprob_tokens,
        "policy.dtensor_cfg.activation_checkpointing": job.checkpointing,
        "policy.dtensor_cfg.lora_cfg.enabled": job.lora,
        "policy.generation.max_new_tokens": job.new_tokens,
        "policy.generation.ignore_eos": True,
        "policy.generation.native_cfg.max_batch_size": job.max_batch_size,
        "loss_fn.reference_policy_kl_penalty": job.kl_penalty,
    }
    return run_config("grpo", settings, job.overrides)


def build_step(job: GrpoJob, config: Any, policy: ShardedTrainer, worker: WatchedWorker, vocab_size: int) -> Grpo:
    generator: Engine = ShardedEngine(worker)
    step_policy: Trainer = policy
    if not job.share_prompts:
        generator, step_policy = UnsharedEngine(generator), UnsharedPolicy(policy)
    generation = config.policy.generation
    rollouts = FreshRollouts(
        RandomPrompts(job.prompt_tokens, vocab_size, job.seed),
        generator,
        EvenTokens(),
        num_samples=job.num_samples,
        sampling=Sampling(generation.max_new_tokens, generation.temperature, ignore_eos=True),
        seed=SEED,
    )
    settings = GrpoSettings(config.grpo.num_prompts_per_step)
    return Grpo(settings, build_objective(config), build_credit(config), step_policy, rollouts, SharedWeights())


def measure(job: GrpoJob) -> dict[str, Any]:
    model, tokenizer = open_model(job.model, job.device, job.torch_dtype, job.seed)
    flops = flops_of(model)
    with ExitStack() as cleanup:
        config = config_of(job, Path(cleanup.enter_context(tokenizer_folder(tokenizer))))
        policy, worker = policy_around(model, config.policy, needs_reference=job.kl_penalty != 0)
    del model
    grpo = build_step(job, config, policy, worker, len(tokenizer))
    if job.warm_up_prompts:
        replace(grpo, settings=GrpoSettings(job.warm_up_prompts)).step(0)
    worker.clear()
    reports = [grpo.step(step) for step in range(1, job.steps + 1)]
    best = min(reports, key=lambda report: report.timings_s["total_step_time"])
    device_name = torch.cuda.get_device_name() if job.device == "cuda" else ""
    result = {
        **step_numbers(best, Hardware(1, peak_flops(device_name), flops)),
        "step_s": [report.timings_s["total_step_time"] for report in reports],
        "peak_gib": worker.peak_gib,
    }
    if job.device == "cuda":
        result["resident_gib"] = torch.cuda.memory_allocated() / GIB  # between steps: weights, optimizer, reference
    if job.profile:
        costs, busy = largest_costs(lambda: grpo.step(job.steps + 1), job.device)
        result["profile"] = {"busy": busy, "costs": [vars(cost) for cost in costs]}
        result["profile_text"] = cost_table(costs, busy, job.device)
    return result


def step_numbers(report: StepReport, hardware: Hardware) -> dict[str, Any]:
    """Stages and rates by NeMo RL's definitions: tokens are those of full sequences in every stage."""
    kept = ("loss", "reward", "grad_norm", "kl_penalty", "token_mult_prob_error", "gen_kl_error", "packing_efficiency")
    return {
        "timings_s": dict(report.timings_s),
        "num_tokens": report.num_tokens,
        "num_samples": report.num_samples,
        "performance": performance(report, hardware),
        "metrics": {name: report.metrics[name] for name in kept if name in report.metrics},
    }
