#!/usr/bin/env bash
# "GRPO using NVIDIA's NeMo RL framework on GKE": Llama 3.1 8B on DeepScaleR, then conversion and evaluation.
#
# Run as it stands, these are the guide's commands with its sizes; set the variables for another model and other sizes.
# Not in this script: KubeRay, the Helm chart and `kubectl exec`, which need a Kubernetes cluster.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
checkpoints=${CHECKPOINTS:-/data/nemo_rl_llama3_8b_ds_cp}
sizes=(${SIZES:-}) eval_sizes=(${EVAL_SIZES:-})
step=${STEP:-60}

# Step 5: the job script.
$python examples/run_grpo_math.py \
  --config examples/configs/grpo_math_8B.yaml \
  logger.wandb_enabled=True \
  cluster.num_nodes="${NUM_NODES:-2}" \
  cluster.gpus_per_node="${GPUS_PER_NODE:-8}" \
  logger.wandb.name='llama3.1-8b-deepscaler-grpo-2nodes' \
  grpo.max_num_steps="${STEPS:-100}" \
  checkpointing.checkpoint_dir="$checkpoints" \
  data.dataset_name='DeepScaler' "${sizes[@]}"

# Step 6: verify the checkpoints.
find "$checkpoints"

# Step 7.1: convert DCP to Hugging Face.
$python examples/converters/convert_dcp_to_hf.py \
  --config "$checkpoints/step_$step/config.yaml" \
  --dcp-ckpt-path "$checkpoints/step_$step/policy/weights/" \
  --hf-ckpt-path "$checkpoints/hf"

# Step 7.3: run the evaluation script. GPQA is gated on the hub: accept its terms and log in first, then set GPQA=1.
$python examples/run_eval.py generation.model_name="$checkpoints/hf" "${eval_sizes[@]}" ${AIME:+data.data_path="$AIME"}
if [ -n "${GPQA:-}" ]; then
  $python examples/run_eval.py --config examples/configs/evals/gpqa_eval.yaml
fi
$python examples/run_eval.py \
  --config examples/configs/evals/math_eval.yaml \
  generation.model_name="$checkpoints/hf" \
  generation.temperature=0.6 \
  generation.vllm_cfg.max_model_len="${MAX_MODEL_LEN:-32768}" \
  generation.vllm_cfg.tensor_parallel_size="${TP:-1}" \
  data.dataset_name=math500 \
  eval.num_tests_per_prompt="${SAMPLES:-16}" \
  cluster.gpus_per_node="${EVAL_GPUS:-8}" "${eval_sizes[@]}" ${MATH500:+data.data_path="$MATH500"}
