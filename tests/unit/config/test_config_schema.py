"""The schema: every key of NeMo RL's exemplars with its default, every field explained, no torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from posttrain.config import ALL_KINDS, KINDS, load_config
from posttrain.config.base import Section
from posttrain.config.foreign.nemo_rl import vocabulary_of
from posttrain.config.interpolation import resolve
from posttrain.config.loader import built_in_defaults
from posttrain.config.runs import RUN_CONFIGS
from posttrain.config.schema import schema_defaults, schema_of, unknown_keys
from posttrain.config.tree import Tree, dotted, leaves
from posttrain.config.yaml_files import read_built_in

REPOSITORY = Path(__file__).parents[3]
NO_RUNS = ("gate.yaml", "pipeline.yaml")  # files of other commands
SHIPPED = sorted(path for path in (REPOSITORY / "configs").glob("*.yaml") if path.name not in NO_RUNS)

GRPO_DEFAULTS = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_rollout_turns": 1,
    "grpo.max_num_epochs": 1,
    "grpo.max_num_steps": 1_000_000,
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.val_period": 10,
    "grpo.val_start_at": -1,
    "grpo.val_at_start": False,
    "grpo.overlong_filtering": False,
    "grpo.max_val_samples": 256,
    "grpo.val_batch_size": 256,
    "grpo.seed": 42,
    "grpo.reward_shaping.overlong_buffer_length": 128,
    "grpo.reward_shaping.max_response_length": 512,
    "grpo.adv_estimator.name": "grpo",
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.kl_input_clamp_value": 20.0,
    "loss_fn.kl_output_clamp_value": 10.0,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_c": None,
    "loss_fn.token_level_loss": True,
    "checkpointing.metric_name": "val:accuracy",
    "checkpointing.keep_top_k": 3,
    "checkpointing.save_period": 10,
    "checkpointing.model_save_format": "safetensors",
    "policy.model_name": "Qwen/Qwen2.5-1.5B",
    "policy.tokenizer.name": "Qwen/Qwen2.5-1.5B",
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 4,
    "policy.generation_batch_size": 32,
    "policy.logprob_batch_size": 4,
    "policy.max_total_sequence_length": 512,
    "policy.precision": "bfloat16",
    "policy.max_grad_norm": 1.0,
    "policy.optimizer.name": "torch.optim.AdamW",
    "policy.optimizer.kwargs.lr": 5e-6,
    "policy.optimizer.kwargs.betas": [0.9, 0.999],
    "policy.optimizer.kwargs.eps": 1e-8,
    "policy.dynamic_batching.train_mb_tokens": 2048,
    "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.train_mb_tokens": 2048,
    "policy.sequence_packing.logprob_mb_tokens": 2048,
    "policy.sequence_packing.algorithm": "modified_first_fit_decreasing",
    "policy.dtensor_cfg._v2": True,
    "policy.dtensor_cfg.lora_cfg.dim": 8,
    "policy.dtensor_cfg.lora_cfg.alpha": 32,
    "policy.megatron_cfg.enabled": False,
    "policy.megatron_cfg.peft.lora_dtype": "None",
    "policy.megatron_cfg.optimizer.clip_grad": 1.0,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 13,
    "policy.megatron_cfg.fp8_cfg.fp8": "e4m3",
    "policy.generation.max_new_tokens": 512,
    "policy.generation.top_k": None,
    "policy.generation.val_temperature": 1.0,
    "policy.generation.port_range_low": 3000,
    "policy.generation.mcore_generation_config.max_model_len": 512,
    "policy.generation.refit_cfg.nixl.backend_name": "UCX",
    "policy.generation.vllm_cfg.gpu_memory_utilization": 0.6,
    "policy.generation.vllm_cfg.precision": "bfloat16",
    "policy.generation.colocated.enabled": True,
    "data.max_input_seq_length": 512,
    "data.train.dataset_name": "OpenMathInstruct-2",
    "data.train.split_validation_size": 0.05,
    "data.train.seed": 42,
    "data.validation": None,
    "data.default.processor": "math_hf_data_processor",
    "env.math.num_workers": 8,
    "cluster.master_port_range_low": 1400,
    "data_plane.storage_capacity": 1_000_000,
    "reward_penalties.penalize_unwanted_tokens": False,
    "on_policy_distillation": None,
}
POSTTRAIN_DEFAULTS = {
    "policy.generation.backend": "native",
    "policy.generation.ignore_eos": False,
    "policy.generation.native_cfg.num_speculative_tokens": "auto",
    "policy.generation.native_cfg.page_size": 16,
    "policy.generation.native_cfg.max_batch_size": 256,
    "policy.generation.native_cfg.max_prefill_tokens": 8192,
    "policy.generation.native_cfg.kv_cache_gib": None,
    "policy.generation.native_cfg.precision": "auto",
    "policy.generation.native_cfg.kv_cache_dtype": "auto",
    "policy.generation.native_cfg.num_first_layers_in_bf16": 0,
    "policy.generation.native_cfg.num_last_layers_in_bf16": 0,
    "policy.device": "auto",
    "policy.deterministic": False,
    "policy.num_threads": None,
    "cluster.launcher": "auto",
    "env.math.timeout_s": None,
    "logger.log_dir": None,
    "data.default.prompt_file": None,
}
DPO_DEFAULTS = {
    "dpo.max_num_steps": 150,
    "dpo.val_period": 25,
    "dpo.val_batches": 8,
    "dpo.val_global_batch_size": 8,
    "dpo.val_micro_batch_size": 1,
    "dpo.val_at_start": True,
    "dpo.reference_policy_kl_penalty": 0.05,
    "dpo.sft_average_log_probs": False,
    "dpo.preference_loss_weight": 1.0,
    "dpo.sft_loss_weight": 0.0,
    "checkpointing.metric_name": "val:validation-default_loss",
    "checkpointing.higher_is_better": False,
    "checkpointing.save_period": 50,
    "policy.model_name": "meta-llama/Llama-3.2-1B-Instruct",
    "policy.train_global_batch_size": 128,
    "policy.train_micro_batch_size": 2,
    "policy.max_total_sequence_length": 1024,
    "policy.sequence_packing.enabled": False,
    "policy.optimizer.kwargs.weight_decay": 0.1,
    "policy.optimizer.kwargs.eps": 1e-5,
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
    "policy.generation": None,
    "data.train.dataset_name": "HelpSteer3",
    "data.validation.split": "validation",
}
RM_DEFAULTS = {
    "rm.max_num_epochs": 1,
    "rm.max_num_steps": 1_000_000,
    "rm.val_period": 16,
    "rm.val_batches": -1,
    "rm.val_global_batch_size": 32,
    "rm.val_at_start": False,
    "rm.seed": 42,
    "rm.center_rewards_coefficient": 0.0,
    "rm.margin_from_rewards": False,
    "checkpointing.save_period": 16,
    "checkpointing.checkpoint_dir": "results/rm",
    "policy.reward_model_cfg.enabled": True,
    "policy.reward_model_cfg.reward_model_type": "bradley_terry",
    "policy.train_global_batch_size": 128,
    "policy.train_micro_batch_size": 1,
    "policy.max_total_sequence_length": 8192,
    "policy.optimizer.kwargs.lr": 2e-6,
    "policy.scheduler": None,
    "policy.generation": None,
    "data.train.dataset_name": "HelpSteer3",
}
SFT_DEFAULTS = {
    "sft.max_num_steps": 60,
    "sft.val_global_batch_size": 32,
    "sft.only_unmask_final": False,
    "checkpointing.metric_name": "val:val_loss",
    "policy.train_global_batch_size": 32,
    "policy.scheduler": None,
    "data.add_bos": True,
    "data.add_eos": True,
    "data.add_generation_prompt": False,
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", {**GRPO_DEFAULTS, **POSTTRAIN_DEFAULTS}),
        ("dpo", DPO_DEFAULTS),
        ("rm", RM_DEFAULTS),
        ("sft", SFT_DEFAULTS),
    ],
)
def test_defaults_are_those_of_nemo_rl(kind: str, expected: dict) -> None:
    loaded = load_config(kind, None, [])
    usual = {dotted(path): value for path, value in leaves(resolve(built_in_defaults(kind)))}
    flat = {**usual, **loaded.flat()}
    assert {key: flat[key] for key in expected} == expected
    assert loaded.warnings == []
    assert set(loaded.origins.values()) == {"default"}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_default_is_in_the_schema_or_in_the_packaged_file_not_in_both(kind: str) -> None:
    schema = Tree(schema_defaults(RUN_CONFIGS[kind]))
    absent = object()
    assert [
        dotted(path) for path, value in leaves(read_built_in(kind).values) if schema.get(path, absent) == value
    ] == []


@pytest.mark.parametrize("kind", KINDS)
def test_packaged_files_have_no_unknown_keys(kind: str) -> None:
    assert list(unknown_keys(schema_of(kind), read_built_in(kind).values)) == []
    assert list(unknown_keys(vocabulary_of(kind), built_in_defaults(kind).values)) == []


def every_section() -> set[type[BaseModel]]:
    modules = [module for name, module in sys.modules.items() if name.startswith("posttrain.config")]
    values = [value for module in modules for value in vars(module).values()]
    return {value for value in values if isinstance(value, type) and issubclass(value, Section)}


def test_every_field_is_explained_in_one_sentence() -> None:
    fields = [(m.__name__, name, info.description) for m in every_section() for name, info in m.model_fields.items()]
    assert len(fields) > 350
    for model, name, description in fields:
        assert description, f"{model}.{name} has no description"
        assert description.endswith("."), f"{model}.{name}: {description}"
        assert ". " not in description.replace("e.g. ", ""), f"{model}.{name}: more than one sentence"


def test_loading_a_config_imports_no_torch() -> None:
    script = (
        "import sys; from posttrain.config import load_config; import posttrain.cli.config_command; "
        "load_config('grpo', None, []); "
        "print(sorted({'torch', 'transformers', 'ray', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    kind = path.name.split("_")[0].removesuffix(".yaml")
    loaded = load_config(kind, path, [])
    assert loaded.kind == kind
    assert any(origin.endswith(f"{path.name}:{line}") for origin in loaded.origins.values() for line in range(1, 200))
