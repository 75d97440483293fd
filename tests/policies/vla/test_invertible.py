"""The invertible head: its flow is undone exactly, and its likelihood is that of the change of variables."""

import math

import pytest
import torch
from torch.distributions import Normal

from mmrl.policies.vla.backbones.states_only import EmptyPrefix
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.tasks.manipulation import tiny_model
from tests.policies.vla.test_critics import quiet
from tests.policies.vla.test_policy import SEEDS, STARTS, stir


@pytest.fixture
def made(make, tmp_path):
    tiny_model.build_states(tmp_path / "blind")

    def policy(**options):
        head = {"type": "invertible", "width": 16, "layers": 2, "last_gain": 1.0, **options}
        return stir(make(head, str(tmp_path / "blind"), sim=quiet()), 0.1)

    return policy


def test_backwards_undoes_forwards(made):
    head = made().module.head
    generator = torch.Generator().manual_seed(0)
    noise, context = torch.randn(5, 2, 4, generator=generator), torch.randn(5, 1, generator=generator)
    with torch.no_grad():
        drawn = head.noise_to_actions(noise, context)
        torch.testing.assert_close(head.actions_to_noise(drawn, context), noise, rtol=1e-4, atol=1e-5)
    assert (drawn - noise).abs().mean() > 0.1


@pytest.mark.parametrize(("mix", "steps"), [(0.9, 5), (0.7, 2)])
def test_the_likelihood_is_that_of_the_change_of_variables(made, mix, steps):
    """Against the determinant of the Jacobian, by automatic differentiation, in double precision."""
    head = made(mix=mix, steps=steps, scale=0.4).module.head.double()
    context = torch.tensor([[0.3]], dtype=torch.float64)
    noise = 0.4 * torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def flow(flat):
        x, y = flat.view(1, 2, 4).unbind(1)
        for step in range(steps):  # `_velocity` rounds to float32
            x = x + velocity(y, step)
            y = y + velocity(x, step)
            x = mix * x + (1 - mix) * y
            y = mix * y + (1 - mix) * x
        return torch.stack([x, y], 1).flatten()

    def velocity(copy, step):
        return head.velocity(torch.cat([context, copy, torch.full((1, 1), step / steps).double()], 1)) / steps

    jacobian = torch.autograd.functional.jacobian(flow, noise)
    known = Normal(0, 0.4).log_prob(noise).sum() - jacobian.det().abs().log()
    chosen = {"copies": flow(noise).float().detach().view(1, 2, 4), "temperature": torch.ones(1)}
    head.float()
    valid = torch.ones(1, 4, dtype=torch.bool)
    with torch.no_grad():
        reading = EmptyPrefix(1, torch.device("cpu"))
        found = head.score(reading, context.float(), chosen, valid, None, None)["logp"]
    assert found.shape == (1, 1) and found.item() == pytest.approx(known.item(), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_it_is_scored_at_the_temperature_of_its_noise(made, temperature):
    head = made(scale=0.3).module.head
    reading, state = EmptyPrefix(1, torch.device("cpu")), torch.tensor([[0.2]])
    with torch.no_grad():
        chosen = head.act(reading, state, ActionSampling([3], temperature))
        found = head.score(reading, state, chosen, torch.ones(1, 4, dtype=torch.bool), None, None)["logp"].item()
    noise = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))  # before it is scaled
    known = Normal(0, 1).log_prob(noise).sum() - 8 * math.log(0.3 * temperature) - 2 * 5 * 4 * math.log(0.9)
    assert found == pytest.approx(known.item(), rel=1e-3)
    torch.testing.assert_close(chosen["actions"], chosen["copies"].mean(1).view(1, 4, 1))


def test_two_ways_are_learned_as_two_ways(made):
    """Demonstrations go left or right from one state; a Gaussian would go between them."""
    head = made(scale=0.5, width=64).module.head
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    shown = torch.tensor([-0.8, 0.8])[:, None, None].expand(2, 4, 1).repeat(32, 1, 1)
    reading, state = EmptyPrefix(64, torch.device("cpu")), torch.zeros(64, 1)
    for step in range(400):
        chosen = head.encode_demonstrations(shown, [64 * step + i for i in range(64)])
        loss = -head.score(reading, state, chosen, torch.ones(64, 4, dtype=torch.bool), None, None)["logp"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        drawn = head.act(reading, state, ActionSampling(list(range(64)), 1.0))["actions"][:, 0, 0]
    near = (drawn.abs() - 0.8).abs() < 0.3
    assert near.float().mean() > 0.8 and 0.2 < (drawn > 0).float().mean() < 0.8


def test_it_plays_and_replays_with_a_ratio_of_one(made):
    policy = made()
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    first, second = (policy.replay(rollouts, policy.module) for _ in range(2))
    assert torch.equal(first.logp, second.logp) and rollouts.mask.any()
    assert rollouts.mask.shape == first.logp.shape and policy.module.head.decisions == 1
