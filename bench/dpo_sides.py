"""The two sides of `dpo_step.py`, each in its own process, on the same weights and the same pairs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import GIB, peak_bytes, reset_peak, resolve_dtype
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
    trl_weights: str = "float32"
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
    objective = PreferenceLoss(config.dpo)
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
    from trl import DPOConfig, DPOTrainer
    from trl_trainer import Watch, trainer_settings

    datasets.disable_progress_bars()
    watch = Watch()

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def row(pair: Pair) -> dict[str, str]:
        chosen, rejected = (f" {as_text(ids)}" for ids in (pair.chosen_ids, pair.rejected_ids))
        return {"prompt": as_text(pair.prompt_ids), "chosen": chosen, "rejected": rejected}

    # fp32 under bf16 autocast is what posttrain's fp32 masters are; in bf16 small updates are rounded away.
    weights = torch.bfloat16 if job.trl_weights == "bfloat16" else torch.float32
    model, _ = open_model(job.model, job.device, weights, job.seed, attention="sdpa")
    peft_config, reference = None, None
    if not job.lora:
        reference = copy.deepcopy(model)
    else:
        from peft import LoraConfig

        peft_config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        config = DPOConfig(
            **trainer_settings(folder, job.device, job.torch_dtype, checkpointing=job.checkpointing),
            per_device_train_batch_size=job.micro_batch_pairs,
            gradient_accumulation_steps=job.pairs_per_step // job.micro_batch_pairs,
            max_steps=job.num_steps,
            beta=job.beta,
            max_length=job.max_tokens,
        )
        data = datasets.Dataset.from_list([row(pair) for pair in job.pairs()])
        tokenizer = make_tokenizer(vocab_size_of(job.model))
        reset_peak()
        trainer = InOrder(
            model=model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer,
            callbacks=[watch], peft_config=peft_config,
        )  # fmt: skip
        trainer.train()
    measured = {"step_s": watch.step_s, "losses": watch.losses, "grad_norms": watch.grad_norms}
    return {**measured, "peak_gib": peak_bytes(job.device) / GIB}
