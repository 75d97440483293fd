"""Processor seconds and memory of a Flow-GRPO step: mmrl beside the inner loop of flow_grpo, on the CPU.

    .venv/bin/python scripts/bench/generation_peers.py [--steps 12] [--threads 1] [--json PATH]

Both arms train LoRA adapters on the same StableDiffusion3Pipeline, made in code, with guidance and a KL term to the
model without adapters. Each arm lives in a process of its own; step by step they take turns, so that both see the
machine in the same mood.

The same in both: pipeline, adapters, prompts; two groups of ten images of ten steps, of which nine are trained; noise
0.7, guidance 4.5, clip range 1e-5; the reward, an image's size as JPEG; advantages normalised by group; two optimizer
steps of AdamW a step, gradients clipped at 1; fp32, SDPA, threads; images are decoded; ten images at once when
sampling. A forward of training holds nine decisions of one image (mmrl) or one decision of nine or ten images
(flow_grpo): a micro-batch of the same size. Prompts are encoded before the clock starts.

`flow_grpo` is written here after the published algorithm (arXiv 2505.05470 and the loop of its authors' train_sd3.py):
both halves of guidance are one batch, of which the unconditional one is differentiated to a gradient of zero;
log-probabilities of the old policy are those that sampling found; the reference is the network with its adapters
disabled, asked beside every step; every time step has its own backward pass. What costs time in theirs and not here:
accelerate, embeddings of every repeated prompt, looking noise levels up by value, logging, averages of the weights.
mmrl runs as `mmrl train` does, with DeepSpeed, statistics, guards and its log.

cpu_s is processor time of a step, of it sample_s that of sampling; growth_mib the peak of resident memory less what the
process held when its model was loaded. Ratios are formed of steps side by side, the first not counted; median
(least .. greatest).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/diffusion/image_sd35_ocr.yaml"
PROMPTS = ["two red circles", "one blue square"]
GROUP, STEPS, TRAINED, GUIDANCE, NOISE, CLIP, BETA, LR = 10, 10, 9, 4.5, 0.7, 1e-5, 0.004, 3e-4
SIZE, PATCH, WIDTH, DEPTH = 16, 2, 192, 3
RANK, TARGETS = 8, ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
ARMS = ("mmrl", "flow_grpo")


def main() -> None:
    options = arguments()
    if options.arm is not None:
        return child(options)
    with tempfile.TemporaryDirectory(prefix="mmrl-peers-") as folder:
        Arm("build", Path(folder), options).wait()
        arms = {name: Arm(name, Path(folder), options) for name in ARMS}
        for number in range(options.steps + 1):
            for arm in list(arms.values())[:: 1 if number % 2 == 0 else -1]:
                arm.step()
        found = {name: arm.wait() for name, arm in arms.items()}
    report = summary(found)
    print(table(report))
    if options.json:
        Path(options.json).write_text(json.dumps({"load": os.getloadavg()[0], **report, "steps": found}) + "\n")
    return None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Flow-GRPO step of mmrl beside flow_grpo's.")
    parser.add_argument("--steps", type=int, default=12, help="measured steps; one more comes before them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="file for the numbers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override for mmrl")
    parser.add_argument("--arm", choices=("build", *ARMS), help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(given)


class Arm:
    """A child process, which waits for a line before each of its steps and writes one after it."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, f"--arm={name}", f"--folder={folder}", f"--steps={options.steps}"]
        command += [f"--threads={options.threads}", *(f"--set={one}" for one in options.set)]
        self.log, self.found = folder / f"{name}.txt", folder / f"{name}.json"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def step(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            self.wait()

    def wait(self) -> dict[str, Any]:
        """What it measured, when it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait() != 0:
            sys.exit(f"{self.log.stem} failed:\n{self.log.read_text()[-3000:]}")
        return json.loads(self.found.read_text()) if self.found.is_file() else {}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and extremes over steps, of each arm and of the ratios of mmrl to flow_grpo."""
    mine, other = found["mmrl"], found["flow_grpo"]
    ratios = {key: spread([a / b for a, b in zip(values, other[key], strict=True)]) for key, values in mine.items()}
    arms = {arm: {key: spread(values) for key, values in one.items()} for arm, one in found.items()}
    return arms | {"mmrl / flow_grpo": ratios}


def spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def table(report: dict[str, Any]) -> str:
    keys = list(next(iter(report.values())))
    lines = [f"| | {' | '.join(keys)} |", "| --- |" + " --- |" * len(keys)]
    for name, values in report.items():
        cells = [f"{m:.3g} ({low:.3g} .. {high:.3g})" if low < high else f"{m:.3g}" for m, low, high in values.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- the children ---


def child(options: argparse.Namespace) -> None:
    import torch

    told = os.fdopen(os.dup(1), "w", buffering=1)  # the parent hears nothing but ends of steps
    os.dup2(2, 1)
    torch.set_num_threads(options.threads)
    folder = Path(options.folder)
    if options.arm == "build":
        return build(folder)
    meter = Meter(told)
    {"mmrl": train_mmrl, "flow_grpo": train_flow_grpo}[options.arm](folder, options, meter)
    (folder / f"{options.arm}.json").write_text(json.dumps(meter.result()))
    return None


def build(folder: Path) -> None:
    from mmrl.tasks.image_generation.tiny.pipeline import stable_diffusion_3

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    sizes = {"channels": 3, "size": SIZE, "patch": PATCH, "width": WIDTH, "depth": DEPTH}
    stable_diffusion_3(str(folder / "model"), 0, words=words, **sizes)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "held_out.txt").write_text("one red circle\n")


class Meter:
    """Processor time of each step, and how far memory grew above what the loaded model takes."""

    def __init__(self, told: Any = None) -> None:
        """told: a stream that hears of every end of a step, which then waits for a line; None: no step waits."""
        self.told = told
        self.steps: list[float] = []
        self.sampling: list[float] = []

    def start(self) -> None:
        """When the model is loaded: waits for the first turn."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.held = memory("VmRSS")
        self.turn()

    def turn(self) -> None:
        if self.told is not None:
            sys.stdin.readline()
        self.began = time.process_time()
        self.sampled = 0.0

    def sample(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, whose time counts as sampling."""
        started = time.process_time()
        result = work()
        self.sampled += time.process_time() - started
        return result

    def end_step(self) -> None:
        self.steps.append(time.process_time() - self.began)
        self.sampling.append(self.sampled)
        if self.told is not None:
            self.told.write("done\n")
        self.turn()

    def result(self) -> dict[str, list[float]]:
        """The first step warms up."""
        peak = memory("VmHWM")
        return {
            "cpu_s": self.steps[1:],
            "sample_s": self.sampling[1:],
            "growth_mib": [peak - self.held],
            "peak_mib": [peak],
        }


def memory(name: str) -> float:
    """MiB of resident memory now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def train_mmrl(folder: Path, options: argparse.Namespace, meter: Meter) -> None:
    from mmrl import config, trainer
    from mmrl.cli.training import train

    class Timed(trainer.Trainer):
        def loop(self) -> None:
            meter.start()
            rollout = self.collector.next
            self.collector.next = lambda *given: meter.sample(lambda: rollout(*given))  # type: ignore[method-assign]
            super().loop()

        def log(self, *given: Any) -> None:
            super().log(*given)
            meter.end_step()

    trainer.Trainer = Timed  # type: ignore[misc]
    shutil.rmtree(folder / "run", ignore_errors=True)
    train(config.load(CONFIG, [*overrides(folder, options), *options.set]))


def overrides(folder: Path, options: argparse.Namespace) -> list[str]:
    """What differs from the recipe for Stable Diffusion 3.5."""
    same = {
        "run_dir": folder / "run",
        "steps": options.steps + 1,
        "threads": options.threads,
        "model.path": folder / "model",
        "model.dtype": "float32",
        "model.text_tokens": 1,
        "model.activation_checkpointing": "false",
        "model.decoding": "whole",
        "model.lora": json.dumps({"rank": RANK, "alpha": 2 * RANK, "targets": TARGETS}),
        "task.data": json.dumps(
            {"type": "prompts", "train": str(folder / "prompts.txt"), "eval": str(folder / "held_out.txt")}
        ),
        "task.rewards": '[{"name": "jpeg_compressibility"}]',
        "task.accuracy": '{"name": "jpeg_compressibility"}',
        "rollout.prompts": len(PROMPTS),
        "rollout.group_size": GROUP,
        "rollout.micro_batch": GROUP,
        "rollout.score_in_background": "false",
        "denoising.resolution": SIZE,
        "denoising.steps": STEPS,
        "denoising.guidance": GUIDANCE,
        "denoising.likelihood.window": '{"type": "all"}',
        "denoising.likelihood.transition.noise": NOISE,
        "algorithm.surrogate.low": CLIP,
        "algorithm.surrogate.high": CLIP,
        "algorithm.minibatches": 2,
        "optim.lr": LR,
        "optim.ema": "null",
        "engine.zero_stage": 0,
        "engine.micro_batch": 1,
        "evaluation.before": "false",
        "evaluation.every": 0,
        "evaluation.prompts": 1,
        "denoising.evaluation_steps": 1,
        "checkpoint.every": 0,
        "checkpoint.best": "false",
        "log.samples_every": 0,
    }
    return [f"{key}={value}" for key, value in same.items()]


def train_flow_grpo(folder: Path, options: argparse.Namespace, meter: Meter) -> None:
    import torch
    from diffusers import StableDiffusion3Pipeline
    from peft import LoraConfig, get_peft_model

    from mmrl.rewards.visual.images import jpeg_compressibility

    torch.manual_seed(0)
    absent = dict.fromkeys(("text_encoder_3", "tokenizer_3", "feature_extractor", "image_encoder"))
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(folder / "model", **absent)
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        part.requires_grad_(False)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian", target_modules=TARGETS)
    network: Any = get_peft_model(pipe.transformer, lora)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=1e-4)
    reward = jpeg_compressibility()
    with torch.no_grad():
        texts, _, pooled, _ = pipe.encode_prompt(
            [*PROMPTS, ""], None, None, device="cpu", do_classifier_free_guidance=False, max_sequence_length=1
        )
    pipe.scheduler.set_timesteps(STEPS)
    peer = FlowGRPO(pipe, network, texts[:-1], pooled[:-1], texts[-1:], pooled[-1:])
    meter.start()
    for _ in range(options.steps + 1):
        samples = meter.sample(lambda: peer.sample(reward))
        peer.train(samples, optimizer, trained)
        meter.end_step()


class FlowGRPO:
    """The loop over one batch of images. Latents are [image, channel, height, width]."""

    def __init__(self, pipe: Any, network: Any, texts: Any, pooled: Any, no_text: Any, no_pooled: Any) -> None:
        """texts, pooled: embeddings of the prompts; no_text, no_pooled: of the empty one, a batch of one."""
        self.pipe, self.network = pipe, network
        self.texts, self.pooled, self.no_text, self.no_pooled = texts, pooled, no_text, no_pooled
        self.sigmas, self.times = pipe.scheduler.sigmas, pipe.scheduler.timesteps

    def predict(self, x: Any, step: int, prompts: Any) -> Any:
        """The guided velocity; both halves are one batch, and no gradient is wanted of the unconditional one."""
        import torch

        count = len(x)
        (both,) = self.network(
            hidden_states=torch.cat([x, x]),
            timestep=self.times[step].expand(2 * count),
            encoder_hidden_states=torch.cat([self.no_text.expand(count, -1, -1), self.texts[prompts]]),
            pooled_projections=torch.cat([self.no_pooled.expand(count, -1), self.pooled[prompts]]),
            return_dict=False,
        )
        without, with_text = both.float().chunk(2)
        without = without.detach()
        return without + GUIDANCE * (with_text - without)

    def step(self, x: Any, v: Any, step: int, x_next: Any = None) -> tuple[Any, Any, Any, Any]:
        """(x_next, its log-probability [image], the mean, g) of the stochastic step; without `x_next` it is drawn."""
        import torch

        sigma, after = self.sigmas[step], self.sigmas[step + 1]
        dt = after - sigma
        below_one = self.sigmas[1] if sigma == 1 else sigma
        g = (sigma / (1 - below_one)).sqrt() * NOISE
        mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
        std = g * (-dt).sqrt()
        if x_next is None:
            x_next = mean + std * torch.randn_like(x)
        logp = torch.distributions.Normal(mean, std, validate_args=False).log_prob(x_next.detach())
        return x_next, logp.mean((1, 2, 3)), mean, g

    def sample(self, reward: Any) -> dict[str, Any]:
        """A group of images a prompt: latents of all steps, log-probabilities, advantages."""
        import torch

        from mmrl.rollouts import Prompt, Sample

        made: list[dict[str, Any]] = []
        for prompt in range(len(PROMPTS)):
            prompts = torch.full((GROUP,), prompt)
            with torch.no_grad():
                latents, logps = [torch.randn(GROUP, 3, SIZE, SIZE)], []
                for step in range(STEPS):
                    v = self.predict(latents[-1], step, prompts)
                    x, logp, _, _ = self.step(latents[-1], v, step)
                    latents.append(x)
                    logps.append(logp)
                pixels = self.pipe.vae.decode(latents[-1], return_dict=False)[0]
                images = self.pipe.image_processor.postprocess(pixels, output_type="pt")
            earned = torch.tensor([reward(Sample(Prompt("", ""), image=one)) for one in images])
            advantage = (earned - earned.mean()) / (earned.std() + 1e-4)
            chain = torch.stack(latents, 1)
            made.append(
                {
                    "prompts": prompts,
                    "x": chain[:, :-1],
                    "x_next": chain[:, 1:],
                    "logp": torch.stack(logps, 1),
                    "advantage": advantage,
                }
            )
        return {key: torch.cat([one[key] for one in made]) for key in made[0]}

    def train(self, samples: dict[str, Any], optimizer: Any, trained: list[Any]) -> None:
        """Two optimizer steps, each of half of the images, whose gradient is gathered over their time steps."""
        import torch

        order = torch.randperm(len(samples["prompts"]))
        for rows in order.chunk(2):
            part = {key: value[rows] for key, value in samples.items()}
            for step in range(TRAINED):
                loss = self.loss(part, step) / TRAINED
                loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def loss(self, part: dict[str, Any], step: int) -> Any:
        """Of one time step of some images: the clipped surrogate and the KL of the means."""
        import torch

        x, x_next = part["x"][:, step], part["x_next"][:, step]
        _, logp, mean, g = self.step(x, self.predict(x, step, part["prompts"]), step, x_next)
        with torch.no_grad(), self.network.disable_adapter():
            _, _, reference, _ = self.step(x, self.predict(x, step, part["prompts"]), step, x_next)
        ratio = (logp - part["logp"][:, step]).exp()
        advantage = part["advantage"].clamp(-5, 5)
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        kl = ((mean - reference) ** 2).mean((1, 2, 3)) / (2 * g**2)
        return surrogate + BETA * kl.mean()


if __name__ == "__main__":
    main()
