"""Fields that must agree with each other: refused when the config is loaded, with both fields and the remedy."""

import pytest

from posttrain.config import ConfigError, load_config

IS_CORRECTED = "loss_fn.use_importance_sampling_correction=true"
TIS = "loss_fn.truncated_importance_sampling_type"

ASYNC = "grpo.async_grpo.enabled=true"
DYNAMIC = "grpo.use_dynamic_sampling=true"
SHAPED = "grpo.reward_shaping.enabled=true"

REFUSED = [
    ([ASYNC, "grpo.use_dynamic_sampling=true"], ["grpo.async_grpo.enabled", "grpo.use_dynamic_sampling"]),
    ([ASYNC, "loss_fn.force_on_policy_ratio=true"], ["grpo.async_grpo.enabled", "force_on_policy_ratio=false"]),
    ([ASYNC, "grpo.async_grpo.groups_in_flight=2.5"], ["groups_in_flight = 2.5", "max_trajectory_age_steps + 1 = 2"]),
    ([ASYNC, "cluster.gpus_per_node=3"], ["num_prompts_per_step = 32", "3 ranks"]),
    (["policy.train_global_batch_size=7"], ["num_prompts_per_step", "train_global_batch_size", "512"]),
    (["policy.train_global_batch_size=1024"], ["num_generations_per_prompt", "is larger than"]),
    (["grpo.num_generations_per_prompt=1"], ["num_generations_per_prompt", "grpo.normalize_rewards=false"]),
    (
        ["grpo.num_generations_per_prompt=1", "grpo.normalize_rewards=false"],
        ["use_leave_one_out_baseline", "at least 2"],
    ),
    (
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
        ["force_on_policy_ratio", "train_global_batch_size=512"],
    ),
    (["loss_fn.sequence_level_importance_ratios=true"], ["GSPO", "token_level_loss=false"]),
    (
        ["preset=trl-gspo", "grpo.adv_estimator.name=gae"],
        ["sequence_level_importance_ratios", "adv_estimator.name = gae"],
    ),
    (["preset=trl-gmpo", "grpo.adv_estimator.name=gae"], ["trust_region = geometric_mean", "adv_estimator.name = gae"]),
    (
        ["preset=trl-gspo", "grpo={turn_credit: {enabled: true}, max_rollout_turns: 2}", "env.math.turns=calculator"],
        ["sequence_level_importance_ratios", "grpo.turn_credit.enabled = true"],
    ),
    (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"], ["use_cispo", "ratio_clip_c"]),
    (["loss_fn.use_cispo=true", "loss_fn.disable_ppo_ratio=true"], ["use_cispo", "disable_ppo_ratio"]),
    (["loss_fn.use_cispo=true", "loss_fn.force_on_policy_ratio=true"], ["use_cispo", "force_on_policy_ratio"]),
    (["loss_fn.use_cispo=true", "loss_fn.token_level_loss=false"], ["use_cispo", "token_level_loss"]),
    ([f"{TIS}=tis", "loss_fn.truncated_importance_sampling_ratio=2"], ["use_importance_sampling_correction"]),
    ([f"{TIS}=tis", IS_CORRECTED], ["truncated_importance_sampling_ratio, the upper bound"]),
    (
        [f"{TIS}=icepop", IS_CORRECTED, "loss_fn.truncated_importance_sampling_ratio=2"],
        ["icepop", "truncated_importance_sampling_ratio_min"],
    ),
    (
        [f"{TIS}=seq-mask-tis", IS_CORRECTED, "loss_fn.truncated_importance_sampling_ratio=2"],
        ["seq-mask-tis", "truncated_importance_sampling_ratio_min"],
    ),
    (
        ["policy.generation.max_new_tokens=600"],
        ["policy.generation.max_new_tokens = 600", "policy.max_total_sequence_length = 512"],
    ),
    (["policy.generation.temperature=0"], ["policy.generation.temperature", "val_temperature"]),
    (
        ["grpo.skip_reference_policy_logprobs_calculation=true"],
        ["skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"],
    ),
    (["grpo.stop_at_validation_metric=accuracy"], ["stop_at_validation_metric", "stop_at_validation_threshold"]),
    (["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"], ["advantage_clip_low", "advantage_clip_high"]),
    (["data.default.env_name=mine"], ["env_name 'mine'", "env.mine.function", "there: math"]),
    (["data.train=null"], ["data.train is empty"]),
    (["data.train=[{split: train}]"], ["needs `dataset_name` or `data_path`"]),
    (["~policy.optimizer.kwargs.lr"], ["policy.optimizer.kwargs.lr is not set"]),
    (["grpo.batch_multiplier=2"], ["batch_multiplier = 2", "use_dynamic_sampling"]),
    (
        [DYNAMIC, "grpo.num_prompts_per_step=2", "grpo.batch_multiplier=0.4"],
        ["= 0.4", "less than one"],
    ),
    (
        [DYNAMIC, "grpo.num_generations_per_prompt=1", "grpo.normalize_rewards=false"],
        ["num_generations_per_prompt to 2"],
    ),
    (
        [DYNAMIC, "loss_fn.force_on_policy_ratio=true"],
        ["force_on_policy_ratio", "set dynamic_sampling_surplus=discard"],
    ),
    (
        [
            "grpo.adv_estimator.name=gdpo",
            "data.train={dataset_name: gsm8k, env_name: two}",
            "env.two.rewards={a: {type: math}, b: {type: regex, pattern: x, weight: 0}}",
        ],
        ["env.two.rewards.b.weight = 0", "reward_weights"],
    ),
    (["grpo.adv_estimator.name=gdpo"], ["env.math has a single one, of type math", "env.math.rewards"]),
    (["grpo.reward_scaling={enabled: true, source_min: 1}"], ["source_min = 1", "source_max = 1"]),
    (
        [SHAPED, "grpo.reward_shaping.overlong_buffer_length=600"],
        ["overlong_buffer_length = 600", "max_response_length"],
    ),
    ([SHAPED, "grpo.reward_shaping.overlong_buffer_penalty=null"], ["needs overlong_buffer_penalty"]),
    ([SHAPED, "grpo.adv_estimator.name=gdpo"], ["reward_shaping", "gdpo"]),
    (["loss_fn={use_kl_in_reward: true, reference_policy_kl_penalty: 0}"], ["use_kl_in_reward", "above 0"]),
    (
        ["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator={name: gdpo, kl_in_reward: sequence}"],
        ["kl_in_reward = sequence", "gdpo"],
    ),
    (["grpo.adv_estimator.name=rloo", "grpo.num_generations_per_prompt=1"], ["rloo", "2 or more"]),
    (
        ["loss_fn={kl_importance_weight: none, use_on_policy_kl_approximation: true}"],
        ["exclude each other"],
    ),
    (["loss_fn={loss_normalizer: max_tokens, max_response_tokens: null}"], ["max_response_tokens"]),
    (["loss_fn.sequence_ratio_type=product"], ["sequence_level_importance_ratios = true"]),
    (["loss_fn={trust_region: tv, use_cispo: true}"], ["trust_region = tv", "use_cispo"]),
    (["loss_fn={trust_region: kl, ratio_clip_c: 3}"], ["trust_region = kl", "ratio_clip_c"]),
    (["loss_fn={trust_region: soft, ratio_ceiling: 2}"], ["trust_region = soft", "ratio_ceiling"]),
    (["loss_fn.trust_region=geometric_mean"], ["trust_region = geometric_mean", "token_level_loss = false"]),
    (["loss_fn={ratio_ceiling: 2, use_cispo: true}"], ["ratio_ceiling", "use_cispo"]),
    (["loss_fn={use_cispo: true, loss_normalizer: sequences}"], ["use_cispo", "token_level_loss"]),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictions_name_the_fields_and_the_remedy(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", None, overrides)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
        ["loss_fn.use_cispo=true"],
        ["loss_fn.disable_ppo_ratio=true", "loss_fn.reference_policy_kl_penalty=0"],
        [f"{TIS}=tis", IS_CORRECTED, "loss_fn.truncated_importance_sampling_ratio=2"],
        ["loss_fn.force_on_policy_ratio=true"],
        ["policy.train_global_batch_size=128"],
        ["env.mine.function=r.py:f", "data.default.env_name=mine"],
        ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.9"],
        ["grpo.num_generations_per_prompt=1", "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}"],
        ["grpo.num_generations_per_prompt=1", "grpo.adv_estimator.group_of_one=reward"],
        [DYNAMIC, "loss_fn.force_on_policy_ratio=true", "grpo.dynamic_sampling_surplus=discard"],
        [
            "grpo.adv_estimator={name: gdpo, reward_weights: [1, 0]}",
            "checkpointing.metric_name=null",
            "data.train={dataset_name: gsm8k, env_name: two}",
            "env.two.rewards={a: {type: math}, b: {type: regex, pattern: x, weight: 0}}",
        ],
        [DYNAMIC, "grpo.batch_multiplier=3"],
        ["loss_fn={sequence_level_importance_ratios: true, loss_normalizer: sequences}"],
    ],
)
def test_what_fits_together_is_accepted(overrides: list[str]) -> None:
    assert load_config("grpo", None, overrides).warnings == []


def test_the_default_batch_size_follows_the_samples_where_it_does_not_divide_them() -> None:
    small = load_config("grpo", None, ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=6"])
    assert small.config.policy.train_global_batch_size == 24
    assert "num_prompts_per_step" in small.origins["policy.train_global_batch_size"]
    large = load_config("grpo", None, ["grpo.num_prompts_per_step=64"])
    assert large.config.policy.train_global_batch_size == 512
    with pytest.raises(ConfigError, match="is larger than"):
        load_config("grpo", None, ["grpo.num_prompts_per_step=4", "policy.train_global_batch_size=512"])


def test_a_group_of_one_without_normalisation_is_allowed_with_a_warning() -> None:
    loaded = load_config(
        "grpo",
        None,
        ["grpo.num_generations_per_prompt=1", "grpo.normalize_rewards=false", "grpo.use_leave_one_out_baseline=false"],
    )
    assert "nothing is learnt" in loaded.warnings[0]


def test_micro_batches_that_were_typed_must_divide_their_batch() -> None:
    with pytest.raises(ConfigError, match=r"policy\.train_global_batch_size = 8 pairs.*train_micro_batch_size = 3"):
        load_config("dpo", None, ["policy.train_global_batch_size=8", "policy.train_micro_batch_size=3"])
    with pytest.raises(ConfigError, match=r"policy\.train_global_batch_size = 32 examples"):
        load_config("sft", None, ["policy.train_micro_batch_size=5"])
    assert load_config("dpo", None, ["policy.train_global_batch_size=3"]).config.policy.train_micro_batch_size == 2


def test_only_the_reward_model_command_trains_a_reward_model() -> None:
    for kind in ("grpo", "dpo", "sft"):
        with pytest.raises(ConfigError, match=r"policy\.reward_model_cfg\.enabled = true.*`posttrain rm`"):
            load_config(kind, None, ["policy.reward_model_cfg.enabled=true"])
    with pytest.raises(ConfigError, match=r"policy\.reward_model_cfg\.enabled = false"):
        load_config("rm", None, ["policy.reward_model_cfg.enabled=false"])
    with pytest.raises(ConfigError, match=r"reward_model_type.*bradley_terry"):
        load_config("rm", None, ["policy.reward_model_cfg.reward_model_type=regression"])


def test_a_chosen_metric_that_nothing_measures_is_mentioned() -> None:
    chosen, data = "checkpointing.metric_name=val:loss", "data.train={data_path: x.jsonl}"
    assert "checkpointing.metric_name" in load_config("dpo", None, [data, chosen]).warnings[0]
    assert load_config("dpo", None, [data]).warnings == []
    assert load_config("dpo", None, [data, chosen, "data.train.split_validation_size=0.1"]).warnings == []


def test_the_deadline_is_in_seconds() -> None:
    for text, seconds in (("01:02:03:04", 93784), ("00:03:45:00", 13500), ("'1:2:3:4'", 93784)):
        config = load_config("grpo", None, [f"checkpointing.checkpoint_must_save_by={text}"]).config
        assert config.checkpointing.must_save_by_s == seconds
    assert load_config("grpo", None, []).config.checkpointing.must_save_by_s is None


def test_schedules_must_be_well_formed() -> None:
    with pytest.raises(ConfigError, match="2 schedules, which need 1 milestones"):
        load_config("grpo", None, ["policy.scheduler=[{name: a.B}, {name: a.C}]"])
    with pytest.raises(ConfigError, match=r"policy\.scheduler"):
        load_config("grpo", None, ["policy.scheduler=[{nam: a.B}]"])


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_pack_that_cannot_hold_both_answers_of_a_pair_is_refused(kind: str) -> None:
    packing = ["policy.max_total_sequence_length=512", "policy.sequence_packing.enabled=true"]
    load_config(kind, None, [*packing, "policy.sequence_packing.train_mb_tokens=1024"])
    with pytest.raises(ConfigError, match=r"train_mb_tokens = 1023 is less than twice .* = 512.*set it to 1024"):
        load_config(kind, None, [*packing, "policy.sequence_packing.train_mb_tokens=1023"])
    load_config("sft", None, [*packing, "policy.sequence_packing.train_mb_tokens=600"])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("grpo.reward_shaping.overlong_buffer_length=64", "grpo.reward_shaping.enabled is off"),
        ("grpo.adv_estimator.kl_in_reward=token", "loss_fn.use_kl_in_reward is off"),
        ("grpo.adv_estimator.reward_weights=[1, 2]", "read by gdpo only"),
        ("grpo.adv_estimator.minus_baseline=false", "read by reinforce_plus_plus only"),
        ("grpo.reward_shaping={enabled: true, max_response_length: 4096}", "begins at 3968 tokens"),
    ],
)
def test_what_nothing_reads_is_mentioned(override: str, part: str) -> None:
    (warning,) = load_config("grpo", None, [override]).warnings
    assert part in warning
