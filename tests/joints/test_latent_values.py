"""A learned value of latents: its least loss, what segments get, what a checkpoint holds."""

import io
import json
import math

import pytest
import torch

from mmrl.core.values import ValueNetwork, fit_values, tilted_loss, word_counts
from mmrl.protocols.auxiliary import AuxiliaryModule, AuxiliaryModules
from mmrl.rollouts import Column
from mmrl.terms.shapers.denoising_steps import segment_returns
from tests.joints.parts import Table, close


@pytest.mark.parametrize("eta", [0.0, 0.5, 2.0])
def test_the_least_loss_is_at_the_tilted_value(eta):
    outcome = torch.tensor([0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    value = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    expected = 1.0 if eta == 0 else math.log(float((eta * outcome).exp().mean())) / eta
    with torch.no_grad():
        value += expected
    tilted_loss(value, outcome, eta).mean().backward()
    close(value.grad, 0.0, atol=1e-9)
    here, near = (float(tilted_loss(torch.tensor(expected + d), outcome, eta).mean()) for d in (0.0, 0.1))
    assert 0 < here < near
    steep = tilted_loss(torch.zeros(2, dtype=torch.float64), torch.tensor([100.0, 101.0]), max(eta, 1.0))
    assert steep.isfinite().all()


def test_segments_by_hand():
    value, outcome = torch.tensor([[1.0, 2.0, 4.0, 7.0, 11.0]]), torch.tensor([20.0])
    close(segment_returns(value, outcome, 1), [[1, 2, 3, 4, 9]])
    close(segment_returns(value, outcome, 2), [[3, 3, 7, 7, 9]])  # 4 - 1, 11 - 4, 20 - 11
    close(segment_returns(value, outcome, 9), [[19] * 5])
    assert segment_returns(value, torch.tensor([math.nan]), 2)[0, :4].tolist() == [3, 3, 7, 7]


def test_it_learns_a_value_and_goes_on_from_its_state():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=chance)
    outcome = (2 * x[:, 0] - x[:, 1]).double()
    whole, half, rest = (AuxiliaryModule(ValueNetwork(3, 16, seed), lr=1e-2) for seed in (0, 0, 7))

    def fit(network, seed):
        return fit_values(network.module, network.update, x, outcome, eta=0.0, passes=30, size=50, seed=seed)

    assert whole.predict(x).tolist() == [0.0] * 400  # nothing is known in the beginning
    first = fit(whole, 0)
    fit(half, 0)
    rest.load(half.state())
    last = fit(whole, 1)
    assert fit(rest, 1) == last < first < 0.2
    assert torch.equal(whole.predict(x), rest.predict(x)) and (whole.predict(x) - outcome).square().mean() < 0.05


def one_weight():
    """A network that gives back its input: Adam moves its weight by the learning rate in each of its first steps."""
    line = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(line.weight)
    return line


def test_a_state_stays_what_it_was():
    modules = AuxiliaryModules()
    own = modules.get("own", one_weight, lr=0.25)
    for _ in range(2):
        kept = modules.state()["own"]
        own.update(own.module(torch.ones(1, 1)).sum())
    close(kept["module"]["weight"], [[0.75]])
    assert kept["updates"] == 1 and kept["optimizer"]["state"][0]["step"] == 1
    close(own.module.weight.detach(), [[0.5]], atol=1e-4)


def test_a_state_whose_owner_has_not_come_yet_is_in_the_next_checkpoint():
    modules, later = AuxiliaryModules(), AuxiliaryModules()
    own = modules.get("own", one_weight, lr=0.25)
    own.update(own.module(torch.ones(1, 1)).sum())
    later.load(modules.state())
    assert later.state().keys() == {"own"}
    close(later.state()["own"]["module"]["weight"], [[0.75]])


def known(given, options, *, latents=True, rewards=(2.0, 4.0)):
    """Two rollouts of two decisions, whose value is 10 times their first number where the network says so."""
    columns = {"latents": [[[0.1], [0.3]], [[0.1], [0.2]]]} if latents else {}
    return given(
        Table([[-1.0, -1.0]] * 2, rewards=list(rewards), **columns), "rollout.prompts=1", "rollout.group_size=2",
        f"algorithm.shaping=[{{type: latent_values, scale: none, {options}}}]",
    )  # fmt: skip


def test_what_a_segment_added_is_its_advantage(given, monkeypatch):
    """V is 1, 3 and 1, 2; outcomes 2 and 4: gains are (2, -1) and (1, 2), of means 1.5 and 0.5."""
    monkeypatch.setattr(ValueNetwork, "forward", lambda self, x: 10 * x[:, 0])
    close(known(given, "warm_up: 0, passes: 0").prepare().advantages, [[0.5, -1.5], [-0.5, 1.5]])
    both = known(given, "warm_up: 0, passes: 0, weight: 2, outcome: 1").prepare().advantages
    a = math.sqrt(0.5)
    close(both, [[1 - a, -3 - a], [-1 + a, 3 + a]], atol=1e-5)
    close(known(given, "warm_up: 0, passes: 0, every: 2").prepare().advantages, [[-1, -1], [1, 1]])


def test_it_only_learns_in_its_warm_up_and_remembers(given):
    made = known(given, "warm_up: 2, passes: 20, lr: 0.05, width: 8")
    a = math.sqrt(0.5)
    losses = []
    for step in range(4):
        found = made.prepare(step=step).advantages
        if step < 2:
            close(found, [[-a, -a], [a, a]], atol=1e-5)
        losses.append(made.batch.reports["latent_values/loss"])
    assert losses[3] < losses[0] and not torch.allclose(found.abs(), torch.tensor(a), atol=1e-3)
    kept = json.loads(json.dumps(made.trainer.preparation.memory))  # as a checkpoint has it
    buffer = io.BytesIO()
    torch.save(made.trainer.preparation.modules.state(), buffer)
    buffer.seek(0)
    networks = torch.load(buffer, weights_only=True)
    expected = made.prepare(step=4).advantages
    again = known(given, "warm_up: 2, passes: 20, lr: 0.05, width: 8")
    again.trainer.preparation.memory.update(kept)
    again.trainer.preparation.modules.load(networks)
    assert torch.equal(again.prepare(step=4).advantages, expected)


def test_a_network_judges_before_it_learns_from_a_step(given):
    """It knows nothing at first: all that is gained is gained at the end, 2 and 4."""
    close(known(given, "warm_up: 0, passes: 50, lr: 0.1").prepare().advantages, [[0, -1], [0, 1]])


def test_a_reward_that_is_unknown_teaches_nothing(given):
    made = known(given, "warm_up: 0, passes: 1", rewards=(math.nan, math.nan))
    close(made.prepare().advantages, [[0, 0], [0, 0]])
    assert "latent_values/loss" not in made.batch.reports


def test_words_are_counted_in_the_same_places_everywhere():
    one, other = word_counts("Draw a seven", 64), word_counts("a seven seven draw", 64)
    assert one.sum() == 3 and (other - one).sum() == 1 and (other - one).max() == 1
    assert isinstance(Column(one[None]).values, torch.Tensor)
