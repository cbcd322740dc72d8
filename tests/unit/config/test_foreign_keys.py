"""What NeMo RL has and posttrain has not: refused where results would change, one line where they would not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.config import ALL_KINDS, ConfigError, load_config
from posttrain.config.foreign.nemo_rl import read_rules, rule_for, vocabulary_of
from posttrain.config.runs import Kind
from posttrain.config.schema import Node, known_keys, schema_of
from posttrain.config.tree import dotted

REFUSED = [
    "grpo.invalid_tool_call_advantage=-1",
    "grpo.malformed_thinking_advantage=-1",
    "grpo.adv_estimator.name=opd",
    "checkpointing.ft_save_period=5",
    "checkpointing.ft_keep_latest_k=2",
    "checkpointing.pretrained_checkpoint.path=/x",
    "checkpointing.model_save_format=torch_save",
    "policy.precision=float16",
    "policy.quant_cfg=NVFP4",
    "policy.dtensor_cfg.custom_parallel_plan=my.plan",
    "policy.dtensor_cfg.automodel_kwargs.freeze_config={a: 1}",
    "policy.draft.enabled=true",
    "policy.generation.backend=sglang",
    "policy.generation.backend=megatron",
    "policy.generation.bad_words=[never]",
    "policy.generation.quant_cfg=FP8",
    "policy.generation.real_quant=true",
    "data.use_multiple_dataloader=true",
    "data.custom_dataloader=my.loader",
    "data.default.processor=vlm_hf_data_processor",
    "data.train=[{dataset_name: gsm8k, tool_key: tools}]",
    "env.nemo_gym.config_paths=[a]",
    "env.reward_model.model_name=x",
    "env.math.stop_strings=[stop]",
    "reward_penalties.penalize_empty_final_answer=true",
    "on_policy_distillation={teachers: []}",
    "async_rl={enabled: true}",
]


INSTEAD = [
    ("grpo.async_grpo.in_flight_weight_updates=true", "set it to false"),
    ("grpo.async_grpo.max_generation_failures=3", "set it to 0"),
    ("policy.megatron_cfg.enabled=true", "FSDP .*tensor_parallel_size .*expert_parallel_size"),
]


@pytest.mark.parametrize(("override", "instead"), [*INSTEAD, *((override, "") for override in REFUSED)])
def test_a_value_that_would_change_results_is_refused(override: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"command line: `.*not implemented.*{instead}"):
        load_config("grpo", None, [override])


IGNORED = [
    ("policy.megatron_cfg.optimizer.lr=1.0", "policy.megatron_cfg.activation_checkpointing=true"),
    ("policy.generation.vllm_cfg.gpu_memory_utilization=0.9", "policy.generation.vllm_kwargs.x=1"),
    ("grpo.async_grpo.max_trajectory_age_steps=3", "grpo.async_grpo.groups_in_flight=2"),
    ("grpo.reward_scaling.target_min=-1", "grpo.reward_scaling.target_max=2"),
    ("grpo.dynamic_sampling_max_gen_batches=3", "grpo.dynamic_sampling_surplus=discard"),
    ("policy.draft.loss_weight=0.2", "policy.draft.num_layers=2"),
    ("data_plane.enabled=true", "data_plane.backend=other"),
    ("policy.dtensor_cfg.automodel_kwargs.force_hf=true", "grpo.debug_payload_metrics=true"),
]


@pytest.mark.parametrize("overrides", IGNORED)
def test_values_that_change_nothing_get_one_line_per_group(overrides: tuple[str, str]) -> None:
    loaded = load_config("grpo", None, list(overrides))
    assert len(loaded.warnings) == 1
    for override in overrides:
        assert override.split("=")[0] in loaded.warnings[0]


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("tensor_model_parallel_size", "policy.dtensor_cfg.tensor_parallel_size"),
        ("context_parallel_size", "policy.dtensor_cfg.context_parallel_size"),
        ("expert_model_parallel_size", "policy.dtensor_cfg.expert_parallel_size"),
        ("pipeline_model_parallel_size", "FSDP"),
    ],
)
def test_sizes_of_megatron_name_what_to_use_instead(key: str, instead: str) -> None:
    (warning,) = load_config("grpo", None, [f"policy.megatron_cfg.{key}=2"]).warnings
    assert f"policy.megatron_cfg.{key}" in warning
    assert instead in warning


QUIET = [
    "policy.megatron_cfg.enabled=false",
    "policy.megatron_cfg.optimizer.lr=5e-6",
    "policy.generation.vllm_cfg.max_model_len=512",
    "policy.generation.vllm_cfg.max_model_len=${policy.max_total_sequence_length}",
    "logger.wandb_enabled=true",
    "logger.wandb.name=x",
    "logger.wandb.log_nemo_gym_full_result_tables=false",
    "logger.monitor_gpus=true",
    "grpo.async_grpo.enabled=false",
    "policy.precision=float32",
    "policy.sequence_packing.enabled=false",
    "policy.sequence_packing.algorithm=concatenative",
    "policy.sequence_packing.algorithm=First_Fit_Shuffle",
    "policy.dynamic_batching.enabled=true",
    "policy.generation.top_p=0.9",
    "policy.generation.top_k=20",
    "policy.generation.val_temperature=0",
    "policy.dtensor_cfg._v2=false",
    "policy.dtensor_cfg.activation_checkpointing=true",
    "policy.dtensor_cfg.lora_cfg.use_triton=false",
    "policy.generation_batch_size=8",
    "grpo.overlong_filtering=true",
    "grpo.use_dynamic_sampling=true",
    "grpo.reward_scaling.enabled=true",
    "grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.5}",
    "grpo.seq_logprob_error_threshold=1.5",
    "grpo.adv_estimator.name=reinforce_plus_plus",
    "loss_fn.use_kl_in_reward=true",
    "loss_fn.positive_example_nll_weight=0.1",
    "grpo.advantage_clip_low=-2",
    "loss_fn.use_cispo=true",
    "loss_fn.ratio_clip_c=3",
    "loss_fn.disable_ppo_ratio=true",
    "loss_fn.reference_policy_kl_type=k1",
    "checkpointing.model_save_format=null",
    "checkpointing.save_optimizer=false",
    "env.math.math_verify_impl=dapo_math_verify",
    "env.math.verifier_type=english_multichoice",
]


@pytest.mark.parametrize("override", QUIET)
def test_what_is_implemented_or_equal_to_the_default_is_not_mentioned(override: str) -> None:
    assert load_config("grpo", None, [override]).warnings == []


def test_settings_that_follow_the_config_in_a_file_are_not_mentioned(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "policy:\n  max_total_sequence_length: 4096\n  generation: {vllm_cfg: {max_model_len: 4096}}\n"
        "  megatron_cfg: {enabled: false}\n"
    )
    assert load_config("grpo", file, []).warnings == []


def test_vllm_without_its_environment_is_accepted_and_the_native_engine_samples() -> None:
    loaded = load_config("grpo", None, ["policy.generation.backend=vllm"])
    (warning,) = loaded.warnings
    assert "policy.generation.backend: vllm needs policy.generation.vllm_cfg.python" in warning
    assert loaded.config.policy.generation.uses_vllm is False


VLLM = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.python=/env/bin/python"]


def test_where_vllm_samples_its_settings_are_read_and_its_answers_corrected() -> None:
    settings = ["gpu_memory_utilization=0.4", "enforce_eager=true", "enable_prefix_caching=false"]
    loaded = load_config("grpo", None, [*VLLM, *(f"policy.generation.vllm_cfg.{text}" for text in settings)])
    assert loaded.warnings == []
    assert loaded.config.policy.generation.uses_vllm is True
    loss = loaded.config.loss_fn
    assert loss.use_importance_sampling_correction is True
    assert (loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio) == ("tis", 2.0)
    own = load_config("grpo", None, [*VLLM, "loss_fn.use_importance_sampling_correction=false"]).config.loss_fn
    assert (own.use_importance_sampling_correction, own.truncated_importance_sampling_type) == (False, None)


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.vllm_cfg.precision=fp8",
        "policy.generation.vllm_cfg.logprobs_mode=raw_logprobs",
        "policy.generation.vllm_cfg.pipeline_parallel_size=2",
        "policy.generation.vllm_cfg.expert_parallel_size=2",
        "policy.generation.vllm_cfg.expose_http_server=true",
        "policy.generation.vllm_cfg.zmq_refit_server_port=5000",
    ],
)
def test_what_vllm_cannot_do_in_training_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match="not implemented"):
        load_config("grpo", None, [*VLLM, override])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy.generation.vllm_cfg.tensor_parallel_size=2"], "tensor_parallel_size = 2: .*colocated.enabled=false"),
        (["policy.generation.vllm_cfg.max_model_len=100"], "max_model_len = 100 is less than policy.max_total_seq"),
        (["grpo.async_grpo.enabled=true", "policy.generation.stop_strings=[x]"], "policy.generation.stop_strings"),
        (["policy.generation.vllm_kwargs.max_model_len=9"], r"vllm_kwargs.max_model_len: .*vllm_cfg.max_model_len"),
        (["policy.generation.vllm_kwargs.worker_extension_cls=a.B"], "vllm_kwargs.worker_extension_cls"),
        (["policy.generation.vllm_cfg.load_format=auto"], "load_format = auto"),
        (["policy.generation.vllm_cfg.load_format=dummy", "lora=true"], "load_format = dummy"),
    ],
)
def test_settings_of_vllm_that_contradict_others_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("grpo", None, [*VLLM, *overrides])


def test_settings_of_the_native_engine_are_said_to_be_unused_where_vllm_samples() -> None:
    settings = [f"policy.generation.native_cfg.{text}" for text in ("num_speculative_tokens=3", "max_batch_size=64")]
    [warning] = load_config("grpo", None, [*VLLM, *settings]).warnings
    assert "native_cfg.max_batch_size: settings of the native engine; vLLM samples" in warning
    assert load_config("grpo", None, settings).warnings == []


def test_an_asynchronous_vllm_needs_no_other_engine() -> None:
    loaded = load_config("grpo", None, [*VLLM, "policy.generation.vllm_cfg.async_engine=true"])
    assert "policy.generation.vllm_cfg.async_engine: requests are always batched continuously" in loaded.warnings[0]


def test_dropout_of_adapters_warns_of_its_position() -> None:
    lora = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dropout=0.1"]
    assert "dropout_position" in load_config("grpo", None, lora).warnings[0]
    assert load_config("grpo", None, [*lora, "policy.dtensor_cfg.lora_cfg.dropout_position=pre"]).warnings == []


def test_dpo_may_pack_pairs() -> None:
    assert load_config("dpo", None, ["policy.sequence_packing.enabled=true"]).warnings == []


def test_every_refusal_and_every_group_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", None, ["policy.megatron_cfg.enabled=true", "policy.precision=float16"])
    assert len(str(caught.value).splitlines()) == 2


def test_keys_that_other_versions_have_under_megatron_are_carried_along() -> None:
    loaded = load_config(
        "grpo", None, ["policy.megatron_cfg.distributed_data_parallel_config.average_in_collective=true"]
    )
    assert len(loaded.warnings) == 1


def test_every_rule_is_about_a_key_of_the_schema() -> None:
    keys = {dotted(key) for kind in ALL_KINDS for key in known_keys(vocabulary_of(kind))}
    keys |= {f"{key}.x" for key in keys} | {
        f"policy.dtensor_cfg.automodel_kwargs.{x}" for x in ("force_hf", "backend.x")
    }
    keys.add("policy.dtensor_cfg.automodel_kwargs.use_liger_kernel")
    for rule in read_rules("rules.yaml"):
        assert any(rule_for(key) is rule for key in keys), rule.pattern


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_section_of_ours_is_not_open_to_unknown_keys_of_others(kind: Kind) -> None:
    def open_sections(foreign: Node, ours: Node, path: tuple[str, ...]) -> Iterator[str]:
        if foreign.open and ours.shape == "section" and not ours.open:
            yield dotted(path)
        for key, child in foreign.children.items():
            if key in ours.children:
                yield from open_sections(child, ours.children[key], (*path, key))

    assert list(open_sections(vocabulary_of(kind), schema_of(kind), ())) == []
