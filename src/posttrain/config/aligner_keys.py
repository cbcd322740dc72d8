"""NeMo-Aligner's keys of DPO and what they are called here: tables, and the conversion of single values.

`aligner_names.py` applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

SECTIONS = ("model", "trainer", "exp_manager", "pretrained_checkpoint")


class Untranslatable(Exception):
    """The value has no counterpart; the text is what to use."""


Convert = Callable[[Any], Any]


def unchanged(value: object) -> Any:
    return value


@dataclass(frozen=True)
class TranslatedKey:
    old: str
    new: tuple[str, ...]
    convert: Convert = unchanged


def _steps(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Untranslatable("a share of an epoch is not understood: give a number of steps, e.g. 100")
    return value


def _max_steps(value: Any) -> int:
    return 1_000_000 if _steps(value) == -1 else value


def _val_batches(value: object) -> int:
    if value == 1.0 and isinstance(value, float):
        return -1
    if isinstance(value, bool) or not isinstance(value, int):
        raise Untranslatable(
            "a share of the validation set is not understood: give a number of batches, or 1.0 for all"
        )
    return value


def _precision(value: object) -> str:
    names = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "32": "float32", "32-true": "float32"}
    if str(value) not in names:
        raise Untranslatable(f"one of {', '.join(names)} is understood")
    return names[str(value)]


def _model(value: object) -> str:
    if str(value).endswith(".nemo"):
        raise Untranslatable(
            "a .nemo archive is not read: convert it to a Hugging Face folder with NeMo's own converter for the model, and "
            "give that folder, or a hub name"
        )
    return str(value)


def _optimizer(value: object) -> str:
    names = ("distributed_fused_adam", "fused_adam", "mcore_distributed_optim", "adamw")
    if value not in names:
        raise Untranslatable(
            f"one of {', '.join(names)} is understood, as torch.optim.AdamW; else use policy.optimizer"
        )
    return "torch.optim.AdamW"


def _scheme(value: object) -> bool:
    if value in (None, "none"):
        return False
    if value != "lora":
        raise Untranslatable("lora or none is understood")
    return True


_MODULES = {
    "attention_qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_dense": ("o_proj",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_fc1": ("gate_proj", "up_proj"),
    "mlp_fc2": ("down_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def _monitor(value: object) -> str:
    names = {"val_loss": "val:loss", "val_acc": "val:accuracy", "val_rewards_chosen_mean": "val:rewards_chosen_mean"}
    if value not in names:
        raise Untranslatable(f"one of {', '.join(names)} is understood; else use checkpointing.metric_name")
    return names[value]


LORA = "policy.dtensor_cfg.lora_cfg"
KEYS: tuple[TranslatedKey, ...] = (
    TranslatedKey("pretrained_checkpoint.restore_from_path", ("policy.model_name",), _model),
    TranslatedKey("trainer.num_nodes", ("cluster.num_nodes",)),
    TranslatedKey("trainer.devices", ("cluster.gpus_per_node",)),
    TranslatedKey("trainer.precision", ("policy.precision",), _precision),
    TranslatedKey("trainer.max_time", ("checkpointing.checkpoint_must_save_by",)),
    TranslatedKey("trainer.dpo.max_epochs", ("dpo.max_num_epochs",)),
    TranslatedKey("trainer.dpo.max_steps", ("dpo.max_num_steps",), _max_steps),
    TranslatedKey("trainer.dpo.val_check_interval", ("dpo.val_period",), _steps),
    TranslatedKey("trainer.dpo.save_interval", ("checkpointing.save_period",), _steps),
    TranslatedKey("trainer.dpo.limit_val_batches", ("dpo.val_batches",), _val_batches),
    TranslatedKey("trainer.dpo.gradient_clip_val", ("policy.max_grad_norm",), lambda value: value or None),
    TranslatedKey("exp_manager.explicit_log_dir", ("checkpointing.checkpoint_dir",)),
    TranslatedKey("exp_manager.create_wandb_logger", ("logger.wandb_enabled",)),
    TranslatedKey("exp_manager.wandb_logger_kwargs.project", ("logger.wandb.project",)),
    TranslatedKey("exp_manager.wandb_logger_kwargs.name", ("logger.wandb.name",)),
    TranslatedKey("exp_manager.create_tensorboard_logger", ("logger.tensorboard_enabled",)),
    TranslatedKey("exp_manager.create_mlflow_logger", ("logger.mlflow_enabled",)),
    TranslatedKey("exp_manager.max_time_per_run", ("checkpointing.checkpoint_must_save_by",)),
    TranslatedKey(
        "exp_manager.checkpoint_callback_params.save_top_k",
        ("checkpointing.keep_top_k",),
        lambda value: None if value == -1 else value,
    ),
    TranslatedKey("exp_manager.checkpoint_callback_params.monitor", ("checkpointing.metric_name",), _monitor),
    TranslatedKey(
        "exp_manager.checkpoint_callback_params.mode", ("checkpointing.higher_is_better",), lambda value: value == "max"
    ),
    TranslatedKey("model.micro_batch_size", ("policy.train_micro_batch_size",)),
    TranslatedKey("model.global_batch_size", ("policy.train_global_batch_size", "dpo.val_global_batch_size")),
    TranslatedKey("model.encoder_seq_length", ("policy.max_total_sequence_length",)),
    TranslatedKey("model.data.seq_length", ("policy.max_total_sequence_length",)),
    TranslatedKey("model.seed", ("dpo.seed",)),
    TranslatedKey("model.precision", ("policy.precision",), _precision),
    TranslatedKey("model.tensor_model_parallel_size", ("policy.dtensor_cfg.tensor_parallel_size",)),
    TranslatedKey("model.context_parallel_size", ("policy.dtensor_cfg.context_parallel_size",)),
    TranslatedKey("model.expert_model_parallel_size", ("policy.dtensor_cfg.expert_parallel_size",)),
    TranslatedKey(
        "model.activations_checkpoint_granularity",
        ("policy.dtensor_cfg.activation_checkpointing",),
        lambda value: value is not None,
    ),
    TranslatedKey("model.dpo.log_prob_forward_micro_batch_size", ("policy.logprob_batch_size",)),
    TranslatedKey("model.dpo.ref_policy_kl_penalty", ("dpo.reference_policy_kl_penalty",)),
    *(
        TranslatedKey(f"model.dpo.{name}", (f"dpo.{name}",))
        for name in ("preference_loss", "preference_loss_weight", "sft_loss_weight", "gt_reward_scale")
    ),
    *(
        TranslatedKey(f"model.dpo.{name}", (f"dpo.{name}",))
        for name in ("preference_average_log_probs", "sft_average_log_probs")
    ),
    *(
        TranslatedKey(f"model.data.{name}", (f"data.default.{name}",))
        for name in ("default_chosen_reward", "default_rejected_reward")
    ),
    TranslatedKey("model.data.shuffle_train_data", ("data.shuffle",)),
    TranslatedKey("model.optim.name", ("policy.optimizer.name",), _optimizer),
    *(
        TranslatedKey(f"model.optim.{name}", (f"policy.optimizer.kwargs.{name}",))
        for name in ("lr", "weight_decay", "betas", "eps")
    ),
    TranslatedKey("model.peft.peft_scheme", (f"{LORA}.enabled",), _scheme),
    TranslatedKey("model.peft.lora_tuning.alpha", (f"{LORA}.alpha",)),
    TranslatedKey("model.peft.lora_tuning.adapter_dropout", (f"{LORA}.dropout",)),
)

# What else may stand there, by the first pattern that fits: what is refused, with what to use, and what changes no result.
REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("trainer.dpo.limit_train_batches", lambda value: value not in (1.0, None), "use dpo.max_num_steps"),
    (
        "model.pipeline_model_parallel_size",
        lambda value: value not in (1, None),
        "posttrain has no pipeline parallelism",
    ),
    ("model.data.append_eod", bool, "answers end as the chat template ends a turn; use policy.tokenizer.chat_template"),
    ("model.data.chat_prompt_tokens*", lambda value: True, "use policy.tokenizer.chat_template, e.g. extra_id"),
    ("model.tokenizer.*", lambda value: value is not None, "use policy.tokenizer.name"),
    ("model.restore_from_path", lambda value: value is not None, "use pretrained_checkpoint.restore_from_path"),
    ("exp_manager.resume_if_exists", lambda value: value is False, "name another folder to begin a new run"),
)
MEGATRON = "settings of Megatron and of NeMo's trainer; posttrain trains with PyTorch and does not use them"
IGNORED: tuple[str, ...] = (
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.logger",
    "trainer.enable_checkpointing",
    "trainer.use_distributed_sampler",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.dpo.limit_train_batches",
    "exp_manager.exp_dir",
    "exp_manager.name",
    "exp_manager.resume_*",
    "exp_manager.create_checkpoint_callback",
    "exp_manager.checkpoint_callback_params.*",
    "exp_manager.wandb_logger_kwargs.*",
    "exp_manager.log_*",
    "model.mcore_gpt",
    "model.megatron_amp_O2",
    "model.transformer_engine",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.sequence_parallel",
    "model.activations_checkpoint_*",
    "model.max_position_embeddings",
    "model.nsys_profile*",
    "model.gradient_*",
    "model.optim.*",
    "model.data.data_impl",
    "model.data.num_workers",
    "model.data.dataloader_type",
    "model.data.splits_string",
    "model.data.skip_warmup",
    "model.data.reset_*",
    "model.data.eod_mask_loss",
    "model.data.apply_ftfy",
    "model.data.append_eod",
    "model.data.validation_drop_last",
    "model.data.pad_length_to_multiple_of",
    "model.data.index_mapping_dir",
    "model.data.seq_length_dec",
    "model.peft.restore_from_path",
    "model.peft.lora_tuning.*",
    "model.tokenizer.*",
    "model.restore_from_path",
)


def one_or_all(sets: list[dict[str, str]]) -> Any:
    return sets[0] if len(sets) == 1 else sets


def linear_layers(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in _MODULES]
    if unknown:
        raise Untranslatable(f"{unknown[0]} is none of {', '.join(_MODULES)}, all; else use {LORA}.target_modules")
    return [layer for name in names for layer in _MODULES[name]]


def cosine_schedule(schedule: Any, max_steps: Any, lr: Any) -> Any:
    """NeMo's CosineAnnealing: a linear warm-up, a cosine down to min_lr, then min_lr for constant_steps."""
    if schedule is None:
        return None
    known = {"name", "warmup_steps", "constant_steps", "min_lr", "max_steps"}
    if not isinstance(schedule, dict) or schedule.get("name") != "CosineAnnealing" or set(schedule) - known:
        raise Untranslatable(
            f"CosineAnnealing with {', '.join(sorted(known))} is understood; else use policy.scheduler"
        )
    total, least = schedule.get("max_steps") or max_steps, schedule.get("min_lr") or 0.0
    warm_up, constant = schedule.get("warmup_steps") or 0, schedule.get("constant_steps") or 0
    if not all(isinstance(count, int) for count in (warm_up, constant)) or not isinstance(least, float | int):
        raise Untranslatable("warmup_steps and constant_steps are numbers of steps, min_lr is a learning rate")
    if not isinstance(total, int) or total < 1:
        raise Untranslatable("it needs trainer.dpo.max_steps, because the steps of an epoch are not known yet")
    decay = total - warm_up - constant
    if decay < 1:
        raise Untranslatable(
            f"{warm_up} warmup_steps and {constant} constant_steps leave no step of {total} for the cosine"
        )
    if constant and not isinstance(lr, float | int):
        raise Untranslatable("constant_steps needs model.optim.lr beside it")
    parts = [(decay, "CosineAnnealingLR", {"T_max": decay, "eta_min": least})]
    if warm_up:
        rise = {"start_factor": 1 / (warm_up + 1), "end_factor": 1.0, "total_iters": warm_up}
        parts.insert(0, (warm_up, "LinearLR", rise))
    if constant:
        parts.append((constant, "ConstantLR", {"factor": least / lr, "total_iters": 10_000_000_000}))
    ends = list(accumulate(steps for steps, _, _ in parts))[:-1]
    listed = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for _, name, kwargs in parts]
    return [*listed, {"milestones": ends}] if ends else listed[0]
