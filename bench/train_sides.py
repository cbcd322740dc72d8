"""The sides of `train.py`, each in its own process: posttrain's worker, plain `transformers`, TRL's SFT trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import GIB, peak_bytes, reset_peak, seconds_of
from profiling import cost_table, largest_costs
from shapes import EOS, PAD, open_model
from torch import Tensor
from train_job import FP8, POSTTRAIN, STOCK, TrainJob, flops_of


def measure(job: TrainJob) -> dict[str, Any]:
    sides = {POSTTRAIN: posttrain_side, FP8: posttrain_side, STOCK: stock_side}
    return sides.get(job.side, trl_side)(job)


def _rates(job: TrainJob, flops: float, step_s: list[float], logprobs_s: list[float]) -> dict[str, Any]:
    """The best of the measured runs. Log-probabilities take a third of the work: no backward pass."""
    num_tokens = sum(map(len, job.sequences()))
    found: dict[str, Any] = {
        "num_tokens": num_tokens,
        "flops_per_token": flops,
        "step_s": step_s,
        "logprobs_s": logprobs_s,
    }
    if step_s:
        found["train_tokens_per_s"] = num_tokens / min(step_s)
        found["train_flops"] = flops * found["train_tokens_per_s"]
    if logprobs_s:
        found["logprobs_tokens_per_s"] = num_tokens / min(logprobs_s)
        found["logprobs_flops"] = flops / 3 * found["logprobs_tokens_per_s"]
    return found


def _repeated(job: TrainJob, work: Any) -> list[float]:
    """Seconds of each run after the first, which warms up."""
    work()
    return [seconds_of(work) for _ in range(job.steps)]


# -- posttrain ---------------------------------------------------------------------------------------------------------


def posttrain_side(job: TrainJob) -> dict[str, Any]:
    """`ShardedTrainer.update`, as every algorithm calls it: packing, micro-batches, backward, clipping, optimizer."""
    from policy_around import common_settings, policy_around, run_config, tokenizer_folder

    from posttrain.algorithms.batches import example_batch
    from posttrain.policy.objectives import NegativeLogLikelihood
    from posttrain.types import Example

    model, tokenizer = open_model(job.model, job.device, job.torch_dtype, job.seed)
    flops = flops_of(model)
    with tokenizer_folder(tokenizer) as folder:
        settings = {
            **common_settings(job.model, job.device, job.torch_dtype, Path(folder)),
            "policy.train_global_batch_size": job.num_sequences,
            "policy.max_total_sequence_length": job.sequence_tokens,
            "policy.sequence_packing.train_mb_tokens": job.micro_batch_tokens,
            "policy.sequence_packing.logprob_mb_tokens": job.logprob_tokens,
            "policy.dtensor_cfg.activation_checkpointing": job.checkpointing,
            "policy.dtensor_cfg.lora_cfg.enabled": job.lora,
        }
        config = run_config("sft", settings, job.overrides)
        policy, worker = policy_around(model, config.policy, needs_reference=False)
    del model
    examples = [Example(i, str(i), tuple(ids[:1]), tuple(ids[1:])) for i, ids in enumerate(job.sequences())]
    batch, objective = example_batch(examples), NegativeLogLikelihood()
    worker.clear()
    logprobs_s = _repeated(job, lambda: policy.logprobs(batch))
    losses: list[float] = []
    step_s = []
    if not job.logprobs_only:
        step_s = _repeated(job, lambda: losses.append(policy.update(batch, objective).metrics["loss"]))
    result = _rates(job, flops, step_s, logprobs_s)
    result |= {"loss": losses[0] if losses else None, "peak_gib": worker.peak_gib.get("update")}
    result["logprobs_peak_gib"] = worker.peak_gib["logprobs"]
    if job.profile:
        work = (lambda: policy.logprobs(batch)) if job.logprobs_only else (lambda: policy.update(batch, objective))
        costs, busy = largest_costs(work, job.device)
        result["profile"] = {"busy": busy, "costs": [vars(cost) for cost in costs]}
        result["profile_text"] = cost_table(costs, busy, job.device)
    return result


# -- plain transformers
# --------------------------------------------------------------------------------------------------


def _padded(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask, ids.masked_fill(mask == 0, -100)


def _micro_batches(job: TrainJob, max_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    rows, size = job.sequences(), job.num_rows(max_tokens)
    return [_padded(rows[start : start + size], job.device) for start in range(0, len(rows), size)]


def _padded_model(job: TrainJob) -> Any:
    model, _ = open_model(job.model, job.device, job.torch_dtype, job.seed, attention="sdpa")
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def stock_side(job: TrainJob) -> dict[str, Any]:
    """The usual loop: sdpa, rows padded to the longest, the model's own loss, AdamW in the precision of the weights."""
    model = _padded_model(job)
    flops = flops_of(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-6, weight_decay=0.01, fused=job.device == "cuda"
    )
    num_targets = sum(len(row) - 1 for row in job.sequences())
    micro_batches = _micro_batches(job, job.micro_batch_tokens)
    without_gradients = _micro_batches(job, job.logprob_tokens)
    losses: list[float] = []

    def step() -> None:
        model.train()
        total = 0.0
        for ids, mask, labels in micro_batches:
            loss = model(
                input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=num_targets, use_cache=False
            ).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)

    @torch.no_grad()
    def logprobs() -> None:
        model.eval()
        for ids, mask, _ in without_gradients:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            chosen = logits.gather(2, ids[:, 1:, None]).squeeze(2).float()
            (chosen - torch.stack([row.float().logsumexp(-1) for row in logits])).cpu()

    reset_peak()
    logprobs_s = _repeated(job, logprobs)
    logprobs_peak = peak_bytes(job.device) / GIB
    reset_peak()
    step_s = [] if job.logprobs_only else _repeated(job, step)
    result = _rates(job, flops, step_s, logprobs_s)
    peak = peak_bytes(job.device) / GIB if step_s else None
    return {**result, "loss": losses[0] if losses else None, "peak_gib": peak, "logprobs_peak_gib": logprobs_peak}


# -- TRL
# -----------------------------------------------------------------------------------------------------------------


def trl_side(job: TrainJob) -> dict[str, Any]:
    """TRL's SFTTrainer with its defaults, but for what the job fixes. No log-probabilities: it has no such pass."""
    from datasets import Dataset
    from shapes import make_tokenizer, vocab_size_of
    from trl import SFTConfig, SFTTrainer
    from trl_trainer import Watch, trainer_settings

    model = _padded_model(job)
    flops = flops_of(model)
    watch = Watch()
    rows = job.sequences()
    size = job.num_rows(job.micro_batch_tokens)
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        config = SFTConfig(
            **trainer_settings(folder, job.device, job.torch_dtype, checkpointing=job.checkpointing),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=-(-len(rows) // size),
            max_steps=job.steps + 1,
            max_length=None,
        )
        tokenizer = make_tokenizer(vocab_size_of(job.model))
        assert tokenizer.eos_token_id == EOS
        data = Dataset.from_list([{"input_ids": row} for row in rows])
        reset_peak()
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[watch]
        )
        trainer.train()
    result = _rates(job, flops, watch.step_s[1:], [])
    return {**result, "loss": watch.losses[0], "peak_gib": peak_bytes(job.device) / GIB, "logprobs_peak_gib": None}
