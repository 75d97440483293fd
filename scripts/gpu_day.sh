#!/usr/bin/env bash
# The first hour on a GPU: are the kernels right and fast, does training at real shapes run, learn, fit and how fast.
# Needs Python with torch 2.11 or newer; no network, no weights, no data. Writes gpu_day.json and gpu_day.md into --out.
#   bash scripts/gpu_day.sh --out DIR [--wheels DIR] [--parts kernels,learning,...] [--small]
# --wheels: a folder that scripts/gpu_day/wheels.sh filled, for machines without a network. --small: tiny shapes, for a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=build/gpu_day wheels="" rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out=$2; shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
scratch=${GPU_DAY_SCRATCH:-${TMPDIR:-/tmp}/mmrl_gpu_day}
mkdir -p "$out" "$scratch/site/mmrl"
if [ -n "$wheels" ] && [ ! -d "$scratch/wheels" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$scratch/wheels" "$wheels"/*.whl
fi
# The checkout as the package that is installed from it: tasks, sims and configs lie in mmrl.
ln -sfn "$PWD"/mmrl/* "$PWD"/tasks "$PWD"/sims "$PWD"/configs "$scratch/site/mmrl/"
export PYTHONPATH="$scratch/site:$PWD:$scratch/wheels" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
python3 -m scripts.gpu_day --out "$out" --scratch "$scratch" "${rest[@]}"
