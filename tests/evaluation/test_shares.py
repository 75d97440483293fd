"""Shares of an evaluation: whatever the ranks and the batches are, every prompt counts once, with a seed of its own."""

import threading
from types import SimpleNamespace

import pytest
import torch

from mmrl.config import load
from mmrl.evaluation.evaluate import evaluate
from mmrl.rollouts import Prompt, Sample
from tests.whole_runs.parts import TINY

ACCURACIES = [1.0, 0.0, 0.25]


class Threads:
    """A rank that gathers among threads."""

    def __init__(self, rank, world, values, barrier):
        self.rank, self.world, self.values, self.barrier = rank, world, values, barrier

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait(10)
        values = list(self.values)
        self.barrier.wait(10)
        return values

    def sum(self, value):
        return torch.stack(self.gather(value)).sum(0)


class Answers:
    """A policy that remembers the seed of each prompt."""

    def __init__(self):
        self.seeds = {}

    def respond(self, prompts, seeds):
        for prompt, seed in zip(prompts, seeds, strict=True):
            assert self.seeds.setdefault(prompt.id, seed) == seed
        return [Sample(prompt, prompt.id) for prompt in prompts]

    def counts(self):
        return {}


def evaluated(world, micro_batch):
    """The result of each rank, and the seed of each prompt."""
    config = load(TINY, ["run_dir=unset", f"evaluation.micro_batch={micro_batch}"])
    task = SimpleNamespace(
        evaluation=[Prompt(str(i), "?") for i in range(len(ACCURACIES))],
        accuracy=lambda samples: torch.tensor([ACCURACIES[int(sample.response)] for sample in samples]),
        measures=lambda samples, group: {},
    )
    values, barrier, policy, results = [None] * world, threading.Barrier(world), Answers(), {}

    def work(rank):
        ranks = Threads(rank, world, values, barrier)
        results[rank] = evaluate(policy, task, ranks, len(ACCURACIES), config)[0]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank] for rank in range(world)], policy.seeds


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 2), (2, 1), (2, 8), (3, 1), (4, 2)])
def test_each_prompt_counts_once_whatever_the_shares(world, micro_batch):
    results, seeds = evaluated(world, micro_batch)
    for result in results:
        assert result["evaluation/n"] == 3 and result["evaluation/unscored"] == 0
        assert result["evaluation/accuracy"] == pytest.approx(1.25 / 3)
    assert seeds == evaluated(1, 8)[1] and len(set(seeds.values())) == 3
