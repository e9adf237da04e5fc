#!/usr/bin/env bash
# Measures one GPU end to end: two calibrations that must agree, every op of three models, a profile, the GPU tests.
#   OUT=folder benchmarks/measuring.sh MODELS     MODELS: folder with llama-1b, llama-8b and qwen3-0.6b (configs suffice)
set -u
models=$1 && mkdir -p "$OUT" && export PYTHONPATH=. COLUMNS=150
ridgeline() { timeout 170 python3 -m ridgeline "$@"; }

for run in 1 2; do
  XDG_CACHE_HOME="$OUT/$run" ridgeline calibrate --json >"$OUT/calibrate$run.json" || echo "FAILED calibrate $run"
done
python3 - "$OUT" <<'PYTHON'
import json, sys
one, two = (json.load(open(f"{sys.argv[1]}/calibrate{run}.json"))["measured"] for run in (1, 2))
for name in one:
    apart = abs(one[name] - two[name]) / max(one[name], two[name])
    print(f"{name:34} {one[name]:12.5g} {two[name]:12.5g} {apart:6.1%} {'APART' if apart > 0.03 else ''}")
PYTHON

export XDG_CACHE_HOME="$OUT/1"
for model in llama-1b llama-8b qwen3-0.6b; do
  for batch in 1 64; do
    ridgeline explain "$models/$model" --gpu H200 --batch $batch --context 1088 --measure >"$OUT/explain-$model-$batch.txt" \
      || echo "FAILED explain $model $batch"
    echo "$model batch $batch: $(grep -a total "$OUT/explain-$model-$batch.txt")"
  done
done
timeout 240 python3 -m ridgeline profile "$models/llama-1b" --load-format dummy --batch 8 --input 1024 --output 32 \
  --out "$OUT/profile" --ncu --ncu-kernels 12 || echo "FAILED profile"
gzip -f "$OUT/profile/trace.json" "$OUT/profile/memory.json"
timeout 150 python3 -m pytest -m gpu tests/bench/machine tests/bench/profile tests/worker -p no:cacheprovider || echo "FAILED tests"
