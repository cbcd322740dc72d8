"""The job with posttrain: `python -m side_by_side.posttrain_side JOB.json RESULT.json`.

A config file and `posttrain.build.TrainingRun`, as the command line has it: run folder, scoring processes and report
are written as for any user. The only thing added is a watch around the step of the algorithm.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from posttrain import __version__
from posttrain.algorithms.dpo import Dpo, PairStream
from posttrain.algorithms.grpo import Grpo
from posttrain.build import TrainingRun
from posttrain.config import load_config
from posttrain.roles import Algorithm, Objective, Trainer
from posttrain.run import quieten_libraries
from posttrain.types import Pair, StepReport, TokenBatch, UpdateReport
from side_by_side import rewards
from side_by_side.job import GRPO, Job, StepTime, peaks_of_helpers, write_result


class WatchedPairs:
    """A stream that remembers what it handed out."""

    def __init__(self, pairs: PairStream) -> None:
        self.pairs = pairs
        self.taken: Sequence[Pair] = ()

    def take(self, count: int) -> Sequence[Pair]:
        self.taken = self.pairs.take(count)
        return self.taken


class WatchedPolicy:
    """A policy that counts the tokens it feeds to the model in updates."""

    def __init__(self, policy: Trainer) -> None:
        self.policy = policy
        self.num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        report = self.policy.update(batch, objective)
        self.num_tokens += report.num_tokens
        return report


class WatchedAlgorithm:
    """Times each step of `algorithm`, and remembers what it worked on."""

    def __init__(self, algorithm: Algorithm) -> None:
        assert isinstance(algorithm, Grpo | Dpo)
        self.policy = WatchedPolicy(algorithm.policy)
        self.pairs: WatchedPairs | None = None
        self.algorithm: Algorithm
        if isinstance(algorithm, Dpo):
            self.pairs = WatchedPairs(algorithm.rows)
            self.algorithm = replace(algorithm, policy=self.policy, rows=self.pairs)
        else:
            self.algorithm = replace(algorithm, policy=self.policy)
        self.steps: list[StepTime] = []
        self.inputs: list[Sequence[int]] = []
        self.helpers: dict[int, int] = {}

    def step(self, step: int) -> StepReport:
        self.policy.num_tokens = 0
        wall, cpu = time.perf_counter(), time.process_time()
        report = self.algorithm.step(step)
        seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.helpers |= peaks_of_helpers()  # a look from outside may miss those of a short run
        name, stage = ("reference", "policy_and_reference_logprobs") if self.pairs else ("generation", "generation")
        stages = {name: report.timings_s[stage], "training": seconds - report.timings_s[stage]}
        loss, grad_norm = report.metrics["loss"], report.metrics["grad_norm"]
        self.steps.append(StepTime(seconds, cpu, report.num_tokens, self.policy.num_tokens, stages, loss, grad_norm))
        self.inputs += [group.task.prompt_ids for group in report.groups]
        for pair in self.pairs.taken if self.pairs else ():
            self.inputs += [pair.prompt_ids + pair.chosen_ids, pair.prompt_ids + pair.rejected_ids]
        return report

    def validate(self, step: int) -> StepReport | None:
        return self.algorithm.validate(step)


def settings(job: Job, folder: Path) -> dict[str, Any]:
    """The job as a config. What is not said here has posttrain's default."""
    budget = job.posttrain_micro_batch_tokens
    policy: dict[str, Any] = {
        "model_name": job.model,
        "device": "cpu",
        "num_threads": job.num_threads,
        "precision": "float32",
        "max_grad_norm": job.max_grad_norm,
        "sequence_packing": {"enabled": True, "train_mb_tokens": budget, "logprob_mb_tokens": budget},
        "optimizer": {
            "kwargs": {"lr": job.learning_rate, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1.0e-8},
        },
        "scheduler": None,
    }
    length = {"max_num_epochs": job.num_steps, "max_num_steps": job.num_steps, "val_period": 0, "val_at_start": False}
    config: dict[str, Any] = {
        "policy": policy,
        "checkpointing": {"enabled": False, "checkpoint_dir": str(folder / "run")},
    }
    data_path = str(folder / "data.jsonl")
    if job.kind == GRPO:
        policy["train_global_batch_size"] = job.num_prompts * job.num_samples
        if job.num_prompt_tokens:
            policy["max_total_sequence_length"] = job.num_prompt_tokens + job.num_new_tokens
        policy["generation"] = {"max_new_tokens": job.num_new_tokens, "temperature": 1.0, "ignore_eos": True}
        config["grpo"] = {
            **length,
            "num_prompts_per_step": job.num_prompts,
            "num_generations_per_prompt": job.num_samples,
            "use_leave_one_out_baseline": False,
        }
        config["loss_fn"] = {"reference_policy_kl_penalty": 0.0}
        config["env"] = {"letters": {"function": f"{rewards.__file__}:share_of_letter_e", "num_workers": 1}}
        train = {"dataset_name": "ResponseDataset", "input_key": "input", "output_key": "input", "env_name": "letters"}
    else:
        policy["train_global_batch_size"] = job.num_pairs
        policy["tokenizer"] = {"chat_template": None}  # plain text, as TRL reads strings
        policy["max_total_sequence_length"] = job.num_sequence_tokens
        config["dpo"] = {**length, "reference_policy_kl_penalty": job.dpo_beta}
        train = {"dataset_name": "PreferenceDataset"}
    config["data"] = {"train": {**train, "data_path": data_path}, "validation": None}
    return config


def main(job_file: str, result_file: str) -> None:
    job = Job.read(Path(job_file))
    quieten_libraries()
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as scratch:
        folder = Path(scratch)
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in job.rows))
        (folder / "config.yaml").write_text(json.dumps(settings(job, folder)))  # JSON is YAML
        run = TrainingRun(load_config("grpo" if job.kind == GRPO else "dpo", folder / "config.yaml", []), quiet=True)
        watched = WatchedAlgorithm(run.loop.algorithm)
        run.loop.algorithm = watched
        code = run.execute()
        assert code == 0, f"the run ended with exit code {code}"
    write_result(Path(result_file), watched.steps, watched.inputs, f"posttrain {__version__}", watched.helpers)


if __name__ == "__main__":
    main(*sys.argv[1:])
