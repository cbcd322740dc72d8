#!/usr/bin/env bash
# "GRPO/DPO Training Job": preference tuning from labelled traces as a stage of a continuous pipeline.
#
# Run as it stands, this is the guide's command with its sizes; set the variables for another model and other sizes.
# VF_COEFF=0.5, the guide's, trains a critic too: then it is PPO.
# Not in this script: the Job, NodePool and Volcano manifests, which need a Kubernetes cluster with GPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
posttrain=${POSTTRAIN:-posttrain}
model=${MODEL:-glm-5-32b}
data=${DATA:-s3://training-data-lake/labeled-dataset/}
checkpoints=${CHECKPOINTS:-/checkpoints}
sizes=(${SIZES:-}) dpo_sizes=(${DPO_SIZES:-})

# GRPO: the container's command and arguments.
$python examples/nemo_grpo_training.py \
  --data-path="$data" \
  --output-path="$checkpoints/grpo-run-001" \
  --num-nodes="${NUM_NODES:-3}" \
  --devices="${DEVICES:-8}" \
  policy.model_name="$model" ${VF_COEFF:+"vf_coeff=$VF_COEFF"} "${sizes[@]}"

# DPO: TRL's settings under posttrain's names. Pairs are made of the traces of one prompt: preferred from 0.7 on, not preferred
# below 0.5. per_device_train_batch_size 4 x gradient_accumulation_steps 8 = 32 pairs for an update.
$posttrain dpo \
  "data.train={dataset_name: TracePairs, data_path: $data, pair_rules: {preferred: 0.7, rejected_below: 0.5}}" \
  policy.model_name="$model" \
  checkpointing.checkpoint_dir="$checkpoints/glm-5-dpo" \
  policy.train_micro_batch_size=4 \
  policy.train_global_batch_size=32 \
  policy.optimizer.kwargs.lr=5e-7 \
  policy.max_total_sequence_length=4096 \
  dpo.reference_policy_kl_penalty=0.1 \
  dpo.max_num_epochs=1 \
  policy.precision=bfloat16 \
  checkpointing.save_period=100 "${dpo_sizes[@]}"
