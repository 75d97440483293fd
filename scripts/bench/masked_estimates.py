"""Bias and standard deviation of every estimator of a masked response's log-likelihood.

    .venv/bin/python scripts/bench/masked_estimates.py runs/warm_starts/discrete/text_sums_masked_warm_start
    [--responses 30] [--seeds 64]

Responses are sampled from the run's model in random order, one token in each step. The exact value is the logarithm of
the likelihood's mean over all orders. Prints a Markdown table, in nats: the mean of (estimate - exact) over responses
and seeds, and the standard deviation over seeds (for estimators that use the order: over orders).
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor

from mmrl import build
from mmrl.config import load
from mmrl.policies.discrete_diffusion.policy import MaskedPolicy
from mmrl.policies.discrete_diffusion.settings import MaskedLikelihood
from mmrl.rollouts import Rollouts
from mmrl.settings import choose

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "one_step, prompt_mask 0": {"type": "one_step", "prompt_mask": 0.0},
    "one_step, prompt_mask 0.15": {"type": "one_step"},
    "coupled, 1 pair": {"type": "coupled"},
    "coupled, 4 pairs": {"type": "coupled", "pairs": 4},
    "elbo, 1 draw": {"type": "elbo", "draws": 1},
    "elbo, 2 draws": {"type": "elbo", "draws": 2},
    "elbo, 2 draws, antithetic": {"type": "elbo", "draws": 2, "antithetic": True},
    "elbo, 4 draws": {"type": "elbo", "draws": 4},
    "elbo, 4 draws, antithetic": {"type": "elbo", "draws": 4, "antithetic": True},
    "trace, shrink 1": {"type": "trace"},
    "trace, shrink 2": {"type": "trace", "shrink": 2},
    "step_merge, 3 segments": {"type": "step_merge", "segments": 3},
    "step_merge, 2 segments": {"type": "step_merge", "segments": 2},
    "step_merge, 1 segment": {"type": "step_merge", "segments": 1},
    "any_order": {"type": "any_order"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--responses", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    overrides = [f"model.path={options.run}/final", "model.warm_start=null", "unmasking.order=random"]
    config = load(ROOT / "configs" / "discrete" / "text_sums_masked.yaml", overrides)
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    assert isinstance(policy, MaskedPolicy)
    prompts = [task.evaluation[i] for i in range(options.responses)]
    drawn = policy.rollout(prompts, 1, list(range(options.responses)))
    drawn.mask = torch.ones_like(drawn.mask)
    exact = exact_logp(policy, drawn)
    print("| estimate | states | bias | standard deviation |\n| --- | --- | --- | --- |")
    for name, tree in KINDS.items():
        policy.likelihood = choose(MaskedLikelihood, tree)
        found = estimates(policy, drawn, options.seeds)
        states = len(policy.scoring_states(drawn.inputs[0]).masked)
        bias, spread = (found - exact[:, None]).mean(), found.var(1).mean().sqrt()
        print(f"| {name} | {states} | {float(bias):+.3f} | {float(spread):.3f} |", flush=True)


@torch.no_grad()
def estimates(policy: MaskedPolicy, drawn: Rollouts, seeds: int) -> Tensor:
    """[response, seed] of whole responses; with each seed another trace of the same response."""
    found = []
    for seed in range(seeds):
        random = torch.Generator().manual_seed(seed)
        for i, record in enumerate(drawn.inputs):
            order = torch.randperm(policy.layout.length, generator=random)
            drawn.inputs[i] = type(record)(**{**vars(record), "seed": seed * 1000 + i, "steps": order})
        found.append(policy.replay(drawn, policy.module).logp.sum(1))
    return torch.stack(found, 1)


@torch.no_grad()
def exact_logp(policy: MaskedPolicy, drawn: Rollouts) -> Tensor:
    """[response] the logarithm of the mean over all orders of the probability of writing it in that order."""
    policy.likelihood, orders = choose(MaskedLikelihood, "trace"), []
    for order in itertools.permutations(range(policy.layout.length)):
        for i, record in enumerate(drawn.inputs):
            drawn.inputs[i] = type(record)(**{**vars(record), "steps": torch.tensor(order)})
        orders.append(policy.replay(drawn, policy.module).logp.sum(1))
    return torch.stack(orders).double().logsumexp(0) - torch.tensor(float(len(orders))).log()


if __name__ == "__main__":
    main()
