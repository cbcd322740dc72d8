"""What NeMo RL knows and posttrain does not have: refused where it would change results, mentioned where it would not.

The table is read from the top; the first pattern that fits a key decides. A value that is the default is never mentioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from posttrain.config.tree import Path, Tree, dotted

PROCESSORS = (
    "default",
    "math_hf_data_processor",
    "math_data_processor",
    "sft_processor",
    "preference_preprocessor",
    "helpsteer3_data_processor",
)
FOREIGN_ENVIRONMENTS = (
    "code",
    "code_jaccard",
    "math_multi_reward",
    "nemo_gym",
    "reward_model",
    "sliding_puzzle_game",
    "vlm",
)

Accepts = Callable[[Any], bool]


def _anything(value: Any) -> bool:
    return True


def _nothing(value: Any) -> bool:
    return False


def _off(value: Any) -> bool:
    return not value


def _at_most_one(value: Any) -> bool:
    return value is None or value == 1


@dataclass(frozen=True)
class Rule:
    pattern: str  # of dotted keys; * stands for anything
    accepts: Accepts  # values that do what they say, or that change nothing
    note: str  # what is missing, or what happens instead; ignored keys with the same note share one warning

    @property
    def ignores(self) -> bool:
        """Nothing reads the key, whatever its value."""
        return self.accepts is _anything


_OWN_ENGINE = "settings of another sampling engine; the native engine does not use them"
_NOT_NEEDED = "not needed by posttrain and left alone"
_RUN_FOLDER = "no connection to this service yet; metrics stay in the run folder (metrics.jsonl, report.html)"
_MEMORY = "not used: it moves memory around and changes no result"
_ASYNC = "asynchronous sampling is off, so its settings are not used"
_MEGATRON = "posttrain trains with PyTorch; Megatron's settings are not used"
_ONE_SHARE = "posttrain shards over data-parallel workers only"
_OPENAI_FORMAT = "keys of the openai_format dataset; name the columns with input_key and output_key"
_DRAFT = "no draft model is trained, so its settings are not used"

RULES: tuple[Rule, ...] = (
    # grpo
    Rule("grpo.async_grpo.enabled", _off, "sampling ahead of training"),
    Rule("grpo.async_grpo.*", _anything, _ASYNC),
    Rule("grpo.invalid_tool_call_advantage", lambda value: value is None, "advantages of tool calls"),
    Rule("grpo.malformed_thinking_advantage", lambda value: value is None, "advantages of thinking tags"),
    Rule("grpo.adv_estimator.name", lambda value: value != "opd", "distillation"),
    Rule("grpo.val_batch_size", _anything, _NOT_NEEDED),
    Rule("policy.sequence_packing.microbatch_order", _anything, "the order of micro-batches changes no result"),
    Rule("dpo.val_micro_batch_size", _anything, "validation uses policy.logprob_batch_size"),
    Rule("rm.val_micro_batch_size", _anything, "validation uses policy.logprob_batch_size"),
    Rule("sft.val_micro_batch_size", _anything, "validation uses policy.logprob_batch_size"),
    Rule("grpo.calculate_advantages_on_gpu", _anything, _NOT_NEEDED),
    Rule("grpo.deduplicate_multimodal_data", _anything, _NOT_NEEDED),
    Rule("grpo.debug_payload_metrics", _anything, _NOT_NEEDED),
    # env
    Rule("env.*.stop_strings", _off, "texts that end answers of one environment; use policy.generation.stop_strings"),
    # checkpointing
    Rule(
        "checkpointing.ft_*", lambda value: value is None, "extra saves against crashes; use checkpointing.save_period"
    ),
    Rule("checkpointing.pretrained_checkpoint", _off, "starting from a Megatron checkpoint"),
    Rule("checkpointing.pretrained_checkpoint.*", _nothing, "starting from a Megatron checkpoint"),
    Rule("checkpointing.model_save_format", lambda value: value != "torch_save", "other formats than safetensors"),
    Rule("checkpointing.model_cache_dir", _anything, _NOT_NEEDED),
    Rule("checkpointing.model_repo_id", _anything, _NOT_NEEDED),
    Rule("checkpointing.is_*", _anything, _NOT_NEEDED),
    Rule("checkpointing.peft_config*", _anything, _NOT_NEEDED),
    # policy
    Rule("policy.precision", lambda value: value != "float16", "training in float16; use bfloat16 or float32"),
    Rule("policy.offload_optimizer_for_logprob", _anything, _MEMORY),
    Rule("policy.quant_cfg", _off, "quantisation-aware training"),
    Rule("policy.quant_cfg.*", _nothing, "quantisation-aware training"),
    Rule("policy.dtensor_cfg.enabled", _anything, "posttrain always trains with PyTorch"),
    Rule("policy.dtensor_cfg.*_parallel_size", _at_most_one, _ONE_SHARE),
    Rule("policy.dtensor_cfg.dp_replicate_size", _at_most_one, _ONE_SHARE),
    Rule("policy.dtensor_cfg.sequence_parallel", _off, _ONE_SHARE),
    Rule("policy.dtensor_cfg.cpu_offload", _off, "keeping weights in CPU memory"),
    Rule("policy.dtensor_cfg.custom_parallel_plan", lambda value: value is None, _ONE_SHARE),
    Rule("policy.dtensor_cfg.moe_parallelizer", _off, _ONE_SHARE),
    Rule("policy.dtensor_cfg.moe_parallelizer.*", _nothing, _ONE_SHARE),
    Rule("policy.dtensor_cfg.automodel_kwargs", _anything, _NOT_NEEDED),
    Rule("policy.dtensor_cfg.automodel_kwargs.force_hf", _anything, _NOT_NEEDED),
    Rule("policy.dtensor_cfg.automodel_kwargs.use_liger_kernel", _anything, _NOT_NEEDED),
    Rule("policy.dtensor_cfg.automodel_kwargs.backend*", _anything, _NOT_NEEDED),
    Rule("policy.dtensor_cfg.automodel_kwargs.*", _nothing, "arguments of NeMo's model loader"),
    Rule("policy.dtensor_cfg.env_vars*", _anything, "set environment variables before the command instead"),
    Rule("policy.dtensor_cfg.defer_fsdp_grad_sync", _anything, _MEMORY),
    Rule("policy.dtensor_cfg.clear_cache_every_n_steps", _anything, _MEMORY),
    Rule("policy.megatron_cfg.enabled", _off, "training with Megatron"),
    Rule("policy.megatron_cfg.*", _anything, _MEGATRON),
    Rule("policy.draft.enabled", _off, "training a draft model"),
    Rule("policy.draft.*", _anything, _DRAFT),
    Rule("policy.router_replay.enabled", _off, "replay of expert choices"),
    # policy.generation
    Rule("policy.generation.backend", lambda value: value in ("native", "vllm"), "other engines than native"),
    Rule("policy.generation.colocated.enabled", bool, "sampling on GPUs of its own"),
    Rule("policy.generation.bad_words", _off, "forbidden words"),
    Rule("policy.generation.quant_cfg", _off, "quantised sampling"),
    Rule("policy.generation.quant_cfg.*", _nothing, "quantised sampling"),
    Rule("policy.generation.real_quant", _off, "quantised sampling"),
    Rule("policy.generation.vllm_*", _anything, _OWN_ENGINE),
    Rule("policy.generation.mcore_generation_config*", _anything, _OWN_ENGINE),
    Rule("policy.generation.refit_*", _anything, _OWN_ENGINE),
    Rule("policy.generation.colocated.resources*", _anything, _OWN_ENGINE),
    Rule("policy.generation.use_async_rollouts", _anything, _OWN_ENGINE),
    # generation of an evaluation
    Rule("generation.colocated.*", _anything, _NOT_NEEDED),
    # data, env
    Rule("data.use_multiple_dataloader", _off, "drawing from each dataset separately"),
    Rule("data.num_prompts_per_dataloader", lambda value: value is None, "drawing from each dataset separately"),
    Rule("data.custom_dataloader", lambda value: value is None, "data loaders of your own"),
    Rule("data.processor", _anything, "the dataset decides how its rows become prompts"),
    Rule("data.*.processor", lambda value: value is None or value in PROCESSORS, "this processor"),
    Rule("data.add_bos", bool, "leaving out the start token that the chat template writes"),
    Rule("data.add_eos", bool, "answers without their end"),
    Rule("data.add_generation_prompt", _anything, "the header of an answer belongs to the prompt and is never trained"),
    Rule("data.*.tool_key", lambda value: value is None, _OPENAI_FORMAT),
    Rule("data.*.use_preserving_dataset", _off, _OPENAI_FORMAT),
    # the rest
    Rule("logger.*_enabled", _anything, _RUN_FOLDER),
    Rule("cluster.segment_size", _anything, _NOT_NEEDED),
    Rule("cluster.master_port_range_*", _anything, "a free port is found by itself"),
    Rule("logger.monitor_gpus", _anything, _RUN_FOLDER),
    Rule("data_plane*", _anything, "batches travel in the process or through Ray; NeMo's data plane is not used"),
    Rule("reward_penalties.penalize_*", _off, "reward penalties"),
    Rule("on_policy_distillation", _off, "distillation"),
    Rule("on_policy_distillation.*", _nothing, "distillation"),
    Rule("async_rl", _off, "the single-controller mode"),
    Rule("async_rl.*", _nothing, "the single-controller mode"),
)


def every_value(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Like `leaves`, but also inside lists of maps."""
    inner: Mapping[str, Any] | None = None
    if isinstance(values, dict) and values:
        inner = values
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        inner = {str(index): item for index, item in enumerate(values)}
    if inner is None:
        yield path, values
        return
    for key, value in inner.items():
        yield from every_value(value, (*path, str(key)))


@lru_cache(maxsize=4096)
def rule_for(key: str) -> Rule | None:
    return next((rule for rule in RULES if fnmatchcase(key, rule.pattern)), None)


def review(
    resolved: dict[str, Any], tree: Tree, is_default: Callable[[Path, Any], bool]
) -> tuple[list[str], list[str]]:
    """(errors, warnings) for what is not implemented. Only values that the user set can be mentioned."""
    errors: list[str] = []
    ignored: dict[str, list[str]] = {}
    for path, value in every_value(resolved):
        rule = rule_for(dotted(path))
        if rule is None:
            continue
        if not rule.accepts(value):
            errors.append(f"{tree.origin(path)}: `{dotted(path)}` = {value!r} is not implemented: {rule.note}")
        elif rule.ignores and not is_default(path, value):
            ignored.setdefault(rule.note, []).append(dotted(path))
    warnings = [f"{_listed(keys)}: {note}" for note, keys in ignored.items()]
    if "policy" not in resolved:
        return errors, warnings
    generation = resolved["policy"].get("generation") or {}
    if generation.get("backend") == "vllm":
        warnings.insert(
            0, "policy.generation.backend: vllm is not installed as an engine here; the native engine samples instead"
        )
    lora = resolved["policy"]["dtensor_cfg"]["lora_cfg"]
    if lora["enabled"] and lora["dropout"] and lora["dropout_position"] == "post":
        warnings.append(
            "policy.dtensor_cfg.lora_cfg.dropout_position: adapters drop their input (pre), not their output (post)"
        )
    return errors, warnings


def foreign_environments(tree: Tree) -> dict[Path, str]:
    """What to say about judges of NeMo RL that posttrain does not have; their settings are not in the schema either."""
    environments = tree.get(("env",))
    if not isinstance(environments, dict):
        return {}
    return {
        ("env", name): f"{tree.origin(('env', name))}: `env.{name}` is not implemented: use `env.math`, say "
        f"what it is with `env.{name}.type` (`posttrain rewards list`), or `env.{name}.function` with a Python reward function"
        for name, settings in environments.items()
        if name in FOREIGN_ENVIRONMENTS
        and not (isinstance(settings, dict) and any(settings.get(key) for key in ("function", "type", "rewards")))
    }


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
