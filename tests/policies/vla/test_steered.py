"""The steered head: the noise that it draws, what the frozen flow makes of it, and how likely that noise was."""

import json
import math

import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution, kl_divergence

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.vla.backbones.backbone import CachedPrefix
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.policies.vla.saved import CONFIG
from mmrl.samplers.chain import gaussian_noise
from tests.policies.vla.conftest import FROZEN_FLOW, KINDS, SMALL_FLOW
from tests.policies.vla.test_critics import quiet
from tests.policies.vla.test_policy import SEEDS, STARTS, TREE, stir
from tests.whole_runs import parts as engine
from tests.whole_runs.test_robots import FLOW, with_head

VALID = torch.ones(1, 2, dtype=torch.bool)


@pytest.fixture
def by_hand(make):
    """A head of two actions of one number. The flow's velocity is x + 0.3, so that each of its four steps of a quarter
    takes x to x - (x + 0.3) / 4. In state 0.3 the means of the two noises are 2 x 0.3 + 0.5 and 0.3 - 0.1."""

    def made(**options):
        policy = make(
            {"type": "steered", "base": FROZEN_FLOW, "layers": 0, "std": 0.8, **options}, sim=quiet(), chunk=2
        )
        head = policy.module.head
        head.base.velocity = lambda reading, state, x, sigma, rows: x + 0.3
        with torch.no_grad():
            last = head.noise.layers[0]
            last.weight.zero_()
            last.weight[:, -1] = torch.tensor([2.0, 1.0])[: len(last.weight)]
            last.bias.copy_(torch.tensor([0.5, -0.1])[: len(last.bias)])
        return head

    return made


def asked(rows=1):
    return CachedPrefix(torch.zeros(rows, 1, 32), torch.ones(rows, 1)), torch.full((rows, 1), 0.3)


def flowed(noise):
    return (noise + 0.3) * 0.75**4 - 0.3


class TestByHand:
    def test_a_chunk_is_what_the_flow_makes_of_the_noise(self, by_hand):
        drawn = by_hand().act(*asked(), ActionSampling([5], temperature=0.0))
        assert drawn["noise"].flatten().tolist() == pytest.approx([1.1, 0.2])
        known = [1.4 * 0.31640625 - 0.3, 0.5 * 0.31640625 - 0.3]  # 0.142969 and -0.141797
        assert drawn["actions"].flatten().tolist() == pytest.approx(known, abs=1e-6)

    def test_noise_grows_with_the_temperature_and_the_flow_draws_none(self, by_hand):
        head = by_hand()
        for temperature in (0.5, 2.0):
            drawn = head.act(*asked(), ActionSampling([5], temperature))
            e = torch.randn(2, 1, generator=torch.Generator().manual_seed(5))
            noise = torch.tensor([[1.1], [0.2]]) + temperature * 0.8 * e
            torch.testing.assert_close(drawn["noise"][0], noise)
            torch.testing.assert_close(drawn["actions"][0], flowed(noise))

    def test_rollouts_and_evaluation_are_one_function_of_the_noise(self, by_hand):
        head = by_hand()
        one, other = (head.act(*asked(), ActionSampling([5], 1.0, training=training)) for training in (True, False))
        assert torch.equal(one["actions"], other["actions"]) and torch.equal(one["noise"], other["noise"])

    @pytest.mark.parametrize("level", ["action", "chunk"])
    def test_the_likelihood_is_of_the_noise_at_the_temperature(self, by_hand, level):
        """At temperature 1.5 the spread is 1.2; the noises 2 and -1 are 0.75 and -1 of it from their means."""
        head = by_hand(level=level)
        chosen = {
            "noise": torch.tensor([[[2.0], [-1.0]]]),
            "temperature": torch.tensor([1.5], dtype=torch.float64),
            "actions": torch.full((1, 2, 1), 99.0),
        }
        found = head.score(*asked(), chosen, VALID, None, None)
        known = [-0.5 * z**2 - math.log(1.2 * math.sqrt(2 * math.pi)) for z in (0.75, -1.0)]
        wanted = known if level == "action" else [sum(known)]
        assert found["logp"][0].tolist() == pytest.approx(wanted, abs=1e-6)

    def test_actions_have_a_gradient_through_the_flow(self, by_hand):
        """The flow takes 1 of noise to 0.75^4 of an action, and the second mean is the bias plus the state."""
        head = by_hand()
        head.act(*asked(), ActionSampling([5], temperature=0.0))["actions"][0, 1, 0].backward()
        assert head.noise.layers[0].bias.grad.tolist() == pytest.approx([0.0, 0.75**4])
        assert head.noise.layers[0].weight.grad[1, -1].item() == pytest.approx(0.3 * 0.75**4)

    def test_all_noise_of_a_chunk_that_ends_early_counts(self, by_hand):
        head = by_hand()
        chosen = head.act(*asked(), ActionSampling([5], 1.0))
        whole = head.score(*asked(), chosen, VALID, None, None)["logp"]
        cut = torch.tensor([[True, False]])
        assert torch.equal(head.score(*asked(), chosen, cut, None, None)["logp"], whole)
        assert head.decision_mask(cut, chosen).tolist() == [[True, True]]
        assert head.decision_mask(~VALID, chosen).tolist() == [[False, False]]

    def test_the_displacement_is_the_distance_from_the_flows_own_noise(self, by_hand):
        """The mean over 200,000 draws of |w - e|^2 by number, w = mean + 0.8 e: (1.21 + 0.04) / 2 + 0.04."""
        head = by_hand()
        found = head.score(*asked(), head.act(*asked(), ActionSampling([5], 1.0)), VALID, None, None)
        assert found["extras.displacement"][0].tolist() == pytest.approx([0.665, 0.665], abs=1e-6)
        e = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0))
        noise = torch.tensor([1.1, 0.2]) + 0.8 * e
        assert (noise - e).square().mean().item() == pytest.approx(0.665, abs=0.005)

    def test_the_divergence_is_from_the_old_noise(self, by_hand):
        head = by_hand()
        chosen = head.act(*asked(), ActionSampling([5], 1.0))
        first = head.score(*asked(), chosen, VALID, None, None)
        found = head.score(*asked(), chosen, VALID, first["prediction"] + torch.tensor([0.1, math.log(2.0)]), None)
        known = kl_divergence(Normal(1.1 + 0.1, 1.6), Normal(1.1, 0.8)).item()
        assert found["divergence"][0].tolist() == pytest.approx([known, known], rel=1e-4)

    def test_two_noises_of_three_are_the_first_and_both_behind(self, make):
        head = make({"type": "steered", "base": FROZEN_FLOW, "noises": 2}, sim=quiet(), chunk=3).module.head
        head.base.velocity = lambda reading, state, x, sigma, rows: x + 0.3
        found = head.denoise(*asked(), torch.tensor([[[1.0], [2.0]]]))
        torch.testing.assert_close(found.flatten(), flowed(torch.tensor([1.0, 2.0, 2.0])))

    def test_the_last_noise_stands_for_all_behind_it(self, by_hand):
        head = by_hand(noises=1)
        assert head.decisions == 1
        drawn = head.act(*asked(), ActionSampling([5], 0.0))
        assert drawn["noise"].shape == (1, 1, 1)
        assert drawn["actions"].flatten().tolist() == pytest.approx(2 * [1.4 * 0.31640625 - 0.3], abs=1e-6)
        with pytest.raises(UserError, match="action.head.noises=3, but a chunk of the flow has 2"):
            by_hand(noises=3)


class TestBounded:
    """Noise 1.5 tanh(u) around the means 1.1 and 0.2 of u, with deviation 0.8."""

    def density(self, temperature=1.0):
        normal = Normal(torch.tensor([1.1, 0.2]), 0.8 * temperature)
        return TransformedDistribution(normal, [TanhTransform(cache_size=1), AffineTransform(0.0, 1.5)])

    def test_the_likeliest_noise_is_the_tanh_of_the_mean(self, by_hand):
        sampled = by_hand(bound=1.5).act(*asked(), ActionSampling([5], temperature=0.0))
        noise = torch.tensor([1.200749, 0.296063])  # 1.5 x 0.800499 and 1.5 x 0.197375
        torch.testing.assert_close(sampled["noise"].flatten(), noise, atol=1e-5, rtol=0)
        torch.testing.assert_close(sampled["actions"].flatten(), flowed(noise), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("level", ["action", "chunk"])
    def test_densities_are_those_of_torch(self, by_hand, temperature, level):
        head = by_hand(bound=1.5, level=level)
        sampled = head.act(*asked(200), ActionSampling(list(range(200)), temperature))
        noise = sampled["noise"][..., 0]
        assert 1.3 < noise.abs().max() < 1.5
        fields = head.score(*asked(200), sampled, VALID.expand(200, 2), None, None)
        expected = self.density(temperature).log_prob(noise)
        torch.testing.assert_close(
            fields["logp"], expected if level == "action" else expected.sum(1, keepdim=True), atol=2e-4, rtol=0
        )
        assert set(fields) == {"logp", "prediction"}
        below = self.density(temperature).cdf(noise)  # as many of each tenth as torch's distribution function says
        assert (torch.histc(below[:, 0], 5, 0, 1) - 40).abs().max() < 20

    def test_the_gradient_of_its_objective_by_hand(self, by_hand):
        """0.5 log p(w) + 3 w of w = 1.5 tanh(u), u = mean + 0.8 e, by the mean: the density of u does not change, the
        slope of the bound does by 2 tanh(u), and w by 1.5 (1 - tanh(u)^2)."""
        head = by_hand(bound=1.5)
        sampled = head.sample_noise(*asked(), ActionSampling([5]))
        logp = head.score(*asked(), sampled, VALID, None, None)["logp"]
        (0.5 * logp + 3.0 * sampled["noise"][..., 0]).sum().backward()
        tanh = sampled["before_tanh"].detach().flatten().tanh()
        expected = 0.5 * 2 * tanh + 3.0 * 1.5 * (1 - tanh**2)
        torch.testing.assert_close(head.noise.layers[0].bias.grad, expected, atol=1e-5, rtol=0)

    def test_a_new_density_has_a_ratio(self, by_hand):
        """A policy whose means are 0.1 higher scores stored noise as torch does."""
        head = by_hand(bound=1.5)
        sampled = head.act(*asked(), ActionSampling([5]))
        with torch.no_grad():
            head.noise.layers[0].bias += 0.1
        moved = TransformedDistribution(
            Normal(torch.tensor([1.2, 0.3]), 0.8), [TanhTransform(cache_size=1), AffineTransform(0.0, 1.5)]
        )
        found = head.score(*asked(), sampled, VALID, None, None)["logp"][0]
        torch.testing.assert_close(found, moved.log_prob(sampled["noise"][0, :, 0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("term", "needed"),
    [("{type: entropy}", "entropy"), ("{type: head_cost, of: displacement}", "a learned distribution of the initial")],
)
def test_terms_without_a_closed_form_are_refused_with_a_bound(tmp_path, term, needed):
    head = f"action.head={{type: steered, bound: 1.5, width: 16, layers: 1, base: {FLOW}}}"
    with pytest.raises(UserError, match=needed):
        engine.make(tmp_path, head, f"algorithm.terms=[{term}]", base=engine.ROBOTS)


def test_the_first_policy_draws_what_its_flow_draws(make, tmp_path):
    """Exactly, given the same noise; and no longer, once it is steered."""
    base = stir(make(SMALL_FLOW))
    base.save(tmp_path, base.module.state_dict())
    policy = make({"type": "steered", "base": FROZEN_FLOW, "width": 16}, str(tmp_path))
    shown = base.sim.reset([0, 30, 50, 70], ["go"] * 4)
    reading, state = policy.module.encode(policy.collate(policy.prepare(shown))), policy.robot_state(shown)
    own = gaussian_noise([3, 4, 5, 6], -1, (4, 1))
    with torch.no_grad():
        flow = base.module.head.act(
            base.module.encode(base.collate(base.prepare(shown))),
            state,
            ActionSampling([3, 4, 5, 6], training=False, groups=[0] * 4),
        )["actions"]
        steered = policy.module.head.denoise(reading, state, own)
        assert torch.equal(flow, steered) and flow.std() > 0.05
        assert policy.module.head.noise.mean(reading, state).abs().max() == 0
        assert policy.module.head.noise.clamped_log_std().exp().unique().item() == 1
        policy.module.head.noise.layers[-1].bias += 0.5
        assert policy.module.head.noise.mean(reading, state).unique().item() == 0.5


def test_only_the_noise_learns(make):
    policy = stir(make("steered"))
    replay = policy.replay(policy.rollout(STARTS, 2, SEEDS), policy.module)
    (replay.logp.sum() + replay.extras["displacement"].sum()).backward()
    learning = {n for n, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()}
    assert all(name.startswith("head.noise.") for name in learning)
    assert learning == {n for n, p in policy.module.named_parameters() if p.requires_grad}


class TestSaved:
    def test_and_loaded_alike(self, make, tmp_path):
        policy = stir(make("steered", critic=True))
        policy.save(tmp_path, policy.module.state_dict())
        again = make("steered", str(tmp_path), critic=True)
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        one, other = (p.replay(rollouts, p.module) for p in (policy, again))
        assert torch.equal(one.logp, other.logp) and torch.equal(one.value, other.value)
        state, found = policy.module.state_dict(), again.module.state_dict()
        assert sorted(state) == sorted(found) and all(torch.equal(state[name], found[name]) for name in state)
        assert not any(p.requires_grad for p in again.module.head.base.parameters())

    def test_options_are_those_it_was_trained_with(self, make, tmp_path):
        policy = make("steered")
        policy.save(tmp_path, policy.module.state_dict())
        assert json.loads((tmp_path / CONFIG).read_text())["head"]["base"]["type"] == "flow"
        for name, value, before in (("noises", 2, None), ("width", 8, 16), ("layers", 2, 1), ("bound", 1.5, None)):
            with pytest.raises(UserError, match=f"action.head.{name}={value}, but .* was trained with {before}"):
                make("steered", str(tmp_path), **{name: value})
        with pytest.raises(UserError, match="action.head.base.width=64, but .* was trained with 32"):
            make({**KINDS["steered"], "base": {"type": "flow", "width": 64, "depth": 1}}, str(tmp_path))


@pytest.mark.parametrize(
    ("head", "more", "message"),
    [
        ({"base": {"type": "token"}}, {}, "action.head.base.type=token is unknown"),
        ({"noises": 0}, {}, "action.head.noises"),
        (
            {},
            {"model": {"lora": {"rank": 2}}},
            "model.lora trains the backbone, which action.head.type=steered freezes",
        ),
        ({}, {"algorithm": {"type": "supervised"}}, "train its base with action.head.type=flow"),
    ],
)
def test_settings_that_can_not_be(head, more, message):
    tree = {
        "run_dir": "unset",
        "task": {"type": "manipulation"},
        "action": {"head": {"type": "steered", **head}},
        **more,
        "model": {"type": "vision_language_action", **more.get("model", {})},
    }
    with pytest.raises(UserError, match=message):
        validate(tree, "test")


def test_a_model_without_a_flow_can_not_be_steered(backbones):
    from tests.policies.vla.test_policy import Line

    config = validate({**TREE, "action": {**TREE["action"], "head": {"type": "steered"}}}, "test")
    with pytest.raises(UserError, match="steered is built around a trained head of type flow, but .* has none"):
        config.model.load(config, Line(), str(backbones["small"]))


def nothing(sample) -> float:
    return 0.5


@pytest.mark.usefixtures("alone")
def test_the_bound_has_a_price_that_rises_while_it_is_broken(tmp_path):
    """Rewards are equal, so that the loss is the term's alone. The spread begins at 1.5, so the displacement at 0.25:
    0.15 above its bound. The price of the second step is 0.5 + 2 x 0.15, and the displacement falls."""
    options = ["model.build=null", f"model.path={with_head(tmp_path / 'base', FLOW)}", "steps=3", "optim.lr=0.02"]
    options += [f"action.head={{type: steered, width: 16, layers: 1, std: 1.5, base: {FLOW}}}"]
    options += ["task.rewards=[{name: tests.policies.vla.test_steered:nothing}]"]
    price = "{type: multiplier, metric: displacement, target: 0.1, start: 0.5, k_i: 2.0}"
    options += [f"algorithm.terms=[{{type: head_cost, of: displacement, coefficient: {price}}}]"]
    engine.train(tmp_path / "run", *options, base=engine.ROBOTS)
    rows = [row for row in engine.metrics(tmp_path / "run") if "loss" in row]
    found = [row["displacement"] for row in rows]
    assert found[0] == pytest.approx(0.25, abs=1e-5) and rows[0]["loss"] == pytest.approx(0.125, abs=1e-5)
    assert rows[1]["loss"] == pytest.approx((0.5 + 2 * 0.15) * found[1], rel=1e-4)
    assert found[2] < found[1] < found[0]
