#!/usr/bin/env bash
# Ridgeline's server and vLLM's on one GPU, one after the other: the same requests at the same moments, rate by rate.
#
#     benchmarks/serve_curve.sh OUT_DIR [VLLM_DIR [MODEL_DIR]]
#
# VLLM_DIR: where vLLM is unpacked, if this Python does not have it. MODEL_DIR: default Llama-3.1-8B's config.json;
# weights are random, as is the tokenizer where the folder has none. Writes OUT_DIR/{curve.jsonl,curve.svg,logs/}, rate
# by rate, and ends by itself after WITHIN seconds. Environment: RATES, DURATION, INPUT, OUTPUT, CONTEXT, SLO, WITHIN,
# COMMIT, PROCESSES (of the client), PYTHON.
set -euo pipefail
out=${1:?usage: serve_curve.sh OUT_DIR [VLLM_DIR [MODEL_DIR]]}
cd "$(dirname "$0")/.."
peer=(); [ -z "${2:-}" ] || peer=(--peer-path "$2")
both="--max-model-len ${CONTEXT:-8192} --gpu-memory-utilization 0.85"
exec "${PYTHON:-python}" -m ridgeline bench serve \
  --start "ridgeline $both" --start "vllm $both" "${peer[@]}" \
  --model "${3:-benchmarks/models/llama-8b}" --dummy \
  --rate "${RATES:-4,8,16,24,32,48}" --duration "${DURATION:-15}" \
  --input-len "${INPUT:-128:1024}" --output-len "${OUTPUT:-64:256}" --slo "${SLO:-ttft=500,tpot=25}" \
  --client-processes "${PROCESSES:-2}" --warmup 8 --within "${WITHIN:-520}" \
  --out "$out/curve.jsonl" --plot "$out/curve.svg" --logs "$out/logs" --commit "${COMMIT:-}"
