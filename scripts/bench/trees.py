"""Rollouts a processor second of trees of text beside flat groups.

    .venv/bin/python scripts/bench/trees.py [--generator vllm_colocated] [--group 8] [--roots 2] [--length 128]

    flat          `group` whole responses a prompt
    tree          `roots` whole responses and `group` - `roots` branches (rollout.extras=[branches]) at ends of segments
                  of `segment` tokens, by chance, in `rounds` rounds
    uncertain     the same at uncertain tokens: the model reads the responses once more for their entropies

The same in all arms: model and weights, prompts and images, sampling at temperature 1 with suppressed tokens, a seed
a response, and exactly `length` tokens a response (end tokens are suppressed too), all of them scored. fp32 on the CPU.
The arms take turns in one process; processor seconds count all threads, and what is printed is the median (least ..
greatest) over rounds, with the tokens that were drawn. The model is that of the digits task, or one of --width.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from mmrl.build import build_generator, build_policy, build_task
from mmrl.collection.branches.points import BranchPoints, SegmentEnds, UncertainTokens
from mmrl.collection.branches.source import Branches
from mmrl.collection.extra_sources import SourceContext
from mmrl.config import load
from mmrl.engine import Ranks
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.tiny_qwen import Sizes, write
from mmrl.protocols.parts import Task
from mmrl.rollouts import FRESH, Rollouts
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.tiny.model import build_tokenizer

CONFIG = Path(__file__).resolve().parents[2] / "configs/warm_starts/vlm/visual_qa_digits_warm_start.yaml"


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    folder = tempfile.mkdtemp(prefix="mmrl-trees-")
    if options.width:
        write(folder, build_tokenizer(), Sizes(patch=CELL, width=options.width, layers=options.layers), seed=0)
    model = [f"model.path={folder}", "model.build=null"] if options.width else []
    lengths = [f"rollout.max_response_length={options.length}", f"rollout.generator.type={options.generator}"]
    made = ["algorithm={type: grpo}", "rollout={prompts: 8, group_size: 8}", *lengths, *model]
    config = load(CONFIG, [f"run_dir={folder}", *made])
    ranks, task = Ranks(), build_task(config)
    policy = build_policy(config, task)
    assert isinstance(policy, VisionLanguagePolicy) and task.train is not None
    endless(policy)
    generator = build_generator(config, policy, task, ranks)
    if generator is None:
        measure(policy, task, options)
    else:
        with generator.generation():
            measure(policy, task, options)
        generator.close()
    ranks.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generator", default="transformers", choices=("transformers", "vllm_colocated"))
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each row")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="responses of a group, branches included")
    parser.add_argument("--roots", type=int, default=2, help="whole responses of a tree, without branches")
    parser.add_argument("--deep", type=int, default=2, help="number of rounds in which branches are added")
    parser.add_argument("--length", type=int, default=128, help="tokens of a response")
    parser.add_argument("--segment", type=int, default=16, help="tokens of a segment")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def endless(policy: VisionLanguagePolicy) -> None:
    """Suppresses the end tokens, so that all responses are of one length."""
    drafter = policy.drafter
    drafter.sampling = replace(drafter.sampling, suppressed=(*drafter.sampling.suppressed, *policy.eos))


def measure(policy: VisionLanguagePolicy, task: Task, options: argparse.Namespace) -> None:
    count = options.group - options.roots
    arms: dict[str, Callable[[int], Rollouts]] = {
        "flat": lambda seed: fresh(policy, task, options, options.group, seed),
        "tree": lambda seed: tree(policy, task, options, count, SegmentEnds(every=options.segment), seed),
        "uncertain": lambda seed: tree(policy, task, options, count, UncertainTokens(apart=options.segment), seed),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    drawn: dict[str, list[int]] = {name: [] for name in arms}
    for seed in range(options.rounds + 1):  # the first warms up
        for name, arm in arms.items():
            started = time.process_time()
            rollouts = arm(seed)
            taken = time.process_time() - started
            if seed:
                found[name].append(len(rollouts) / taken)
                drawn[name].append(tokens_drawn(rollouts))
    for name, rates in found.items():
        low, middle, high = min(rates), statistics.median(rates), max(rates)
        times = middle / statistics.median(found["flat"])
        print(
            f"{name:10} {middle:7.2f} ({low:.2f} .. {high:.2f}) rollouts a processor second, x {times:.2f}; "
            f"{statistics.mean(drawn[name]):.0f} tokens drawn"
        )


def fresh(policy: VisionLanguagePolicy, task: Task, options: argparse.Namespace, size: int, seed: int) -> Rollouts:
    """Scored groups of whole responses."""
    assert task.train is not None
    prompts = [task.train[i] for i in range(options.prompts)]
    seeds = range(1000 * seed, 1000 * seed + size * len(prompts))
    made = policy.rollout(prompts, size, seeds)
    made.prompt, made.origin = made.group.clone(), torch.full((len(made),), FRESH)
    made.rewards = task.score(made.samples, made.group)
    made.accuracy = task.accuracy(made.samples)
    return made


def tree(
    policy: VisionLanguagePolicy,
    task: Task,
    options: argparse.Namespace,
    count: int,
    at: BranchPoints,
    seed: int,
) -> Rollouts:
    """Scored groups of roots, and what branched off from them."""
    roots = fresh(policy, task, options, options.roots, seed)
    assert task.train is not None
    source = Branches(count=count, rounds=min(options.deep, count), at=at)
    source.start(SourceContext(policy, task.train, task, seed, (0, 1), int, Path(), 1))
    branches = source.make(roots)
    return Rollouts.concat([replace(roots, nodes=torch.arange(len(roots))[:, None].expand(roots.mask.shape)), branches])


def tokens_drawn(rollouts: Rollouts) -> int:
    """Counts the decisions, each of those that are shared once."""
    if rollouts.nodes is None:
        return int(rollouts.mask.sum())
    column = torch.arange(rollouts.mask.shape[1]).expand(rollouts.mask.shape)
    return len({*zip(rollouts.nodes[rollouts.mask].tolist(), column[rollouts.mask].tolist(), strict=True)})


if __name__ == "__main__":
    main()
