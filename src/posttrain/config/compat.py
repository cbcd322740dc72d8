"""Keys of older NeMo RL versions, and of documents written for them, rewritten to the keys of today.

A rule looks at one tree, a file or one override, before it is laid over others. Each one that applies adds one
line. The new name wins where both are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.config.runs import KINDS, SUPERVISED_KINDS, Kind
from posttrain.config.tree import Path, Tree, dotted

_ABSENT = object()


@dataclass(frozen=True)
class Rename:
    """`old` becomes every key of `new`; no `new` means that nothing reads it any more."""

    old: str
    new: tuple[str, ...] = ()
    reason: str = ""
    applies: Callable[[Any], bool] = lambda value: True
    convert: Callable[[Any], Any] = lambda value: value
    kinds: tuple[Kind, ...] = KINDS


def _same_key(old_section: str, new_section: str, *keys: str) -> Iterator[Rename]:
    for key in keys:
        yield Rename(f"{old_section}.{key}", (f"{new_section}.{key}",))


# `data` was flat until v0.6: one dataset, whose keys stood directly under `data`.
_FLAT_DATA = (
    *_same_key("data", "data.train", "dataset_name", "data_path", "split", "repeat", "split_validation_size", "seed"),
    Rename("data.train_data_path", ("data.train.data_path",)),
    Rename("data.train_split", ("data.train.split",)),
    Rename("data.val_data_path", ("data.validation.data_path",)),
    Rename("data.val_split", ("data.validation.split",)),
    *_same_key("data", "data.default", "prompt_file", "system_prompt_file", "processor", "env_name", "subset"),
    *_same_key("data", "data.default", "input_key", "output_key", "prompt_key", "chosen_key", "rejected_key"),
    *_same_key("data", "data.default", "download_dir", "chat_key", "system_key", "system_prompt", "tool_key"),
    *_same_key("data", "data.default", "use_preserving_dataset"),
)

_METRICS = {
    "val_reward": "val:accuracy",
    "val_loss": "val:val_loss",
    "validation-default_loss": "val:validation-default_loss",
}

RENAMES: tuple[Rename, ...] = (
    Rename("loss_fn.ratio_eps_min", ("loss_fn.ratio_clip_min",), kinds=("grpo",)),
    Rename("loss_fn.ratio_eps_max", ("loss_fn.ratio_clip_max",), kinds=("grpo",)),
    Rename("loss_fn.clip_epsilon", ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"), kinds=("grpo",)),
    Rename("loss_fn.kl_penalty_coeff", ("loss_fn.reference_policy_kl_penalty",), kinds=("grpo",)),
    Rename(
        "checkpointing.metric_name",
        ("checkpointing.metric_name",),
        applies=lambda name: isinstance(name, str) and name in _METRICS,
        convert=lambda name: _METRICS[name],
    ),
    Rename("checkpointing.is_async", ("checkpointing.async_save",), applies=lambda value: value is not None),
    *_FLAT_DATA,
    Rename("policy.activation_checkpointing_enabled", ("policy.dtensor_cfg.activation_checkpointing",)),
    Rename(
        "policy.megatron_cfg.use_linear_ce_fusion_loss",
        ("policy.megatron_cfg.use_fused_linear_logprobs",),
    ),
    Rename(
        "policy.megatron_cfg.linear_ce_fusion_chunk_size",
        ("policy.megatron_cfg.fused_linear_logprobs_chunk_size",),
    ),
    Rename(
        "policy.megatron_cfg.fp8_cfg",
        ("policy.megatron_cfg.fp8_cfg.enabled",),
        applies=lambda value: value is None,
        convert=lambda value: False,
    ),
    Rename("policy.megatron_cfg.converter_type", reason="the type is read from the model's own config"),
    Rename("policy.refit_buffer_size_gb", reason="sampler and trainer share their weights"),
    Rename("policy.fsdp_offload_enabled", reason="weights stay where they are trained"),
    Rename(
        "policy.generation",
        reason="nothing is sampled in this kind of run",
        applies=lambda value: value is not None,
        kinds=SUPERVISED_KINDS,
    ),
    # NeMo RL says in vLLM's section that sampling is in FP8; here the native engine does it.
    Rename(
        "policy.generation.vllm_cfg.precision",
        ("policy.generation.native_cfg.precision",),
        applies=lambda value: value == "fp8",
        kinds=("grpo",),
    ),
    Rename(
        "policy.generation.vllm_cfg.kv_cache_dtype",
        ("policy.generation.native_cfg.kv_cache_dtype",),
        applies=lambda value: isinstance(value, str) and value.startswith("fp8"),
        convert=lambda value: "fp8",
        kinds=("grpo",),
    ),
    *(
        Rename(
            f"policy.generation.vllm_cfg.{key}",
            (f"policy.generation.native_cfg.{key}",),
            applies=bool,
            kinds=("grpo",),
        )
        for key in ("num_first_layers_in_bf16", "num_last_layers_in_bf16")
    ),
    Rename("eval.pass_k_value", ("eval.k_value",), kinds=("eval",)),
    Rename(
        "rm.max_num_steps",
        ("rm.max_num_steps",),
        applies=lambda value: value == -1,
        convert=lambda value: 1_000_000,
    ),
)


def apply_renames(tree: Tree, kind: Kind, warnings: list[str]) -> bool:
    """Rewrite old keys in `tree`. Appends one line to `warnings` for each, and returns whether there was any."""
    before = len(warnings)
    for rule in RENAMES:
        if kind in rule.kinds:
            _apply(rule, tree, warnings)
    _name_validation_sets(tree, warnings)
    _name_new_validation_set(tree, before, warnings)
    _state_dapo_verifier(tree, warnings)
    _forget_idle_truncation(tree, warnings)
    return len(warnings) > before


def _path(key: str) -> Path:
    return tuple(key.split("."))


def _apply(rule: Rename, tree: Tree, warnings: list[str]) -> None:
    old = _path(rule.old)
    value = tree.get(old, _ABSENT)
    if value is _ABSENT or not rule.applies(value):
        return
    targets = [_path(key) for key in rule.new]
    if any(isinstance(tree.get(target[:-1]), list) for target in targets):
        return  # there is a list of datasets beside the flat keys; the old key stays, as an unknown one
    origin = tree.origin(old)
    tree.remove(old)
    if not targets:
        warnings.append(f"{origin}: `{rule.old}` is not used: {rule.reason}")
        return
    taken = [target for target in targets if tree.get(target, _ABSENT) is not _ABSENT]
    for target in targets:
        if target not in taken:
            tree.put(target, rule.convert(value), origin)
    names = " and ".join(f"`{dotted(target)}`" for target in targets)
    if taken:
        warnings.append(f"{origin}: `{rule.old}` is ignored, because {names} is set as well")
    elif rule.new == (rule.old,):
        warnings.append(f"{origin}: `{rule.old}: {value}` is now `{rule.convert(value)}`")
    else:
        warnings.append(f"{origin}: `{rule.old}` is now {names}")


def _name_validation_sets(tree: Tree, warnings: list[str]) -> None:
    """`data.val_data_paths: {name: path}` becomes a list of named validation sets."""
    old = ("data", "val_data_paths")
    paths = tree.get(old)
    if not isinstance(paths, dict) or not paths:
        return
    origin = tree.origin(old)
    tree.remove(old)
    dataset = tree.get(("data", "train", "dataset_name"))
    shared = {"dataset_name": dataset} if dataset else {}
    tree.put(
        ("data", "validation"), [{"name": name, **shared, "data_path": path} for name, path in paths.items()], origin
    )
    warnings.append(
        f"{origin}: `data.val_data_paths` is now `data.validation`, a list of datasets with `name` and `data_path`"
    )


def _name_new_validation_set(tree: Tree, before: int, warnings: list[str]) -> None:
    """Flat files name the dataset once; the validation file is of the same kind."""
    validation = tree.get(("data", "validation"))
    was_flat = any("`data.val_data_path`" in line for line in warnings[before:])
    dataset = tree.get(("data", "train", "dataset_name"))
    if was_flat and dataset and isinstance(validation, dict) and "dataset_name" not in validation:
        origin = tree.origin(("data", "validation", "data_path"))
        tree.put(("data", "validation", "dataset_name"), dataset, origin)


def _state_dapo_verifier(tree: Tree, warnings: list[str]) -> None:
    """`env.dapo` once meant its own verifier, without saying so."""
    path = ("env", "dapo")
    settings = tree.get(path)
    if not isinstance(settings, dict) or not settings or {"math_verify_impl", "function"} & set(settings):
        return
    origin = tree.origin(path)
    tree.put((*path, "math_verify_impl"), "dapo_math_verify", origin)
    warnings.append(f"{origin}: `env.dapo` is now any environment with `math_verify_impl: dapo_math_verify`")


def _forget_idle_truncation(tree: Tree, warnings: list[str]) -> None:
    """`tis` was the default of a switch that did nothing without a ratio."""
    section = tree.get(("loss_fn",))
    if not isinstance(section, dict) or section.get("truncated_importance_sampling_type") != "tis":
        return
    if (
        "truncated_importance_sampling_ratio" not in section
        or section["truncated_importance_sampling_ratio"] is not None
    ):
        return
    if section.get("use_importance_sampling_correction") is True:
        return
    path = ("loss_fn", "truncated_importance_sampling_type")
    origin = tree.origin(path)
    tree.put(path, None, origin)
    warnings.append(f"{origin}: `loss_fn.truncated_importance_sampling_type: tis` without a ratio is now `null`")
