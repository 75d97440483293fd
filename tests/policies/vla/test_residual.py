"""The residual head: what it adds to a head that is held still, and how likely it finds what came of it."""

import json
import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.vla.backbones.states_only import EmptyPrefix
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.policies.vla.saved import CONFIG
from mmrl.samplers.chain import gaussian_noise
from mmrl.tasks.manipulation import tiny_model
from tests.policies.vla.conftest import KINDS, SMALL_FLOW
from tests.policies.vla.test_critics import quiet
from tests.policies.vla.test_policy import SEEDS, STARTS, stir
from tests.whole_runs import parts as engine
from tests.whole_runs.test_robots import with_head

OWN = "mmrl.policies.vla.heads.mixture_settings:ResidualActions"
LINEAR = {"type": "gaussian", "layers": 0}
BASES = {
    "token": {"type": "token", "bins": 8},
    "autoregressive": {"type": "token", "bins": 8, "decoding": "autoregressive"},
    "gaussian": {"type": "gaussian", "width": 16, "layers": 1, "std": 0.2},
    "regression": {"type": "regression", "scale": 0.2},
    "bridge": {"type": "bridge", "width": 32, "depth": 2, "queries": 3},
    "invertible": {"type": "invertible", "width": 16, "layers": 1, "last_gain": 0.1},
    "flow": SMALL_FLOW,
}


@pytest.fixture
def blind(tmp_path):
    tiny_model.build_states(tmp_path / "blind")
    return str(tmp_path / "blind")


@pytest.fixture
def by_hand(make, blind):
    """A head of one action of one number, over a base that says 2 x + 0.1 in state x; two experts with one unit each,
    and a code of one number."""

    def made(**options):
        head = {"type": "residual", "base": LINEAR, "experts": 2, "code": 1, "width": 1, "std": 0.2, **options}
        policy = make(head, blind, sim=quiet(), chunk=1)
        head = policy.module.head
        weights = {
            "base.layers.0.weight": [[2.0]],
            "base.layers.0.bias": [0.1],
            "encode.weight": [[1.0]],
            "encode.bias": [0.2],
            "gate.weight": [[1.0], [-1.0]],
            "gate.bias": [0.0, 0.0],
            "experts.0.0.weight": [[1.0, 1.0]],
            "experts.1.0.weight": [[1.0, 1.0]],
            "experts.0.2.weight": [[1.0]],
            "experts.1.2.weight": [[-2.0]],
        }
        lacking = head.load_state_dict({n: torch.tensor(v) for n, v in weights.items()}, strict=False)
        assert not lacking.unexpected_keys
        return policy

    return made


def asked(rows=1):
    return EmptyPrefix(rows, torch.device("cpu")), torch.full((rows, 1), 0.3)


def one(value):
    return torch.tensor([[[value]]])


class TestByHand:
    """In state 0.3 the base says 0.7. The code is tanh(0.3 + 0.2) = 0.462117. Both experts' unit is tanh(0.3 + 0.7), so
    that they say tanh(0.761594) = 0.642015 and tanh(-1.523188) = -0.909252, of which half is within reach."""

    VALID = torch.ones(1, 1, dtype=torch.bool)

    def test_the_mean_is_the_base_and_the_experts_by_their_gates(self, by_hand):
        """The gates are sigmoids of +-2 x 0.462117: 0.715903 and 0.284097."""
        head = by_hand().module.head
        drawn = head.act(*asked(), ActionSampling([5], temperature=0.0))
        assert drawn["proposal"].item() == pytest.approx(0.7)
        added = 0.5 * (0.715903 * 0.642015 - 0.284097 * 0.909252)
        assert drawn["actions"].item() == pytest.approx(0.7 + added, abs=2e-6)
        assert drawn["actions"].item() == pytest.approx(0.800653, abs=1e-6)
        assert drawn["code_noise"].item() == 0.0

    def test_a_number_is_reached_from_the_base_within_bounds(self, by_hand):
        head = by_hand(reach=0.05).module.head
        drawn = head.act(*asked(), ActionSampling([5], temperature=0.0))
        assert drawn["actions"].item() == pytest.approx(0.7 + 0.0100653, abs=1e-6)

    def test_the_likelihood_is_around_the_mean_at_the_temperature(self, by_hand):
        """With 0.2 of noise in the code the gates are 0.789885 and 0.210115, and the mean is 0.858036; at temperature
        1.5 the spread is 0.3."""
        head = by_hand().module.head
        chosen = {
            "actions": one(0.9),
            "temperature": torch.tensor([1.5], dtype=torch.float64),
            "proposal": one(0.7),
            "code_noise": torch.tensor([[0.2]]),
        }
        found = head.score(*asked(), chosen, self.VALID, None, None)
        assert found["logp"].item() == pytest.approx(0.275251, abs=1e-5)
        assert found["entropy"].item() == pytest.approx(0.214966, abs=1e-5)
        assert found["prediction"].flatten().tolist() == pytest.approx([0.858036, math.log(0.3)], abs=1e-5)
        # of the code before its noise: (0.462117^2 + 0.25 - 1) / 2 - log 0.5
        assert found["extras.information"].item() == pytest.approx(0.424923, abs=1e-5)

    def test_the_divergence_is_from_the_old_policy(self, by_hand):
        head = by_hand().module.head
        chosen = head.act(*asked(), ActionSampling([5], temperature=1.5))
        first = head.score(*asked(), chosen, self.VALID, None, None)
        old = first["prediction"] + torch.tensor([0.1, math.log(2.0)])
        found = head.score(*asked(), chosen, self.VALID, old, None)
        mean, std = first["prediction"][..., 0].item(), first["prediction"][..., 1].exp().item()
        known = kl_divergence(Normal(mean + 0.1, 2 * std), Normal(mean, std))
        assert found["divergence"].item() == pytest.approx(known.item(), rel=1e-4)

    def test_noise_of_actions_and_of_the_code_grow_with_the_temperature(self, by_hand):
        head = by_hand(noise=0.25).module.head
        for temperature in (0.5, 2.0):
            drawn = head.act(*asked(2), ActionSampling([5, 6], temperature))
            known = temperature * 0.25 * torch.cat([gaussian_noise([seed], 1 << 20, (1,)) for seed in (5, 6)])
            torch.testing.assert_close(drawn["code_noise"], known)
            noise = torch.stack([torch.randn(1, 1, generator=torch.Generator().manual_seed(s)) for s in (5, 6)])
            mean = head.residual_mean(drawn["proposal"], head.code(*asked(2)) + known, *asked(2))
            torch.testing.assert_close(drawn["actions"], mean + temperature * 0.2 * noise)
        assert (known / 0.5 - noise[:, 0]).abs().min() > 1e-3  # the two are not the same numbers

    def test_without_noise_nothing_is_said_of_information(self, by_hand):
        head = by_hand(noise=0.0).module.head
        drawn = head.act(*asked(), ActionSampling([5], 1.0))
        assert drawn["code_noise"].item() == 0.0
        assert "extras.information" not in head.score(*asked(), drawn, self.VALID, None, None)

    def test_a_demonstration_is_scored_around_what_the_base_would_do(self, by_hand):
        head = by_hand().module.head
        taught = head.encode_demonstrations(one(0.9), [7])
        assert taught["temperature"].item() == 1.0
        disturbance = 0.5 * gaussian_noise([7], 1 << 20, (1,))
        torch.testing.assert_close(taught["code_noise"], disturbance)
        known = head.residual_mean(one(0.7), head.code(*asked()) + disturbance, *asked())
        found = head.score(*asked(), taught, self.VALID, None, None)
        assert found["logp"].item() == pytest.approx(Normal(known, 0.2).log_prob(one(0.9)).item(), abs=1e-5)


@pytest.mark.parametrize("kind", BASES)
def test_the_first_policy_does_what_its_base_does(make, tmp_path, kind):
    """Exactly; and no longer, once experts add something. Then its own spread is around what they make of it."""
    base = stir(make(BASES[kind]))
    base.save(tmp_path, base.module.state_dict())
    policy = make({"type": "residual", "base": BASES[kind], "width": 16}, str(tmp_path))
    for a, b in zip(base.respond(STARTS, [1, 2, 3]), policy.respond(STARTS, [1, 2, 3]), strict=True):
        assert a.episode == b.episode
    seen = base.sim.reset([0, 30, 50, 70], ["go"] * 4)
    want, first = head_does(base, seen), head_does(policy, seen)
    assert torch.equal(want, first) and want.abs().max() > 0.01
    with torch.no_grad():
        for expert in policy.module.head.experts:
            expert[-1].bias += 0.1
    torch.testing.assert_close(head_does(policy, seen) - want, torch.full_like(want, 0.5 * math.tanh(0.1)))


def head_does(policy, seen):
    reading = policy.module.encode(policy.collate(policy.prepare(seen)))
    with torch.no_grad():
        how = ActionSampling([3, 4, 5, 6], 0.0, training=False)
        return policy.module.head.act(reading, policy.robot_state(seen), how)["actions"]


@pytest.mark.parametrize("kind", ["residual", "residual, flow"])
def test_draws_do_not_depend_on_the_batch(make, kind):
    policy = stir(make(kind, temperature=0.7))
    whole = policy.rollout(STARTS, 2, SEEDS)
    alone = policy.rollout(STARTS[1:2], 2, SEEDS[2:4])
    for together, apart in zip(whole.inputs[2:4], alone.inputs, strict=True):
        assert len(together) == len(apart)
        for a, b in zip(together, apart, strict=True):
            for name in a.sampled:
                torch.testing.assert_close(a.sampled[name], b.sampled[name], rtol=1e-5, atol=1e-6)
    first, second = whole.inputs[0][0].sampled, whole.inputs[1][0].sampled  # of one group, with seeds of their own
    assert (first["actions"] - second["actions"]).abs().min() > 1e-4
    if kind == "residual":
        assert torch.equal(first["proposal"], second["proposal"])
        assert (first["code_noise"] - second["code_noise"]).abs().min() > 1e-4


def test_what_was_proposed_is_kept(make):
    """A replay asks the base no more, so that it scores what was drawn around, to the bit."""
    policy = stir(make("residual"))
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        before = policy.replay(rollouts, policy.module).logp
        for parameter in policy.module.head.base.parameters():
            parameter += 1.0
        assert torch.equal(policy.replay(rollouts, policy.module).logp, before)


@pytest.mark.parametrize("kind", ["residual", "residual, flow"])
def test_only_experts_gate_code_and_spread_learn(make, kind):
    policy = stir(make(kind))
    replay = policy.replay(policy.rollout(STARTS, 2, SEEDS), policy.module)
    (replay.logp.sum() + sum(extra.sum() for extra in replay.extras.values())).backward()
    learning = {n for n, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()}
    assert {name.split(".")[1] for name in learning} == {"experts", "gate", "encode", "log_std"}
    assert learning == {n for n, p in policy.module.named_parameters() if p.requires_grad}


def test_the_gate_reads_the_prompt_and_nothing_else(make):
    """Of a backbone that reads, the state reaches the gate only through what the backbone made of it."""
    head = stir(make("residual", sim=quiet())).module.head
    assert head.encode.in_features == 32 and head.encode.out_features == 4
    assert head.experts[0][0].in_features == 32 + 1 + 4


class TestSaved:
    def test_and_loaded_alike(self, make, tmp_path):
        policy = stir(make("residual", critic=True))
        policy.save(tmp_path, policy.module.state_dict())
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        again = make("residual", str(tmp_path), critic=True)
        one, other = (p.replay(rollouts, p.module) for p in (policy, again))
        assert torch.equal(one.logp, other.logp) and torch.equal(one.value, other.value)
        assert not any(p.requires_grad for p in again.module.head.base.parameters())
        state, found = policy.module.state_dict(), again.module.state_dict()
        assert all(torch.equal(state[name], found[name]) for name in state)

    def test_options_of_head_and_base_are_those_it_was_trained_with(self, make, tmp_path):
        policy = make("residual")
        policy.save(tmp_path, policy.module.state_dict())
        told = json.loads((tmp_path / CONFIG).read_text())["head"]
        assert told["type"] == "residual" and told["base"]["type"] == "token" and told["base"]["bins"] == 8
        for name, value in (("experts", 4), ("code", 3), ("noise", 0.1), ("reach", 0.2), ("width", 8), ("layers", 2)):
            with pytest.raises(UserError, match=f"action.head.{name}={value}, but .* was trained with {told[name]}"):
                make("residual", str(tmp_path), **{name: value})
        for base, message in (
            ({"type": "token", "bins": 9}, "action.head.base.bins=9, but .* was trained with 8"),
            (BASES["gaussian"], "action.head.base.type=gaussian, but .* was trained with token"),
        ):
            with pytest.raises(UserError, match=message):
                make({**KINDS["residual"], "base": base}, str(tmp_path))
        with pytest.raises(UserError, match="action.head.type=token, but .* was trained with residual"):
            make("parallel", str(tmp_path))

    def test_a_head_becomes_a_base_as_it_was_trained(self, make, tmp_path):
        base = stir(make("gaussian", critic=True, chunk=3))
        base.save(tmp_path, base.module.state_dict())
        head = {"type": "residual", "base": {**KINDS["gaussian"], "std": 0.1, "level": "chunk"}}  # neither is a shape
        policy = make(head, str(tmp_path), chunk=3, critic=True)
        for name, value in base.module.head.state_dict().items():
            assert torch.equal(policy.module.head.base.state_dict()[name], value), name
        for name, value in base.module.critic.state_dict().items():
            assert torch.equal(policy.module.critic.state_dict()[name], value), name
        with pytest.raises(UserError, match="action.head.base.type=regression, but .* was trained with gaussian"):
            make({"type": "residual", "base": {"type": "regression"}}, str(tmp_path), chunk=3)
        with pytest.raises(UserError, match="action.head.base.width=17, but .* was trained with 16"):
            make({"type": "residual", "base": {**KINDS["gaussian"], "width": 17}}, str(tmp_path), chunk=3)
        with pytest.raises(UserError, match="action.chunk=4, but .* was trained with 3"):
            make({"type": "residual", "base": KINDS["gaussian"]}, str(tmp_path))


class TestRefusals:
    def test_a_model_without_a_head_has_no_base(self, backbones, monkeypatch):
        """Before its weights are read."""
        from mmrl.policies.vla import loading
        from tests.policies.vla.test_policy import TREE, Line

        monkeypatch.setattr(loading, "load_backbone", None)
        head = {"type": "residual", "base": {"type": "gaussian"}}
        config = validate({**TREE, "action": {**TREE["action"], "head": head}}, "test")
        said = "is built around a trained head of type gaussian, but model.path=.* has none; train one with"
        with pytest.raises(UserError, match=f"action.head.type=residual {said} action.head.type=gaussian"):
            config.model.load(config, Line(), str(backbones["small"]))

    def test_tokens_of_a_backbone_need_no_head_unless_they_read_a_state(self, backbones):
        from tests.policies.vla.test_policy import TREE, Line

        for proprioception in (False, True):
            action = {**TREE["action"], "proprioception": proprioception}
            action["head"] = {"type": "residual", "base": BASES["autoregressive"]}
            config = validate({**TREE, "action": action}, "test")
            if proprioception:  # the state would be read by weights that nobody has trained
                with pytest.raises(UserError, match="a trained head of type token, but model.path=.* has none"):
                    config.model.load(config, Line(), str(backbones["small"]))
            else:
                policy = config.model.load(config, Line(), str(backbones["small"]))
                assert not any(p.requires_grad for p in policy.module.backbone.parameters())

    @pytest.mark.parametrize(
        ("head", "model", "message"),
        [
            ({"base": {"type": "residual"}}, {}, "action.head.base.type=residual is unknown"),
            ({"base": {"type": OWN}}, {}, f"action.head: base.type={OWN} is itself built around a head"),
            ({}, {"lora": {"rank": 2}}, "model.lora trains the backbone, which action.head.type=residual freezes"),
            ({"experts": 0}, {}, "action.head.experts"),
            ({"noise": -0.1}, {}, "action.head.noise"),
            ({"reach": 0.0}, {}, "action.head.reach"),
            ({"bins": 8}, {}, "unknown key action.head.bins"),
        ],
    )
    def test_settings_that_can_not_be(self, head, model, message):
        tree = {
            "run_dir": "unset",
            "model": {"type": "vision_language_action", **model},
            "task": {"type": "manipulation"},
            "action": {"head": {"type": "residual", **head}},
        }
        with pytest.raises(UserError, match=message):
            validate(tree, "test")

    def test_a_base_that_reads_images_needs_some(self, make, blind):
        said = "action.head.base.type=token reads the output of a backbone"
        with pytest.raises(UserError, match=said):
            make({"type": "residual"}, marked(blind), sim=quiet())

    def test_bases_of_openvla_are_for_it_alone(self, make, tmp_path, backbones):
        for base, key in (({"type": "l1"}, "type=l1"), ({"type": "token", "decoding": "bidirectional"}, "decoding")):
            with pytest.raises(UserError, match=f"action.head.base.{key}.* is for OpenVLA-OFT"):
                make({"type": "residual", "base": base}, marked(backbones["small"], tmp_path / key))


def marked(folder, into=None):
    """A folder that says it has a head."""
    import shutil
    from pathlib import Path

    if into is not None:
        folder = shutil.copytree(folder, into)
    (Path(folder) / CONFIG).write_text("{}")
    return str(folder)


@pytest.mark.usefixtures("alone")
def test_what_the_gate_is_told_costs(tmp_path):
    """All rewards are equal, so the loss is that of the term: 0.25 times the mean over decisions."""
    base = "{type: gaussian, width: 16, layers: 1}"
    options = ["model.build=null", f"model.path={with_head(tmp_path / 'base', base)}", "rollout.temperature=0.7"]
    options += [f"action.head={{type: residual, base: {base}, code: 3, noise: 0.4}}", "steps=1"]
    options += ["task.rewards=[{name: tests.policies.vla.test_residual:nothing}]"]
    options += ["algorithm.terms=[{type: head_cost, coefficient: 0.25}]"]
    trainer = engine.make(tmp_path / "run", *options, base=engine.ROBOTS)
    head, seen, usual = trainer.policy.module.head, [], trainer.losses

    def losses(micro, totals):
        parts, stats = usual(micro, totals)
        seen.append((stats["information"][micro.mask], micro.mask.sum()))
        return parts, stats

    trainer.losses = losses
    before = head.encode.weight.detach().clone()
    trainer.train()
    engine.release(trainer)
    told = torch.cat([values for values, _ in seen])
    row = next(row for row in engine.metrics(tmp_path / "run") if "loss" in row)
    assert row["loss"] == pytest.approx(0.25 * told.mean().item(), rel=1e-4) and row["loss"] > 0
    assert row["information"] == pytest.approx(told.mean().item(), rel=1e-4)
    assert not torch.equal(before, head.encode.weight)  # and the code learns from it


def nothing(sample) -> float:
    return 0.5


def test_the_term_needs_a_code_with_noise():
    tree = {
        "run_dir": "unset",
        "model": {"type": "vision_language_action"},
        "task": {"type": "manipulation"},
        "algorithm": {"terms": [{"type": "head_cost"}]},
    }
    for head in ({"type": "residual", "noise": 0.0}, {"type": "gaussian"}):
        with pytest.raises(UserError, match="head_cost.* needs a noisy code of the prompt that gates the residual"):
            validate({**tree, "action": {"head": head}}, "test")
    validate({**tree, "action": {"head": {"type": "residual"}}}, "test")
