"""What test_vllm.py runs in processes of its own: vLLM beside a model in training. Results go into JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from tests.engine.parts import Fixed, Questions, make, metrics, release, spread, train

VLLM = ["rollout.engine=vllm", "rollout.max_response_length=8", "rollout.vllm.cache_gib=0.1"]


def long_questions(options, seed):
    """Prompts of several blocks of vLLM's prefix cache, with a picture."""
    task = Fixed(spread)
    picture = (Image.effect_mandelbrot((24, 8), (-2, -1, 1, 1), 50).convert("RGB"),)
    task.train = task.evaluation = Questions(
        Prompt(str(i), "<image>" + f"Where is the {i}? " * 40, picture) for i in range(8)
    )
    return task


def one_rank(folder: Path) -> None:
    trainer = make(
        folder / "one", *VLLM, "optim.lr=1e-2", "steps=4", "task.name=tests.engine.vllm_workers:long_questions"
    )
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.prompts[i] for i in range(4)]
    found: dict = {"suppressed": list(policy.sampling.suppressed)}
    with generator.generation():
        ours = policy.rollout(prompts, 4, range(16))
        alone = policy.rollout(prompts[2:], 4, range(8, 16))
        greedy = policy.rollout(prompts, 1, range(4), temperature=0.0)
        hot = policy.rollout(prompts, 64, range(256), temperature=2.0)
    policy.engine = None
    plain = policy.rollout(prompts, 1, range(4), temperature=0.0)
    policy.engine = engine
    found["greedy"], found["plain"] = responses(greedy), responses(plain)
    found["seeded"], found["alone"] = responses(ours)[8:], responses(alone)
    found["hot"] = sorted({token for row in responses(hot) for token in row})
    trainer.train()
    found["stale_caches"] = stale(generator, policy, without="forget")
    found["healthy"] = stale(generator, policy)
    found["stale_weights"] = stale(generator, policy, without="load")
    release(trainer)
    (folder / "one.json").write_text(json.dumps(found))


def stale(generator, policy, without=None) -> str:
    """What a synchronisation says that skips a part, after weights have moved."""
    generator.synchronise()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.1)
    if without:
        setattr(generator.engine, without, lambda *ignored: None)
    try:
        generator.synchronise()
    except UserError as error:
        return str(error)
    finally:
        if without:
            delattr(generator.engine, without)
    return ""


def responses(rollouts) -> list[list[int]]:
    return [tokens.response.tolist() for tokens in rollouts.inputs]


def two_ranks(folder: Path, *options: str) -> None:
    """ZeRO-3; each rank has an engine of its own."""
    train(folder / "two", *VLLM, "engine.zero_stage=3", "optim.lr=1e-2", "checkpoint.every=2", *options)


def two_ranks_again(folder: Path, *options: str) -> None:
    train(folder / "two", *VLLM, "engine.zero_stage=3", "optim.lr=1e-2", "checkpoint.every=2", *options, resume=True)
