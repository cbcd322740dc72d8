#!/usr/bin/env bash
# "NVIDIA NeMo Aligner DPO Training": from preference pairs to an aligned model, with NeMo-Aligner's names.
#
# Set the variables for another model and other sizes. Not in this script: .nemo archives, Megatron and TransformerEngine.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
posttrain=${POSTTRAIN:-posttrain}
model=${MODEL:-models/sft}
train=${TRAIN:-train.jsonl}             # 1. prompt, chosen_response, rejected_response; chosen_reward, rejected_reward for RPO
validation=${VALIDATION:-val.jsonl}
length=${SEQ_LENGTH:-2048}
out=${OUT:-results/dpo}
sizes=(${SIZES:-})

# 2. Pack sequences: the pack size is at least double model.encoder_seq_length.
for name in train validation; do
  $posttrain data pack "${!name}" "$out/$name.parquet" --model "$model" --chat-template extra_id \
    --pack-size $((2 * length)) --max-length "$length" --algorithm first_fit_decreasing
done

# 3. and 4. Configure and launch DPO training.
dpo() {
  local folder=$1
  shift
  $python examples/run_dpo.py \
    trainer.num_nodes=1 \
    trainer.devices="${DEVICES:-8}" \
    trainer.precision="${PRECISION:-bf16}" \
    trainer.dpo.max_epochs=1 \
    trainer.dpo.max_steps="${STEPS:--1}" \
    trainer.dpo.val_check_interval="${VAL_INTERVAL:-100}" \
    trainer.dpo.save_interval="${SAVE_INTERVAL:-100}" \
    pretrained_checkpoint.restore_from_path="$model" \
    exp_manager.explicit_log_dir="$folder" \
    exp_manager.create_wandb_logger=false \
    model.encoder_seq_length="$length" \
    model.micro_batch_size=1 \
    model.global_batch_size="${BATCH:-256}" \
    model.optim.name=distributed_fused_adam \
    model.optim.lr=9e-6 \
    model.dpo.ref_policy_kl_penalty=0.2 \
    policy.tokenizer.chat_template=extra_id "${sizes[@]}" "$@"
}
rows="model.data.data_prefix={train: [$train], validation: [$validation], test: [$validation]}"
packs="model.data.data_prefix={train: [$out/train.parquet], validation: [$out/validation.parquet]}"
# All weights, from the rows; then the same from the packs.
dpo "$out/rows" "$rows"
dpo "$out/packs" "$packs" model.data.data_impl=packed_jsonl
# LoRA with RPO: no second copy of the model is stored for the reference.
dpo "$out/lora" "$rows" model.peft.peft_scheme=lora model.peft.lora_tuning.adapter_dim=32 model.dpo.preference_loss=rpo_bwd_kl

# 5. Evaluate and export: accuracy, and chosen rewards above rejected ones.
grep -E "Accuracy|Chosen Reward|Rejected Reward" "$out/rows/logs/train.log" | tail -6
$posttrain convert "$out/rows" --to "$out/hf"
