"""Q networks of the noise of a steered head: their targets and weights, and the policy's gradient, by hand."""

import json

import pytest
import torch

from mmrl.core.values import EntropyTemperature, QEnsemble
from mmrl.errors import UserError
from mmrl.measurements.noise_values import STREAM
from mmrl.policies.vla.heads.steered import SteeredHead
from mmrl.protocols.auxiliary import AuxiliaryModule
from mmrl.samplers.chain import INITIAL, derive_seed, gaussian_noise
from tests.joints.parts import close
from tests.joints.test_q_gradient import HEADS, Q, module, prepared, recorded
from tests.whole_runs.parts import ROBOTS, call, distance, final, make, metrics, release, timeless, train
from tests.whole_runs.test_robots import FLOW, with_head

WIDTH = 33  # of an observation: the backbone's 32 features, and the state
pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return with_head(tmp_path_factory.mktemp("base"), FLOW)


def steered(base, *, head="", noise="{updates: 1}", q="", more="", steps=6):
    """Options of a run whose head steers chunks of four actions of one number."""
    return [
        f"rollout={{prompts: 8, extras: [{{type: action_proposals, steps: {steps}, group_size: 2}}]}}",
        f"algorithm={{type: soft_actor_critic, {Q}, noise: {noise}{q}}}{more}}}",
        "engine.micro_batch=40",
        "task.train_size=60",
        "action.chunk=4",
        "model.build=null",
        f"model.path={base}",
        f"action.head={{type: steered, width: 16, layers: 0, base: {FLOW}{head}}}",
    ]


def flowed(noise):
    """Four steps of the velocity x + 0.3, clipped to the robot's actions."""
    return ((noise + 0.3) * 0.75**4 - 0.3).clamp(-1, 1)


def known_flow(monkeypatch):
    def denoise(self, prefix, state, noise):
        return (noise + 0.3) * 0.75**4 - 0.3

    monkeypatch.setattr(SteeredHead, "denoise", denoise)


def column(rollouts, name):
    (values,) = [record.values for key, record in rollouts.extras.items() if key.startswith(name)]
    return values


# --- from the YAML key to targets ---


def test_the_noise_learns_the_q_of_the_actions_denoised_from_it(tmp_path, base, monkeypatch):
    """Q of actions is a_1 by one network and 2 a_4 by the other; networks of the noise begin at 0. Their first error is
    the square of these, and their weights are those of a step of Adam by hand."""
    forward, descend = QEnsemble.forward, AuxiliaryModule.descend

    def known(self, x):
        if x.shape[1] == WIDTH + 4:
            return forward(self, x)
        return torch.stack([x[:, -8], 2.0 * x[:, -5]]).double()

    def skipped(self, losses, total):
        if not isinstance(self.module, QEnsemble) or self.module.online[0].layers[0].in_features == WIDTH + 4:
            descend(self, losses, total)

    known_flow(monkeypatch)
    monkeypatch.setattr(QEnsemble, "forward", known)
    monkeypatch.setattr(AuxiliaryModule, "descend", skipped)
    trainer, rollouts, _ = prepared(tmp_path, *steered(base))
    assert trainer.policy.off_policy.encoding_sizes == (WIDTH, 8) and trainer.policy.off_policy.noise_size == 4
    rows = recorded(rollouts).nonzero().flatten().tolist()
    assert len(rows) == 12
    seed = derive_seed(derive_seed(derive_seed(trainer.config.seed, 1), STREAM), 0)
    noise = gaussian_noise([derive_seed(seed, i) for i in range(12)], INITIAL, (4, 1))
    actions = flowed(noise)[..., 0]
    target = torch.stack([actions[:, 0], 2.0 * actions[:, 3]]).double()
    close(column(rollouts, "noise_q_values")[rows], target.square().mean(0), atol=1e-5)
    assert column(rollouts, "noise_q_values")[~recorded(rollouts)].isnan().all()
    observations = trainer.policy.off_policy.encode_observations(
        [rollouts.samples[row].prompt.metadata["observation"] for row in rows]
    )
    mine = AuxiliaryModule(QEnsemble(WIDTH + 4, 16, 2, trainer.config.seed + 3), lr=0.01)
    errors = (mine.module(torch.cat([observations, noise[..., 0]], 1)) - target).square()
    mine.update(errors.sum() / 12)
    for found, known_weight in zip(module(trainer, "noise_q").online.parameters(), mine.trained, strict=True):
        close(found.detach(), known_weight.detach(), atol=1e-6)
    release(trainer)


def test_each_update_draws_steps_and_noise_anew(tmp_path, base, monkeypatch):
    read = []
    prior = SteeredHead.sample_prior

    def spied(self, seeds):
        noise = prior(self, seeds)
        read.append([float(row[0, 0]) for row in noise])
        return noise

    monkeypatch.setattr(SteeredHead, "sample_prior", spied)
    options = steered(base, noise="{updates: 3}", q=", updates: 2, batch: 5")
    trainer, rollouts, _ = prepared(tmp_path, *options, steps=3)
    assert [len(noise) for noise in read] == [5] * 6  # nothing is stored in the first training step
    assert len({number for noise in read for number in noise}) == 30
    errors = column(rollouts, "noise_q_values")[recorded(rollouts)]
    assert 5 <= int((~errors.isnan()).sum()) <= 12
    release(trainer)


@pytest.mark.parametrize(("head", "numbers"), [("", 4), (", noises: 1", 1)])
def test_the_target_entropy_is_of_the_noise(tmp_path, base, monkeypatch, head, numbers):
    found = []
    forward = EntropyTemperature.forward

    def spied(self, logp, target):
        found.append(target)
        return forward(self, logp, target)

    monkeypatch.setattr(EntropyTemperature, "forward", spied)
    trainer, *_ = prepared(tmp_path, *steered(base, head=head, q=", entropy: {target: -1.5}"))
    assert found == [-1.5 * numbers]
    release(trainer)


# --- from the YAML key to the policy's gradient ---


@pytest.mark.parametrize(("of", "expected"), [("least", -3.0), ("mean", -2.0)])
def test_the_policy_climbs_q_of_its_noise_by_hand(tmp_path, base, monkeypatch, of, expected):
    """Q networks are -3 w_1 and -w_1 of positive noise of about 0.5; nothing is denoised. See
    test_the_policy_climbs_q_by_hand of test_q_gradient.py."""

    def fixed(self, x):
        first = x[:, -4].double()
        return torch.stack([-3.0 * first, -1.0 * first])

    def refused(self, prefix, state, noise):
        raise AssertionError("the policy's loss needs no actions")

    options = steered(base, head=", std: 0.1", q=", entropy: {temperature: 0.5, target: null}", more=f", of: {of}")
    trainer, rollouts, minibatches = prepared(tmp_path, *options)
    monkeypatch.setattr(QEnsemble, "fixed", fixed)
    monkeypatch.setattr(SteeredHead, "denoise", refused)
    head = trainer.policy.module.head.noise
    with torch.no_grad():
        head.layers[0].weight.zero_()
        head.layers[0].bias.copy_(torch.tensor([0.5, 0.2, 0.0, 0.0]))
    (micro,) = minibatches[0]
    parts, stats = trainer.losses(micro, trainer.algorithm.denominators(micro))
    trainer.engine.backward(sum(parts.values()))
    close(head.layers[0].bias.grad, [-expected, 0.0, 0.0, 0.0], atol=1e-4)
    # by the logarithm of the deviation: the entropy's part is -temperature for each number
    q_part = head.log_std.grad.flatten() + 0.5
    assert q_part[1:].abs().max() < 1e-4 and abs(float(q_part[0])) < 0.3
    stored = recorded(micro)
    noise = stats["q_gradient/q"][stored][:, 0] / expected
    assert noise.mean() == pytest.approx(0.5, abs=0.15) and len(noise.unique()) == 12
    normal = torch.distributions.Normal(0.0, 0.1)
    assert stats["q_gradient/logp"][stored].max() < 4 * float(normal.log_prob(torch.tensor(0.0))) + 1e-4
    release(trainer)


def test_the_policy_climbs_q_of_bounded_noise_by_hand(tmp_path, base, monkeypatch):
    """The Q networks are -3 w_1 and -w_1 of w = 1.5 tanh(u). By the mean of u_1 the loss 0.5 log p(w) + 3 w_1 has the
    gradient 0.5 x 2 tanh(u_1) + 3 x 1.5 (1 - tanh(u_1)^2); see test_steered.py."""

    def fixed(self, x):
        first = x[:, -4].double()
        return torch.stack([-3.0 * first, -1.0 * first])

    entropy = ", entropy: {temperature: 0.5, target: null}"
    options = steered(base, head=", std: 0.4, bound: 1.5", q=entropy)
    trainer, _, minibatches = prepared(tmp_path, *options)
    monkeypatch.setattr(QEnsemble, "fixed", fixed)
    head = trainer.policy.module.head.noise
    with torch.no_grad():
        head.layers[0].weight.zero_()
        head.layers[0].bias.copy_(torch.tensor([1.5, 0.0, 0.0, 0.0]))  # so that w_1 is above 0
    (micro,) = minibatches[0]
    parts, stats = trainer.losses(micro, trainer.algorithm.denominators(micro))
    trainer.engine.backward(sum(parts.values()))
    tanh = stats["q_gradient/q"][recorded(micro)][:, 0] / -3.0 / 1.5
    assert tanh.min() > 0 and tanh.max() < 1 and len(tanh.unique()) == 12
    close(head.layers[0].bias.grad[0], (0.5 * 2 * tanh + 3 * 1.5 * (1 - tanh**2)).mean(), atol=1e-4)
    release(trainer)


def test_q_of_the_noise_reads_the_step_s_own_observation(tmp_path, base, monkeypatch):
    monkeypatch.setattr(QEnsemble, "fixed", lambda self, x: torch.stack([x[:, -5].double()] * 2))
    trainer, rollouts, minibatches = prepared(tmp_path, *steered(base))
    (micro,) = minibatches[0]
    found = trainer.losses(micro, trainer.algorithm.denominators(micro))[1]["q_gradient/q"][:, 0]
    rows = recorded(micro).nonzero().flatten().tolist()
    close(found[rows], [float(micro.samples[row].prompt.metadata["observation"].state[0, 0]) for row in rows])
    release(trainer)


# --- whole runs ---


def test_it_goes_on_exactly(tmp_path, base):
    settings = steered(base, noise="{updates: 2}", q=", updates: 2, batch: 6", more=", minibatches: 3")
    train(tmp_path / "whole", *settings, "steps=6", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=3", "checkpoint.every=3", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=6", "checkpoint.every=3", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 6
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    assert all(row["q/noise_error"] > 0 and row["grad_norm"] > 0 for row in rows[0][1:])
    assert len({row["q/noise_error"] for row in rows[0][1:]}) == 5


def run(folder, base):
    train(folder, *steered(base), "steps=3", "optim.lr=1e-12", "checkpoint.every=3", base=ROBOTS)


def test_two_ranks_move_the_networks_together(tmp_path, base):
    call(run, tmp_path / "two", base, log=tmp_path / "two.log", ranks=2)
    ranks = [torch.load(tmp_path / "two/checkpoints/step-000003" / f"rank-{i}.pt")["own"]["modules"] for i in range(2)]
    assert {name.rpartition(" ")[2] for name in ranks[0]} == {"q", "noise_q", "temperature"}
    for name, state in ranks[0].items():
        for key, values in state["module"].items():
            assert torch.equal(values, ranks[1][name]["module"][key]), key
        assert state["updates"] == ranks[1][name]["updates"] == 2


@pytest.mark.slow
def test_on_a_line_it_reaches_the_goal(tmp_path, base):
    """The flow hardly moves; the noise that it is given does."""
    settings = steered(base, noise="{updates: 40}", q=", updates: 40, batch: 64", more=", minibatches: 8", steps=128)
    train(tmp_path, *settings, "engine.micro_batch=32", "steps=12", "optim.lr=0.01", base=ROBOTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert rows[-1]["accuracy"] >= 0.9 > rows[0]["accuracy"], [row["accuracy"] for row in rows]


# --- refusals ---


def test_heads_without_noise_are_refused(tmp_path):
    settings = [
        "rollout.extras=[{type: stored_steps, steps: 6}]",
        f"algorithm={{type: soft_actor_critic, {Q}, noise: {{updates: 1}}}}}}",
        f"action.head={HEADS['gaussian']}",
    ]
    with pytest.raises(UserError, match=r"algorithm.type=soft_actor_critic needs noise that a trained network"):
        make(tmp_path, *settings, base=ROBOTS)
