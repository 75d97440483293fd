"""The checks of `mmrl doctor --gpu`. `python -m mmrl.doctor.checks NAME FOLDER` runs one and writes its findings."""

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
from mmrl.doctor.findings import Finding, Status, advice_for
from mmrl.errors import UserError, describe_error
from mmrl.runtime.installation import extra_command

STEPS = 3
GPU_ONLY: Final = "needs a GPU"
SMALL = ["steps=3", "evaluation.every=0", "evaluation.before=false", "evaluation.prompts=4", "checkpoint.best=false"]
SMALL += ["checkpoint.every=0", "checkpoint.resume=false", "log.samples_every=0", "threads=1"]
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


def ranks(folder: Path) -> list[Finding]:
    """Checks that each rank has its own GPU and that ranks reach each other."""
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
        return [Finding("ranks reach each other", "fails", message, advice_for(message))]
    report = json.loads((folder / "ranks.json").read_text())
    return judged(report, gpus)


def judged(report: dict[str, Any], gpus: int) -> list[Finding]:
    """Returns findings from the report of rank 0: GPU, host and process of each rank, and times of collectives."""
    backend, speed = report["backend"], f"{report['gigabytes_per_second']:.2f} GB/s summing {report['mebibytes']} MiB"
    works = Finding(f"{backend} sums over {len(report['ranks'])} ranks", "works", speed)
    objects = Finding("gloo carries objects", "works", f"{report['objects_ms']:.1f} ms a gathering")
    if not gpus:
        missing = [Finding(name, GPU_ONLY, "no GPU here") for name in ("a GPU for each rank", "NCCL sums over ranks")]
        return [*missing, works, objects]
    uuids = [rank["gpu"] for rank in report["ranks"]]
    if len(set(uuids)) < len(uuids):
        message = f"ranks share GPUs: {', '.join(uuids)}"
        advice = "see CUDA_VISIBLE_DEVICES; start one rank a GPU with torchrun, which sets LOCAL_RANK"
        return [Finding("a GPU for each rank", "fails", message, advice), works, objects]
    kinds = {rank["name"] for rank in report["ranks"]}
    if len(kinds) > 1:
        message, advice = (
            f"GPUs differ: {', '.join(sorted(kinds))}",
            "the smallest and slowest decides; take equal ones",
        )
        return [Finding("a GPU for each rank", "fails", message, advice), works, objects]
    return [Finding("a GPU for each rank", "works", f"{len(uuids)} x {kinds.pop()}"), works, objects]


def kernel(folder: Path) -> list[Finding]:
    """Checks that kernels are built and right, and measures their speed."""
    from mmrl import kernels
    from mmrl.doctor.speed import table

    findings = []
    for line in kernels.status():
        kind, _, message = line.partition(": ")
        name = f"{kind} kernels are built and right"
        if "numerically right" in message:
            findings.append(Finding(name, "works", message))
        elif "no GPU here" in message:
            findings.append(Finding(name, GPU_ONLY, message))
        else:
            findings.append(Finding(name, "fails", message, advice_for(message)))
    lines = table("cuda" if has_gpu() else "cpu")
    if not has_gpu():
        findings.append(Finding("CUDA kernels are fast", GPU_ONLY, "no GPU here"))
    where = "CUDA" if has_gpu() else "C++"
    return [
        *findings,
        Finding(f"{where} kernels beside eager and compiled", "works", "see the table", lines=tuple(lines)),
    ]


def vllm_colocated(folder: Path) -> list[Finding]:
    """Checks that weights arrive and likelihoods agree; on a GPU also that the engine sleeps during training."""
    return with_vllm(folder, "vllm_colocated", ["vLLM sleeps and wakes", "weights go from GPU to GPU"])


def vllm_server(folder: Path) -> list[Finding]:
    return with_vllm(folder, "vllm_server", ["a server of vLLM has a GPU of its own"])


def with_vllm(folder: Path, kind: str, on_gpus: list[str]) -> list[Finding]:
    """Trains a tiny language model with vLLM as the generator. on_gpus: names of checks that the same run answers on
    GPUs."""
    name = f"{kind} gets weights and answers"
    if importlib.util.find_spec("vllm") is None:
        advice = "pip install 'vllm==0.32.0', or keep rollout.generator=transformers"
        return [Finding(name, "not installed", "no vLLM here", advice)]
    generator = {"type": kind, "cache_gib": 0.5}
    import torch

    if kind == "vllm_server" and has_gpu():
        if torch.cuda.device_count() < 2:
            return [Finding(name, GPU_ONLY, "needs a second GPU beside the one that trains")]
        generator["first_device"] = 1
    recipe = {**LANGUAGE, "rollout": {**LANGUAGE["rollout"], "generator": generator}}
    finding = trained(folder, name, recipe, [], metrics=("generation/logp_gap", "time/synchronise"))
    if not has_gpu():
        return [finding, *(Finding(other, GPU_ONLY, "no GPU here") for other in on_gpus)]
    return [finding, *(Finding(other, finding.status, finding.message, finding.advice) for other in on_gpus)]


def renderers(folder: Path) -> list[Finding]:
    """Checks MuJoCo's images, on the rank's GPU where there is one."""
    if importlib.util.find_spec("mujoco") is None:
        return [Finding("MuJoCo renders", "not installed", "no MuJoCo here", extra_command("mujoco"))]
    from mmrl import sims

    if has_gpu():
        os.environ["MUJOCO_GL"] = "egl"
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", "0")
    begun = time.perf_counter()
    with sims.build("tabletop", 2, {"image_size": 64}) as sim:
        sim.reset([0, 1], ["reach", "reach"])
        lit = int(sim.observation().images.max())
    backend = sims.renderers()["mujoco"].text
    message = f"by {backend}, two images in {time.perf_counter() - begun:.1f} s"
    if lit == 0:
        return [Finding("MuJoCo renders", "fails", f"images by {backend} are black", advice_for("EGL"))]
    works = Finding("MuJoCo renders", "works", message)
    if not has_gpu():
        return [works, Finding("EGL on the rank's GPU", GPU_ONLY, f"no GPU here; {backend} renders on the CPU")]
    status: Status = "works" if backend == "egl" else "fails"
    return [works, Finding("EGL on the rank's GPU", status, message, "" if status == "works" else advice_for("EGL"))]


def physics(folder: Path) -> list[Finding]:
    """Checks ManiSkill's simulation, on the GPU where there is one."""
    if importlib.util.find_spec("mani_skill") is None:
        return [Finding("ManiSkill steps", "not installed", "no ManiSkill here", extra_command("maniskill"))]
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
        begun = time.perf_counter()
        for _ in range(10):
            sim.step(np.zeros((rows, 1, sim.simulator.action_dim)))
        rate = 10 * rows / (time.perf_counter() - begun)
    finding = Finding(f"ManiSkill steps with {backend}", "works", f"{rate:.0f} steps/s in {rows} rows")
    return [finding] if has_gpu() else [finding, Finding("ManiSkill steps with physx_cuda", GPU_ONLY, "no GPU here")]


def language(folder: Path) -> list[Finding]:
    return recipe(folder, "a vision-language model trains", LANGUAGE)


def images(folder: Path) -> list[Finding]:
    return recipe(folder, "a diffusion model trains", IMAGES)


def robots(folder: Path) -> list[Finding]:
    if importlib.util.find_spec("mujoco") is None:
        return [Finding("a robot's policy trains", "not installed", "no MuJoCo here", extra_command("mujoco"))]
    return recipe(folder, "a robot's policy trains", ROBOTS)


def recipe(folder: Path, name: str, settings: Recipe) -> list[Finding]:
    """Trains a tiny model for three steps; on a GPU in bfloat16, with memory compared to the estimate."""
    overrides = ["model.dtype=bfloat16", "engine.zero_stage=1"] if has_gpu() and settings is not ROBOTS else []
    finding = trained(folder, name, settings, overrides)
    if settings is ROBOTS:  # its network is too small for a memory estimate
        return [finding]
    return [finding, *memory(folder, name, folder / "recipe.yaml", overrides, finding)]


CHECKS: dict[str, Callable[[Path], list[Finding]]] = {
    "ranks": ranks,
    "kernels": kernel,
    "renderers": renderers,
    "physics": physics,
    "language": language,
    "images": images,
    "robots": robots,
    "vllm_colocated": vllm_colocated,
    "vllm_server": vllm_server,
}


# --- training for three steps ---


def trained(folder: Path, name: str, settings: Recipe, overrides: list[str], metrics: tuple[str, ...] = ()) -> Finding:
    """Runs `mmrl train` in a process of its own. metrics: of its last step, for the report."""
    import yaml

    file, run = folder / "recipe.yaml", folder / "run"
    file.write_text(yaml.safe_dump(settings))
    return of_run(name, file, run, [*SMALL, *overrides], metrics)


def of_run(name: str, file: Path, run: Path, overrides: list[str], metrics: tuple[str, ...] = ()) -> Finding:
    """Trains a configuration in a process of its own, and returns the finding on its metrics, or on its last line of
    stderr."""
    command = [sys.executable, "-m", "mmrl", "train", str(file), *overrides, f"run_dir={run}"]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.perf_counter() - begun
    if done.returncode:
        message = last_line(done.stderr)
        return Finding(name, "fails", message, advice_for(message))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return of_rows(name, [row for row in rows if "loss" in row], took, metrics)


def of_rows(name: str, steps: list[dict[str, float]], took: float, metrics: tuple[str, ...] = ()) -> Finding:
    """Judges a run by the metrics of its steps."""
    if len(steps) < STEPS:
        return Finding(name, "fails", f"{len(steps)} of {STEPS} steps were made", advice_for("time limit"))
    last = steps[-1]
    gap = max(step.get("surrogate/ratio_gap_max", 0.0) for step in steps)
    parts = [f"{STEPS} steps in {took:.0f} s"]
    parts += [f"{key} {last[key]:.3g}" for key in ("memory/gpu_gib", "memory/host_gib", *metrics) if key in last]
    if not all(step["grad_norm"] == step["grad_norm"] for step in steps):
        return Finding(name, "fails", f"a gradient is not finite ({', '.join(parts)})", "set model.dtype=float32")
    if gap > 0:
        parts.append(f"the ratio is {gap:.1e} away from 1 before an update")
    return Finding(name, "works", ", ".join(parts))


def against_estimate(name: str, measured: float, estimated: float) -> Finding:
    """Judges a memory estimate, in GiB. It may be too high by 20 % and 1 GiB, and too low by 5 %."""
    message = f"{measured:.1f} GiB measured, {estimated:.1f} GiB estimated"
    if measured > 1.05 * estimated:
        return Finding(name, "fails", message, "the estimate is too low: lower engine.micro_batch, and report it")
    if estimated > 1.2 * measured + 1:
        return Finding(
            name, "fails", message, "the estimate is too high: a larger engine.micro_batch may fit; report it"
        )
    return Finding(name, "works", message)


def of_recipe(folder: Path, config: str, overrides: list[str]) -> list[Finding]:
    """Trains the user's recipe at its size for three steps, with memory compared to the estimate."""
    file = Path(config)
    name = f"{file.stem} trains"
    finding = of_run(name, file, folder / "run", [*SMALL, *overrides])
    return [finding, *memory(folder, name, file, overrides, finding)]


def memory(folder: Path, name: str, file: Path, overrides: list[str], finding: Finding) -> list[Finding]:
    """Compares the GPU memory of a run to the estimate; no finding where the run failed."""
    name = f"{name}: memory as estimated"
    if not has_gpu():
        return [Finding(name, GPU_ONLY, "no GPU here")]
    if finding.status != "works":
        return []
    import torch

    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    measured = max(json.loads(row).get("memory/gpu_gib", 0.0) for row in rows)
    size = torch.cuda.get_device_properties(0).total_memory
    return [against_estimate(name, measured, estimated(file, overrides, size, folder / "model"))]


def estimated(file: Path, overrides: list[str], size: float, folder: Path) -> float:
    """Returns the estimated GiB that torch allocates for a job on one GPU of `size` bytes. folder: where the model is
    written if the job builds one (`model.build`)."""
    from mmrl.config import load
    from mmrl.doctor.memory_plan import CONTEXT, Gpu, Peaks, described
    from mmrl.engine.memory import GIB
    from mmrl.settings import locate

    job = load(file, [*overrides, "run_dir=none"])
    path = job.model.path
    if path is None:
        assert job.model.build is not None
        locate(job.model.build, "model.build")(str(folder), seed=job.seed)
        path = str(folder)
    return (described(job, path, 1, Gpu("this GPU", size), Peaks()).most - CONTEXT) / GIB


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["it says nothing"])[-1][:300]


def main() -> None:
    """Runs one check by name in this process, and writes findings.json into a folder."""
    name, folder, *more = sys.argv[1:]
    target = Path(folder)
    try:
        findings = CHECKS[name](target) if name in CHECKS else of_recipe(target, more[0], more[1:])
    except UserError as error:
        message = " ".join(str(error).split())
        findings = [Finding(name, "fails", message, advice_for(message))]
    except Exception as error:  # of any library: the finding
        findings = [Finding(name, "fails", describe_error(error), advice_for(describe_error(error)))]
    (target / "findings.json").write_text(json.dumps([finding.plain() for finding in findings]))


if __name__ == "__main__":
    main()
