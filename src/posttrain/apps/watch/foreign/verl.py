"""verl: the JSON lines of its file logger (`trainer.logger=[file]`), and the answers in `trainer.rollout_data_dir`."""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.watch.foreign.run import ForeignRun, grouped, parsed_line, translated
from posttrain.files.json_files import JsonObject

KEYS = {
    "actor/kl_loss": "train/kl_penalty",
    "actor/entropy": "train/approx_entropy",
    "actor/entropy_loss": "train/approx_entropy",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/pg_loss": "train/loss",
    "actor/pg_clipfrac": "train/clip_fraction",
    "critic/score/mean": "train/reward",
    "critic/score/min": "train/reward_min",
    "critic/score/max": "train/reward_max",
    "response_length/mean": "train/mean_generation_length",
    "response_length/max": "train/max_generation_length",
    "response_length/clip_ratio": "train/truncation_rate",
    "rollout_corr/rollout_is_mean": "train/sampling_importance_ratio",
    "rollout_corr/rollout_is_eff_sample_size": "train/sampling_effective_sample_size",
    "rollout_corr/kl": "train/gen_kl_error",
    "timing_s/gen": "timing/train/generation",
    "validation": "validation/accuracy",
}
NAMES = {
    "policy.optimizer.kwargs.lr": "actor_rollout_ref.actor.optim.lr",
    "policy.optimizer.kwargs.weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "loss_fn.reference_policy_kl_penalty": "actor_rollout_ref.actor.kl_loss_coef",
    "policy.generation.max_new_tokens": "data.max_response_length",
    "policy.generation.temperature": "actor_rollout_ref.rollout.temperature",
    "loss_fn.use_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "grpo.num_generations_per_prompt": "actor_rollout_ref.rollout.n",
}


def find(folder: Path) -> Path | None:
    """A file of rows {"step": …, "data": {…}}."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            row = parsed_line(file.readline())
        if isinstance(row.get("data"), dict) and "step" in row:
            return path
    return None


def read(folder: Path, file: Path) -> ForeignRun:
    rows = []
    for line in file.read_bytes().splitlines():
        row = parsed_line(line)
        if isinstance(row.get("data"), dict) and isinstance(row.get("step"), int):
            data = dict(row["data"])
            scores = [value for key, value in data.items() if key.startswith("val-core/") and "mean@" in key]
            if scores:
                data["validation"] = sum(scores) / len(scores)
            rows.append({"step": row["step"], **data})
    return ForeignRun("verl", "grpo", translated(rows, KEYS), NAMES, groups=lambda step: _groups(folder, step))


def _groups(folder: Path, step: int) -> list[JsonObject]:
    """`STEP.jsonl` in the folder or one below it: input, output, score."""
    path = next((path for path in (folder / f"{step}.jsonl", *folder.glob(f"*/{step}.jsonl")) if path.is_file()), None)
    if path is None:
        return []
    rows = [parsed_line(line) for line in path.read_bytes().splitlines()]
    return grouped(
        (str(row.get("input")), {"text": row.get("output"), "reward": row.get("score")}) for row in rows if row
    )
