"""Rewards of a chain's steps, from what their completions earn to advantages: step_gains (StepGains)."""

import math

import pytest
import torch

from mmrl import build
from mmrl.collection.collector import Collector
from mmrl.config import validate
from mmrl.core.credit import turning_point_gains
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.measurements.chains import Completions
from mmrl.rollouts import Column
from mmrl.tasks.image_generation.tiny import model as tiny_model
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close

WORTH = [[0.0, 1.0, 3.0], [2.0, 1.0, 2.0], [1.0, 1.0, 4.0]]


def shaped(given, options, worth=WORTH):
    made = given(
        Table([[-1.0, -1.0]] * 3, rewards=[3.0, 2.0, 4.0]),
        "rollout.prompts=1",
        "rollout.group_size=3",
        f"algorithm.shaping=[{{type: step_gains, {options}}}]",
    )
    rollouts = made.table.rollouts()
    rollouts.extras[Completions().name] = Column(torch.tensor(worth))
    return made.prepare(rollouts).advantages


def test_gains_against_the_same_step_of_the_group(given):
    # d = (1, 2), (-1, 1), (0, 3): means 0 and 2.
    close(shaped(given, "turning_points: false, scale: none"), [[1, 0], [-1, -1], [0, 1]])
    close(shaped(given, "turning_points: false"), [[1, 0], [-1, -1], [0, 1]])  # whose deviations are 1
    outcome = torch.tensor([0.0, -1.0, 1.0])[:, None]
    both = shaped(given, "turning_points: false, scale: none, weight: 2, outcome: 0.5")
    close(both, 2 * torch.tensor([[1.0, 0], [-1, -1], [0, 1]]) + 0.5 * outcome)


def test_turning_points_by_hand():
    rows = {
        # R: what comes of the signs of (d_1, d_2, d_3) against R_3 - R_0
        (0.0, 1.0, 2.0, 3.0): [3.0, 1.0, 1.0],  # the first step points to the outcome, no later one turns
        (0.0, -1.0, 1.0, 3.0): [-1.0, 4.0, 2.0],  # away, then it turns and goes on: 3 - (-1)
        (0.0, -1.0, 4.0, 3.0): [-1.0, 5.0, -1.0],  # it turns, but overshoots: the rest goes back
        (3.0, 4.0, 2.0, 1.0): [1.0, -3.0, -1.0],  # downwards alike
        (0.0, 2.0, 1.0, 1.5): [2.0, -1.0, 0.5],  # the first overshoots; the last ends where it turns
        (1.0, 0.0, 2.0, 1.0): [-1.0, 2.0, -1.0],  # an outcome like the beginning: nowhere to turn to
    }
    close(turning_point_gains(torch.tensor(list(rows))), list(rows.values()))


def test_they_reach_the_advantages_by_default(given):
    # turned: row 0 (0, 1, 3) -> 3 - 0 at the first step; row 1 has no direction; row 2 keeps 0 and 3.
    close(shaped(given, "scale: none"), [[3 - 2 / 3, 0], [-1 - 2 / 3, -1], [-2 / 3, 1]])


def test_a_step_that_could_not_be_scored_has_no_part(given):
    worth = [[0.0, 1.0, 3.0], [2.0, math.nan, 2.0], [1.0, 1.0, 4.0]]
    close(shaped(given, "turning_points: false, scale: none", worth), [[0.5, -0.5], [0, 0], [-0.5, 0.5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny_model.build_digits(str(folder), seed=0)
    return folder


def drawn(folder, algorithm=None, **likelihood):
    config = validate(
        {
            "run_dir": "unset",
            "model": {"type": "diffusion", "path": str(folder)},
            "task": {"type": "image_generation", "data": {"type": "digits"}},
            "denoising": {"steps": 5, "guidance": 2.0, "likelihood": {"type": "chain", **likelihood}},
            "algorithm": algorithm or {"shaping": ["step_gains"]},
            "rollout": {"prompts": 2, "group_size": 3},
        },
        "test",
    )
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    ranks = Ranks()
    return policy, task, Collector(config, policy, task, ranks, None).next(0, Metrics(ranks))


@pytest.mark.parametrize("window", [{"type": "all"}, {"type": "random", "size": 2, "first": 1}])
def test_completions_are_the_rewards_of_states_led_on_without_noise(folder, window):
    """By Euler steps by hand from every kept state; behind the last step stands what the rollout itself earned."""
    policy, task, batch = drawn(folder, window=window)
    worth = batch.extras[Completions().name].values
    assert worth.shape == (6, batch.mask.shape[1] + 1)
    torch.testing.assert_close(worth[:, -1], batch.rewards[:, 0])
    sigmas = policy.sampler.grid.sigmas
    for i, record in enumerate(batch.inputs):
        for k, point in enumerate(record.points.tolist()):
            x = record.x[k][None]
            predict = policy.network.predictor(policy.sampler, [record.condition_inputs], 2.0)
            for step in range(point, 5):
                with torch.no_grad():
                    v = predict(x, torch.tensor([step]), torch.tensor([0]))
                x = x + (sigmas[step + 1] - sigmas[step]) * v
            image = policy.family.decode(x)[0]
            sample = type(batch.samples[i])(batch.samples[i].prompt, image=image)
            expected = task.score([sample], torch.tensor([0]))[0, 0]
            torch.testing.assert_close(worth[i, k], expected, rtol=1e-3, atol=1e-3)


def test_decisions_without_chains_are_refused(folder):
    with pytest.raises(UserError, match="needs chains that can be completed from each of their steps"):
        validate(
            {
                "run_dir": "unset",
                "model": {"type": "diffusion", "path": str(folder)},
                "task": {"type": "image_generation"},
                "denoising": {"likelihood": "matching"},
                "algorithm": {"type": "matching", "shaping": ["step_gains"]},
            },
            "test",
        )
