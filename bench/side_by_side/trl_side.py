"""The job with TRL: `python -m side_by_side.trl_side JOB.json RESULT.json`.

TRL's defaults, but for what the job fixes: fp32 without activation checkpointing (both are on by default and slower
here), answers of a fixed length, a constant learning rate. Its methods are not replaced; they are watched from outside.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from side_by_side.job import GRPO, Job, StepTime, write_result
from side_by_side.rewards import share_of_letter_e


class Watch(TrainerCallback):
    """Times each step, and counts what the watched calls inside it were given."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        self.inputs: list[list[int]] = []
        self.stage_s = 0.0  # of generation, or of the reference
        self.tokens = self.computed_tokens = 0

    def see(self, input_ids: torch.Tensor, mask: torch.Tensor, num_new: int = 0) -> None:
        """Rows of padded tokens, of which each will have `num_new` more."""
        self.tokens += int(mask.sum()) + num_new * len(mask)
        self.computed_tokens += input_ids.numel() + num_new * len(mask)
        self.inputs += [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stage_s, self.tokens, self.computed_tokens = 0.0, 0, 0
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        name = "generation" if isinstance(args, GRPOConfig) else "reference"
        stages = {name: self.stage_s, "training": seconds - self.stage_s}
        self.steps.append(StepTime(seconds, cpu, self.tokens, self.computed_tokens, stages))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.steps and logs and "loss" in logs:
            self.steps[-1].loss, self.steps[-1].grad_norm = float(logs["loss"]), float(logs["grad_norm"])


def common_options(job: Job) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "max_steps": job.num_steps,
        "learning_rate": job.learning_rate,
        "max_grad_norm": job.max_grad_norm,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


def grpo_trainer(job: Job, model: Any, tokenizer: Any, watch: Watch) -> GRPOTrainer:
    def reward(completions: Any, **columns: Any) -> list[float]:
        return [share_of_letter_e("", completion[0]["content"], None) for completion in completions]

    generate = model.generate

    def watched(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = generate(*args, **kwargs)
        watch.stage_s += time.perf_counter() - start
        ids = kwargs["input_ids"]
        assert output.shape[1] - ids.shape[1] == job.num_new_tokens, "every answer has the fixed length"
        watch.see(ids, kwargs["attention_mask"], job.num_new_tokens)
        return output

    model.generate = watched
    total = job.num_prompts * job.num_samples
    config = GRPOConfig(
        **common_options(job),
        per_device_train_batch_size=job.trl_micro_batch,
        gradient_accumulation_steps=total // job.trl_micro_batch,
        num_generations=job.num_samples,
        max_completion_length=job.num_new_tokens,
        generation_kwargs={"min_new_tokens": job.num_new_tokens},
        temperature=1.0,
        beta=0.0,
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["input"]}]} for row in job.rows])
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[watch]
    )


def dpo_trainer(job: Job, model: Any, tokenizer: Any, watch: Watch) -> DPOTrainer:
    reference = copy.deepcopy(model)
    started: list[float] = []
    reference.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))

    def reference_done(*_: Any) -> None:
        watch.stage_s += time.perf_counter() - started.pop()

    reference.register_forward_hook(reference_done)

    class WatchedTrainer(DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            watch.see(inputs["input_ids"], inputs["attention_mask"])
            return super().compute_loss(model, inputs, *args, **kwargs)

    config = DPOConfig(
        **common_options(job),
        per_device_train_batch_size=job.trl_micro_batch,
        gradient_accumulation_steps=job.num_pairs // job.trl_micro_batch,
        max_length=job.num_sequence_tokens,
        beta=job.dpo_beta,
    )
    return WatchedTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(list(job.rows)),
        processing_class=tokenizer,
        callbacks=[watch],
    )


def main(job_file: str, result_file: str) -> None:
    job = Job.read(Path(job_file))
    torch.set_num_threads(job.num_threads)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    watch = Watch()
    build = grpo_trainer if job.kind == GRPO else dpo_trainer
    build(job, model, tokenizer, watch).train()
    write_result(Path(result_file), watch.steps, watch.inputs, f"TRL {trl.__version__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
