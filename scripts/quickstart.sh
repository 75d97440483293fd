#!/usr/bin/env bash
# Set up .venv if need be, then teach a tiny vision-language model to read handwritten digits: a short supervised warm
# start, then GRPO. Arguments are overrides for the GRPO run, for example: bash scripts/quickstart.sh seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
seed=0
for override in "$@"; do case "$override" in seed=*) seed=${override#seed=} ;; esac; done
base=runs/visual_qa_digits_warm_start_seed$seed
run=runs/visual_qa_digits_seed$seed
rm -rf "$base" "$run"
.venv/bin/mmrl train configs/warm_starts/vlm/visual_qa_digits_warm_start.yaml run_dir="$base" seed="$seed"
.venv/bin/mmrl train configs/vlm/visual_qa_digits.yaml model.warm_start=null model.path="$base/final" run_dir="$run" "$@"
