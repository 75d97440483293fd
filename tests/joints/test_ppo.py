"""PPO by hand: a critic, two episodes of two steps and one."""

import math

import pytest

from tests.joints.parts import Table, close, steps

# gamma = lam = 1/2. Episode 0 earns 1 at its end: delta_1 = 1 - 0.4, A_1 = 0.6; delta_0 = 0.5 x 0.4 - 0.2 = 0, and so
# A_0 = 0 + 0.25 x 0.6. Episode 1 earns nothing: A = -0.1. Returns A + V: 0.35, 1 and 0.
PPO = "algorithm={type: ppo, gamma: 0.5, lam: 0.5"
VALUES = [[0.2, 0.4], [0.1]]
ADVANTAGES = [0.15, 0.6, -0.1]
MEAN = sum(ADVANTAGES) / 3
STD = math.sqrt(sum((a - MEAN) ** 2 for a in ADVANTAGES) / 2)
STANDARD = [(a - MEAN) / STD for a in ADVANTAGES]


def critic(given, options="", *, ends=(1.0, 1.0), bootstrap=(0.0, 0.0), rewards=((0.0, 0.0), (0.0,)), move=None):
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}{options}}}")
    rollouts = table.rollouts()
    known = {"terminated": [[0.0, ends[0]], [ends[1]]], "bootstrap": [[0.0, bootstrap[0]], [bootstrap[1]]]}
    rollouts.extras["steps"] = steps(table, values=VALUES, rewards=[list(row) for row in rewards], **known)
    if move is not None:
        made.move(value=move)
    made.prepare(rollouts)
    return made, rollouts


def returns(rollouts):
    return rollouts.extras["steps"].returns.where(rollouts.mask, 0)


def test_advantages_and_returns(given):
    made, rollouts = critic(given)
    close(rollouts.advantages, [STANDARD[:2], [STANDARD[2], 0]], atol=1e-5)
    close(returns(rollouts), [[0.35, 1.0], [0.0, 0.0]])
    made.learn()
    close(made.gradient(), [[-STANDARD[0] / 3, -STANDARD[1] / 3], [-STANDARD[2] / 3, 0]], atol=1e-5)
    found = made.metrics.result()
    close(found["critic/value"], 0.7 / 3)
    close(found["critic/return"], 1.35 / 3)


@pytest.mark.parametrize("coefficient", [0.5, 2.0])
def test_the_critics_loss(given, coefficient):
    # (0.2 - 0.35)^2 + (0.4 - 1)^2 + 0.1^2 = 0.3925, over three steps; the surrogate's mean is 0.
    made, _ = critic(given, f", value_coefficient: {coefficient}")
    close(made.learn(), coefficient * 0.3925 / 3, atol=1e-5)
    slopes = [2 * coefficient * error / 3 for error in (-0.15, -0.6, 0.1)]
    close(made.gradient("value"), [slopes[:2], [slopes[2], 0]])
    close(made.metrics.result()["critic/error"], 0.3925 / 3)


def test_a_clipped_value(given):
    # The second value moved from 0.4 to 0.7, kept to 0.45: (0.45 - 1)^2 is worse than (0.7 - 1)^2, and has no gradient.
    made, _ = critic(given, ", value_clip: 0.05", move=[[0.0, 0.3], [0.0]])
    close(made.learn(), 0.5 * (0.0225 + 0.3025 + 0.01) / 3, atol=1e-5)
    close(made.gradient("value"), [[-0.05, 0], [0.1 / 3, 0]])


def test_the_simulators_own_reward(given):
    # 0.1 x 1 and 0.1 x 2 more: A_0 = 0.1 + 0.15, A of episode 1 = 0.2 - 0.1.
    _, rollouts = critic(given, ", simulator_reward: 0.1", rewards=((1.0, 0.0), (2.0,)))
    close(returns(rollouts), [[0.25 + 0.2, 1.0], [0.2, 0.0]])


def test_by_default_the_simulators_reward_weighs_nothing(given):
    _, rollouts = critic(given, rewards=((1.0, 0.0), (2.0,)))
    close(returns(rollouts), [[0.35, 1.0], [0.0, 0.0]])


def test_an_episode_that_the_limit_cut_goes_on_in_the_critics_word(given):
    # Episode 0: delta_1 = 1 + 0.5 x 0.8 - 0.4 = 1, A_0 = 0.25. Episode 1: delta = 0.5 x 0.6 - 0.1.
    _, rollouts = critic(given, ends=(0.0, 0.0), bootstrap=(0.8, 0.6))
    close(returns(rollouts), [[0.45, 1.4], [0.3, 0.0]])


def test_steps_of_all_ranks_are_standardised_together(given):
    """Two equal ranks have the same mean; the unbiased std of six numbers is another than that of three."""
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}}}", world=2, rank=1)
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    wide = [a * math.sqrt(5 / 4) for a in STANDARD]  # 2 / 3 x 2 of the squares, over 5 in the place of 2
    close(rollouts.advantages, [wide[:2], [wide[2], 0]], atol=1e-5)


def test_micro_batches_share_the_denominator_of_steps(given):
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}}}", "engine.micro_batch=1")
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    close(made.learn(), 0.5 * 0.3925 / 3, atol=1e-5)
