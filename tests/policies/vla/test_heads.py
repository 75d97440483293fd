"""Heads by value: temperatures, windows of a group and step, weights and references of flows, heads of one's own."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributions import Categorical, Laplace, Normal, kl_divergence

from mmrl.errors import UserError
from mmrl.policies.vla.heads.flow import FlowHead
from mmrl.policies.vla.heads.head import Head
from mmrl.policies.vla.saved import CONFIG, WEIGHTS
from mmrl.policies.vla.settings import ActionHead, Actions, TaughtFlow
from mmrl.protocols.critic import SharedCritic
from mmrl.protocols.requirements import Needs
from mmrl.report.settings import Log
from mmrl.rollouts import Rollouts
from mmrl.samplers.sigmas import linear
from mmrl.samplers.transitions import coefficients
from mmrl.schedules.schedule import Linear
from mmrl.sims import build
from tests.policies.vla.conftest import CHUNK, KINDS, starts
from tests.policies.vla.test_policy import SEEDS, STARTS, stir, velocity

SIX = {"steps": 6}


def window(**options):
    return {"type": "chain", "window": options}


def points(rollouts):
    """Of every rollout the windows of all its looks."""
    return [[look.sampled["points"].tolist() for look in episode] for episode in rollouts.inputs]


class TestWindows:
    def test_one_for_all_looks_of_all_rollouts_of_a_group(self, make):
        policy = make("flow", likelihood=window(type="random", size=1), **SIX)
        groups = [points(policy.rollout(starts(0), 8, list(range(100 * g, 100 * g + 8)))) for g in range(12)]
        seen = [{tuple(place) for episode in group for place in episode} for group in groups]
        assert all(len(places) == 1 for places in seen)
        assert max(len(episode) for group in groups for episode in group) > 1  # several looks
        assert len(set.union(*seen)) > 2  # of 5 places, for 12 groups

    def test_the_same_whatever_plays_beside(self, make):
        policy = make("flow", likelihood=window(type="random", size=2), **SIX)
        whole = points(policy.rollout(STARTS, 2, SEEDS, step=3))
        alone = points(policy.rollout(STARTS[1:2], 2, SEEDS[2:4], step=3))
        assert whole[2:4] == alone

    def test_sliding_ones_move_with_the_training_step(self, make):
        policy = make("flow", likelihood=window(type="sliding", size=2, every=2), **SIX)
        found = [points(policy.rollout(STARTS, 2, SEEDS, step=step)) for step in range(9)]
        for step, rollouts in enumerate(found):
            begins = [0, 0, 1, 1, 2, 2, 3, 3, 0][step]
            assert all(place == [begins, begins + 1] for episode in rollouts for place in episode)


def test_two_looks_of_an_episode_have_noise_of_their_own(make):
    for kind in ("flow, all steps", "regression"):
        policy = make(kind)
        rollouts = policy.rollout(starts(0), 1, [5])
        first, second = rollouts.inputs[0]
        if kind == "regression":
            head = policy.module.head
            scale = head.log_scale.detach().exp()
            noises = []
            for look in (first, second):
                reading = policy.module.encode(policy.module.backbone.collate([look.observation], policy.device))
                with torch.no_grad():
                    noises.append((look.sampled["actions"] - head.median(reading, look.state[None])[0]) / scale)
        else:
            noises = [first.sampled["x"][0], second.sampled["x"][0]]  # where each chain begins
        assert (noises[0] - noises[1]).abs().min() > 1e-3


class TestTemperature:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("kind", ["regression", "bridge"])
    @pytest.mark.quick("bridge-0.5", "regression-2.0")
    def test_laplace_is_scored_as_it_is_sampled(self, make, kind, temperature):
        """By torch.distributions; and the score of the scale has mean 0 over what was drawn."""
        policy = stir(make(kind, rows=64, temperature=temperature, scale=0.2))
        head = policy.module.head
        gradients = []
        for part in range(8):
            drawn = policy.rollout(starts(0), 64, list(range(64 * part, 64 * part + 64)))
            first = replace(drawn, inputs=[episode[:1] for episode in drawn.inputs], mask=drawn.mask[:, :CHUNK])
            replay = policy.replay(first, policy.module)
            (gradient,) = torch.autograd.grad(replay.logp.sum(), head.log_scale)
            gradients.append(gradient.flatten() / 64)
        looks = [episode[0] for episode in first.inputs]
        assert all(look.sampled["temperature"] == temperature for look in looks)
        reading = policy.module.encode(
            policy.module.backbone.collate([look.observation for look in looks], policy.device)
        )
        state = torch.stack([look.state for look in looks])
        with torch.no_grad():
            median = head.median(reading, state).double()
        known = Laplace(median, temperature * head.log_scale.detach().double().exp())
        expected = known.log_prob(torch.stack([look.sampled["actions"] for look in looks]).double()).flatten(1)
        there = torch.stack([look.valid for look in looks])  # one number an action
        torch.testing.assert_close(replay.logp.detach().double()[there], expected[there], rtol=1e-4, atol=1e-4)
        entropy = known.entropy().flatten(1)[there]
        torch.testing.assert_close(replay.entropy.detach().double()[there], entropy, rtol=1e-5, atol=1e-5)
        # |z| - 1 of 512 draws of each of 4 numbers has mean 0 and deviation 1 / 22.6.
        assert torch.stack(gradients).mean(0).abs().max() < 4.5 / 22.6

    @pytest.mark.parametrize("kind", ["parallel", "autoregressive"])
    def test_tokens_are_scored_as_they_are_sampled(self, make, kind):
        policy = stir(make(kind, rows=64, temperature=0.5))
        rollouts = policy.rollout(starts(0), 1, [3])
        look, head = rollouts.inputs[0][0], policy.module.head
        reading = policy.module.encode(policy.module.backbone.collate([look.observation], policy.device))
        with torch.no_grad():
            logits = head._logits(head._hidden_states(reading, look.state[None], look.sampled["columns"][None]))[0]
            found = policy.replay(rollouts, policy.module)
        known = Categorical(logits=logits.double() / 0.5)
        expected = known.log_prob(look.sampled["columns"]).float()
        torch.testing.assert_close(found.logp[0, :CHUNK], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.entropy[0, :CHUNK], known.entropy().float(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kind", ["parallel", "regression"])
    def test_it_may_change_between_the_rollouts_of_a_batch(self, make, kind):
        """A schedule; each look is scored at the temperature of its own rollouts, whatever it is now."""
        control = Linear(start=2.0, end=0.5, steps=2)
        policy = stir(make(kind))
        policy.temperature, parts = control, []
        for step in range(3):
            control.update(step, {})
            parts.append(policy.rollout(STARTS[:2], 1, [10 * step, 10 * step + 1], step=step))
        with torch.no_grad():
            alone = [policy.replay(part, policy.module).logp for part in parts]
            mixed = policy.replay(Rollouts.concat(parts).select(torch.tensor([4, 0, 2, 3, 5, 1])), policy.module).logp
        kept = [[look.sampled["temperature"].item() for e in part.inputs for look in e] for part in parts]
        assert [set(of_step) for of_step in kept] == [{2.0}, {1.25}, {0.5}]
        for row, (step, place) in enumerate([(2, 0), (0, 0), (1, 0), (1, 1), (2, 1), (0, 1)]):
            own = alone[step][place]
            torch.testing.assert_close(mixed[row, : len(own)], own, rtol=1e-4, atol=1e-5)

    def test_demonstrations_are_scored_at_one(self, make):
        head = make("regression", supervised=True).module.head
        assert head.encode_demonstrations(torch.zeros(3, CHUNK, 1), [1, 2, 3])["temperature"].tolist() == [1.0] * 3


def test_a_demonstrated_chunk_goes_on_with_its_last_action():
    """A chunk of two actions of one number for an expert that plans four actions of three numbers."""
    head = FlowHead(TaughtFlow(draws=2), Actions(head=TaughtFlow(draws=2), chunk=2), 1, 1, latent=(4, 3))
    taught = head.encode_demonstrations(torch.tensor([[[1.0], [2.0]]]), [7])
    assert taught["data"].tolist() == [[[1, 0, 0], [2, 0, 0], [2, 0, 0], [2, 0, 0]]]
    assert taught["actions"].tolist() == [[[1], [2]]]


class TestFlows:
    @pytest.mark.parametrize("how", ["std", "inverse_dt"])
    def test_weights_of_steps(self, make, how):
        cps = {"type": "cps", "noise": 0.7, "logp": "density"}
        likelihood = {"type": "chain", "transition": cps, "step_weight": how}
        policy = make("flow", likelihood=likelihood, **SIX)
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        with torch.no_grad():
            weight = policy.replay(rollouts, policy.module).weight
        std = policy.module.head.sampler.std[:5]
        expected = std / std.mean() if how == "std" else torch.ones(5)  # a linear grid has equal steps
        for b, episode in enumerate(rollouts.inputs):
            for s in range(len(episode)):
                torch.testing.assert_close(weight[b, 5 * s : 5 * s + 5], expected)
            assert not weight[b, 5 * len(episode) :].any()

    @pytest.mark.parametrize("kind", ["flow, all steps", "flow, matching"])
    def test_the_distance_to_the_reference_policy(self, make, kind):
        """The exact KL of a step by torch.distributions, and the squared distance, over executed actions alone."""
        policy, moved, third = stir(make(kind)), stir(make(kind), 0.4), stir(make(kind), 0.8)
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        with torch.no_grad():
            before, other = (each.replay(rollouts, each.module) for each in (policy, third))
        assert "reference_error" not in before.extras
        rollouts = replace(rollouts, old_prediction=before.prediction, ref_prediction=before.prediction)
        own = policy.replay(rollouts, policy.module)
        assert not own.extras["reference_error"].any() and (own.reference_kl is None or not own.reference_kl.any())
        # the old policy is another one than the reference, so that neither can stand for the other
        now = moved.replay(replace(rollouts, old_prediction=other.prediction), moved.module)
        assert now.extras["reference_error"].requires_grad
        looks = [(b, s, look) for b, episode in enumerate(rollouts.inputs) for s, look in enumerate(episode)]
        b, s, look = next(found for found in looks if not found[2].valid.all())
        d, sigmas = policy.module.head.decisions, linear(4)
        if kind == "flow, matching":
            errors = []
            for sigma, noise in zip(look.sampled["sigma"], look.sampled["noise"], strict=True):
                x = (1 - sigma) * look.sampled["data"] + sigma * noise
                v, old = (velocity(p, look, x, float(sigma))[0][0] for p in (moved, policy))
                errors.append((v - old).square()[look.valid].sum() / CHUNK)
            assert now.reference_kl is None
            assert now.extras["reference_error"][b, s].item() == pytest.approx(
                torch.stack(errors).mean().item(), rel=1e-3
            )
            return
        for k in range(3):
            a_x, a_v, std = (float(c) for c in coefficients("cps", sigmas[k], sigmas[k + 1], noise=0.7))
            x = look.sampled["x"][k]
            v, reference, old = (velocity(p, look, x, float(sigmas[k]))[0][0].double() for p in (moved, policy, third))
            step = Normal(a_x * x + a_v * v, std)
            to_reference, to_old = (
                kl_divergence(step, Normal(a_x * x + a_v * p, std))[look.valid].sum().item() / CHUNK
                for p in (reference, old)
            )
            at = (b, d * s + k)
            assert now.reference_kl[at].item() == pytest.approx(to_reference, rel=1e-3)
            assert now.divergence[at].item() == pytest.approx(to_old, rel=1e-3)
            assert to_old != pytest.approx(to_reference, rel=0.1)
            error = (v - reference).square()[look.valid].sum().item() / CHUNK
            assert now.extras["reference_error"][at].item() == pytest.approx(error, rel=1e-3)
        assert now.divergence.requires_grad and now.reference_kl.requires_grad

    def test_one_that_was_taught_goes_on_with_learned_noise(self, make, tmp_path):
        """The network that says how wide steps are is new; nothing else is."""
        policy = stir(make("flow", supervised=True))
        policy.save(tmp_path, policy.module.state_dict())
        again = make("flow, learned", str(tmp_path))
        taught, now = policy.module.head.state_dict(), again.module.head.state_dict()
        assert set(now) - set(taught) == {"expert.spread.weight", "expert.spread.bias"}
        assert all(torch.equal(value, now[name]) for name, value in taught.items())
        assert again.rollout(STARTS[:1], 2, SEEDS[:2]).mask.any()


class NormalHead(Head):
    """A head of one's own: a Gaussian of fixed width around what one layer makes of the last token."""

    def __init__(self, settings, action, action_dim, state_dim, width):
        super().__init__(action, action_dim, state_dim)
        self.std, self.layer = settings.std, torch.nn.Linear(width, action.chunk * action_dim)

    @property
    def decisions(self):
        return 1

    def _mean(self, reading):
        return self.layer(reading.last).view(-1, *self.shape)

    def act(self, reading, state, how):
        mean = self._mean(reading)
        noise = [torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)) for seed in how.seeds]
        return {"actions": mean + how.temperature * self.std * torch.stack(noise)}

    def score(self, reading, state, chosen, valid, old, reference):
        logp = Normal(self._mean(reading), self.std).log_prob(chosen["actions"])
        return {"logp": logp.where(valid[..., None], 0).sum((1, 2))[:, None]}


class OwnHead(ActionHead):
    """Settings of `NormalHead`."""

    type: str = "tests.policies.vla.test_heads:OwnHead"
    architecture_keys = ("size",)
    std: float = 0.2
    size: int = 1

    @property
    def offers(self):
        return frozenset()

    def build(self, action, backbone, action_dim, state_dim):
        return NormalHead(self, action, action_dim, state_dim, backbone.width)


class TestAHeadOfOnesOwn:
    def test_plays_replays_learns_and_is_saved(self, make, tmp_path):
        own = {"type": "tests.policies.vla.test_heads:OwnHead", "std": 0.3}
        policy = make(own, critic=True)
        assert type(policy.module.head).__name__ == "NormalHead" and policy.max_decisions == 25
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        now = policy.replay(rollouts, policy.module)
        assert torch.equal(now.logp.detach(), policy.replay(rollouts, policy.module).logp.detach())
        look = next(look for episode in rollouts.inputs for look in episode if not look.valid.all())
        assert rollouts.mask.any() and rollouts.extras["steps"].values.shape == rollouts.mask.shape
        row = next(b for b, episode in enumerate(rollouts.inputs) if any(one is look for one in episode))
        place = next(s for s, one in enumerate(rollouts.inputs[row]) if one is look)
        reading = policy.module.encode(policy.module.backbone.collate([look.observation], policy.device))
        with torch.no_grad():
            mean = policy.module.head._mean(reading)[0]
        known = Normal(mean.double(), 0.3).log_prob(look.sampled["actions"].double())[look.valid].sum()
        assert now.logp[row, place].item() == pytest.approx(known.item(), rel=1e-4)
        now.logp[rollouts.mask].sum().backward()
        assert policy.module.head.layer.weight.grad.any()
        policy.save(tmp_path, policy.module.state_dict())
        again = make(own, str(tmp_path))
        assert torch.equal(again.module.head.layer.weight, policy.module.head.layer.weight)
        with pytest.raises(UserError, match="action.head.size=2, but .* was trained with 1"):
            make(own, str(tmp_path), size=2)
        with pytest.raises(UserError, match="action.head.type=regression, but .* was trained with tests.policies.vla"):
            make("regression", str(tmp_path))
        shown = {**STARTS[0].metadata, "observation": policy.sim.reset([0], ["go"])}
        shown["observation"] = shown["observation"].select(np.array([0]))
        shown["actions"] = np.zeros((2, 1), np.float32)
        assert policy.demonstrate([replace(STARTS[0], metadata=shown)], [1]).mask.tolist() == [[True]]


class TestSavedDescriptions:
    def test_hold_the_section(self, make, tmp_path):
        policy = make("bridge", scale=0.3)
        policy.save(tmp_path, policy.module.state_dict())
        told = json.loads((tmp_path / CONFIG).read_text())
        assert told["chunk"] == CHUNK and told["head"] == {
            "type": "bridge",
            "level": "token",
            "scale": 0.3,
            "width": 32,
            "depth": 2,
            "queries": 3,
        }

    @pytest.mark.parametrize(("kind", "then"), [("bridge", "bridge"), ("flow", "flow"), ("parallel", "token")])
    def test_from_before_heads_had_sections_are_read(self, make, tmp_path, kind, then):
        """Options beside the head's name, and gates without a dimension."""
        policy = stir(make(kind))
        policy.save(tmp_path, policy.module.state_dict())
        told = {"head": then, "chunk": CHUNK, "level": "token", "decoding": "parallel", "bins": 8, "width": 32}
        told |= {"depth": 2 if kind == "bridge" else 1, "queries": 3, "spread": "sampler", "proprioception": True}
        (tmp_path / CONFIG).write_text(json.dumps(told))
        old = {n: t.reshape(()) if n.endswith(".gate") else t for n, t in load_file(tmp_path / WEIGHTS).items()}
        assert kind != "bridge" or any(tensor.dim() == 0 for tensor in old.values())
        save_file(old, tmp_path / WEIGHTS)
        again = make(kind, str(tmp_path))
        for name, value in policy.module.state_dict().items():
            assert torch.equal(again.module.state_dict()[name], value), name
        if kind == "bridge":
            with pytest.raises(UserError, match="action.head.queries=4, but .* was trained with 3"):
                make(kind, str(tmp_path), queries=4)

    def test_every_parameter_can_be_broadcast(self, make):
        """DeepSpeed sends parameters as bytes, which a tensor without a dimension has no view of."""
        for kind in KINDS:
            for name, parameter in make(kind, critic=True).module.named_parameters():
                assert parameter.dim() > 0 and parameter.data.view(torch.uint8).numel(), name


def test_a_critic_is_a_part_with_a_name_of_its_own(make):
    module = make("regression", critic=True).module
    parts = {name.split(".")[0] for name, _ in module.named_parameters()}
    assert parts == {"backbone", "head", "critic"}


class ConfigParts:
    """What `loading.load` reads of a configuration."""

    def __init__(self, model, action, rollout, evaluation, critic=False):
        self.model, self.action, self.rollout, self.evaluation = model, action, rollout, evaluation
        self.seed, self.rollouts_per_step, self.engine = 3, 24, None
        self.log = Log(samples=5)
        self.needs = Needs(critic=SharedCritic() if critic else None)

    def section(self, name):
        return vars(self)[name]


class Line:
    """A task with a simulator."""

    simulator_rows = 8
    watched = False

    def make_simulator(self, rows):
        return build("tests.sims.line_simulator:Line", rows)


class TestFromAConfiguration:
    def parts(self, head, *, sampled=True, **options):
        from mmrl.policies.vla import settings
        from mmrl.settings import make as made
        from mmrl.settings import option

        class Sampled(settings.EpisodeSampling):
            micro_batch: int | None = option(None, "rollouts at once")

        class Played(settings.EpisodePrompts):
            micro_batch: int | None = option(None, "rollouts at once")

        class Evaluated(settings.EpisodeEvaluation):
            prompts: int = 4

        rollout = made(Sampled, {"temperature": 0.7, **options}) if sampled else made(Played, options)
        evaluation = made(Evaluated, {"temperature": 0.1}) if sampled else settings.Section()
        model = settings.VisionLanguageActionModel()
        return ConfigParts(model, made(Actions, {"head": head}), rollout, evaluation, critic=sampled)

    def test_every_key_reaches_its_place(self, backbones):
        from mmrl.policies.vla.loading import load

        policy = load(self.parts({"type": "regression", "scale": 0.4}), Line(), str(backbones["small"]))
        assert len(policy.sim) == 8 and policy.temperature.value == 0.7 and policy.evaluation_temperature == 0.1
        assert policy.module.critic is not None and policy.log.samples == 5
        assert policy.module.head.log_scale.exp().mean().item() == pytest.approx(0.4)
        few = load(self.parts({"type": "regression"}, micro_batch=6), Line(), str(backbones["small"]))
        assert len(few.sim) == 6
        flow = load(self.parts({"type": "flow"}, sampled=False), Line(), str(backbones["small"]))
        assert flow.evaluation_temperature == 0 and flow.module.critic is None
        again = load(self.parts({"type": "regression"}), Line(), str(backbones["small"]))
        assert torch.equal(again.module.head.queries, policy.module.head.queries)  # drawn from the seed

    def test_a_task_without_a_simulator_is_refused(self, backbones):
        from mmrl.policies.vla.loading import load

        with pytest.raises(UserError, match="needs a task with a simulator"):
            load(self.parts({"type": "flow"}, sampled=False), object(), str(backbones["small"]))
