"""The success of a policy that is trained against right and wrong, in closed form, as an oracle of the core.

With advantages (1 - p) / s for right and -p / s for wrong answers, s the deviation of a success of probability p, the
policy that maximises E[A] - beta KL(policy || reference) has logit p' = logit p_ref + (A_right - A_wrong) / beta. So
logit p' = logit p_ref + 1 / (beta s) with a scale and logit p_ref + 1 / beta without one (arXiv 2503.06639).
"""

import math

import pytest
import torch

from mmrl.core.advantages import group_advantages
from mmrl.core.regularizers import kl_estimate
from mmrl.core.surrogates import surrogate


def logit(p):
    return math.log(p / (1 - p))


def trained(p, reference, beta, scale):
    """The policy of one parameter after the inner problem is solved by gradient descent on the core's own losses, with
    the expectation over right and wrong taken exactly. Advantages are of a group of 10000 with the success p."""
    right = round(10000 * p)
    rewards = torch.cat([torch.ones(right), torch.zeros(10000 - right)]).double()
    advantages, _ = group_advantages(rewards, torch.zeros(10000, dtype=torch.long), scale=scale)
    a = torch.stack([advantages[0], advantages[-1]])
    theta = torch.tensor(logit(reference), dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([math.log(reference), math.log(1 - reference)], dtype=torch.float64)
    for _ in range(4000):
        logp = torch.stack([torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)])
        chance = logp.detach().exp()
        value, _ = surrogate((logp - logp.detach())[:, None], a, kind="reinforce")
        kl = kl_estimate(logp[:, None], ref[:, None], kind="k2")  # whose gradient is that of the KL in expectation
        (chance[:, None] * (value + beta * kl)).sum().backward()
        curvature = float(beta * chance.prod())  # of the objective at its maximum
        with torch.no_grad():
            theta -= 0.5 * theta.grad / curvature
            theta.grad = None
    return float(theta.detach())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("scale", "beta"), [("group_std", 2.0), ("none", 0.7)])
@pytest.mark.quick("group_std-2.0-0.5")
def test_one_step_of_the_recurrence(p, scale, beta):
    gained = 1 / math.sqrt(p * (1 - p)) if scale == "group_std" else 1.0
    found = trained(p, reference=0.3, beta=beta, scale=scale)
    assert found == pytest.approx(logit(0.3) + gained / beta, abs=2e-3)


def test_success_rises_to_a_fixed_point_above_the_reference():
    p, reference = 0.2, 0.2
    seen = [p]
    for _ in range(4):
        p = 1 / (1 + math.exp(-trained(p, reference, beta=2.0, scale="group_std")))
        seen.append(p)
        p = round(p, 4)
    fixed = seen[-1]
    assert fixed > reference
    assert fixed == pytest.approx(
        1 / (1 + math.exp(-logit(reference) - 0.5 / math.sqrt(fixed * (1 - fixed)))), abs=5e-3
    )
