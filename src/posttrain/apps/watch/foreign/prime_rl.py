"""prime-rl: the `metrics.jsonl` of its file monitor. Trainer and orchestrator write rows of their own for the same step.

It has no KL to the starting model, and its file monitor keeps no answers.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.watch.foreign.run import ForeignRun, parsed_line, translated

FILE = "metrics.jsonl"
KEYS = {
    "loss/mean": "train/loss",
    "entropy/mean": "train/approx_entropy",
    "entropy/all/mean": "train/approx_entropy",
    "mismatch_kl/mean": "train/gen_kl_error",
    "mismatch_kl/all/mean": "train/gen_kl_error",
    "importance_ratio/mean": "train/sampling_importance_ratio",
    "is_masked/mean": "train/clip_fraction",
    "optim/grad_norm": "train/grad_norm",
    "optim/lr": "train/lr",
    "reward/mean": "train/reward",
    "reward/all/mean": "train/reward",
    "reward/all/min": "train/reward_min",
    "reward/all/max": "train/reward_max",
    "completion_len/mean": "train/mean_generation_length",
    "completion_len/all/mean": "train/mean_generation_length",
    "decode_len/all/mean": "train/mean_generation_length",
    "is_truncated/mean": "train/truncation_rate",
    "is_truncated/all/mean": "train/truncation_rate",
    "effective_batch_size/all": "train/groups_with_signal",
    "val_reward/mean": "validation/accuracy",
    "val_reward/all/mean": "validation/accuracy",
    "time/generate_completions": "timing/train/generation",
}
NAMES = {
    "policy.optimizer.kwargs.lr": "trainer.optim.lr",
    "policy.optimizer.kwargs.weight_decay": "trainer.optim.weight_decay",
    "loss_fn.reference_policy_kl_penalty": "trainer.loss.kl_tau",
    "policy.generation.max_new_tokens": "orchestrator.sampling.max_tokens",
    "policy.generation.temperature": "orchestrator.sampling.temperature",
    "grpo.async_grpo.max_trajectory_age_steps": "orchestrator.max_off_policy_steps",
    "grpo.num_generations_per_prompt": "orchestrator.rollouts_per_example",
}


def find(folder: Path) -> list[Path]:
    """The files of trainer and orchestrator: in the folder, or one below it."""
    found = [path for path in (folder / FILE, *sorted(folder.glob(f"*/{FILE}"))) if path.is_file()]
    return [path for path in found if _is_of_prime_rl(path)]


def _is_of_prime_rl(path: Path) -> bool:
    with path.open("rb") as file:
        rows = [parsed_line(line) for _, line in zip(range(20), file, strict=False)]
    return any(key in row for row in rows for key in ("optim/grad_norm", "reward/all/mean", "reward/mean"))


def read(folder: Path, files: list[Path]) -> ForeignRun:
    rows = [row for path in files for row in map(parsed_line, path.read_bytes().splitlines())]
    rows = [row for row in rows if isinstance(row.get("step"), int)]
    return ForeignRun("prime-rl", "grpo", translated(rows, KEYS), NAMES)
