#!/usr/bin/env bash
# The figures of docs/performance.md on one GPU, in parts of a few minutes; a part that fails or runs too long does not end the others.
#
#   bench/table.sh OUT [PART ...]      parts: sampling, vllm, training, grpo, serving, drafts, gap, tests; default: these
#                                      and: today, vllm-today (models with experts, recurrence, sinks), requests (chat, tools, schema)
#
# VLLM_PYTHON: Python of an environment with vLLM (docs/vllm.md), for `vllm`, `vllm-today`, `serving` and `requests`. SFT: a model trained on GSM8K, and TEST: its
# held-out problems, for `drafts` and `gap`. MODEL: a folder with a tokenizer that writes JSON, for `requests`. SHAPE=tiny tries the script on a CPU. Each part writes OUT/NAME.json and OUT/NAME.log.
set -u
[ $# -gt 0 ] || { echo "usage: bench/table.sh OUT [PART ...]" >&2; exit 64; }
OUT=$(realpath -m "$1"); shift
cd "$(dirname "$0")/.."
PARTS=${*:-sampling vllm training grpo serving drafts gap tests}
SHAPE=${SHAPE:-llama-8b}; PYTHON=${PYTHON:-python}
WORK="512x128+256 512x128+900 long-tail"; FP8="--set policy.fp8=true --set policy.generation.native_cfg.precision=fp8"
REDUCED="--set policy.optimizer.state_dtype=bfloat16 --set policy.optimizer.master_weights=none"; PROMPTS="--prompts 16"; TRAIN=--fp8
TODAY="qwen-30b-a3b qwen-hybrid-4b gpt-oss-20b"; SHORT=512x128+256
[ "$SHAPE" = tiny ] && WORK="6x12+8 8x12+4..20" FP8="" PROMPTS="" TRAIN=""
export PYTHONUNBUFFERED=1 PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p "$OUT"

run() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 code=0; shift 2
  timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
  echo "== $name: exit code $code"; tail -n 15 "$OUT/$name.log"
}

serve() {  # REQUEST ...: both servers over the same weights, each with 40 % of the memory; one is idle while the other is measured
  local folder=${MODEL:-$OUT/weights} request
  [ -n "${MODEL:-}" ] || "$PYTHON" -c "import sys, torch; sys.path.insert(0, 'bench'); from shapes import make_model, make_tokenizer
device = 'cuda' if torch.cuda.is_available() else 'cpu'
model = make_model('$SHAPE', device, torch.bfloat16 if device == 'cuda' else torch.float32)
model.save_pretrained('$folder'); make_tokenizer(model.config.vocab_size).save_pretrained('$folder')"
  "$PYTHON" -m posttrain serve "$folder" --port 8000 --max-batch-size 256 --max-model-len 2048 --gpu-memory-utilization 0.4 >"$OUT/server.log" 2>&1 &
  local servers=$! against=() word
  await 8000 120 || return 1
  if [ -n "${VLLM_PYTHON:-}" ]; then
    "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$folder" --port 8001 --max-num-seqs 256 --max-model-len 2048 \
      --gpu-memory-utilization 0.4 --enable-auto-tool-choice --tool-call-parser hermes >"$OUT/vllm-server.log" 2>&1 &
    servers="$servers $!"
    await 8001 240 && against=(--against http://127.0.0.1:8001)
  fi
  word=""; [ "$SHAPE" = tiny ] || [ -n "${MODEL:-}" ] || word=--shape-words
  for request; do
    "$PYTHON" bench/serve_load.py http://127.0.0.1:8000 "${against[@]}" $word --request "$request" --streams 200 --requests 800 --max-tokens 128 --rounds 2 \
      --pid "${servers%% *}" --json "$OUT/serving-$request.json"
  done
  kill $servers
}
await() {  # PORT SECONDS
  for _ in $(seq "$2"); do curl -sf "http://127.0.0.1:$1/v1/models" >/dev/null && return 0; sleep 1; done
  echo "no server on port $1 after $2 s"; return 1
}
export -f serve await; export OUT SHAPE PYTHON

needs() {  # VARIABLE ...: whether all are set
  for name; do [ -n "${!name:-}" ] || { echo "== $part: skipped, $name is not set"; return 1; }; done
}

for part in $PARTS; do case $part in
  sampling)
    run sampling-bf16 300 "$PYTHON" bench/decode.py --shape "$SHAPE" --workload $WORK --engines native --release --out "$OUT/sampling-bf16.json"
    run sampling-fp8 300 "$PYTHON" bench/decode.py --shape "$SHAPE" --workload $WORK --engines native --release --native precision=fp8 --out "$OUT/sampling-fp8.json" ;;
  vllm)
    needs VLLM_PYTHON || continue
    run vllm-bf16 300 "$VLLM_PYTHON" bench/decode.py --shape "$SHAPE" --workload $WORK --engines vllm --out "$OUT/vllm-bf16.json"
    run vllm-fp8 300 "$VLLM_PYTHON" bench/decode.py --shape "$SHAPE" --workload $WORK --engines vllm --vllm quantization=fp8 --out "$OUT/vllm-fp8.json" ;;
  training) run training 200 "$PYTHON" bench/train.py --shape "$SHAPE" $TRAIN $REDUCED --out "$OUT/training.json" ;;
  grpo)
    run grpo-lora 200 "$PYTHON" bench/grpo_step.py --shape "$SHAPE" $PROMPTS --lora $FP8 --out "$OUT/grpo-lora.json"
    run grpo-full 200 "$PYTHON" bench/grpo_step.py --shape "$SHAPE" $PROMPTS $FP8 $REDUCED --out "$OUT/grpo-full.json" ;;
  serving) MODEL="" run serving 420 bash -c 'serve completion' ;;
  requests) needs MODEL && MODEL="$MODEL" run requests 420 bash -c 'serve chat tools schema' ;;
  today)
    for shape in $TODAY; do run "today-$shape" 150 "$PYTHON" bench/decode.py --shape "$shape" --workload $SHORT --engines native --out "$OUT/today-$shape.json"; done
    run today-training 150 "$PYTHON" bench/train.py --shape qwen-hybrid-4b --sequences 18 $REDUCED --out "$OUT/today-training.json"
    run today-grpo 300 "$PYTHON" bench/grpo_step.py --shape qwen-30b-a3b --lora --prompts 4 --out "$OUT/today-grpo.json" ;;
  vllm-today)
    needs VLLM_PYTHON || continue
    for shape in $TODAY; do run "vllm-$shape" 300 "$VLLM_PYTHON" bench/decode.py --shape "$shape" --workload $SHORT --engines vllm --out "$OUT/vllm-$shape.json"; done ;;
  images)
    run images 300 "$PYTHON" bench/images.py --out "$OUT/images.json"
    needs VLLM_PYTHON && run vllm-images 300 "$VLLM_PYTHON" bench/images.py --engines vllm --out "$OUT/vllm-images.json" ;;
  turns) run turns 150 "$PYTHON" bench/turns.py --shape llama-1.5b --prompts 2 --turns 30 --out "$OUT/turns.json" ;;
  drafts) needs SFT TEST && run drafts 150 "$PYTHON" bench/speculation.py --model "$SFT" --data "$TEST" --prompts 8 --samples 16 --new-tokens 512 --batch 128 \
      --temperature 0.7 --drafts auto 3 7 --out "$OUT/drafts.json" ;;
  gap) needs SFT && run gap 150 "$PYTHON" bench/sampler_gap.py --model "$SFT" --out "$OUT/gap.json" ;;
  tests) run tests 600 "$PYTHON" -m pytest tests/gpu -q -n 5 -p no:cacheprovider ;;
  *) echo "no part $part" >&2; exit 64 ;;
esac; done
