"""PPO and distillation in the layout of NeMo RL's files: what is understood, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import ConfigError, load_config
from posttrain.config.loader import load_words

PPO = """
ppo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 1
  max_num_epochs: 3
  steps_per_epoch: 1
  ppo_epochs: 1
  async_ppo: {enabled: false, max_trajectory_age_steps: 2, warmup_generation_lead_steps: null}
  seed: 7
  adv_estimator: {name: gae, gae_lambda: 0.9, gae_gamma: 0.99, normalize_advantages: false}
loss_fn: {value_loss_scale: 0.4, value_cliprange: 0.3, use_kl_in_reward: true, ratio_clip_max: 0.2}
policy:
  model_name: models/small
  train_global_batch_size: 16
  train_micro_batch_size: 2
  max_total_sequence_length: 256
  precision: bfloat16
  generation: {max_new_tokens: 128}
  dtensor_cfg: {enabled: true, activation_checkpointing: true, tensor_parallel_size: 1}
value:
  model_name: ${policy.model_name}
  tokenizer: {name: "${value.model_name}"}
  train_global_batch_size: ${policy.train_global_batch_size}
  train_micro_batch_size: 1
  precision: bfloat16
  reward_model_cfg: {enabled: true, reward_model_type: regression, only_head_unfreeze: false}
  dtensor_cfg: {enabled: true, activation_checkpointing: true, tensor_parallel_size: 2}
  dynamic_batching: {enabled: false, train_mb_tokens: 512}
  optimizer: {kwargs: {lr: 1.0e-5}}
data:
  train: {dataset_name: ResponseDataset, data_path: rows.jsonl, seed: "${ppo.seed}"}
env: {math: {num_workers: 2}}
checkpointing: {checkpoint_dir: "results/ppo-${ppo.num_prompts_per_step}"}
"""
DISTILLATION = """
distillation: {num_prompts_per_step: 8, num_generations_per_prompt: 1, max_num_steps: 5, topk_logits_k: 32, seed: 3}
loss_fn: {kl_type: forward, mixed_kl_weight: 0.5, zero_outside_topk: false}
policy: &base
  model_name: models/small
  max_total_sequence_length: 512
  dtensor_cfg: &layout {enabled: true, tensor_parallel_size: 1, context_parallel_size: 1}
  generation: {max_new_tokens: 256}
teacher:
  <<: *base
  model_name: models/large
  dtensor_cfg: {<<: *layout, tensor_parallel_size: 4}
data:
  train: {dataset_name: ResponseDataset, data_path: rows.jsonl}
logger: {wandb: {name: "k-${distillation.topk_logits_k}"}}
"""


def file_of(folder: Path, text: str, *changes: tuple[str, str]) -> Path:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


def test_a_ppo_file_of_nemo_rl(tmp_path: Path) -> None:
    file = file_of(tmp_path, PPO)
    config = load_config("ppo", file, ["ppo.max_num_steps=9"]).config
    grpo, estimator = config.grpo, config.grpo.adv_estimator
    assert (grpo.num_prompts_per_step, grpo.max_num_epochs, grpo.max_num_steps, grpo.seed) == (16, 3, 9, 7)
    assert (estimator.gae_lambda, estimator.gae_gamma, estimator.whiten_advantages) == (0.9, 0.99, "none")
    assert (config.value_loss_fn.scale, config.value_loss_fn.cliprange) == (0.4, 0.3)
    assert config.critic is not None
    assert (config.critic.model_name, config.critic.optimizer.kwargs["lr"]) == ("models/small", 1e-5)
    assert config.data.train_sets()[0].seed == 7
    assert config.checkpointing.checkpoint_dir == "results/ppo-16"
    assert load_words([], file).config == load_config("ppo", file).config
    warnings = load_config("ppo", file).warnings
    assert sum("value." in line and "micro-batches as the policy" in line for line in warnings) == 1


def test_a_distillation_file_of_nemo_rl(tmp_path: Path) -> None:
    loaded = load_words([], file_of(tmp_path, DISTILLATION))
    config, teacher = loaded.config, loaded.config.teacher
    assert (config.called, config.grpo.num_prompts_per_step, config.grpo.max_num_steps) == ("distill", 8, 5)
    assert (teacher.model_name, teacher.divergence, teacher.over, teacher.top_k) == (
        "models/large", "forward", "top_k", 32)  # fmt: skip
    assert any("teacher.dtensor_cfg.tensor_parallel_size" in line for line in loaded.warnings)
    assert not any("teacher.max_total_sequence_length" in line for line in loaded.warnings), "it is the policy's"
    (tmp_path / "child.yaml").write_text(
        "defaults: run.yaml\nlogger: {wandb: {name: 'k${distillation.topk_logits_k}'}}\n"
    )
    child = load_config("distill", tmp_path / "child.yaml", ["distillation.topk_logits_k=16"]).config
    assert (child.teacher.top_k, child.logger.wandb.name) == (16, "k16")
    mixed = file_of(
        tmp_path,
        DISTILLATION,
        ("kl_type: forward", "kl_type: mixed"),
        ("{distillation.topk_logits_k}", "{loss_fn.kl_type}"),
    )
    assert load_words(["distill", "loss_fn.kl_type=reverse"], mixed).config.teacher.divergence == "reverse"
    own = load_words(["distill", "teacher.over=sampled"], file_of(tmp_path, DISTILLATION)).config.teacher
    assert (own.over, own.divergence) == ("sampled", "forward")


@pytest.mark.parametrize(
    ("text", "old", "new", "named", "instead"),
    [
        (DISTILLATION, "kl_type: forward", "kl_type: mixed", "loss_fn.kl_type", "teacher.divergence=jsd"),
        (DISTILLATION, "topk: false", "topk: true", "loss_fn.zero_outside_topk", "set it to false"),
        (DISTILLATION, "  model_name: models/large", "  model_name: models/large\n  precision: float32",
         "teacher.precision", "policy.precision"),
        (DISTILLATION, "  model_name: models/large", "  model_name: models/large\n  megatron_cfg: {enabled: true}",
         "teacher.megatron_cfg.enabled", "leave it out"),
        (DISTILLATION, "  model_name: models/large", "  model_name: models/large\n  max_total_sequence_lengthh: 1",
         "teacher.max_total_sequence_lengthh", "did you mean `teacher.max_total_sequence_length`"),
        (DISTILLATION, "  model_name: models/large", "  model_name: models/large\n  colocated: {enabled: false}",
         "teacher.colocated.enabled", "on the ranks that train"),
        (DISTILLATION, "  model_name: models/large", "  url: http://localhost:8000/v1", "teacher.url",
         "teacher.model_name"),
        (PPO, "value:\n", "value:\n  scheduler: [{name: torch.optim.lr_scheduler.ConstantLR}]\n",
         "value.scheduler", "the critic has the policy's"),
        (PPO, "train_global_batch_size: ${policy.train_global_batch_size}", "train_global_batch_size: 8",
         "value.train_global_batch_size", "leave it out"),
        (PPO, "ppo_epochs: 1", "ppo_epochs: 4", "grpo.ppo_epochs", "policy.train_global_batch_size"),
        (PPO, "gae_lambda: 0.9", "gae_lambda: 0.9, gae_lambda_value: 1.0", "grpo.adv_estimator.gae_lambda_value",
         "use gae_lambda"),
        (PPO, "only_head_unfreeze: false", "only_head_unfreeze: true", "value.reward_model_cfg.only_head_unfreeze", ""),
        (PPO, "gae_lambda: 0.9", "gae_lambd: 0.9", "grpo.adv_estimator.gae_lambd", "did you mean"),
    ],
)  # fmt: skip
def test_what_would_change_results_is_refused_by_name(
    text: str, old: str, new: str, named: str, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_words([], file_of(tmp_path, text, (old, new)))
    assert named in str(raised.value)
    assert instead in str(raised.value)


def test_a_file_for_another_command_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `ppo` .*belongs to `posttrain ppo`"):
        load_config("grpo", file_of(tmp_path, PPO))
    with pytest.raises(ConfigError, match=r"unknown key `distillation` .*belongs to `posttrain distill`"):
        load_config("ppo", file_of(tmp_path, DISTILLATION))
