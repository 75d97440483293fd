"""algorithm.surrogate=self_normalised (StableDRL), from its key to the loss and its gradient by every decision."""

import math

import pytest
import torch

from mmrl.errors import UserError
from tests.joints.parts import Table, close

SURROGATE = "algorithm.surrogate={type: self_normalised, low: 0.2, high: 0.3}"
PLAIN = ["algorithm.scale=none", "algorithm.epochs=2", "rollout.group_size=2"]


def moved(given, *overrides):
    """Two groups of two; advantages are +-0.5 and +-1."""
    table = Table([[-1.0, -2.0], [-1.0], [-3.0], [-2.0]], group=[0, 0, 1, 1], rewards=[0.0, 1.0, 2.0, 0.0])
    made = given(table, SURROGATE, *PLAIN, *overrides)
    made.prepare()
    return made.move(logp=[[0.1, -0.5], [0.4], [0.2], [-0.1]])


def test_weights_are_clipped_on_both_sides_and_shared_out_in_their_group(given):
    # Weights e^0.1, 0.8 (from e^-0.5) and 1.3 (from e^0.4); and e^0.2, e^-0.1 in the other group.
    one, other = [math.exp(0.1), 0.8, 1.3], [math.exp(0.2), math.exp(-0.1)]
    w = [x * 3 / sum(one) for x in one] + [x * 2 / sum(other) for x in other]
    logp, sign = [-0.9, -2.5, -0.6, -2.8, -2.1], [-0.5, -0.5, 0.5, 1.0, -1.0]
    for size in (64, 2):
        made = moved(given, f"engine.micro_batch={size}")
        slope = [[-w[0] * sign[0], -w[1] * sign[1]], [-w[2] * sign[2], 0], [-w[3] * sign[3], 0], [-w[4] * sign[4], 0]]
        close(made.learn(), -sum(a * b * c for a, b, c in zip(w, sign, logp, strict=True)) / 5)
        close(made.gradient(), torch.tensor(slope) / 5)
    close(made.metrics.result()["surrogate/clipped"], 2 / 5)
    close(made.metrics.result()["surrogate/share"], 1.0)


def test_before_the_first_update_it_is_the_policy_gradient(given):
    made = moved(given).move(logp=[[0.0, 0.0], [0.0], [0.0], [0.0]])
    made.learn()
    close(made.gradient() * 5, [[0.5, 0.5], [-0.5, 0], [-1, 0], [1, 0]])


def test_of_sequences_a_rollout_has_one_weight(given):
    made = moved(given, "algorithm.level=sequence")
    made.learn()
    close(made.gradient()[0, 0], made.gradient()[0, 1])


def test_groups_are_needed_whole(given):
    with pytest.raises(UserError, match="engine.micro_batch=1 splits groups of 2"):
        moved(given, "engine.micro_batch=1")
    with pytest.raises(UserError, match="algorithm.surrogate.low"):
        moved(given, "algorithm.surrogate.low=1")
