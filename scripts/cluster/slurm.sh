#!/usr/bin/env bash
# One job of two hosts with eight GPUs each: sbatch scripts/cluster/slurm.sh [key=value ...]
# The same line again goes on from the last checkpoint (checkpoint.resume=auto); so does Slurm's own requeue.
#SBATCH --job-name=mmrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source .venv/bin/activate
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
run=runs/vlm/visual_qa_geometry3k
# Five minutes before its time is over every task gets SIGTERM: a checkpoint is saved, end.json says "stopped".
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 \
    --rdzv_backend c10d --rdzv_endpoint "$head:29500" --rdzv_id "$SLURM_JOB_ID" \
    -m mmrl train visual_qa_geometry3k model.path=Qwen/Qwen2.5-VL-7B-Instruct engine.zero_stage=2 run_dir="$run" "$@" \
    || { grep --quiet '"state": "stopped"' "$run/end.json" && scontrol requeue "$SLURM_JOB_ID"; }
