#!/usr/bin/env bash
# Fill a folder with the wheels that a bare machine with CUDA's torch, transformers and Python 3.12 lacks, and weigh it.
# Needs the .venv of scripts/setup.sh: DeepSpeed's wheel is made beside torch.
#   bash scripts/gpu_day/wheels.sh DIR
set -euo pipefail
python="$(dirname "${BASH_SOURCE[0]}")/../../.venv/bin/python"
folder=$1
mkdir -p "$folder"
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${platform}_x86_64"); done
for wanted in hjson pydantic==2.14.4 pydantic_core==2.50.5 annotated_types typing_inspection omegaconf==2.4.0 math_verify==0.9.0 \
    latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2 nh3 diffusers==0.42.1 importlib_metadata open_clip_torch==3.3.0 \
    ftfy wcwidth gymnasium==1.4.0 farama_notifications liger_kernel==0.8.5 mujoco==3.17.0 glfw pyopengl; do
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$folder" "$wanted"
done
# DeepSpeed is published as sources; of its extensions none is used, so none is built.
DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$folder" deepspeed==0.19.8
du -sh "$folder"
