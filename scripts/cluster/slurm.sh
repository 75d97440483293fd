#!/usr/bin/env bash
# One job of two hosts with eight GPUs each: sbatch scripts/cluster/slurm.sh [key=value ...]
# The same line again goes on from the last checkpoint (checkpoint.resume=auto); so does Slurm's own requeue.
# For another job copy this file and change the recipe, its keys and the numbers below.
#SBATCH --job-name=mmrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
#SBATCH --output=mmrl-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source .venv/bin/activate
recipe=visual_qa_geometry3k
run=runs/$recipe
for word in "$@"; do case $word in run_dir=*) run=${word#run_dir=} ;; esac; done
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))                        # jobs that share a host need different ports
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK                 # srun does not take it from the job by itself
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270                      # seconds until torchrun kills ranks; 30 by default
# Five minutes before its time is over every task gets SIGTERM: a checkpoint is saved, end.json says "stopped".
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" \
    --rdzv_backend c10d --rdzv_endpoint "${hosts[0]}:$port" --rdzv_id "$SLURM_JOB_ID" \
    -m mmrl train "$recipe" model.path=Qwen/Qwen2.5-VL-7B-Instruct engine.zero_stage=2 "$@" run_dir="$run" \
    || { grep --quiet '"state": "stopped"' "$run/end.json" && scontrol requeue "$SLURM_JOB_ID"; }
