"""Keys of older NeMo RL versions are understood, in files and on the command line, each with one line of warning."""

from pathlib import Path

import pytest

from posttrain.config import ConfigError, load_config

ABSENT = object()

RENAMES = [
    ("grpo", "loss_fn.ratio_eps_min=0.1", {"loss_fn.ratio_clip_min": 0.1, "loss_fn.ratio_clip_max": 0.2}),
    ("grpo", "loss_fn.ratio_eps_max=0.28", {"loss_fn.ratio_clip_max": 0.28, "loss_fn.ratio_clip_min": 0.2}),
    ("grpo", "loss_fn.clip_epsilon=0.3", {"loss_fn.ratio_clip_min": 0.3, "loss_fn.ratio_clip_max": 0.3}),
    ("grpo", "loss_fn.kl_penalty_coeff=0.04", {"loss_fn.reference_policy_kl_penalty": 0.04}),
    ("grpo", "checkpointing.metric_name=val_reward", {"checkpointing.metric_name": "val:accuracy"}),
    ("sft", "checkpointing.metric_name=val_loss", {"checkpointing.metric_name": "val:val_loss"}),
    ("rm", "rm.max_num_steps=-1", {"rm.max_num_steps": 1_000_000}),
    ("grpo", "data.dataset_name='DeepScaler'", {"data.train.dataset_name": "DeepScaler"}),
    ("grpo", "data.train_data_path=a.jsonl", {"data.train.data_path": "a.jsonl"}),
    ("grpo", "data.val_data_path=b.jsonl", {"data.validation.data_path": "b.jsonl"}),
    ("grpo", "data.train_split=train", {"data.train.split": "train"}),
    ("grpo", "data.prompt_file=cot.txt", {"data.default.prompt_file": "cot.txt"}),
    ("grpo", "data.system_prompt_file=s.txt", {"data.default.system_prompt_file": "s.txt"}),
    ("grpo", "data.env_name=math", {"data.default.env_name": "math"}),
    ("grpo", "data.processor=math_data_processor", {"data.default.processor": ABSENT}),
    ("grpo", "data.input_key=question", {"data.default.input_key": "question"}),
    ("dpo", "data.val_data_paths={held: v.jsonl}", {"data.validation": [{"name": "held", "data_path": "v.jsonl"}]}),
    ("grpo", "policy.megatron_cfg.fp8_cfg=null", {"policy.megatron_cfg.fp8_cfg": ABSENT}),
    (
        "grpo",
        "policy.generation.vllm_cfg.precision=fp8",
        {"policy.generation.native_cfg.precision": "fp8", "loss_fn.use_importance_sampling_correction": True},
    ),
    (
        "grpo",
        "policy.generation.vllm_cfg.kv_cache_dtype=fp8_e4m3",
        {"policy.generation.native_cfg.kv_cache_dtype": "fp8"},
    ),
    (
        "grpo",
        "policy.generation.vllm_cfg.num_last_layers_in_bf16=2",
        {"policy.generation.native_cfg.num_last_layers_in_bf16": 2},
    ),
    ("grpo", "policy.megatron_cfg.converter_type=Qwen2ForCausalLM", {"policy.megatron_cfg.converter_type": ABSENT}),
    ("grpo", "policy.refit_buffer_size_gb=4", {"policy.refit_buffer_size_gb": ABSENT}),
    ("grpo", "policy.fsdp_offload_enabled=false", {"policy.fsdp_offload_enabled": ABSENT}),
    (
        "grpo",
        "policy.activation_checkpointing_enabled=true",
        {"policy.dtensor_cfg.activation_checkpointing": True},
    ),
    ("dpo", "policy.generation.temperature=1", {"policy.generation": None}),
    ("grpo", "env.dapo.num_workers=4", {"env.dapo.math_verify_impl": "dapo_math_verify", "env.dapo.num_workers": 4}),
]


@pytest.mark.parametrize(("kind", "override", "expected"), RENAMES)
def test_an_old_key_on_the_command_line_is_understood_and_mentioned_once(
    kind: str, override: str, expected: dict
) -> None:
    loaded = load_config(kind, None, [override])
    flat = loaded.flat()
    assert {key: flat.get(key, ABSENT) for key in expected} == expected
    mentions = [warning for warning in loaded.warnings if warning.startswith("command line:")]
    assert len(mentions) == 1
    assert override.split("=")[0].split(".")[1] in mentions[0]


@pytest.mark.parametrize(("kind", "override", "expected"), RENAMES)
def test_an_old_key_in_a_file_is_understood(kind: str, override: str, expected: dict, tmp_path: Path) -> None:
    key, value = override.split("=", 1)
    parts = key.split(".")
    lines = ["  " * depth + f"{part}:" for depth, part in enumerate(parts)]
    file = tmp_path / "old.yaml"
    file.write_text("\n".join(lines) + f" {value}\n")
    loaded = load_config(kind, file, ["data.train.dataset_name=x"] if "data.train" in override else [])
    flat = loaded.flat()
    assert {key: flat.get(key, ABSENT) for key in expected} == expected
    assert f"old.yaml:{len(parts)}" in " ".join(loaded.warnings)


def test_the_fused_logprob_key_has_a_new_name() -> None:
    loaded = load_config("grpo", None, ["policy.megatron_cfg.use_linear_ce_fusion_loss=true"])
    assert "use_linear_ce_fusion_loss` is now `policy.megatron_cfg.use_fused_linear_logprobs" in loaded.warnings[0]


def test_the_new_name_wins_where_both_are_written(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("loss_fn: {ratio_eps_min: 0.1, ratio_clip_min: 0.15}\n")
    loaded = load_config("grpo", file, [])
    assert loaded.config.loss_fn.ratio_clip_min == 0.15
    assert "is ignored" in loaded.warnings[0]


def test_a_flat_data_section_of_an_old_file(tmp_path: Path) -> None:
    file = tmp_path / "flat.yaml"
    file.write_text(
        "data:\n  dataset_name: ResponseDataset\n  train_data_path: t.jsonl\n  val_data_path: v.jsonl\n"
        "  input_key: question\n  output_key: answer\n  prompt_file: null\n  shuffle: false\n"
    )
    data = load_config("grpo", file, []).config.data
    train, validation = data.train_sets()[0], data.validation_sets()[0]
    assert (train.dataset_name, train.data_path, train.input_key) == ("ResponseDataset", "t.jsonl", "question")
    assert (validation.dataset_name, validation.data_path) == ("ResponseDataset", "v.jsonl")
    assert validation.output_key == "answer"
    assert train.split_validation_size is None
    assert data.shuffle is False


def test_flat_keys_beside_a_list_of_datasets_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text("data:\n  dataset_name: gsm8k\n  train: [{dataset_name: DeepScaler}]\n")
    with pytest.raises(ConfigError, match=r"unknown key `data\.dataset_name`"):
        load_config("grpo", file, [])


def test_truncation_that_did_nothing_is_dropped_and_one_that_lacks_its_ratio_is_not(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    section = "loss_fn: {truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: null"
    file.write_text(section + "}\n")
    loaded = load_config("grpo", file, [])
    assert loaded.config.loss_fn.truncated_importance_sampling_type is None
    assert len(loaded.warnings) == 1
    file.write_text(section + ", use_importance_sampling_correction: true}\n")
    with pytest.raises(ConfigError, match=r"needs loss_fn\.truncated_importance_sampling_ratio"):
        load_config("grpo", file, [])
