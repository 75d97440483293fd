"""Critics, policies that read nothing but states, and episodes taken apart into their looks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import states_only
from mmrl.policies.vla.episodes import Episodes
from mmrl.protocols.batch import Batch
from mmrl.sims import build
from mmrl.tasks.manipulation import tiny_model
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics
from tests.joints.parts import Ledger, Log
from tests.policies.vla.conftest import starts
from tests.policies.vla.test_policy import SEEDS, STARTS, stir
from tests.sims.line_simulator import Line
from tests.whole_runs.parts import ROBOTS


class QuietLine(Line):
    """It says the same whatever it shows."""

    def instruction(self, row):
        return "go"


def quiet():
    return build("tests.policies.vla.test_critics:QuietLine", 4)


@pytest.fixture
def blind(tmp_path):
    tiny_model.build_states(tmp_path / "blind")
    return str(tmp_path / "blind")


class TestAPolicyOfStates:
    def test_its_mean_is_the_perceptron_of_the_state(self, make, blind):
        policy = stir(make("gaussian", blind, sim=quiet(), std=0.5))
        rollouts = policy.rollout(STARTS, 1, [1, 2, 3])
        look, head = rollouts.inputs[1][0], policy.module.head
        first, _, last = head.layers
        mean = last(torch.tanh(first(look.state))).view(4, 1)
        assert mean.abs().min() > 0
        known = Normal(mean, head.log_std.exp()).log_prob(look.sampled["actions"]).sum(-1)
        found = policy.replay(rollouts, policy.module)
        torch.testing.assert_close(found.logp[1, :4], known.where(look.valid, 0), rtol=1e-5, atol=1e-5)
        entropy = (0.5 * math.log(2 * math.pi * math.e) + head.log_std)[0].item()
        assert found.entropy[1, 0].item() == pytest.approx(entropy, rel=1e-5)
        noise = torch.randn(4, 1, generator=torch.Generator().manual_seed(7))
        state = look.state[None]
        from mmrl.policies.vla.heads.head import ActionSampling

        drawn, likeliest = (
            head.act(states_only.EmptyPrefix(1, policy.device), state, ActionSampling([7], temperature))["actions"][0]
            for temperature in (0.5, 0.0)
        )
        torch.testing.assert_close(likeliest, mean)
        torch.testing.assert_close(drawn, mean + 0.5 * head.log_std.exp() * noise)

    def test_it_is_scored_at_the_temperature_that_it_was_sampled_with(self, make, blind):
        policy = stir(make("gaussian", blind, sim=quiet(), temperature=0.5))
        look = (rollouts := policy.rollout(STARTS[:1], 1, [1])).inputs[0][0]
        head = policy.module.head
        mean = head.mean(states_only.EmptyPrefix(1, policy.device), look.state[None])[0]
        known = Normal(mean, 0.5 * head.log_std.exp())
        found = policy.replay(rollouts, policy.module)
        expected = known.log_prob(look.sampled["actions"]).sum(-1).where(look.valid, 0)
        torch.testing.assert_close(found.logp[0, :4], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy[0, :4], known.entropy()[:, 0].where(look.valid, 0))

    def test_a_spread_that_was_learned_to_be_less_counts_as_the_least(self, make, blind):
        policy = stir(make("gaussian", blind, sim=quiet(), least_std=0.2, temperature=0.5))
        head = policy.module.head
        with torch.no_grad():
            head.log_std.copy_(torch.tensor([[0.01], [0.3], [0.19], [0.21]]).log())
        spread = torch.tensor([[0.2], [0.3], [0.2], [0.21]])
        look = (rollouts := policy.rollout(STARTS[:1], 1, [7])).inputs[0][0]
        mean = head.mean(states_only.EmptyPrefix(1, policy.device), look.state[None])[0].detach()
        found = policy.replay(rollouts, policy.module)
        known = Normal(mean, 0.5 * spread)
        expected = known.log_prob(look.sampled["actions"]).sum(-1).where(look.valid, 0)
        torch.testing.assert_close(found.logp[0, :4], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy[0, :4], known.entropy()[:, 0].where(look.valid, 0))
        from mmrl.policies.vla.heads.head import ActionSampling

        drawn, likeliest = (
            head.act(states_only.EmptyPrefix(1, policy.device), look.state[None], ActionSampling([7], t))["actions"][0]
            for t in (0.5, 0.0)
        )
        noise = torch.randn(4, 1, generator=torch.Generator().manual_seed(7))
        torch.testing.assert_close(drawn - likeliest, 0.5 * spread * noise)
        found.entropy.sum().backward()
        assert (head.log_std.grad[:, 0] != 0).tolist() == [False, True, False, True]

    @pytest.mark.parametrize("level", ["token", "action", "chunk"])
    def test_its_divergence_from_others_is_exact(self, make, blind, level):
        policy = stir(make("gaussian", blind, sim=quiet(), level=level))
        rollouts = policy.rollout(STARTS, 1, [1, 2, 3])
        with torch.no_grad():
            before = policy.replay(rollouts, policy.module)
        assert before.divergence is None
        look, head = rollouts.inputs[1][0], policy.module.head

        def distribution():
            mean = head.mean(states_only.EmptyPrefix(1, policy.device), look.state[None])[0]
            return Normal(mean, head.log_std.exp())

        with torch.no_grad():
            then = distribution()
        rollouts = replace(
            rollouts, old_logp=before.logp, old_prediction=before.prediction, ref_prediction=before.prediction
        )
        assert not policy.replay(rollouts, policy.module).divergence.any()
        stir(policy, 0.1)
        found = policy.replay(rollouts, policy.module)
        known = kl_divergence(then, distribution()).where(look.valid[:, None], 0)
        known = known.sum() if level == "chunk" else known[:, 0]
        decisions = head.decisions
        torch.testing.assert_close(found.divergence[1, :decisions].squeeze(), known, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.reference_kl, found.divergence)
        found.divergence.sum().backward()
        assert head.log_std.grad.any() and head.layers[-1].weight.grad.any()

    def test_it_starts_near_zero_with_the_spread_that_was_asked_for(self, make, blind):
        policy = make("gaussian", blind, sim=quiet(), std=0.5, width=256, layers=3)
        assert policy.module.head.log_std.exp().tolist() == [[pytest.approx(0.5)]] * 4
        looks = [look for episode in policy.rollout(STARTS, 2, SEEDS).inputs for look in episode]
        states = torch.stack([look.state for look in looks])
        mean = policy.module.head.mean(states_only.EmptyPrefix(len(looks), policy.device), states)
        assert 0 < mean.abs().max() < 0.05

    def test_saved_and_loaded_alike(self, make, blind, tmp_path):
        policy = stir(make("gaussian", blind, sim=quiet(), critic="separate"))
        policy.save(tmp_path / "final", policy.module.state_dict())
        again = make("gaussian", str(tmp_path / "final"), critic="separate")
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        one, other = (p.replay(rollouts, p.module) for p in (policy, again))
        assert torch.equal(one.logp, other.logp) and torch.equal(one.value, other.value)

    @pytest.mark.parametrize(
        ("head", "options", "message"),
        [
            (
                "regression",
                {},
                "type=regression reads the output of a backbone.* use action.head.type=gaussian",
            ),
            ("gaussian", {"proprioception": False}, "reads only the robot's state, but action.proprioception=False"),
            ("gaussian", {"freeze": ["vision"]}, "model.freeze is not for the small network"),
        ],
    )
    def test_what_it_can_not_be(self, make, blind, head, options, message):
        with pytest.raises(UserError, match=message):
            make(head, blind, **options)

    def test_it_has_one_instruction(self):
        backbone = states_only.StateBackbone()
        nothing = np.zeros((2, 0, 0, 3), np.uint8), np.zeros((2, 1), np.float32)
        assert backbone.prepare([nothing[0]], ["push", "push"], nothing[1]) == [None, None]
        with pytest.raises(UserError, match="instructions are 'push' and 'lift'"):
            backbone.prepare([nothing[0]], ["push", "lift"], nothing[1])


class TestCritics:
    def test_a_separate_one_reads_the_state_alone(self, make):
        policy = stir(make("regression", critic={"type": "separate", "width": 8, "layers": 2}))
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        look, layers = rollouts.inputs[2][0], policy.module.critic.layers
        value = layers[4](torch.tanh(layers[2](torch.tanh(layers[0](look.state[None])))))
        assert len(layers) == 5 and layers[0].weight.shape == (8, 1)
        found = policy.replay(rollouts, policy.module).value
        torch.testing.assert_close(found[2, 0], value[0, 0])
        torch.testing.assert_close(rollouts.extras["steps"].values[2, 0], value[0, 0])
        found.sum().backward()
        touched = {n for n, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()}
        assert touched == {n for n, _ in policy.module.named_parameters() if n.startswith("critic.")}

    @pytest.mark.parametrize("detach", [False, True])
    def test_a_shared_one_teaches_the_backbone_unless_told_otherwise(self, make, detach):
        policy = stir(make("regression", critic={"type": "shared", "detach": detach, "width": 16, "layers": 2}))
        assert [tuple(p.shape) for p in policy.module.critic.parameters() if p.dim() == 2] == [
            (16, 33),
            (16, 16),
            (1, 16),
        ]
        policy.replay(policy.rollout(STARTS, 2, SEEDS), policy.module).value.sum().backward()
        taught = any(p.grad is not None and p.grad.any() for p in policy.module.backbone.parameters())
        assert taught != detach

    def test_a_state_must_be_there(self, make):
        from mmrl.policies.vla.critic import build as made
        from mmrl.protocols.critic import SeparateCritic

        with pytest.raises(UserError, match="separate reads the robot's state, but the simulator has none"):
            made(SeparateCritic(), 32, 0)


class WatchedLine(QuietLine):
    """Its state goes on with a number that no camera measures."""

    state_dim, hidden = 2, 5.0

    def _told(self, moved):
        moved.state = np.concatenate([moved.state, np.full((len(moved.state), 1), self.hidden, np.float32)], 1)
        return moved

    def reset(self, rows, seeds, tasks):
        return self._told(super().reset(rows, seeds, tasks))

    def step(self, rows, actions):
        return self._told(super().step(rows, actions))


class OtherLine(WatchedLine):
    hidden = -3.0


class TestPrivilegedStates:
    def played(self, make, path, simulator, **options):
        sim = build(f"tests.policies.vla.test_critics:{simulator}", 4)
        policy = stir(make("gaussian", path, sim=sim, privileged=1, **options))
        return policy, policy.rollout(STARTS, 2, SEEDS)

    @pytest.mark.parametrize("critic", ["separate", "shared"])
    def test_only_the_critic_reads_them(self, make, blind, critic):
        policy, rollouts = self.played(make, blind, "WatchedLine", critic=critic)
        other, others = self.played(make, blind, "OtherLine", critic=critic)
        assert rollouts.inputs[0][0].state.tolist() == [0.0, 5.0]
        assert policy.module.head.layers[0].weight.shape[1] == 1 and policy.module.critic.layers[0].weight.shape[1] == 2
        one, two = policy.replay(rollouts, policy.module), other.replay(others, other.module)
        assert torch.equal(one.logp, two.logp) and torch.equal(rollouts.mask, others.mask)
        known = rollouts.extras["steps"].mask
        assert (one.value[known] != two.value[known]).all()
        steps, moved = rollouts.extras["steps"], others.extras["steps"]
        assert (steps.bootstrap != moved.bootstrap).any() and (steps.values != moved.values)[known].all()

    def test_there_must_be_so_many(self, make, blind):
        with pytest.raises(UserError, match="action.privileged=2, but the simulator's state has 1 numbers"):
            make("regression", sim=quiet(), privileged=2)
        with pytest.raises(UserError, match="the simulator's state has 0 numbers"):
            make("gaussian", blind, sim=quiet(), privileged=1)


def test_another_critic_than_the_one_that_was_trained_is_refused(make, blind, tmp_path):
    policy = make("gaussian", blind, sim=quiet(), critic="separate")
    policy.save(tmp_path / "final", policy.module.state_dict())
    with pytest.raises(
        UserError, match="algorithm.critic gives critic.layers.0.bias the shape .8., but in .* it has .256."
    ):
        make("gaussian", str(tmp_path / "final"), sim=quiet(), critic={"type": "separate", "width": 8})


# --- single looks ---


class NearLine(Line):
    """It starts before its end, so that an episode has several looks, and not always as many."""

    def reset(self, rows, seeds, tasks):
        return super().reset(rows, [seed % 90 for seed in seeds], tasks)


@pytest.fixture
def trainer(tmp_path):
    """The tiny robot's trainer, whose episodes have several looks, with real settings, policy and simulator, and a
    ledger in the engine's place."""

    def made(*overrides):
        from mmrl.build import build_policy, build_task
        from mmrl.config import load, to_yaml

        world = ["task.simulator=tests.policies.vla.test_critics:NearLine", "action.chunk=2"]
        options = ["optim.lr=0.1", f"run_dir={tmp_path}", *world, *overrides]
        config = load(ROBOTS, ["algorithm={type: ppo, simulator_reward: 0.5}", "rollout.prompts=6", *options])
        task = build_task(config)
        policy = stir(build_policy(config, task), 0.1)
        return Trainer(config, policy, task, Ledger(policy.module, 0.0), Log(tmp_path, to_yaml(config), writes=False))

    return made


def learned(trainer, rollouts):
    """The gradients of a step's updates, and what was known of its looks."""
    metrics, shuffle = Metrics(trainer.engine), torch.Generator().manual_seed(0)
    minibatches, _ = trainer.preparation.minibatches(rollouts, 0, shuffle, metrics)
    for minibatch in minibatches:
        trainer.update(minibatch, metrics)
    return trainer.engine.gradients, minibatches, metrics.result()


def test_the_job_says_which_critic(trainer):
    made = trainer("algorithm.critic={type: separate, width: 12, layers: 1}")
    assert [p.shape[0] for p in made.policy.module.critic.parameters() if p.dim() == 2] == [12, 1]


class TestSingleLooks:
    def test_one_minibatch_of_them_gives_the_gradient_of_whole_episodes(self, trainer):
        found = []
        for shuffle in ("episodes", "steps"):
            made = trainer(f"algorithm.shuffle={shuffle}", "engine.micro_batch=5")
            rollouts = made.collector.next(0, Metrics(made.engine))
            found.append(learned(made, rollouts))
        (whole, _, one), (single, minibatches, other) = found
        assert {len(micro) for micro in minibatches[0][:-1]} == {5}
        assert sum(len(micro) for micro in minibatches[0]) == rollouts.extras["steps"].mask.sum()
        moved = [name for name, gradient in whole[0].items() if gradient is not None and gradient.any()]
        assert any(n.startswith("critic.") for n in moved) and any(n.startswith("backbone.") for n in moved)
        for name in moved:
            assert (single[0][name] - whole[0][name]).norm() < 1e-4 * whole[0][name].norm() + 1e-6, name
        for name in ("loss", "critic/error", "critic/return", "entropy", "surrogate/clip_high"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name

    def test_they_are_shuffled_and_each_keeps_what_is_known_of_it(self, trainer):
        made = trainer("algorithm.shuffle=steps", "algorithm.minibatches=3", "engine.micro_batch=64")
        rollouts = made.collector.next(0, Metrics(made.engine))
        _, minibatches, result = learned(made, rollouts)
        assert len({len(episode) for episode in rollouts.inputs}) > 1
        assert result["updates"] == 3 and result["surrogate/ratio_gap_max"] == 0.0
        sizes = [sum(map(len, minibatch)) for minibatch in minibatches]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == sum(map(len, rollouts.inputs))
        known = {id(look): (b, s) for b, episode in enumerate(rollouts.inputs) for s, look in enumerate(episode)}
        order, steps = [], rollouts.extras["steps"]
        decisions = rollouts.mask.shape[1] // steps.mask.shape[1]
        for micro in (micro for minibatch in minibatches for micro in minibatch):
            for i, (look,) in enumerate(micro.inputs):
                b, s = known.pop(id(look))
                order.append((b, s))
                of_look = slice(s * decisions, (s + 1) * decisions)
                assert torch.equal(micro.mask[i], rollouts.mask[b, of_look])
                assert torch.equal(micro.advantages[i], rollouts.advantages[b, of_look])
                for name in ("returns", "values", "mask"):
                    own = vars(micro.extras["steps"])[name]
                    assert own.shape[1] == 1 and own[i, 0] == vars(steps)[name][b, s], name
                assert micro.samples[i] is rollouts.samples[b]
        assert not known and order != sorted(order)

    @pytest.mark.parametrize("kind", ["gaussian", "flow, all steps"])
    def test_alone_they_have_the_likelihoods_that_they_have_in_their_episodes(self, make, kind):
        policy = stir(make(kind, critic=True))
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        rollouts.inputs[0], rollouts.mask[0, policy.module.head.decisions :] = rollouts.inputs[0][:1], False
        whole = policy.replay(rollouts, policy.module)
        rollouts.old_prediction = torch.randn(whole.prediction.shape, generator=torch.Generator().manual_seed(1))
        whole = policy.replay(rollouts, policy.module)
        assert len({len(episode) for episode in rollouts.inputs}) > 1
        order = torch.randperm(sum(map(len, rollouts.inputs)), generator=torch.Generator().manual_seed(0))
        single = policy.replay(policy.by_step(rollouts).select(order), policy.module)
        places = [(b, s) for b, episode in enumerate(rollouts.inputs) for s in range(len(episode))]
        for i, place in enumerate(order.tolist()):
            b, s = places[place]
            torch.testing.assert_close(single.value[i], whole.value[b, s : s + 1])
            decisions = single.logp.shape[1]
            for name in ("logp", "prediction", "divergence"):
                expected = vars(whole)[name][b, s * decisions : (s + 1) * decisions]
                torch.testing.assert_close(vars(single)[name][i], expected, rtol=1e-5, atol=1e-5)

    def test_each_knows_which_of_its_actions_were_executed(self, make, blind):
        policy = stir(make("gaussian", blind, sim=quiet(), std=0.5))
        rollouts = policy.rollout(starts(0, 60, 90), 1, [1, 2, 3])
        lengths = [sample.episode.length for sample in rollouts.samples]
        assert len(set(lengths)) > 1
        assert [sum(int(look.valid.sum()) for look in episode) for episode in rollouts.inputs] == lengths

    def test_what_was_stacked_serves_the_same_looks_alone(self, make, blind, monkeypatch):
        policy = stir(make("gaussian", blind, sim=quiet(), critic=True))
        rollouts = policy.rollout(STARTS, 1, [1, 2, 3])
        assert any(not look.valid.all() for episode in rollouts.inputs for look in episode)
        first = policy.replay(rollouts, policy.module).logp
        changed = replace(rollouts, inputs=[[replace(e[0], state=e[0].state + 1), *e[1:]] for e in rollouts.inputs])
        other = policy.replay(changed, policy.module).logp
        assert not torch.equal(other[:, :4], first[:, :4]) and torch.equal(other[:, 4:], first[:, 4:])
        turned = rollouts.select(torch.tensor([2, 0]))
        assert torch.equal(policy.replay(turned, policy.module).logp, first[[2, 0]])
        monkeypatch.setattr(Episodes, "__init__", None)  # once is enough
        assert torch.equal(policy.replay(rollouts, policy.module).logp, first)

    def test_advantages_come_from_whole_episodes(self, trainer):
        made = trainer("algorithm.shuffle=steps")
        rollouts = made.collector.next(0, Metrics(made.engine))
        batch = Batch(rollouts, made.task.reward_names, made.task.reward_weights)
        assert max(map(len, rollouts.inputs)) > 1
        expected = made.algorithm.advantages(batch)
        made.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), Metrics(made.engine))
        assert torch.equal(rollouts.advantages, expected)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("reduce=sequence_mean", "it needs algorithm.reduce=token_mean"),
            ("level=sequence", "it needs algorithm.reduce=token_mean and algorithm.level=decision"),
            (
                "shaping=[entropy]",
                "shaping.0 .entropy. needs whole episodes, which algorithm.shuffle=steps splits",
            ),
            ("terms=['tests.joints.test_measurements:Away']", "terms.0 .*Away. needs whole episodes"),
        ],
    )
    def test_what_needs_whole_episodes_is_refused(self, trainer, option, message):
        with pytest.raises(UserError, match=message):
            trainer("algorithm.shuffle=steps", f"algorithm.{option}")

    def test_a_step_without_looks_is_no_step(self, make):
        policy = make("regression", critic=True, simulator={"unstartable": [30]})
        with pytest.warns(RuntimeWarning, match="lost its episode"):
            rollouts = policy.rollout(starts(30, 0), 2, SEEDS[:4])
        apart = policy.by_step(rollouts)
        assert len(apart) == sum(map(len, rollouts.inputs)) and apart.mask.any()
        assert {id(s) for s in apart.samples} <= {id(s) for s in rollouts.samples[2:]}
