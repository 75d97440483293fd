"""algorithm.type=tilt_matching (DTM), from its keys to the loss and its gradient by every decision, and on a masked
model by enumeration of what it says."""

import math

import pytest
import torch

from mmrl.algorithms.denoising.tilt_matching import KEY, TiltMatching
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.rollouts import Column, Replay
from tests.joints.parts import Table, close
from tests.policies.discrete_diffusion.parts import Exact, forget_end, policy_of
from tests.policies.discrete_diffusion.parts import given as responses

FACTORS = {
    "none": lambda worth: [0.0] * 3,
    "one": lambda worth: [1.0] * 3,
    "others": lambda worth: [(sum(worth) - w) / 2 for w in worth],
}


def three(**columns):
    cross = [[0.5, 1.5], [2.0], [0.25]]
    return Table([[-1.0, -2.0], [-1.0], [-3.0]], rewards=[0.0, 1.0, 2.0], old_cross_entropy=cross, **columns)


def job(given, kind, *overrides, table=None):
    algorithm = f"algorithm={{type: tilt_matching, tilt: 0.5, control_variate: {kind}}}"
    return given(table or three(), algorithm, "rollout.prompts=1", "rollout.group_size=3", *overrides)


@pytest.mark.parametrize("kind", FACTORS)
def test_targets_are_tilted_and_controlled(given, kind):
    made = job(given, kind)
    made.prepare()
    worth = [1.0, math.exp(0.5), math.exp(1.0)]
    c = FACTORS[kind](worth)
    own = [w - f for w, f in zip(worth, c, strict=True)]
    loss = (3 * own[0] + 2.0 * c[0]) + (1 * own[1] + 2.0 * c[1]) + (3 * own[2] + 0.25 * c[2])
    close(made.learn(), loss / 4)
    close(made.gradient() * 4, [[-own[0], -own[0]], [-own[1], 0], [-own[2], 0]])
    close(made.gradient("entropy") * 4, [[c[0], c[0]], [c[1], 0], [c[2], 0]])


def test_what_was_not_scored_or_filled_up_teaches_nothing(given):
    table = three()
    table.rewards[1] = math.nan
    made = job(given, "others", table=table)
    made.prepare()
    made.learn()
    left = 1 - math.e
    close(made.gradient() * 4, [[-left, -left], [0, 0], [left, 0]])
    close(made.gradient("entropy")[1], [0, 0])
    made = job(given, "one")
    rollouts = made.table.rollouts()
    rollouts.filler = torch.tensor([True] * 3)
    made.prepare(rollouts)
    made.learn()
    close(made.gradient(), torch.zeros(3, 2))
    close(made.gradient("entropy"), torch.zeros(3, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("masked")


def test_the_old_distribution_is_that_of_the_states_that_are_asked_about(folder):
    """Two states of a response, by hand: a policy that has moved since is compared with what it was."""
    likelihood = {"type": "trace", "shrink": 2}
    options = {"unmasking": {"likelihood": likelihood, "order": "random"}, "algorithm": {"type": "tilt_matching"}}
    policy = forget_end(policy_of(folder, **options))
    response = [8, 13, 10]
    batch = responses(policy, [response], [[2, 0, 1]])  # the last two are asked about together
    before = Exact(policy, 3)
    tables = [before.table([None] * 3), before.table([None, *response[1:]])]
    with torch.no_grad():
        first = policy.replay(batch, policy.module)
    assert "old_cross_entropy" not in first.extras and first.prediction.shape == (1, 3, 2, 16)
    batch.old_prediction = first.prediction
    same = policy.replay(batch, policy.module)
    torch.testing.assert_close(same.extras["old_cross_entropy"], first.entropy)  # to itself it is the entropy
    slope = torch.autograd.grad(
        same.extras["old_cross_entropy"].sum(), list(policy.module.parameters()), allow_unused=True
    )
    assert max(float(g.abs().max()) for g in slope if g is not None) < 1e-5  # and nothing pulls
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
        now = policy.replay(batch, policy.module)
    after = Exact(policy, 3)
    moved = [after.table([None] * 3), after.table([None, *response[1:]])]
    expected = torch.stack(
        [-(tables[s][k].exp() * moved[s][k].clamp(min=-1e9)).sum() for k, s in ((0, 1), (1, 0), (2, 0))]
    )
    torch.testing.assert_close(now.extras["old_cross_entropy"][0].double(), expected, rtol=0, atol=3e-5)
    assert (now.extras["old_cross_entropy"][0] - same.extras["old_cross_entropy"][0]).abs().max() > 0.01


@pytest.mark.parametrize("factor", [0.0, 1.0, 1.3])
def test_the_target_is_on_average_the_tilted_posterior(factor):
    """Of one place: all tokens as rollouts, each as often as the policy draws it. What is said best then is
    p e^(tilt r) / Z, whatever the factor: there the loss is flat."""
    chance = torch.tensor([0.5, 0.3, 0.15, 0.05])
    worth = (0.7 * torch.tensor([-1.0, 1.0, 0.5, 2.0])).exp()
    micro = Table([[0.0]] * 4).rollouts()
    micro.advantages, micro.extras[KEY] = (worth - factor)[:, None], Column(torch.full((4,), factor))

    def loss(logits):
        said = logits.log_softmax(0)
        cross = -(chance * said).sum().expand(4, 1)
        return (
            chance[:, None] * TiltMatching().loss(micro, Replay(said[:, None], extras={"old_cross_entropy": cross}))[0]
        ).sum()

    tilted = (chance * worth).log().requires_grad_()
    (slope,) = torch.autograd.grad(loss(tilted), tilted)
    close(slope, torch.zeros(4))
    assert (torch.autograd.functional.jacobian(loss, chance.log()).abs() > 0.01).any()  # not where it began


def test_what_does_not_fit_is_one_line(given):
    for overrides, line in (
        (
            ["algorithm.control_variate=others", "rollout.group_size=1"],
            "a group has no other rollouts; raise rollout.group_size",
        ),
        (["algorithm.control_variate=two"], "algorithm.control_variate"),
    ):
        with pytest.raises(UserError, match=line):
            given(three(), "algorithm={type: tilt_matching}", *overrides)
    with pytest.raises(UserError, match="needs the whole distribution of each decision"):
        validate({"run_dir": "x", "algorithm": {"type": "tilt_matching"}}, "test")


def test_the_factor_travels_with_its_rollout(given):
    made = job(given, "others", "engine.micro_batch=1")
    made.prepare()
    assert len(made.minibatches[0]) == 3
    assert all(isinstance(micro.extras[KEY], Column) for micro in made.minibatches[0])
    whole = job(given, "others")
    whole.prepare()
    close(made.learn(), whole.learn())
