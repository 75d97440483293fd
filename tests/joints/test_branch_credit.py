"""Credit of a step from the branches that part there (TempFlow-GRPO): branches, completions, advantages, the loss."""

import math

import pytest
import torch

from mmrl.config import validate
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.measurements.chains import CandidateCompletions
from mmrl.rollouts import Column
from mmrl.training.metrics import Metrics
from mmrl.training.preparation import Preparation
from tests.joints.parts import Table, close
from tests.joints.test_step_gains import drawn as drawn_for
from tests.joints.test_step_gains import folder  # noqa: F401  (a fixture)

# Step 0 of the first group: mean 2, std 1; step 1: mean 14 / 3. In the second group all are alike, then std 1 / 2.
OUTCOMES = [[1.0, 5.0], [3.0, 5.0], [2.0, 4.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.5]]
CENTRED = [[-1, 1 / 3], [1, 1 / 3], [0, -2 / 3], [0, -0.5], [0, 0.5], [0, 0]]
THIRD = math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2)


def made(given, options="", *overrides):
    table = Table([[-1.0, -2.0]] * 6, group=[0, 0, 0, 1, 1, 1], rewards=[1.0, 2.0, 3.0, 0.0, 0.0, 0.0])
    return given(
        table, "rollout.prompts=2", "rollout.group_size=3",
        f"algorithm={{surrogate: reinforce, shaping: [{{type: branch_credit{options}}}]}}", *overrides,
    )  # fmt: skip


def prepared(job, outcomes=OUTCOMES):
    rollouts = job.table.rollouts()
    rollouts.extras[CandidateCompletions().name] = Column(torch.tensor(outcomes))
    return job.prepare(rollouts)


def test_branches_are_compared_with_those_of_their_step(given):
    close(prepared(made(given, ", scale: none")).advantages, CENTRED)
    scaled = [[a, b / (THIRD if row < 3 else 0.5)] for row, (a, b) in enumerate(CENTRED)]
    job = made(given)
    close(prepared(job).advantages, scaled, atol=2e-5)
    job.learn()
    close(job.gradient(), [[-a / 12 for a in row] for row in scaled], atol=1e-5)


def test_the_outcome_may_have_a_share(given):
    """The rollouts' own rewards are 1, 2, 3: advantages -1, 0, 1, and none in the other group."""
    found = prepared(made(given, ", scale: none, weight: 2, outcome: 0.5")).advantages
    own = [-0.5, 0, 0.5, 0, 0, 0]
    close(found, [[2 * value + own[row] for value in CENTRED[row]] for row in range(6)], atol=1e-5)


def test_a_branch_that_could_not_be_scored_has_no_part(given):
    unknown = [[1.0, math.nan], [3.0, 5.0], [math.nan, 4.0], *OUTCOMES[3:]]
    found = prepared(made(given, ", scale: none"), unknown).advantages
    close(found[:3], [[-1, 0], [1, 0.5], [0, -0.5]])


def test_micro_batches_change_nothing(given):
    job = made(given)
    prepared(job)
    whole, expected = job.learn(), job.gradient()
    job.close()
    job = made(given, "", "engine.micro_batch=2")
    prepared(job)
    close(job.learn(), whole)
    close(job.gradient(), expected)


def branches(folder, trunk, **more):  # noqa: F811
    return drawn_for(
        folder,
        algorithm={"shaping": ["branch_credit"]},
        shared_states=True,
        trunk=trunk,
        window={"type": "first_half", "size": 3, "last": 3},
        **more,
    )


def test_every_step_branches_off_the_deterministic_chain(folder):  # noqa: F811
    """The states of a group are those of one Euler chain by hand; each branch has noise of its own."""
    policy, _, batch = branches(folder, "ode")
    sigmas = policy.sampler.grid.sigmas
    for group in (0, 1):
        records = batch.inputs[3 * group : 3 * group + 3]
        predict = policy.network.predictor(policy.sampler, [records[0].condition_inputs], 2.0)
        x = records[0].x[0][None]
        for k, point in enumerate(records[0].points.tolist()):
            assert all(torch.equal(record.x[k], records[0].x[k]) for record in records)
            torch.testing.assert_close(x[0], records[0].x[k], atol=1e-5, rtol=0)
            assert not any(torch.equal(records[0].x_next[k], record.x_next[k]) for record in records[1:])
            with torch.no_grad():
                v = predict(x, torch.tensor([point]), torch.tensor([0]))
            x = x + (sigmas[point + 1] - sigmas[point]) * v
    other = branches(folder, "candidate")[2]
    assert torch.equal(other.inputs[0].x[0], batch.inputs[0].x[0])
    assert torch.equal(other.inputs[0].x_next[0], batch.inputs[0].x_next[0])
    assert not torch.equal(other.inputs[0].x[1], batch.inputs[0].x[1])


def test_a_steps_credit_does_not_hang_on_what_came_before(folder):  # noqa: F811
    """Outcomes are of completions; the loss of the whole path is REINFORCE's by step, at a ratio of exactly 1."""
    policy, task, batch = branches(folder, "ode", step_weight="std")
    worth = batch.extras[CandidateCompletions().name].values
    torch.testing.assert_close(worth[:, -1], batch.rewards[:, 0])
    config = validate(
        {
            "run_dir": "unset",
            "model": {"type": "diffusion", "path": str(folder)},
            "task": {"type": "image_generation"},
            "denoising": {"steps": 5, "likelihood": {"shared_states": True, "trunk": "ode", "step_weight": "std"}},
            "algorithm": {"shaping": ["branch_credit"]},
            "rollout": {"prompts": 2, "group_size": 3},
        },
        "test",
    )
    ranks = Ranks()
    preparation = Preparation(config, policy, task, ranks, None, None)
    preparation.minibatches(batch, 0, torch.Generator().manual_seed(0), Metrics(ranks))
    for group in (0, 1):
        rows = slice(3 * group, 3 * group + 3)
        own = worth[rows]
        expected = (own - own.mean(0)) / (own.std(0) + 1e-6)
        close(batch.advantages[rows], expected, atol=1e-4)
    now = policy.replay(batch, policy.module)
    assert now.log_ratio.abs().max() == 0 and now.log_ratio.requires_grad
    std = policy.sampler.std[torch.stack([record.points for record in batch.inputs])]
    close(now.weight, std / std.mean(1, keepdim=True), atol=1e-5)


def test_a_chain_of_its_own_states_is_refused(folder):  # noqa: F811
    tree = {
        "run_dir": "unset",
        "model": {"type": "diffusion", "path": str(folder)},
        "task": {"type": "image_generation"},
        "algorithm": {"shaping": ["branch_credit"]},
    }
    with pytest.raises(UserError, match=r"\(branch_credit\) needs denoising steps from states that a group shares"):
        validate(tree, "test")
    alone = {"likelihood": {"trunk": "ode"}}
    with pytest.raises(UserError, match="trunk=ode has an effect only with shared_states=true; set"):
        validate(tree | {"denoising": alone, "algorithm": {}}, "test")
