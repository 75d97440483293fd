"""The head of several horizons: what it fuses, how it is scored, and when horizons share the work."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.vla.backbones.states_only import EmptyPrefix
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.tasks.manipulation import tiny_model
from tests.policies.vla.test_critics import quiet
from tests.policies.vla.test_policy import SEEDS, STARTS, stir
from tests.whole_runs import parts as engine

TREE = {"run_dir": "unset", "model": {"type": "vision_language_action"}, "task": {"type": "manipulation"}}
# Of actions and scores of a chunk of two, for the state and the two horizons.
WEIGHTS = [[1.0, 0.5, -0.5], [0.0, 1.0, 0.0], [2.0, 9.0, 0.1], [0.0, 5.0, 0.0]]


@pytest.fixture
def by_hand(make, tmp_path):
    """Horizons 1 and 2 of one number an action, linear in the state."""
    tiny_model.build_states(tmp_path / "blind")
    head = {"type": "horizons", "layers": 0, "std": 0.2}
    made = make(head, str(tmp_path / "blind"), sim=quiet(), chunk=2).module.head
    with torch.no_grad():
        made.layers[0].weight.copy_(torch.tensor(WEIGHTS))
    return made


def asked():
    return EmptyPrefix(1, torch.device("cpu")), torch.full((1, 1), 0.3)


class TestByHand:
    """In state 0.3 horizon 1 says 0.8 of action 0, with score 1. Horizon 2 says -0.2 and 0.7, with scores 0. What
    horizon 1 says of action 1 counts for nothing."""

    MEAN = (0.731059 * 0.8 - 0.268941 * 0.2, 0.7)

    def test_each_action_is_fused_from_the_horizons_that_reach_it(self, by_hand):
        _, gates = by_hand.predict_horizons(*asked())
        torch.testing.assert_close(gates, torch.tensor([[[0.731059, 0.0], [0.268941, 1.0]]]), atol=1e-6, rtol=0)
        greedy = by_hand.act(*asked(), ActionSampling([3], 0.0))["actions"].flatten().tolist()
        assert greedy == pytest.approx(self.MEAN, abs=1e-6) and greedy[0] == pytest.approx(0.531059, abs=1e-6)

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_it_is_a_normal_of_the_mean_at_the_temperature(self, by_hand, temperature):
        chosen = by_hand.act(*asked(), ActionSampling([3], temperature))
        noise = torch.randn(2, 1, generator=torch.Generator().manual_seed(3))
        mean = torch.tensor(self.MEAN)[:, None]
        torch.testing.assert_close(chosen["actions"][0], mean + temperature * 0.2 * noise, atol=1e-6, rtol=0)
        found = by_hand.score(*asked(), chosen, torch.ones(1, 2, dtype=torch.bool), None, None)
        known = Normal(mean, temperature * 0.2)
        torch.testing.assert_close(found["logp"][0], known.log_prob(chosen["actions"][0])[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(found["entropy"][0], known.entropy()[:, 0])
        old = found["prediction"] + torch.tensor([0.1, math.log(2.0)])
        apart = by_hand.score(*asked(), chosen, torch.tensor([[True, False]]), old, None)
        wide = Normal(mean + 0.1, 2 * temperature * 0.2)
        assert apart["divergence"][0].tolist() == pytest.approx([kl_divergence(wide, known)[0, 0].item(), 0], rel=1e-4)

    def test_the_load_of_a_horizon_is_its_share_of_what_it_reaches(self, by_hand):
        """Of action 0 the gates are doubled: 1.462117 and 0.537883. So the loads are 1.462117 and (0.537883 + 1) / 2,
        and the imbalance is (0.462117^2 + 0.231059^2) / 2, for both decisions of the look."""
        chosen = by_hand.act(*asked(), ActionSampling([3], 1.0))
        found = by_hand.score(*asked(), chosen, torch.ones(1, 2, dtype=torch.bool), None, None)
        assert found["extras.imbalance"].tolist() == [[pytest.approx(0.133470, abs=1e-5)] * 2]
        with torch.no_grad():
            by_hand.layers[0].weight[1] = 0.0
        even = by_hand.score(*asked(), chosen, torch.ones(1, 2, dtype=torch.bool), None, None)
        assert even["extras.imbalance"].abs().max() < 1e-12


def test_horizons_are_powers_of_two_unless_they_are_named(make):
    for chunk, lengths in ((8, [1, 2, 4, 8]), (5, [1, 2, 4, 5]), (1, [1])):
        head = make({"type": "horizons", "width": 8}, chunk=chunk).module.head
        assert head.reached.sum(1).tolist() == lengths
        assert head.reached.float().argmin(1).tolist() == [*lengths[:-1], 0]  # the first that is not reached
    named = make({"type": "horizons", "width": 8, "horizons": [3, 4]}).module.head
    assert named.reached.tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize(
    ("horizons", "message"),
    [
        ([1, 2], "horizons must end with action.chunk=4, .*ends with 2"),
        ([1, 8], "horizons must end with action.chunk=4, .*ends with 8"),
        ([2, 1, 4], r"horizons must be strictly increasing and at least 1, not \[2, 1, 4\]"),
        ([0, 4], r"horizons must be strictly increasing and at least 1, not \[0, 4\]"),
        ([2, 2, 4], r"horizons must be strictly increasing and at least 1, not \[2, 2, 4\]"),
        ([], "horizons"),
    ],
)
def test_horizons_that_do_not_fit_the_chunk_are_refused(horizons, message):
    """With the configuration, before anything is loaded."""
    with pytest.raises(UserError, match=message):
        validate({**TREE, "action": {"chunk": 4, "head": {"type": "horizons", "horizons": horizons}}}, "test")


def test_draws_do_not_depend_on_the_batch(make):
    policy = stir(make("horizons", temperature=0.7))
    whole, alone = policy.rollout(STARTS, 2, SEEDS), policy.rollout(STARTS[1:2], 2, SEEDS[2:4])
    for together, apart in zip(whole.inputs[2:4], alone.inputs, strict=True):
        for a, b in zip(together, apart, strict=True):
            torch.testing.assert_close(a.sampled["actions"], b.sampled["actions"], rtol=1e-5, atol=1e-6)
    first, second = (whole.inputs[row][0].sampled["actions"] for row in (0, 1))
    assert (first - second).abs().min() > 1e-4


def test_saved_and_loaded_alike(make, tmp_path):
    policy = stir(make("horizons"))
    policy.save(tmp_path, policy.module.state_dict())
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    again = make("horizons", str(tmp_path))
    assert torch.equal(policy.replay(rollouts, policy.module).logp, again.replay(rollouts, again.module).logp)
    with pytest.raises(UserError, match=r"action.head.horizons=\[1, 4\], but .* was trained with None"):
        make("horizons", str(tmp_path), horizons=[1, 4])
    with pytest.raises(UserError, match="action.head.width=8, but .* was trained with 16"):
        make("horizons", str(tmp_path), width=8)


def test_demonstrations_teach_all_horizons_that_reach_them(make):
    """A few steps raise the likelihood of what was shown; of a chunk that ends after two actions, no horizon learns
    the others."""
    policy = make("horizons", supervised=True)
    shown = {**STARTS[0].metadata, "observation": policy.sim.reset([0], ["go"]).select(np.array([0]))}
    shown["actions"] = np.full((2, 1), 0.5, np.float32)
    told = policy.demonstrate([replace(STARTS[0], metadata=shown)], [1])
    assert told.mask.tolist() == [[True, True, False, False]]
    head, before = policy.module.head, policy.replay(told, policy.module)
    (-before.logp.sum()).backward()
    grad = head.layers[-1].bias.grad.view(4, 2)
    assert grad[:2, 0].abs().min() > 0 and grad[2:].abs().max() == 0
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        replay = policy.replay(told, policy.module)
        (-replay.logp.sum() + replay.extras["imbalance"].sum()).backward()
        optimizer.step()
    assert (replay.logp - before.logp)[0, :2].min() > 0 and replay.extras["imbalance"].shape == told.mask.shape


@pytest.mark.usefixtures("alone")
def test_uneven_loads_cost(tmp_path):
    """All rewards are equal, so the loss is that of the term."""
    options = ["rollout.temperature=0.7", "steps=1", "action.head={type: horizons, width: 16, last_gain: 1.0}"]
    options += ["task.rewards=[{name: tests.policies.vla.test_residual:nothing}]"]
    options += ["algorithm.terms=[{type: head_cost, of: imbalance, coefficient: 0.25}]"]
    engine.train(tmp_path, *options, base=engine.ROBOTS)
    row = next(row for row in engine.metrics(tmp_path) if "loss" in row)
    assert row["loss"] == pytest.approx(0.25 * row["imbalance"], rel=1e-4) and row["loss"] > 1e-4


def test_the_term_needs_horizons():
    told = {**TREE, "algorithm": {"terms": [{"type": "head_cost", "of": "imbalance"}]}}
    with pytest.raises(UserError, match="head_cost.* needs a mixture of action horizons"):
        validate({**told, "action": {"head": {"type": "residual"}}}, "test")
    for algorithm in ("grpo", "supervised"):
        own = {"algorithm": {**told["algorithm"], "type": algorithm}}
        more = {"task": {"type": "manipulation", "demonstrations": {}}} if algorithm == "supervised" else {}
        validate({**told, **own, **more, "action": {"head": {"type": "horizons"}}}, "test")
