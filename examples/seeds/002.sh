#!/usr/bin/env bash
# "Fine-Tuning Large Language Models with NeMo-RL and GRPO on GKE": the workflow from a dataset to a served model.
#
# The guide describes the steps and prints no commands; these are the commands. Set the variables for another model and other
# sizes. Not in this script: step 2, the Helm chart that starts a Ray cluster.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
posttrain=${POSTTRAIN:-posttrain}
model=${MODEL:-Qwen/Qwen2.5-1.5B}       # 1. a model of the Llama, Gemma or Qwen family,
dataset=${DATASET:-GSM8K}               #    and a dataset: OpenMathInstruct, Deepscaler or GSM8K
out=${OUT:-results/gsm8k}
sizes=(${SIZES:-}) eval_sizes=(${EVAL_SIZES:-})

train() {
  $posttrain grpo policy.model_name="$model" data.train.dataset_name="$dataset" checkpointing.checkpoint_dir="$out" \
    "${sizes[@]}" "$@"
}

# 3. Run the RL training loop. Checkpoints are saved periodically.
train grpo.max_num_steps="${STEPS:-100}"

# 4. Convert the checkpoint to the Hugging Face format.
$posttrain convert "$out" --to "$out/hf"

# 5. Evaluate the model.
$python examples/run_eval.py generation.model_name="$out/hf" data.dataset_name="$dataset" "${eval_sizes[@]}"

# 6. Review and iterate: more steps continue from the newest checkpoint.
train grpo.max_num_steps="${MORE_STEPS:-200}"

# 7. Serve the model: an OpenAI-compatible server. Here it answers one request and stops.
port=${PORT:-8000}
$posttrain serve "$out" --port "$port" &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
$python - "$port" <<'CLIENT'
import json, sys, time, urllib.error, urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}/v1"
for _ in range(600):
    try:
        models = json.load(urllib.request.urlopen(f"{url}/models"))
        break
    except urllib.error.URLError:
        time.sleep(0.5)
question = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "12 + 30 = ?"}], "max_tokens": 8}
request = urllib.request.Request(f"{url}/chat/completions", json.dumps(question).encode())
print("answer:", json.load(urllib.request.urlopen(request))["choices"][0]["message"])
CLIENT
