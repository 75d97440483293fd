"""PPO over the trace of an unmasked response (TraceRL), by hand and against its recursion, token by token."""

import math

import pytest
import torch

from mmrl.algorithms.algorithm import Algorithm
from mmrl.core.credit import mean_per_moment, renumber_moments
from mmrl.rollouts import Steps
from mmrl.settings import choose
from tests.joints.parts import Table, close, steps

# gamma = lam = 1/2. Rollout 0 fills its second place first, and the two others in one step, which earns 1: the step is
# worth 0.3, so delta_1 = 0.7 and delta_0 = 0.5 x 0.3 - 0.5 = -0.35; A of the first step -0.35 + 0.25 x 0.7. Its tokens
# are 1 - 0.2 and 1 - 0.4. Rollout 1 goes from left to right and earns nothing: -0.3, and 0.05 - 0.25 x 0.3.
VALUES, MOMENTS = [[0.2, 0.5, 0.4], [0.1, 0.3]], [[4, 1, 4], [0, 3]]
ADVANTAGES = [0.8, -0.175, 0.6, -0.025, -0.3]
RETURNS = [[1.0, 0.325, 1.0], [0.075, 0.0, 0.0]]
MEAN = sum(ADVANTAGES) / 5
STD = math.sqrt(sum((a - MEAN) ** 2 for a in ADVANTAGES) / 4)
STANDARD = [(a - MEAN) / STD for a in ADVANTAGES]


def traced(given, *overrides, options=""):
    table = Table([[-1.0] * 3, [-1.0] * 2], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    algorithm = f"algorithm={{type: ppo, gamma: 0.5, lam: 0.5{options}}}"
    made = given(table, "rollout={prompts: 2}", algorithm, *overrides)
    rollouts = table.rollouts()
    known = steps(table, values=VALUES)
    known.moment = table.padded([[float(m) for m in row] for row in MOMENTS]).long()
    rollouts.extras["steps"] = known
    made.prepare(rollouts)
    return made, rollouts


def test_time_passes_by_steps_of_the_trace(given):
    made, rollouts = traced(given)
    close(rollouts.advantages, [STANDARD[:3], [*STANDARD[3:], 0]], atol=1e-5)
    close(rollouts.extras["steps"].returns.where(rollouts.mask, 0), RETURNS)
    errors = [v - r for row, wanted in zip(VALUES, RETURNS, strict=True) for v, r in zip(row, wanted, strict=False)]
    close(made.learn(), 0.5 * sum(e**2 for e in errors) / 5, atol=1e-5)
    close(made.gradient(), [[-a / 5 for a in STANDARD[:3]], [*(-a / 5 for a in STANDARD[3:]), 0]], atol=1e-5)
    close(made.gradient("value"), [[e / 5 for e in errors[:3]], [*(e / 5 for e in errors[3:]), 0]], atol=1e-5)
    assert made.metrics.result()["surrogate/ratio_gap_max"] == 0


def test_micro_batches_change_nothing(given):
    made, _ = traced(given)
    whole, expected = made.learn(), made.gradient()
    made.close()
    made, _ = traced(given, "engine.micro_batch=1")
    close(made.learn(), whole)
    close(made.gradient(), expected)


def test_what_the_policy_says_of_time_is_asked_for_with_its_values(given):
    table = Table([[-1.0] * 3, [-1.0] * 2], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", "algorithm={type: ppo, gamma: 0.5, lam: 0.5}", "engine.micro_batch=1")
    moments, replay = table.padded([[float(m) for m in row] for row in MOMENTS]).long(), made.trainer.policy.replay

    def told(rollouts, model, *, reference=False):
        found = replay(rollouts, model, reference=reference)
        found.extras["moment"] = moments[torch.tensor(rollouts.inputs)]
        return found

    made.trainer.policy.replay = told
    rollouts = table.rollouts()
    made.prepare(rollouts)
    close(rollouts.advantages, [STANDARD[:3], [*STANDARD[3:], 0]], atol=1e-5)


def by_token(rewards, values, moments, gamma, lam):
    """TraceRL's own recursion of one rollout, in plain numbers: advantages and values of tokens."""
    found = [0.0] * len(values)
    following, worth_next = 0.0, 0.0
    for moment in sorted(set(moments), reverse=True):
        own = [j for j, m in enumerate(moments) if m == moment]
        for j in own:
            found[j] = rewards[j] - values[j] + gamma * worth_next + gamma * lam * following
        earned, worth = (sum(column[j] for j in own) / len(own) for column in (rewards, values))
        following = earned - worth + gamma * worth_next + gamma * lam * following
        worth_next = worth
    return found


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_recursion(seed):
    chance = torch.Generator().manual_seed(seed)
    mask = torch.arange(7) < torch.tensor([7, 4, 1, 0])[:, None]
    rewards, values = torch.randn(2, 4, 7, generator=chance, dtype=torch.float64)
    moment = torch.randint(0, 5, (4, 7), generator=chance)
    known = Steps.from_decisions(mask, values, moment)
    learner = choose(Algorithm, {"type": "ppo", "gamma": 0.9, "lam": 0.7})
    advantages, returns = learner.trace_estimates(rewards.where(mask, 0.0), known)
    for row, count in enumerate(mask.sum(1).tolist()):
        own = (column[row, :count].tolist() for column in (rewards, values, moment))
        expected = by_token(*own, 0.9, 0.7)
        torch.testing.assert_close(advantages[row, :count], torch.tensor(expected, dtype=torch.float64))
        assert not advantages[row, count:].any() and not returns[row, count:].any()


def test_without_discounts_tokens_are_worth_the_reward_less_their_own_value():
    """The check of TraceRL's own code: R_j is the reward, A_j = R_j - V_j. So are targets with value_lam = 1."""
    chance = torch.Generator().manual_seed(1)
    mask, moment = torch.ones(1, 6, dtype=torch.bool), torch.tensor([[3, 0, 3, 2, 0, 5]])
    values = torch.randn(1, 6, generator=chance, dtype=torch.float64)
    known = Steps.from_decisions(mask, values, moment)
    rewards = (moment == 5) * torch.tensor(0.7, dtype=torch.float64)
    for options in ({"type": "ppo", "lam": 1.0}, {"type": "ppo", "lam": 0.3, "value_lam": 1.0}):
        advantages, returns = choose(Algorithm, options | {"gamma": 1.0}).trace_estimates(rewards, known)
        if options["lam"] == 1.0:
            torch.testing.assert_close(advantages, 0.7 - values)
        torch.testing.assert_close(returns, torch.full_like(values, 0.7))


def test_the_length_of_a_response_is_that_of_its_trace():
    """Lambda by length is 1 - 1 / (scale l) for l steps: two here, of four tokens."""
    mask, moment = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1, 0, 1, 0]])
    known = Steps.from_decisions(mask, torch.zeros(1, 4, dtype=torch.float64), moment)
    rewards = moment.double()
    learner = choose(Algorithm, {"type": "ppo", "gamma": 1.0, "lam": {"type": "by_length", "scale": 1.0}})
    torch.testing.assert_close(learner.trace_estimates(rewards, known)[0], rewards.where(moment == 1, 0.5))


def test_moments_without_a_counted_place_are_passed_over():
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    number, there = renumber_moments(torch.tensor([[7, 2, 4], [5, 0, 0], [1, 1, 1]]), mask)
    assert number.where(mask, -1).tolist() == [[1, 0, -1], [0, -1, -1], [-1, -1, -1]]
    assert there.tolist() == [[True, True], [True, False], [False, False]]
    means = mean_per_moment(torch.tensor([[3.0, 1.0, 9.0], [2.0, 9.0, 9.0], [9.0] * 3]), number, mask, 2)
    assert means.tolist() == [[1.0, 3.0], [2.0, 0.0], [0.0, 0.0]]
