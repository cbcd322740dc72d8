"""TRL: `trainer_state.json` of the output folder or its newest checkpoint, and `completions/*.parquet`.

The rewards of its DPO are beta times ours. `training_args.bin` is a pickle and is not opened, so settings are unknown but for
what is logged.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.watch.foreign.run import ForeignRun, grouped, kind_of, translated
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject, parse_json

STATE = "trainer_state.json"
KEYS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "groups_with_signal": "train/groups_with_signal",
    "kl": "train/kl_penalty",
    "entropy": "train/approx_entropy",
    "completions/mean_length": "train/mean_generation_length",
    "completions/max_length": "train/max_generation_length",
    "completions/clipped_ratio": "train/truncation_rate",
    "clip_ratio/region_mean": "train/clip_fraction",
    "sampling/importance_sampling_ratio/mean": "train/sampling_importance_ratio",
    "rewards/chosen": "train/rewards_chosen_mean",
    "rewards/rejected": "train/rewards_rejected_mean",
    "rewards/accuracies": "train/accuracy",
    "accuracy": "train/accuracy",
    "eval_loss": "validation/loss",
    "eval_reward": "validation/accuracy",
    "eval_rewards/accuracies": "validation/accuracy",
    "eval_accuracy": "validation/accuracy",
}
NAMES = {
    "policy.optimizer.kwargs.lr": "learning_rate",
    "policy.optimizer.kwargs.weight_decay": "weight_decay",
    "loss_fn.reference_policy_kl_penalty": "beta",
    "policy.generation.max_new_tokens": "max_completion_length",
    "policy.generation.temperature": "temperature",
    "loss_fn.use_importance_sampling_correction": "vllm_importance_sampling_correction",
    "grpo.overlong_filtering": "mask_truncated_completions",
    "grpo.num_generations_per_prompt": "num_generations",
    "sft.max_num_steps": "max_steps",
    "dpo.max_num_steps": "max_steps",
    "rm.max_num_steps": "max_steps",
    "dpo.max_num_epochs": "num_train_epochs",
    "rm.max_num_epochs": "num_train_epochs",
}


def find(folder: Path) -> Path | None:
    """The newest state: that of the folder itself, or of its last checkpoint."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2] or 0))
    places = [folder, *reversed(checkpoints)]
    return next((place / STATE for place in places if (place / STATE).is_file()), None)


def read(folder: Path, state: Path) -> ForeignRun:
    content = parse_json(state.read_bytes())
    history = content.get("log_history") if isinstance(content, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{state} has no log_history: it is not the state of a TRL trainer")
    rows = [dict(row) for row in history if isinstance(row, dict) and isinstance(row.get("step"), int)]
    for row in rows:
        if isinstance(row.get("frac_reward_zero_std"), int | float):
            row["groups_with_signal"] = 1 - row["frac_reward_zero_std"]
    kind = kind_of(rows, grpo="reward", dpo="rewards/chosen", rm="margin")
    return ForeignRun("TRL", kind, translated(rows, KEYS), NAMES, groups=lambda step: _groups(folder, step))


def _groups(folder: Path, step: int) -> list[JsonObject]:
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    if not path.is_file():
        return []
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path).to_pylist()
    known = {"step", "prompt", "completion", "advantage"}
    answers = []
    for row in rows:
        rewards = [value for key, value in row.items() if key not in known and isinstance(value, int | float)]
        answer = {"text": _text(row["completion"]), "reward": sum(rewards) if rewards else None}
        answers.append((_text(row["prompt"]), answer))
    return grouped(answers)


def _text(content: object) -> str:
    """A string, or the contents of a list of messages."""
    if isinstance(content, list):
        return "\n".join(str(message.get("content", "")) for message in content if isinstance(message, dict))
    return str(content)
