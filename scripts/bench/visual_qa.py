"""Rollouts a second and peak memory of a GRPO step on the CPU: mmrl, TRL's GRPOTrainer, and a plain PyTorch loop.

    .venv/bin/python scripts/bench/visual_qa.py --steps 20 --rounds 3 [--threads 2] [--json PATH]

Each arm trains the same tiny vision-language model, warm-started once by mmrl, in a process of its own, in turns. TRL
has its own environment, made at the first run under build/bench-trl with the versions of constraints.txt.

The same in all arms: weights and processor; questions and their order; chat template, prompt tokens and images; 16
prompts x 8 rollouts of at most 4 tokens (--prompts, --group, --length) at temperature 1, the tokens that mmrl never
samples suppressed; exact match, computed by the same code; advantages normalised by the group's standard deviation;
token-mean loss, one update a step on one micro-batch; no KL term; AdamW, constant learning rate, gradients clipped at
1; fp32, SDPA, threads; the first two steps not timed; and the greedy evaluation, by `mmrl eval`, of the weights that
each arm leaves behind.

What differs: the random numbers, hence the rollouts. mmrl and TRL compute entropies and statistics, `plain` does not.
mmrl and `plain` leave suppressed tokens out of the softmax when they train; TRL has no such option. TRL takes its
images from a `datasets.Dataset`, which decodes them when they are used, as its users do; mmrl draws them when they
are used; `plain` has them at hand. TRL runs without gradient checkpointing, progress bar, logging and saving, which its
users mostly have on; mmrl writes its log. `plain` is not a trainer, only the least that one has to do with
transformers' own generate and forward on every rollout: a yardstick for what a framework adds or saves.

With --width the model is a larger one of random weights, and nothing is expected of its answers: with --cells 4 --scale
8, images of 256 tokens, prompts are of about 300 tokens, and with --length 256 most responses are as long as that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/bench-trl"
MMRL = [sys.executable, "-m", "mmrl"]
CONFIG = ROOT / "configs/warm_starts/vlm/visual_qa_digits_warm_start.yaml"
TRL = ["torch", "torchvision", "transformers", "accelerate", "datasets", "scikit-learn", "pydantic", "trl==1.16.0"]
WARM_UP = 2  # steps not timed
SHARED = ("steps", "threads", "lr", "prompts", "group", "length", "cells", "scale")  # what children are told


def data(options: argparse.Namespace) -> dict[str, Any]:
    shown = {"questions": ["sum", "largest", "above_five"], "cells": options.cells, "scale": options.scale}
    return {**shown, "careless": 0.0, "train_size": 100_000, "eval_size": 10_000}


def asked(options: argparse.Namespace) -> list[str]:
    """`data` as overrides."""
    return [f"task.data.{key}={json.dumps(value)}" for key, value in data(options).items()]


def main() -> None:
    options = arguments()
    if options.arm is not None:
        return child(options)
    arms = options.arms.split(",")
    make_environment()
    base = make_base(options.warm_start) if options.width is None else make_model(options.width, options.layers)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        for place in range(len(arms)):
            arm = arms[(number + place) % len(arms)]
            results[arm].append(result := measure(arm, base, number, options))
            print(f"round {number + 1}  {arm:<6}", "  ".join(f"{k} {v:.3f}" for k, v in result.items()), flush=True)
    summary = summarise(results, options)
    print(table(summary))
    if options.json:
        Path(options.json).write_text(json.dumps(summary, indent=2) + "\n")
    return None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="mmrl, TRL and a plain loop on the same GRPO steps.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument(
        "--warm-start", type=int, default=200, help="supervised steps before RL, the same for all libraries"
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts of each prompt")
    parser.add_argument("--length", type=int, default=4, help="largest number of tokens of a response")
    parser.add_argument("--cells", type=int, default=2, help="number of digits in an image")
    parser.add_argument("--scale", type=int, default=1, help="side of a digit, in tokens")
    parser.add_argument("--width", type=int, help="use a model of random weights of this width, with --layers layers")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=2000, help="number of questions for the evaluation at the end")
    parser.add_argument("--arms", default="mmrl,trl,plain")
    parser.add_argument("--json", help="file for the numbers")
    for name in ("--arm", "--base", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must exceed {WARM_UP}, the steps that are not timed")
    return options


# --- the driver: standard library only, so that its own memory does not count in its children's peaks ---


def make_environment() -> None:
    """TRL's own virtual environment, with mmrl's versions of what both need."""
    constraints = ROOT / "constraints.txt"
    want = hashlib.sha256((" ".join(TRL) + constraints.read_text()).encode()).hexdigest()
    stamp = BUILD / "stamp"
    if stamp.is_file() and stamp.read_text() == want:
        return
    uv = shutil.which("uv") or str(ROOT / ".venv/uv/bin/uv")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([uv, "venv", "--quiet", "--allow-existing", "--python", python, str(BUILD / "venv")], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(BUILD / "venv/bin/python")]
    subprocess.run([*install, "--constraint", str(constraints), *TRL], check=True)
    # Questions and the reward are mmrl's own, of which this needs no more than TRL does.
    subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
    stamp.write_text(want)


def make_base(steps: int) -> Path:
    run = BUILD / f"base-{steps}"
    if not (run / "final").is_dir():
        shutil.rmtree(run, ignore_errors=True)
        command = [*MMRL, "train", str(CONFIG), f"run_dir={run}", f"steps={steps}", "evaluation.before=false"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return run / "final"


def make_model(width: int, layers: int) -> Path:
    """A model like the tiny one, that wide and with room for long texts."""
    folder = BUILD / f"model-{width}-{layers}"
    shutil.rmtree(folder, ignore_errors=True)
    made = (
        "from mmrl.tasks.visual_qa.tiny.model import CELL, build_tokenizer; "
        "from mmrl.policies.vlm.tiny_qwen import Sizes, write; "
        f"write({str(folder)!r}, build_tokenizer(), Sizes(patch=CELL, width={width}, layers={layers}), seed=0)"
    )
    subprocess.run([sys.executable, "-c", made], check=True, cwd=ROOT)
    return folder


def measure(arm: str, base: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One arm for one round, in a fresh process, and the held-out accuracy of what it learned."""
    out = BUILD / "runs" / arm
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    python = BUILD / "venv/bin/python" if arm == "trl" else sys.executable
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **threads, **quiet}
    same = [f"--{name}={getattr(options, name)}" for name in SHARED]
    child_of = [f"--arm={arm}", f"--base={base}", f"--out={out}", f"--seed={seed}"]
    run([python, __file__, *same, *child_of], environment, out / "log.txt")
    held_out = [f"evaluation.prompts={options.held_out}", *asked(options), f"threads={options.threads}"]
    run([*MMRL, "eval", out / "final", CONFIG, *held_out], environment, out / "eval.txt")
    result = json.loads((out / "result.json").read_text())
    return result | {"accuracy": json.loads((out / "final/evaluation.json").read_text())["evaluation/accuracy"]}


def run(command: list[Any], environment: dict[str, str], log: Path) -> None:
    with log.open("w") as file:
        code = subprocess.run(command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{log.read_text()[-3000:]}")


def summarise(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians and extremes over rounds; ratios are formed within a round, where the machine was in one mood."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    arms = {arm: {key: spread([r[key] for r in rounds]) for key in rounds[0]} for arm, rounds in results.items()}
    ratios = {
        f"mmrl / {arm}": {
            key: spread([mine[key] / other[key] for mine, other in zip(results["mmrl"], rounds, strict=True)])
            for key in ("rollouts_per_second", "rollouts_per_cpu_s", "peak_mib", "growth_mib")
        }
        for arm, rounds in results.items()
        if arm != "mmrl" and "mmrl" in results
    }
    settings = {name: vars(options)[name] for name in (*SHARED, "rounds", "width", "layers")}
    return {"machine": machine(), "settings": settings, "arms": arms, "ratios": ratios, "rounds": results}


def machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def table(summary: dict[str, Any]) -> str:
    def cell(s: dict[str, float]) -> str:
        digits = 0 if s["median"] >= 20 else 2 if s["median"] >= 1 else 3
        return f"{s['median']:.{digits}f} ({s['min']:.{digits}f} .. {s['max']:.{digits}f})"

    settings = ", ".join(f"{k} {v}" for k, v in summary["settings"].items())
    lines = ["", summary["machine"], f"{settings}; median (min .. max) of rounds"]
    for part in (part for part in ("arms", "ratios") if summary[part]):
        columns = list(next(iter(summary[part].values())))
        lines += ["", " " * 14 + "".join(f"{c:>24}" for c in columns)]
        lines += [f"{n:<14}" + "".join(f"{cell(v[c]):>24}" for c in columns) for n, v in summary[part].items()]
    return "\n".join(lines)


# --- the children ---


def child(options: argparse.Namespace) -> None:
    """Train one arm, leave its weights in out/final and its numbers in out/result.json."""
    import torch

    torch.set_num_threads(options.threads)
    idle, ends, rewards = {"mmrl": train_mmrl, "trl": train_trl, "plain": train_plain}[options.arm](options)
    peak = peak_mib()
    assert len(ends) == len(rewards) == options.steps and torch.get_num_threads() == options.threads
    rollouts = options.prompts * options.group * (options.steps - WARM_UP)
    quarter = max(1, options.steps // 4)
    result = {
        "rollouts_per_second": rollouts / (ends[-1][0] - ends[WARM_UP - 1][0]),
        "rollouts_per_cpu_s": rollouts / (ends[-1][1] - ends[WARM_UP - 1][1]),  # blind to what else the machine does
        "peak_mib": peak,
        "growth_mib": peak - idle,  # over what the imports took
        "reward_first": statistics.mean(rewards[:quarter]),
        "reward_last": statistics.mean(rewards[-quarter:]),
    }
    (Path(options.out) / "result.json").write_text(json.dumps(result))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now() -> tuple[float, float]:
    """Wall clock and processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


# MiB after the imports; when each step ended; its mean reward
Outcome = tuple[float, list[tuple[float, float]], list[float]]


def train_mmrl(options: argparse.Namespace) -> Outcome:
    import mmrl.engine
    import mmrl.policies.vlm.policy  # noqa: F401
    from mmrl import config
    from mmrl.cli.training import train
    from mmrl.trainer import Trainer

    class Timed(Trainer):
        def log(self, *given: Any) -> None:
            super().log(*given)
            ends.append(now())

    idle, run = peak_mib(), Path(options.out)
    ends: list[tuple[float, float]] = []
    mmrl.trainer.Trainer = Timed  # type: ignore[misc]
    overrides = {
        "run_dir": run,
        "seed": options.seed,
        "steps": options.steps,
        "threads": options.threads,
        "model.build": "null",
        "model.path": options.base,
        "algorithm.type": "grpo",
        "rollout.prompts": options.prompts,
        "rollout.group_size": options.group,
        "rollout.max_response_length": options.length,
        "rollout.max_idle_steps": options.steps + 1,  # a model of random weights earns nothing
        "optim.lr": options.lr,
        "optim.warmup_steps": 0,
        "optim.schedule": "constant",
        "engine.micro_batch": options.prompts * options.group,
        "evaluation.before": "false",
        "evaluation.prompts": 1,  # the one evaluation after the last step is not timed
        "checkpoint.every": 0,
        "checkpoint.best": "false",
        "log.samples_every": 0,
    }
    train(config.load(CONFIG, [*asked(options), *(f"{key}={value}" for key, value in overrides.items())]))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return idle, ends, [row["accuracy"] for row in rows if "time/step" in row]


def questions(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The task, and the prompts of all steps in mmrl's order."""
    from mmrl.prompts.sampler import Permutation
    from mmrl.tasks.visual_qa.settings import DigitsData, VisualQASettings

    task = VisualQASettings(data=DigitsData(**data(options))).build(options.seed)
    assert task.train is not None
    order = Permutation()
    order.start(len(task.train), options.seed)
    return task, [task.train[index] for index in order.draw(options.steps * options.prompts)]


def score(task: Any, prompts: list[Any], responses: list[str], length: int) -> list[float]:
    from mmrl.rollouts import Sample

    pairs = zip(prompts, responses, strict=True)
    return task.accuracy([Sample(p, r, 0, False, length) for p, r in pairs]).tolist()


def load_model(path: str) -> tuple[Any, Any, list[int]]:
    """Model, processor and the tokens that stand for no text."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    processor = AutoProcessor.from_pretrained(path)
    special = {number for number, token in processor.tokenizer.added_tokens_decoder.items() if token.special}
    return model, processor, sorted(special - {processor.tokenizer.eos_token_id})


def train_trl(options: argparse.Namespace) -> Outcome:
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    idle, rewards, ends, seen = peak_mib(), [], [], []
    task, prompts = questions(options)
    model, processor, suppressed = load_model(options.base)
    rows = [
        {"prompt": [{"role": "user", "content": p.text}], "image": p.images[0], "number": i}
        for i, p in enumerate(prompts)
    ]

    def exact_match(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        values = score(task, [prompts[i] for i in number], [c[0]["content"] for c in completions], options.length)
        rewards.append(statistics.mean(values))
        return values

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    config = GRPOConfig(
        output_dir=options.out,
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=options.prompts * options.group,
        gradient_accumulation_steps=1,
        num_generations=options.group,
        max_completion_length=options.length,
        temperature=1.0,
        generation_kwargs={"suppress_tokens": suppressed},
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        exact_match,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
        callbacks=[Clock()],
    )
    model.model.visual.register_forward_pre_hook(lambda module, inputs: seen.append(1))
    trainer.train()
    assert len(seen) == 2 * options.steps, "the vision tower must run once to sample and once to train"
    trainer.save_model(f"{options.out}/final")
    return idle, ends, rewards


def train_plain(options: argparse.Namespace) -> Outcome:
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor  # noqa: F401

    idle, rewards, ends = peak_mib(), [], []
    task, prompts = questions(options)
    model, processor, suppressed = load_model(options.base)
    count, group, length = options.prompts, options.group, options.length
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    torch.manual_seed(options.seed)
    eos = processor.tokenizer.eos_token_id
    for step in range(options.steps):
        batch = prompts[step * count : (step + 1) * count]
        chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": p.text}]}] for p in batch]
        text = processor.apply_chat_template(chats, add_generation_prompt=True)
        inputs = dict(processor(text=text, images=[p.images[0] for p in batch], padding=True, return_tensors="pt"))
        patches = inputs["pixel_values"].unflatten(0, (count, -1))  # all images are of one size
        inputs = {k: v.repeat_interleave(group, 0) for k, v in {**inputs, "pixel_values": patches}.items()}
        inputs["pixel_values"] = inputs["pixel_values"].flatten(0, 1)
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=length, suppress_tokens=suppressed)
        width = inputs["input_ids"].shape[1]
        answers = ids[:, width:]
        ended = (answers == eos).cumsum(1)
        mask = (ended - (answers == eos).long()) == 0  # up to the first end token, with it
        answers = answers.masked_fill(~mask, eos)
        texts = processor.batch_decode(answers, skip_special_tokens=True)
        reward = torch.tensor(score(task, [p for p in batch for _ in range(group)], texts, length)).view(count, group)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        grown = {k: torch.cat([inputs[k], fill], 1) for k, fill in extension(inputs, mask).items()}
        logits = model(
            **{**inputs, **grown, "input_ids": ids}, use_cache=False, logits_to_keep=answers.shape[1] + 1
        ).logits
        logits[..., suppressed] = -torch.inf
        logp = logits[:, :-1].log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
        loss = -((logp - logp.detach()).exp() * advantage.view(-1, 1))[mask].sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(reward.mean()))
        ends.append(now())
    model.save_pretrained(f"{options.out}/final")
    processor.save_pretrained(f"{options.out}/final")
    return idle, ends, rewards


def extension(inputs: dict[str, Any], mask: Any) -> dict[str, Any]:
    """What the inputs with one value a token hold for the answers."""
    values = {"attention_mask": mask.long(), "mm_token_type_ids": mask.long() * 0}
    return {k: v for k, v in values.items() if k in inputs}


if __name__ == "__main__":
    main()
