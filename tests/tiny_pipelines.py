"""A pipeline that takes seconds: a tiny model learns to prefer the first letters of the alphabet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_runs
import yaml

STEPS = 24
GATE = {
    "gate": {"min_problems": 5},
    "checks": {
        "reward": {"metric": "reward", "at_least": 0.05},
        "drift": {"metric": "kl_from_base", "at_most": 100.0},
        "length": {"metric": "mean_length_tokens", "at_most": 30},
    },
}


def save_world(folder: Path) -> Path:
    """Model, traces, problems, a reward function and gate.yaml: what is there before the first run."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_runs.save_model(folder / "base")
    tiny_runs.write_rows(folder / "traces.jsonl", tiny_runs.traces(20, 6))
    problems = [{"problem": row["input"], "answer": row["output"]} for row in tiny_runs.questions(12, seed=3)]
    tiny_runs.write_rows(folder / "problems.jsonl", problems)
    (folder / "rewards.py").write_text(tiny_runs.ODD_CHARACTERS)
    (folder / "gate.yaml").write_text(yaml.safe_dump(GATE))
    return folder


def settings(world: Path, home: Path) -> dict[str, Any]:
    """The values of a pipeline.yaml: DPO on pairs from the traces."""
    return {
        "pipeline": {"name": "tiny", "folder": str(home), "gpu_hour_price": 3600.0},
        "base_model": str(world / "base"),
        "traces": {"path": str(world / "traces.jsonl")},
        "train": {
            "algorithm": "dpo",
            "overrides": [
                f"dpo.max_num_steps={STEPS}",
                "dpo.max_num_epochs=100",
                "dpo.val_period=0",
                "dpo.val_at_start=false",
                "policy.precision=float32",
                "policy.device=cpu",
                "policy.num_threads=1",
                "policy.max_total_sequence_length=64",
                "policy.train_global_batch_size=4",
                "policy.train_micro_batch_size=4",
                "policy.optimizer.kwargs.lr=1e-2",
                "checkpointing.save_period=4",
                "checkpointing.keep_top_k=2",
                "checkpointing.metric_name=null",
            ],
        },
        "evaluate": {
            "main": {
                "overrides": [
                    f"data.dataset_name={world / 'problems.jsonl'}",
                    "generation.device=cpu",
                    "generation.num_threads=1",
                    "generation.num_prompts_per_step=4",
                    "generation.max_new_tokens=8",
                    "generation.vllm_cfg.max_model_len=64",
                    f"env.mine.function={world / 'rewards.py:odd'}",
                    "env.mine.num_workers=1",
                    "eval.bootstrap_resamples=100",
                ]
            }
        },
        "gate": {"config": str(world / "gate.yaml")},
        "registry": {"location": str(home / "registry")},
    }


def write_file(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
