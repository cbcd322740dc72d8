#!/usr/bin/env bash
# "GRPO/RLHF Training with NeMo RL": LoRA of a 7B model on two nodes with eight GPUs each.
#
# Run as it stands, this is the guide's command with its sizes; set the variables for another model and other sizes.
# On two nodes: NODE_RANK=0 on the first, NODE_RANK=1 MASTER_IP=... on the second. The guide's manifest is in docs/seeds/manifests.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
model=${MODEL:-TechPulse/techpulse-7b-v1}
checkpoints=${CHECKPOINTS:-/shared/grpo-checkpoints}
logs=${LOGS:-/tmp/grpo-logs}
sizes=(${SIZES:-})

# Start Ray cluster. The guide waits for all workers in a loop of its own; the command below does that itself.
case "${NODE_RANK:-}" in
  "") ;; # one machine, or a cluster that is up already
  0) ray start --head --num-gpus="${GPUS_PER_NODE:-8}" --port=6379 --temp-dir=/tmp/ray ;;
  *) exec ray start --address="$MASTER_IP:6379" --num-gpus="${GPUS_PER_NODE:-8}" --temp-dir=/tmp/ray --block ;;
esac

# Run GRPO training
$python examples/run_grpo.py \
  cluster.num_nodes="${NUM_NODES:-2}" \
  cluster.gpus_per_node="${GPUS_PER_NODE:-8}" \
  grpo.max_num_steps="${STEPS:-100}" \
  grpo.num_prompts_per_step="${PROMPTS:-32}" \
  grpo.num_generations_per_prompt="${GENERATIONS:-16}" \
  policy.model_name="$model" \
  policy.tokenizer.name="$model" \
  policy.dtensor_cfg.enabled=true \
  policy.dtensor_cfg.lora_cfg.enabled=true \
  policy.dtensor_cfg.lora_cfg.dim=8 \
  policy.train_global_batch_size="${BATCH:-512}" \
  policy.generation.vllm_cfg.gpu_memory_utilization=0.6 \
  policy.generation.temperature=1.0 \
  loss_fn.reference_policy_kl_penalty=0.01 \
  checkpointing.checkpoint_dir="$checkpoints" \
  checkpointing.save_period="${SAVE_PERIOD:-10}" \
  logger.wandb_enabled=false \
  logger.log_dir="$logs" "${sizes[@]}"

# Checkpoint: Verify Training. `kubectl logs` shows the same lines as the log of the run.
# 1. Training is progressing
grep "Step " "$logs/logs/train.log" | tail -5
# 2. Reward is increasing
grep "Reward" "$logs/logs/train.log" | tail -5
# 3. Checkpoints are being saved
ls "$checkpoints"
# 4. No NCCL errors: should return empty
grep -i "nccl.*error" "$logs/logs/train.log" | head -5 || true
