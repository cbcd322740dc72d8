"""The two sides of `dpo_step.py`, each in its own process, on the same weights and the same pairs."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import GIB, peak_bytes, reset_peak, resolve_dtype, synchronise
from pair_lengths import PairLengths, random_pairs
from shapes import as_text, make_tokenizer, open_model, vocab_size_of

from posttrain.types import Pair

POSTTRAIN, TRL = "posttrain", "trl"


@dataclass(frozen=True)
class DpoJob:
    side: str
    model: str
    device: str
    dtype: str
    lengths: Sequence[Sequence[int]]  # (prompt, chosen, rejected) of every pair, in the order in which they are trained
    pairs_per_step: int
    max_tokens: int  # of a sequence
    micro_batch_tokens: int  # of posttrain
    micro_batch_pairs: int  # of TRL
    lora: bool = False
    checkpointing: bool = False
    beta: float = 0.1
    seed: int = 0
    overrides: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return resolve_dtype(self.dtype, self.device)

    @property
    def num_steps(self) -> int:
        return len(self.lengths) // self.pairs_per_step

    def pairs(self) -> list[Pair]:
        lengths = [PairLengths(*three) for three in self.lengths]
        return random_pairs(lengths, vocab_size_of(self.model), self.seed)


class PairsInOrder:
    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs, self.at = pairs, 0

    def take(self, count: int) -> Sequence[Pair]:
        self.at += count
        return self.pairs[self.at - count : self.at]


def measure(job: DpoJob) -> dict[str, Any]:
    result = posttrain_side(job) if job.side == POSTTRAIN else trl_side(job)
    # The first step warms up. All others count: their lengths differ, so the best one would be a matter of luck.
    seconds = result["step_s"][1:] or result["step_s"]
    return {**result, "pairs_per_s": job.pairs_per_step * len(seconds) / sum(seconds)}


def posttrain_side(job: DpoJob) -> dict[str, Any]:
    """The real step of `algorithms/dpo.py`. Every pair is new, so the reference is computed every time."""
    from policy_around import common_settings, policy_around, run_config, tokenizer_folder

    from posttrain.algorithms.dpo import Dpo
    from posttrain.build.datasets import options
    from posttrain.policy.objectives import PreferenceLoss
    from posttrain.policy.reference_cache import CachedReference

    model, tokenizer = open_model(job.model, job.device, job.torch_dtype, job.seed)
    with tokenizer_folder(tokenizer) as folder:
        settings = {
            **common_settings(job.model, job.device, job.torch_dtype, Path(folder)),
            "policy.train_global_batch_size": job.pairs_per_step,
            "policy.max_total_sequence_length": job.max_tokens,
            "policy.sequence_packing.train_mb_tokens": job.micro_batch_tokens,
            "policy.sequence_packing.logprob_mb_tokens": job.micro_batch_tokens,
            "policy.dtensor_cfg.activation_checkpointing": job.checkpointing,
            "policy.dtensor_cfg.lora_cfg.enabled": job.lora,
            "dpo.reference_policy_kl_penalty": job.beta,
        }
        config = run_config("dpo", settings, job.overrides)
        policy, worker = policy_around(model, config.policy, needs_reference=True)
    del model
    objective = PreferenceLoss(**options(config.dpo, PreferenceLoss))
    dpo = Dpo(
        job.pairs_per_step, objective, policy, PairsInOrder(job.pairs()), reference=CachedReference(policy, max_bytes=0)
    )
    reset_peak()
    step_s, losses, norms, stages = [], [], [], []
    for step in range(1, job.num_steps + 1):
        report = dpo.step(step)
        step_s.append(report.timings_s["total_step_time"])
        losses.append(report.metrics["loss"])
        norms.append(report.metrics["grad_norm"])
        stages.append(dict(report.timings_s))
    peak = max(worker.peak_gib.values())
    return {"step_s": step_s, "losses": losses, "grad_norms": norms, "peak_gib": peak, "stages": stages}


def trl_side(job: DpoJob) -> dict[str, Any]:
    """TRL's DPOTrainer with its defaults, but for what the job fixes; pairs in the given order."""
    import datasets
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    datasets.disable_progress_bars()
    step_s: list[float] = []
    losses: list[float] = []
    norms: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronise()
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronise()
            step_s.append(time.perf_counter() - self.start)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))
                norms.append(float(logs["grad_norm"]))

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def row(pair: Pair) -> dict[str, str]:
        chosen, rejected = (f" {as_text(ids)}" for ids in (pair.chosen_ids, pair.rejected_ids))
        return {"prompt": as_text(pair.prompt_ids), "chosen": chosen, "rejected": rejected}

    # fp32 weights under bf16 autocast, as posttrain's fp32 masters: otherwise small updates are rounded away.
    model, _ = open_model(job.model, job.device, torch.float32, job.seed, attention="sdpa")
    peft_config, reference = None, None
    if not job.lora:
        reference = copy.deepcopy(model)
    else:
        from peft import LoraConfig

        peft_config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        config = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job.micro_batch_pairs,
            gradient_accumulation_steps=job.pairs_per_step // job.micro_batch_pairs,
            max_steps=job.num_steps,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            beta=job.beta,
            max_length=job.max_tokens,
            bf16=job.torch_dtype is torch.bfloat16,
            use_cpu=job.device == "cpu",
            gradient_checkpointing=job.checkpointing,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        )
        data = datasets.Dataset.from_list([row(pair) for pair in job.pairs()])
        tokenizer = make_tokenizer(vocab_size_of(job.model))
        reset_peak()
        trainer = InOrder(
            model=model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer,
            callbacks=[Watch()], peft_config=peft_config,
        )  # fmt: skip
        trainer.train()
    return {"step_s": step_s, "losses": losses, "grad_norms": norms, "peak_gib": peak_bytes(job.device) / GIB}
