"""States in numbers of about one size, and the small network that sees nothing but them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.vla import states
from mmrl.policies.vla.backbones import small
from mmrl.policies.vla.heads.codec import ActionStatistics
from mmrl.policies.vla.saved import CONFIG
from mmrl.sims import build
from tests.policies.vla.conftest import CHUNK, KINDS, starts
from tests.sims.line_simulator import Line


class DarkLine(Line):
    """The line, without images."""

    image_shape = (0, 0, 3)

    def __init__(self, count):
        super().__init__(count)


class ShiftedLine(DarkLine):
    """Shows where the point is as (position - 1.5) / 0.5."""

    def reset(self, rows, seeds, tasks):
        return self._shifted(super().reset(rows, seeds, tasks))

    def step(self, rows, actions):
        return self._shifted(super().step(rows, actions))

    def _shifted(self, out):
        out.state[:] = (out.state - np.float32(1.5)) / np.float32(0.5)
        return out


def dark(rows):
    return build("tests.policies.vla.test_states:DarkLine", rows)


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blind")
    small.create(folder, small.SmallActionConfig(("go", "from"), bins=8, width=32, channels=()), seed=0)
    return str(folder)


def test_standardised_by_hand():
    known = states.StateStatistics(np.array([1, 2, 0], np.float32), np.array([2, 0.001, 0.5], np.float32))
    found = known.standardize(np.array([[2, 2.05, 100], [-3, 2, -0.25]], np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0.5, 5, 10], [-2, 0, -0.5]], rtol=1e-4)  # no std below 0.01, none beyond 10


def test_measured_over_every_state_that_was_acted_on():
    """Episodes of at most 6 actions from (2^31 + i) mod 2^32 / 100, which is past the end: each shows one state."""
    sim = dark(3)
    known = states.measure_statistics(sim, None, episodes=4)
    started = (np.arange(4) + (1 << 31)) / 100
    np.testing.assert_allclose(known.mean, started.mean(), rtol=1e-6)
    assert len(sim.simulator.received) == 4  # and not those of the idle rows


def test_actions_are_in_the_robots_units():
    sim = dark(2)
    tenfold = ActionStatistics(np.array([20.0]), np.array([30.0]), np.array([True]))
    states.measure_statistics(sim, tenfold, episodes=2)
    assert all(20 <= action <= 30 for _, action in sim.simulator.received)


def test_measured_alike_whatever_the_number_of_rows_starts_from():
    first, second = (states.measure_statistics(dark(2), None, episodes=4) for _ in range(2))
    assert np.array_equal(first.mean, second.mean) and np.array_equal(first.std, second.std)


def test_as_if_the_simulator_showed_standardised_states(make, blind):
    """Actions, values, values of cut episodes and likelihoods."""
    plain = make("regression", blind, sim=build("tests.policies.vla.test_states:ShiftedLine", 2), critic=True)
    policy = make("regression", blind, sim=dark(2), critic=True, standardise=True)
    policy.state_statistics = states.StateStatistics(np.array([1.5], np.float32), np.array([0.5], np.float32))
    with torch.no_grad():
        plain.module.critic.layers[-1].weight.normal_(generator=torch.Generator().manual_seed(0))
        plain.module.head.leave[-1].bias -= 0.5  # so that the time limit cuts the episodes
    policy.module.load_state_dict(plain.module.state_dict())
    first, second = (one.rollout(starts(0, 50), 1, [1, 2]) for one in (plain, policy))
    assert [episode[0].state.item() for episode in second.inputs] == [-3, -2]
    one, other = first.extras["steps"], second.extras["steps"]
    assert (other.bootstrap != 0).any() and torch.equal(first.mask, second.mask)
    for name in ("values", "bootstrap", "rewards"):
        assert torch.equal(vars(one)[name], vars(other)[name]), name
    assert torch.equal(plain.replay(first, plain.module).logp, policy.replay(second, policy.module).logp)


@pytest.mark.parametrize("kind", KINDS)
def test_a_blind_network_plays_and_replays(make, blind, kind):
    policy = make(kind, blind, sim=dark(4))
    assert not any("convolutions" in name for name in policy.module.state_dict())
    rollouts = policy.rollout(starts(0, 30), 2, [1, 2, 3, 4])
    with torch.no_grad():
        first, second = (policy.replay(rollouts, policy.module) for _ in range(2))
    assert torch.equal(first.logp, second.logp) and first.logp[rollouts.mask].isfinite().all()


def test_a_blind_network_acts_on_its_state(make, blind):
    policy = make("regression", blind, sim=dark(2))
    here, there = (policy.rollout(starts(seed), 1, [7]).inputs[0][0].sampled["actions"] for seed in (0, 60))
    assert (here - there).abs().min() > 1e-3


def test_a_network_that_sees_needs_images(make):
    with pytest.raises(UserError, match="shows no images.*model.build=.*:build_blind"):
        make("regression", "small", sim=dark(2)).rollout(starts(0, 30), 1, [1, 2])


def test_statistics_are_kept_with_the_model(make, blind, tmp_path):
    policy = make("regression", blind, sim=dark(2), standardise=True)
    policy.save(tmp_path / "model", policy.module.state_dict())
    again = make("regression", tmp_path / "model", sim=dark(2), standardise=True)
    assert np.array_equal(policy.state_statistics.mean, again.state_statistics.mean) and np.array_equal(
        policy.state_statistics.std, again.state_statistics.std
    )
    assert not again.sim.simulator.received  # nothing was measured anew
    with pytest.raises(
        UserError, match="action.standardise=false, but .* was trained with standardised states; set it to true"
    ):
        make("regression", tmp_path / "model", sim=dark(2))
    told = json.loads((tmp_path / "model" / CONFIG).read_text())
    assert told["chunk"] == CHUNK
    told["states"] = {"mean": [0.0] * 2, "std": [1.0] * 2}
    (tmp_path / "model" / CONFIG).write_text(json.dumps(told))
    with pytest.raises(UserError, match="trained on states of 2 numbers, but the simulator.s have 1"):
        make("regression", tmp_path / "model", sim=dark(2), standardise=True)


def test_small_networks_do_without_transformers():
    """It takes seconds to import."""
    code = """if True:
        import sys
        import mmrl.policies.vla.loading, mmrl.tasks.manipulation.tiny_model
        assert "transformers" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
