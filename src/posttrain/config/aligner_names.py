"""The names of NeMo-Aligner's DPO config, translated: `model.dpo.*`, `model.data.*`, `trainer.dpo.*`, `exp_manager.*` and so on.

`posttrain dpo` understands them in files and on the command line. All of them are translated together, because one setting here
may come from several there. A key that posttrain has no counterpart for is refused with what to use, or, where it changes no
result, mentioned. The value of posttrain's own name wins where both are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from posttrain.config.errors import ConfigError
from posttrain.config.interpolation import MISSING, resolve
from posttrain.config.tree import COMMAND_LINE, Path, Tree, dotted, leaves

SECTIONS = ("model", "trainer", "exp_manager", "pretrained_checkpoint")
_ABSENT = object()


class _Untranslatable(Exception):
    """The value has no counterpart; the text is what to use."""


Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Key:
    old: str
    new: tuple[str, ...]
    convert: Convert = _same


def _steps(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Untranslatable("a share of an epoch is not understood: give a number of steps, e.g. 100")
    return value


def _max_steps(value: Any) -> int:
    return 1_000_000 if _steps(value) == -1 else value


def _val_batches(value: Any) -> int:
    if value == 1.0 and isinstance(value, float):
        return -1
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Untranslatable(
            "a share of the validation set is not understood: give a number of batches, or 1.0 for all"
        )
    return value


def _precision(value: Any) -> str:
    names = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "32": "float32", "32-true": "float32"}
    if str(value) not in names:
        raise _Untranslatable(f"one of {', '.join(names)} is understood")
    return names[str(value)]


def _model(value: Any) -> str:
    if str(value).endswith(".nemo"):
        raise _Untranslatable(
            "a .nemo archive is not read: convert it to a Hugging Face folder with NeMo's own converter for the model, and "
            "give that folder, or a hub name"
        )
    return str(value)


def _optimizer(value: Any) -> str:
    names = ("distributed_fused_adam", "fused_adam", "mcore_distributed_optim", "adamw")
    if value not in names:
        raise _Untranslatable(
            f"one of {', '.join(names)} is understood, as torch.optim.AdamW; else use policy.optimizer"
        )
    return "torch.optim.AdamW"


def _scheme(value: Any) -> bool:
    if value in (None, "none"):
        return False
    if value != "lora":
        raise _Untranslatable("lora or none is understood")
    return True


_MODULES = {
    "attention_qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_dense": ("o_proj",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_fc1": ("gate_proj", "up_proj"),
    "mlp_fc2": ("down_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def _monitor(value: Any) -> str:
    names = {"val_loss": "val:loss", "val_acc": "val:accuracy", "val_rewards_chosen_mean": "val:rewards_chosen_mean"}
    if value not in names:
        raise _Untranslatable(f"one of {', '.join(names)} is understood; else use checkpointing.metric_name")
    return names[value]


_LORA = "policy.dtensor_cfg.lora_cfg"
KEYS: tuple[_Key, ...] = (
    _Key("pretrained_checkpoint.restore_from_path", ("policy.model_name",), _model),
    _Key("trainer.num_nodes", ("cluster.num_nodes",)),
    _Key("trainer.devices", ("cluster.gpus_per_node",)),
    _Key("trainer.precision", ("policy.precision",), _precision),
    _Key("trainer.max_time", ("checkpointing.checkpoint_must_save_by",)),
    _Key("trainer.dpo.max_epochs", ("dpo.max_num_epochs",)),
    _Key("trainer.dpo.max_steps", ("dpo.max_num_steps",), _max_steps),
    _Key("trainer.dpo.val_check_interval", ("dpo.val_period",), _steps),
    _Key("trainer.dpo.save_interval", ("checkpointing.save_period",), _steps),
    _Key("trainer.dpo.limit_val_batches", ("dpo.val_batches",), _val_batches),
    _Key("trainer.dpo.gradient_clip_val", ("policy.max_grad_norm",), lambda value: value or None),
    _Key("exp_manager.explicit_log_dir", ("checkpointing.checkpoint_dir",)),
    _Key("exp_manager.create_wandb_logger", ("logger.wandb_enabled",)),
    _Key("exp_manager.wandb_logger_kwargs.project", ("logger.wandb.project",)),
    _Key("exp_manager.wandb_logger_kwargs.name", ("logger.wandb.name",)),
    _Key("exp_manager.create_tensorboard_logger", ("logger.tensorboard_enabled",)),
    _Key("exp_manager.create_mlflow_logger", ("logger.mlflow_enabled",)),
    _Key("exp_manager.max_time_per_run", ("checkpointing.checkpoint_must_save_by",)),
    _Key(
        "exp_manager.checkpoint_callback_params.save_top_k",
        ("checkpointing.keep_top_k",),
        lambda value: None if value == -1 else value,
    ),
    _Key("exp_manager.checkpoint_callback_params.monitor", ("checkpointing.metric_name",), _monitor),
    _Key(
        "exp_manager.checkpoint_callback_params.mode", ("checkpointing.higher_is_better",), lambda value: value == "max"
    ),
    _Key("model.micro_batch_size", ("policy.train_micro_batch_size",)),
    _Key("model.global_batch_size", ("policy.train_global_batch_size", "dpo.val_global_batch_size")),
    _Key("model.encoder_seq_length", ("policy.max_total_sequence_length",)),
    _Key("model.data.seq_length", ("policy.max_total_sequence_length",)),
    _Key("model.seed", ("dpo.seed",)),
    _Key("model.precision", ("policy.precision",), _precision),
    _Key("model.tensor_model_parallel_size", ("policy.dtensor_cfg.tensor_parallel_size",)),
    _Key("model.context_parallel_size", ("policy.dtensor_cfg.context_parallel_size",)),
    _Key("model.expert_model_parallel_size", ("policy.dtensor_cfg.expert_parallel_size",)),
    _Key(
        "model.activations_checkpoint_granularity",
        ("policy.dtensor_cfg.activation_checkpointing",),
        lambda value: value is not None,
    ),
    _Key("model.dpo.log_prob_forward_micro_batch_size", ("policy.logprob_batch_size",)),
    _Key("model.dpo.ref_policy_kl_penalty", ("dpo.reference_policy_kl_penalty",)),
    *(
        _Key(f"model.dpo.{name}", (f"dpo.{name}",))
        for name in ("preference_loss", "preference_loss_weight", "sft_loss_weight", "gt_reward_scale")
    ),
    *(
        _Key(f"model.dpo.{name}", (f"dpo.{name}",))
        for name in ("preference_average_log_probs", "sft_average_log_probs")
    ),
    *(
        _Key(f"model.data.{name}", (f"data.default.{name}",))
        for name in ("default_chosen_reward", "default_rejected_reward")
    ),
    _Key("model.data.shuffle_train_data", ("data.shuffle",)),
    _Key("model.optim.name", ("policy.optimizer.name",), _optimizer),
    *(
        _Key(f"model.optim.{name}", (f"policy.optimizer.kwargs.{name}",))
        for name in ("lr", "weight_decay", "betas", "eps")
    ),
    _Key("model.peft.peft_scheme", (f"{_LORA}.enabled",), _scheme),
    _Key("model.peft.lora_tuning.alpha", (f"{_LORA}.alpha",)),
    _Key("model.peft.lora_tuning.adapter_dropout", (f"{_LORA}.dropout",)),
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
_MEGATRON = "settings of Megatron and of NeMo's trainer; posttrain trains with PyTorch and does not use them"
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


def translate(tree: Tree, warnings: list[str]) -> None:
    """Replace the sections of NeMo-Aligner in `tree`. Raises ConfigError for what has no counterpart."""
    given = Tree(
        {section: tree.get((section,)) for section in SECTIONS if tree.get((section,), _ABSENT) is not _ABSENT}
    )
    if not given.values:
        return
    given.origins = {path: origin for path, origin in tree.origins.items() if path[0] in SECTIONS}
    for section in SECTIONS:
        if section in tree.values:
            tree.remove((section,))
    for path, value in list(leaves(given.values)):
        if value == MISSING:  # to be given elsewhere; what it stands for has a default here, or is asked for
            given.remove(path)
    given.values = resolve(given)
    _Translation(given, tree, warnings).run()


class _Translation:
    def __init__(self, given: Tree, tree: Tree, warnings: list[str]) -> None:
        self._given, self._tree, self._warnings = given, tree, warnings
        self._errors: list[str] = []

    def run(self) -> None:
        self._data()
        self._schedule()
        self._folder()
        self._adapters()
        for key in KEYS:
            value = self._take(key.old)
            if value is not _ABSENT:
                self._put(key.old, key.new, value, key.convert)
        ignored = list(self._rest())
        if self._errors:
            raise ConfigError("\n".join(self._errors))
        if ignored:
            self._warnings.append(f"{', '.join(ignored)}: {_MEGATRON}")

    def _take(self, key: str) -> Any:
        path = tuple(key.split("."))
        value = self._given.get(path, _ABSENT)
        if value is not _ABSENT:
            self._given.values = _without(self._given.values, path)
        return value

    def _put(self, old: str, new: tuple[str, ...], value: Any, convert: Convert = _same) -> None:
        origin = self._given.origin(tuple(old.split(".")))
        try:
            converted = convert(value)
        except _Untranslatable as error:
            self._errors.append(f"{origin}: `{old}` = {value!r}: {error}")
            return
        names = " and ".join(f"`{name}`" for name in new)
        taken = [name for name in new if self._is_set_otherwise(tuple(name.split(".")), converted, origin)]
        if taken:
            self._warnings.append(f"{origin}: `{old}` is ignored, because `{taken[0]}` is set as well")
            return
        for name in new:
            self._tree.put(tuple(name.split(".")), converted, origin)
        self._warnings.append(f"{origin}: `{old}` is now {names}")

    def _is_set_otherwise(self, path: Path, value: Any, origin: str) -> bool:
        """Whether posttrain's own name holds another value, which wins unless it is a file's against the command line's."""
        present = self._tree.get(path, _ABSENT)
        is_overridden = origin == COMMAND_LINE and self._tree.origin(path) != COMMAND_LINE
        return present is not _ABSENT and present != value and not is_overridden

    def _data(self) -> None:
        """`model.data.data_prefix`: a file, a list of files, or those of training and validation by name."""
        old = "model.data.data_prefix"
        prefix, kind = self._take(old), self._given.get(("model", "data", "data_impl"))
        if prefix is _ABSENT or prefix is None:
            return
        name = "PackedPairs" if kind == "packed_jsonl" else "NeMo-Aligner"
        files = prefix if isinstance(prefix, dict) else {"train": prefix}
        for split in ("train", "validation"):
            paths = files.get(split)
            paths = [paths] if isinstance(paths, str) else paths or []
            sets = [{"dataset_name": name, "data_path": str(path)} for path in paths]
            if sets:
                self._put(f"{old}.{split}" if isinstance(prefix, dict) else old, (f"data.{split}",), sets, _alone)

    def _schedule(self) -> None:
        old = "model.optim.sched"
        schedule = self._take(old)
        if schedule is _ABSENT:
            return
        max_steps = self._given.get(("trainer", "dpo", "max_steps"))
        lr = self._given.get(("model", "optim", "lr"))
        self._put(old, ("policy.scheduler",), schedule, lambda value: _scheduler(value, max_steps, lr))

    def _folder(self) -> None:
        """`exp_dir` and `name`, where there is no `explicit_log_dir`."""
        if self._given.get(("exp_manager", "explicit_log_dir")) is not None:
            return
        self._take("exp_manager.explicit_log_dir")
        if self._given.get(("exp_manager", "exp_dir")) is not None:
            folder, name = self._take("exp_manager.exp_dir"), self._take("exp_manager.name")
            whole = folder if name in (_ABSENT, None) else f"{folder}/{name}"
            self._put("exp_manager.exp_dir", ("checkpointing.checkpoint_dir",), whole)

    def _adapters(self) -> None:
        """NeMo's adapters are scaled by alpha / dim, where alpha is dim unless it is given."""
        section = "model.peft.lora_tuning"
        rank = self._take(f"{section}.adapter_dim")
        if rank is not _ABSENT:
            alpha = self._given.get((*section.split("."), "alpha"))
            names = (f"{_LORA}.dim",) if alpha is not None else (f"{_LORA}.dim", f"{_LORA}.alpha")
            self._put(f"{section}.adapter_dim", names, rank)
        if self._given.get((*section.split("."), "alpha"), 0) is None:
            self._take(f"{section}.alpha")
        modules = self._take(f"{section}.target_modules")
        if modules is not _ABSENT and modules is not None:
            listed = [modules] if isinstance(modules, str) else modules
            self._put(f"{section}.target_modules", (f"{_LORA}.match_all_linear",), listed, lambda names: "all" in names)
            if "all" not in listed:
                self._put(f"{section}.target_modules", (f"{_LORA}.target_modules",), listed, _linear_layers)

    def _rest(self) -> Iterator[str]:
        """What was not translated: yields the keys that change no result, and notes an error for each of the others."""
        for path, value in leaves(self._given.values):
            key, origin = dotted(path), self._given.origin(path)
            remedy = next(
                (text for pattern, applies, text in REFUSED if fnmatchcase(key, pattern) and applies(value)), None
            )
            if remedy is not None:
                self._errors.append(f"{origin}: `{key}` = {value!r} is not implemented: {remedy}")
            elif value == {}:
                continue
            elif any(fnmatchcase(key, pattern) for pattern in IGNORED):
                yield key
            else:
                self._errors.append(
                    f"{origin}: `{key}` is no key of NeMo-Aligner's DPO that posttrain knows; docs/seeds.md lists those it "
                    "translates, and `posttrain config show dpo` its own"
                )


def _alone(sets: list[dict[str, str]]) -> Any:
    return sets[0] if len(sets) == 1 else sets


def _linear_layers(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in _MODULES]
    if unknown:
        raise _Untranslatable(f"{unknown[0]} is none of {', '.join(_MODULES)}, all; else use {_LORA}.target_modules")
    return [layer for name in names for layer in _MODULES[name]]


def _scheduler(schedule: Any, max_steps: Any, lr: Any) -> Any:
    """NeMo's CosineAnnealing: a linear warm-up, a cosine down to min_lr, then min_lr for constant_steps."""
    if schedule is None:
        return None
    known = {"name", "warmup_steps", "constant_steps", "min_lr", "max_steps"}
    if not isinstance(schedule, dict) or schedule.get("name") != "CosineAnnealing" or set(schedule) - known:
        raise _Untranslatable(
            f"CosineAnnealing with {', '.join(sorted(known))} is understood; else use policy.scheduler"
        )
    total, least = schedule.get("max_steps") or max_steps, schedule.get("min_lr", 0.0)
    warm_up, constant = schedule.get("warmup_steps") or 0, schedule.get("constant_steps") or 0
    if not isinstance(total, int) or total < 1:
        raise _Untranslatable("it needs trainer.dpo.max_steps, because the steps of an epoch are not known yet")
    decay = total - warm_up - constant
    if decay < 1:
        raise _Untranslatable(
            f"{warm_up} warmup_steps and {constant} constant_steps leave no step of {total} for the cosine"
        )
    if constant and not isinstance(lr, float | int):
        raise _Untranslatable("constant_steps needs model.optim.lr beside it")
    parts = [(decay, "CosineAnnealingLR", {"T_max": decay, "eta_min": least})]
    if warm_up:
        rise = {"start_factor": 1 / (warm_up + 1), "end_factor": 1.0, "total_iters": warm_up}
        parts.insert(0, (warm_up, "LinearLR", rise))
    if constant:
        parts.append((constant, "ConstantLR", {"factor": least / lr, "total_iters": 10_000_000_000}))
    ends = list(accumulate(steps for steps, _, _ in parts))[:-1]
    listed = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for _, name, kwargs in parts]
    return [*listed, {"milestones": ends}] if ends else listed[0]


def _without(values: dict[str, Any], path: Path) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {name: value for name, value in values.items() if name != key}
    return {name: _without(value, tuple(rest)) if name == key else value for name, value in values.items()}
