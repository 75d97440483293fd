"""Candidates of a step, from how they are drawn to the loss: shared states, completions, pairs (SPO)."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.measurements.chains import CandidateCompletions
from mmrl.protocols.measurement import CollectedContext
from mmrl.rollouts import Column
from tests.joints.parts import Table, close
from tests.joints.test_step_gains import drawn as drawn_for
from tests.joints.test_step_gains import folder  # noqa: F401  (a fixture)

OUTCOMES = [[1.0, 5.0], [3.0, 5.0], [2.0, 4.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.5]]


def made(given, *overrides):
    table = Table([[-1.0, -2.0]] * 6, group=[0, 0, 0, 1, 1, 1], rewards=[0.0] * 6)
    return given(
        table, "rollout.prompts=2", "rollout.group_size=3",
        "algorithm={type: candidate_preference, beta: 2.0}", *overrides,
    )  # fmt: skip


def prepared(job, outcomes=OUTCOMES):
    rollouts = job.table.rollouts()
    rollouts.extras[CandidateCompletions().name] = Column(torch.tensor(outcomes))
    return job.prepare(rollouts)


def test_each_step_has_its_best_and_its_worst(given):
    """Group 0: rows 1 and 0 at the first step, 0 and 2 at the second; group 1: all alike, then rows 1 and 0."""
    found = prepared(made(given)).advantages
    close(found, [[-1, 1], [1, 0], [0, -1], [0, -1], [0, 1], [0, 0]])
    unknown = [[1.0, math.nan], [math.nan, 5.0], [2.0, 4.0], *OUTCOMES[3:]]
    close(prepared(made(given), unknown).advantages, [[-1, 0], [0, 1], [1, -1], [0, -1], [0, 1], [0, 0]])


def test_the_loss_is_a_mean_over_pairs_whatever_their_group(given):
    """Log-ratios to the reference are what weights were moved by: margins 2 x 0.4, 2 x 0.2 and 2 x -0.1."""
    job = made(given)
    job.move(logp=[[-0.1, 0.2], [0.3, 0.0], [0.0, 0.0], [0.0, 0.1], [0.0, 0.0], [0.0, 0.0]])
    prepared(job)
    margins = [0.8, 0.4, -0.2]
    close(job.learn(), sum(math.log1p(math.exp(-m)) for m in margins) / 3)
    slope = [2 / 3 / (1 + math.exp(m)) for m in margins]
    close(
        job.gradient(),
        [[slope[0], -slope[1]], [-slope[0], 0], [0, slope[1]], [0, slope[2]], [0, -slope[2]], [0, 0]],
    )
    found = job.metrics.result()
    close(found["preference/margin"], sum(margins) / 3)
    close(found["preference/right"], 2 / 3)


def test_candidates_share_their_state_and_are_completed_by_hand(folder):  # noqa: F811
    """The next state is one of the candidates; outcomes are rewards of each one's own Euler completion."""
    policy, task, batch = drawn_for(
        folder,
        algorithm={"type": "candidate_preference"},
        shared_states=True,
        window={"type": "first_half", "size": 3, "last": 3},
    )
    count = batch.mask.shape[1]
    sigmas = policy.sampler.grid.sigmas
    assert count == 3
    for group in (0, 1):
        records = [
            r for r, g in zip(batch.inputs, batch.group.unique(return_inverse=True)[1], strict=True) if g == group
        ]
        for k in range(count):
            assert all(torch.equal(r.x[k], records[0].x[k]) for r in records)
            assert not torch.equal(records[0].x_next[k], records[1].x_next[k])
            if k + 1 < count:
                assert any(torch.equal(records[0].x[k + 1], r.x_next[k]) for r in records)
    went_on = set()  # which candidate of the first step the group went on from
    for seed in range(0, 60, 3):
        first, *_ = drawn = policy.rollout([batch.samples[0].prompt], 3, [seed, seed + 1, seed + 2], step=0).inputs
        went_on |= {i for i, record in enumerate(drawn) if torch.equal(first.x[1], record.x_next[0])}
    assert went_on == {0, 1, 2}
    worth = batch.extras[CandidateCompletions().name].values
    assert worth.shape == (6, 3)
    torch.testing.assert_close(worth[:, -1], batch.rewards[:, 0])  # the last candidate's completion is the image
    for i in (0, 4):
        record = batch.inputs[i]
        for k, point in enumerate(record.points.tolist()):
            x = record.x_next[k][None]
            predict = policy.network.predictor(policy.sampler, [record.condition_inputs], 2.0)
            for step in range(point + 1, 5):
                with torch.no_grad():
                    x = x + (sigmas[step + 1] - sigmas[step]) * predict(x, torch.tensor([step]), torch.tensor([0]))
            sample = type(batch.samples[i])(batch.samples[i].prompt, image=policy.family.decode(x)[0])
            torch.testing.assert_close(worth[i, k], task.score([sample], torch.tensor([0]))[0, 0], rtol=1e-3, atol=1e-3)
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        assert torch.equal(now.logp, policy.replay(batch, policy.module).logp)
    assert now.log_ratio.abs().max() == 0  # exactly on-policy
    read = policy.latents(batch)
    assert read.shape == (6, 3, 65) and torch.equal(read[2, 1, :64], batch.inputs[2].x[1].flatten())
    assert torch.equal(read[:, :, 64], sigmas[torch.stack([r.points for r in batch.inputs])])


def test_completions_are_scored_in_the_groups_of_their_rollouts():
    """A reward that is the number of the group tells in which one each completion was scored."""
    policy = SimpleNamespace(complete_steps=lambda rollouts, *, ends: [None] * 6)
    task = SimpleNamespace(score=lambda samples, group: group[:, None].float(), reward_weights=[2.0])
    context = CollectedContext(policy, task, 0, 0, 2, int, None)
    rollouts = Table([[-1.0, -1.0]] * 3, group=[5, 5, 9]).rollouts()
    close(CandidateCompletions().measure(rollouts, context).values, [[10, 10], [10, 10], [18, 18]])


def test_a_chain_of_its_own_states_is_refused(folder):  # noqa: F811
    tree = {
        "run_dir": "unset",
        "model": {"type": "diffusion", "path": str(folder)},
        "task": {"type": "image_generation"},
        "algorithm": {"type": "candidate_preference"},
    }
    with pytest.raises(UserError, match=r"needs denoising steps from states that a group shares .*shared_states=true"):
        validate(tree, "test")
    both = {"likelihood": {"shared_states": True, "branching": [12]}}
    with pytest.raises(UserError, match="exclude each other"):
        validate(tree | {"denoising": both}, "test")
    shaped = {"likelihood": {"shared_states": True}}
    with pytest.raises(UserError, match="needs a separate denoising chain for each rollout"):
        validate(tree | {"denoising": shaped, "algorithm": {"shaping": ["step_gains"]}}, "test")
