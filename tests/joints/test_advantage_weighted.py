"""Weighted imitation by hand: returns, values, weights, and both losses."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.protocols.trajectory import RewardsToGo
from mmrl.rollouts import DEMONSTRATION, FRESH, REPLAYED
from tests.joints.parts import Table, close, steps

# Rewards 1 and 3, the second two actions later, and an outcome of 2 with it: with gamma 1/2 and half of the simulator's
# rewards R = 0.5 (1 + 3/4) + 2/4 = 1.375. The other step earns an outcome of -1 at once: R = -1.
EARNED = [
    RewardsToGo(np.array([1.0, 3.0]), np.array([0, 2]), 2.0),
    RewardsToGo(np.array([5.0]), np.array([0]), -3.5),
]
RETURNS = "returns: {gamma: 0.5, simulator_reward: 0.5}"
VALUES = [[0.375], [0.0]]  # advantages 1 and -1


def with_earnings(rollouts, rows):
    for row, earned in zip(rows, EARNED, strict=True):
        sample = rollouts.samples[row]
        prompt = replace(sample.prompt, metadata={**sample.prompt.metadata, "tail": SimpleNamespace(rewards=earned)})
        rollouts.samples[row] = replace(sample, prompt=prompt)
    return rollouts


def offline(given, options=""):
    """Two steps of two decisions each."""
    table = Table([[-1.0, -2.0], [-3.0, -1.0]], group=[0, 1], rewards=[0.0, 0.0], value=[[v, v] for (v,) in VALUES])
    made = given(table, "rollout={prompts: 2}", f"algorithm={{type: advantage_weighted, {RETURNS}{options}}}")
    rollouts = with_earnings(table.rollouts(), (0, 1))
    rollouts.extras["steps"] = steps(table, values=[[v, v] for (v,) in VALUES])
    made.prepare(rollouts)
    return made


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ("", [math.e, 1 / math.e]),
        (", weights: {temperature: 0.5}", [math.exp(2), math.exp(-2)]),
        (", weights: {temperature: 0.1, most: 5}", [5.0, math.exp(-10)]),
        (", weights: {form: positive}", [1.0, 0.0]),
        (", weights: {form: binary}", [1.0, 0.0]),
    ],
)
def test_an_episodes_steps_weigh_by_their_advantage(given, options, weights):
    """The imitation's loss is a mean over four decisions, the critic's over two steps: 0.5 (0.5 x 1 + 0.5 x 1) / 2."""
    made = offline(given, options)
    imitated = (weights[0] * 3 + weights[1] * 4) / 4
    close(made.learn(), imitated + 0.25, atol=1e-4)
    close(made.gradient(), [[-weights[0] / 4] * 2, [-weights[1] / 4] * 2], atol=1e-4)
    found = made.metrics.result()
    close(found["advantage_weighted/weight"], sum(weights) / 2, atol=1e-4)
    close(found["advantage_weighted/advantage"], 0.0)
    close(found["critic/error"], 0.5)


def test_a_critic_of_the_better_returns(given):
    """Above the value an error weighs 0.9, below it 0.1: slopes -2 x 0.9 x 1 and 2 x 0.1 x 1, times 2 over 2 steps."""
    made = offline(given, ", expectile: 0.9, value_coefficient: 2.0")
    made.learn()
    close(made.gradient("value")[:, 0], [-1.8, 0.2])
    close(made.metrics.result()["critic/error"], 0.5)


def test_an_episode_that_does_not_say_what_it_earned_is_named(given):
    table = Table([[-1.0]], group=[0], rewards=[0.0], value=[[0.0]])
    made = given(table, "rollout={prompts: 1}", "algorithm={type: advantage_weighted}")
    with pytest.raises(UserError, match=r"the recorded episode of .* has no reward; .* next.reward or next.success"):
        made.prepare(table.rollouts())


def beside(given, of, origin, *, options=""):
    """PPO's two steps, of which the critic knows that they are worth nothing more, and a stored and a shown one."""
    logp = [[-1.0], [-2.0], [-1.5], [-0.5]]
    table = Table(logp, group=[0, 1, -1, -2], rewards=[0.0, 0.0, math.nan, math.nan], value=[[0.0], [0.0], *VALUES])
    term = f"{{type: advantage_weighted, coefficient: 0.5, of: {of}, {RETURNS}{options}}}"
    source = "{type: demonstrations, prompts: 1}" if of == "demonstrations" else "{type: self_imitation, count: 1}"
    extras = f"extras: [{source}]"  # those of the table stand in for what it adds
    made = given(table, f"rollout={{prompts: 2, {extras}}}", f"algorithm={{type: ppo, terms: [{term}]}}")
    rollouts = with_earnings(table.rollouts(), (2, 3))
    rollouts.origin = torch.tensor([FRESH, FRESH, *origin])
    rollouts.extras["steps"] = steps(table, values=[[0.0], [0.0], *VALUES], terminated=[[1.0]] * 4)
    rollouts.extras["steps"].mask[2:] = False
    made.prepare(rollouts)
    return made


@pytest.mark.parametrize(
    ("of", "origin", "expected"),
    [
        ("replayed", (REPLAYED, DEMONSTRATION), [0, 0, -0.5 * math.e / 4, 0]),
        ("replayed", (REPLAYED, REPLAYED), [0, 0, -0.5 * math.e / 4, -0.5 / math.e / 4]),
        ("demonstrations", (REPLAYED, DEMONSTRATION), [0, 0, 0, -0.5 / math.e / 4]),
    ],
)
def test_stored_steps_are_imitated_beside_ppo(given, of, origin, expected):
    made = beside(given, of, origin)
    made.learn()
    close(made.gradient()[:, 0], expected, atol=1e-5)
    close(made.gradient("value")[:, 0], [0, 0, 0, 0])  # PPO's critic learns from its own episodes alone
    assert made.metrics.result()["advantage_weighted/weight"] == pytest.approx(
        {0: math.e, 1: (math.e + 1 / math.e) / 2, 2: 1 / math.e}[(of == "demonstrations") * 2 + (origin[1] == REPLAYED)]
    )


def test_self_imitation_of_what_was_better_than_expected(given):
    made = beside(given, "replayed", (REPLAYED, REPLAYED), options=", weights: {form: positive}")
    made.learn()
    close(made.gradient()[:, 0], [0, 0, -0.5 / 4, 0], atol=1e-5)


def test_a_job_without_a_critic_is_refused(given):
    table = Table([[-1.0]], group=[0], rewards=[0.0])
    with pytest.raises(
        UserError, match=r"algorithm.terms.0 \(advantage_weighted\) needs a critic, .* use algorithm.type=ppo"
    ):
        given(table, "algorithm.terms=[advantage_weighted]")


def test_a_job_without_stored_steps_is_refused(given):
    table = Table([[-1.0]], group=[0], rewards=[0.0], value=[[0.0]])
    with pytest.raises(
        UserError,
        match=r"algorithm.terms.0 \(advantage_weighted\) learns .* rollout.extras, which has no source of such",
    ):
        given(table, "rollout={prompts: 1}", "algorithm={type: ppo, terms: [advantage_weighted]}")
