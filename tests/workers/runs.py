"""Whole runs of tiny jobs, and how they are compared."""

import pytest
import torch

from tests.whole_runs.parts import metrics, timeless, train

ONE = "rollout.workers={count: 1}"
GUIDED = ["algorithm.minibatches=2", "denoising.guidance=1.5", "rollout.dynamic_sampling={low: 0.4}"]
GUIDED += ["optim.ema=0.9", "evaluation.every=2"]
WALK = ["task.simulator=gymnasium", "task.tasks=[default]", "action.chunk=2", "action.horizon=8"]
WALK += ["task.options={env: 'tests.workers.walk:MMRLWalk-v0', instruction: go, success: solved, max_steps: 8}"]
PPO = [*WALK, "algorithm={type: ppo, simulator_reward: 0.5, gamma: 0.9, lam: 0.8}", "steps=3"]
COOLING = "rollout.temperature={type: linear, start: 2.0, end: 0.5, steps: 2}"


def run(folder, *options, base):
    """Its metrics. Workers have as many threads as this process: sums of other parts are rounded otherwise."""
    train(folder, *options, f"threads={torch.get_num_threads()}", base=base)
    rows = timeless(metrics(folder))
    return [
        {k: v for k, v in row.items() if not k.removeprefix("evaluation/").startswith("generation/")} for row in rows
    ]


def alike(one, other, rel=0.0):
    """To the bit, or within rounding."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert value == (pytest.approx(b[name], rel=rel, abs=1e-6, nan_ok=True) if rel else b[name]), name
