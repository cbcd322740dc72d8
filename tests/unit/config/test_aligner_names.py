"""The names of NeMo-Aligner's DPO config, in files and on the command line of `posttrain dpo`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from posttrain.config import ConfigError, load_config
from posttrain.config.loader import guess_kind
from posttrain.policy.optimizer.mixed_precision import build_scheduler

COMMAND = """
trainer.num_nodes=1
trainer.devices=8
trainer.precision=bf16
++trainer.dpo.max_epochs=1
trainer.dpo.max_steps=-1
trainer.dpo.val_check_interval=20
trainer.dpo.save_interval=100
trainer.dpo.limit_val_batches=1.0
trainer.dpo.gradient_clip_val=1.0
pretrained_checkpoint.restore_from_path=org/sft-model
exp_manager.explicit_log_dir=/results/dpo
exp_manager.create_wandb_logger=false
exp_manager.checkpoint_callback_params.save_top_k=3
exp_manager.checkpoint_callback_params.monitor=val_loss
exp_manager.checkpoint_callback_params.mode=min
model.data.data_prefix={train:[train.jsonl],validation:[val.jsonl],test:[val.jsonl]}
model.data.data_impl=jsonl
model.data.default_chosen_reward=0.9
++model.micro_batch_size=2
++model.global_batch_size=256
model.encoder_seq_length=2048
model.megatron_amp_O2=true
model.dpo.ref_policy_kl_penalty=0.2
model.dpo.preference_loss=rpo_bwd_kl
model.dpo.gt_reward_scale=2.0
model.dpo.sft_loss_weight=0.5
model.optim.name=distributed_fused_adam
model.optim.lr=9e-6
model.optim.weight_decay=0.1
model.optim.betas=[0.9,0.98]
model.peft.peft_scheme=lora
model.peft.lora_tuning.adapter_dim=16
model.peft.lora_tuning.target_modules=[attention_qkv,mlp_fc2]
"""


def test_command_line_of_the_workflow_is_translated() -> None:
    loaded = load_config("dpo", None, COMMAND.split())
    config = loaded.config
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (1, 8)
    assert config.policy.model_name == config.policy.tokenizer.name == "org/sft-model"
    assert (config.dpo.max_num_epochs, config.dpo.max_num_steps) == (1, 1_000_000)
    assert (config.dpo.val_period, config.dpo.val_batches, config.dpo.val_global_batch_size) == (20, -1, 256)
    assert (config.policy.train_global_batch_size, config.policy.train_micro_batch_size) == (256, 2)
    assert config.policy.max_total_sequence_length == 2048
    assert (config.dpo.preference_loss, config.dpo.reference_policy_kl_penalty) == ("rpo_bwd_kl", 0.2)
    assert (config.dpo.gt_reward_scale, config.dpo.sft_loss_weight) == (2.0, 0.5)
    assert config.policy.optimizer.name == "torch.optim.AdamW"
    assert config.policy.optimizer.kwargs["lr"] == 9e-6
    lora = config.policy.dtensor_cfg.lora_cfg
    assert (lora.enabled, lora.dim, lora.alpha, lora.match_all_linear) == (True, 16, 16, False), "alpha is dim in NeMo"
    assert lora.target_modules == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert (config.checkpointing.checkpoint_dir, config.checkpointing.save_period) == ("/results/dpo", 100)
    assert (config.checkpointing.metric_name, config.checkpointing.higher_is_better) == ("val:loss", False)
    (train,), (validation,) = config.data.train_sets(), config.data.validation_sets()
    assert (train.dataset_name, train.data_path, validation.data_path) == ("NeMo-Aligner", "train.jsonl", "val.jsonl")
    assert config.data.default.default_chosen_reward == 0.9
    renamed = "command line: `model.dpo.ref_policy_kl_penalty` is now `dpo.reference_policy_kl_penalty`"
    assert renamed in loaded.warnings
    (ignored,) = [line for line in loaded.warnings if "Megatron" in line]
    assert "model.megatron_amp_O2" in ignored
    assert loaded.origins["dpo.reference_policy_kl_penalty"] == "command line"


FILE = """\
trainer:
  devices: 1
  dpo: {max_steps: 100, val_check_interval: 10}
pretrained_checkpoint:
  restore_from_path: ???
exp_manager: {explicit_log_dir: null, exp_dir: /results, name: megatron_gpt_dpo}
model:
  encoder_seq_length: 512
  micro_batch_size: 1
  global_batch_size: 64
  dpo:
    log_prob_forward_micro_batch_size: ${model.micro_batch_size}
    preference_average_log_probs: true
    sft_average_log_probs: ${.preference_average_log_probs}
  data: {data_prefix: pairs.jsonl, seq_length: "${model.encoder_seq_length}"}
  optim:
    name: fused_adam
    lr: 9.0e-6
    sched: {name: CosineAnnealing, warmup_steps: 10, constant_steps: 20, min_lr: 9.0e-7}
"""


def test_file_is_translated_together_with_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "gpt_dpo.yaml"
    file.write_text(FILE)
    assert guess_kind(file) == "dpo"
    overrides = ["pretrained_checkpoint.restore_from_path=org/model", "model.optim.sched.warmup_steps=4", "dpo.seed=7"]
    loaded = load_config("dpo", file, overrides)
    config = loaded.config
    assert config.policy.model_name == "org/model"
    assert config.checkpointing.checkpoint_dir == "/results/megatron_gpt_dpo"
    assert config.policy.logprob_batch_size == 1
    assert config.dpo.sft_average_log_probs
    assert config.dpo.seed == 7
    assert config.data.train_sets()[0].data_path == "pairs.jsonl"
    assert loaded.origins["dpo.max_num_steps"] == f"{file}:3"
    assert [entry.get("milestones") for entry in config.policy.scheduler][-1] == [4, 80]


def test_cosine_schedule_has_the_learning_rates_of_nemo() -> None:
    warm_up, constant, total, lr, least = 4, 20, 40, 9e-6, 9e-7
    schedule = f"{{name: CosineAnnealing, warmup_steps: {warm_up}, constant_steps: {constant}, min_lr: {least}}}"
    overrides = [f"trainer.dpo.max_steps={total}", f"model.optim.lr={lr}", f"model.optim.sched={schedule}"]
    config = load_config("dpo", None, overrides).config
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = build_scheduler(optimizer, config.policy.scheduler)
    assert scheduler is not None
    decay = total - warm_up - constant
    for step in range(total):
        if step < warm_up:
            expected = lr * (step + 1) / (warm_up + 1)
        elif step < warm_up + decay:
            expected = least + (lr - least) * (1 + math.cos(math.pi * (step - warm_up) / decay)) / 2
        else:
            expected = least
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.dpo.val_check_interval=0.1", "number of steps"),
        ("trainer.dpo.limit_train_batches=0.5", "dpo.max_num_steps"),
        ("trainer.dpo.limit_val_batches=0.5", "number of batches"),
        ("trainer.precision=16", "bf16"),
        ("pretrained_checkpoint.restore_from_path=/models/sft.nemo", "Hugging Face folder"),
        ("exp_manager.resume_if_exists=false", "another folder"),
        ("model.pipeline_model_parallel_size=2", "pipeline"),
        ("model.data.chat_prompt_tokens.turn_start=x", "policy.tokenizer.chat_template"),
        ("model.optim.name=lamb", "policy.optimizer"),
        ("model.optim.sched={name: CosineAnnealing, warmup_steps: 10}", "trainer.dpo.max_steps"),
        ("model.optim.sched={name: PolynomialDecay}", "policy.scheduler"),
        ("model.peft.peft_scheme=ptuning", "lora or none"),
        ("model.peft.lora_tuning.target_modules=[embedding]", "attention_qkv"),
        ("model.dpo.unheard_of=1", "docs/seeds/differences.md"),
        ("model.peft.lora_tuning.target_modules=5", "attention_qkv"),
        ("model.optim.sched={name: CosineAnnealing, warmup_steps: soon, max_steps: 9}", "numbers of steps"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_use(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("dpo", None, [override])
    assert override.partition("=")[0] in str(refused.value)
    assert "command line" in str(refused.value)
    assert named in str(refused.value)


def test_own_name_wins_over_the_translated_one(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("dpo: {reference_policy_kl_penalty: 0.3}\nmodel: {dpo: {ref_policy_kl_penalty: 0.2}}\n")
    loaded = load_config("dpo", file)
    assert loaded.config.dpo.reference_policy_kl_penalty == 0.3
    assert any("is ignored, because `dpo.reference_policy_kl_penalty` is set as well" in w for w in loaded.warnings)
    typed = load_config("dpo", file, ["model.dpo.ref_policy_kl_penalty=0.4"])
    assert typed.config.dpo.reference_policy_kl_penalty == 0.4, "the command line wins over the file"


def test_other_kinds_of_run_say_which_one_understands_these_names() -> None:
    with pytest.raises(ConfigError, match=r"`model`.*posttrain dpo"):
        load_config("grpo", None, ["model.dpo.ref_policy_kl_penalty=0.2"])


def test_packed_files_are_read_as_packs() -> None:
    loaded = load_config(
        "dpo", None, ["model.data.data_impl=packed_jsonl", "model.data.data_prefix=[a.parquet,b.parquet]"]
    )
    sets = [(entry.dataset_name, entry.data_path) for entry in loaded.config.data.train_sets()]
    assert sets == [("PackedPairs", "a.parquet"), ("PackedPairs", "b.parquet")]
