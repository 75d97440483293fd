"""Gradients of Q networks through actions: targets, the weight of the entropy, and the policy's gradient, by hand."""

import json
import math

import pytest
import torch

from mmrl.core.values import EntropyTemperature, QEnsemble
from mmrl.errors import UserError
from mmrl.measurements.q_values import ESTIMATES
from mmrl.policies.vla.off_policy import OffPolicyAccess
from mmrl.protocols.abilities import SampledActions
from mmrl.protocols.measurement import ReplayedContext
from mmrl.rollouts import DEMONSTRATION, FRESH, REPLAYED
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close
from tests.whole_runs.parts import ROBOTS, call, distance, final, make, metrics, release, timeless, train
from tests.whole_runs.test_robots import FLOW, with_head

pytestmark = pytest.mark.usefixtures("alone")
Q = "returns: {gamma: 0.5, simulator_reward: 1.0}, q: {width: 16, members: 2, lr: 0.01, tau: 0.5"
HEADS = {
    "squashed": "{type: squashed_gaussian, width: 16, layers: 1}",
    "gaussian": "{type: gaussian, width: 16, layers: 1}",
    "linear": "{type: gaussian, layers: 0, std: 0.1, last_gain: 0.001}",
}


def options(head="gaussian", q="", more="", source="{type: stored_steps, steps: 12}"):
    return [
        f"rollout={{prompts: 8, extras: [{source}]}}",
        f"algorithm={{type: soft_actor_critic, {Q}{q}}}{more}}}",
        "engine.micro_batch=20",
        "task.train_size=60",
        "action.chunk=2",
        f"action.head={HEADS.get(head, head)}",
    ]


def prepared(folder, *settings, steps=2):
    """A trainer after `steps` - 1 whole training steps, and its next batch as it is trained on."""
    trainer = make(folder, *settings, base=ROBOTS)
    for step in range(steps):
        rollouts = trainer.collector.next(step, Metrics(trainer.engine))
        measured = Metrics(trainer.engine)
        minibatches, batch = trainer.preparation.minibatches(
            rollouts, step, torch.Generator().manual_seed(step), measured
        )
        if step < steps - 1:
            for minibatch in minibatches:
                trainer.update(minibatch, measured)
            trainer.collector.observe(batch)
    return trainer, rollouts, minibatches


def module(trainer, name):
    (found,) = [m for key, m in trainer.preparation.modules._modules.items() if key.endswith(f" {name}")]
    return found.module


def recorded(rollouts):
    return torch.tensor(["tail" in sample.prompt.metadata for sample in rollouts.samples])


# --- parts by hand ---


@pytest.mark.parametrize(("logp", "rises"), [(3.0, True), (1.0, False)])
def test_the_weight_of_the_entropy_rises_where_entropy_is_below_its_target(logp, rises):
    """Entropies -3 and -1, a target of -2: the slope of the loss by the logarithm is -(logp + target)."""
    temperature = EntropyTemperature(0.2)
    assert float(temperature.value) == pytest.approx(0.2)
    temperature(torch.tensor([logp], requires_grad=True), -2.0).sum().backward()
    assert float(temperature.log_value.grad) == pytest.approx(-(logp - 2.0))
    assert (float(temperature.log_value.grad) < 0) == rises


def test_fixed_networks_pass_a_gradient_to_actions_alone():
    ensemble = QEnsemble(3, 8, 2, seed=0)
    for network in ensemble.online:
        torch.nn.init.normal_(network.layers[-1].weight)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(ensemble.fixed(x), ensemble(x))
    ensemble.fixed(x)[1].sum().backward()
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    shift = torch.zeros_like(x)
    shift[2, 1] = 1e-5
    slope = (ensemble(x + shift)[1, 2] - ensemble(x - shift)[1, 2]) / 2e-5
    assert float(x.grad[2, 1]) == pytest.approx(float(slope.detach()), rel=1e-4)


# --- from the YAML key to targets ---


@pytest.mark.parametrize(
    ("entropy", "logp", "weight"),
    [
        ("null", 4.0, 0.0),
        ("{temperature: 0.2, target: null}", 4.0, 0.2),
        ("{temperature: 0.2, target: -1.5, lr: 0.1}", 4.0, 0.2 * math.exp(0.1)),  # entropy -4, 2 numbers: below -3
        ("{temperature: 0.2, target: -1.5, lr: 0.1}", 2.0, 0.2 * math.exp(-0.1)),  # entropy -2: above -3
        # Entropy -3.01: below -3, but not with the 0 of steps that end an episode and have no next action.
        ("{temperature: 0.2, target: -1.5, lr: 0.1}", 3.01, 0.2 * math.exp(0.1)),
    ],
)
def test_the_target_of_a_stored_step_by_hand(tmp_path, monkeypatch, entropy, logp, weight):
    """Q networks begin at 0, so the squared error of a step is that of r - gamma^k weight logp(a' | s')."""

    def sample(access, observations, seeds, *, logp=None):
        n = len(observations)
        assert len(set(seeds)) == n
        return SampledActions(
            access.encode_observations(observations), torch.ones(n, 4), torch.full((n,), known) if logp else None
        )

    known = logp
    monkeypatch.setattr(OffPolicyAccess, "sample", sample)
    trainer, rollouts, _ = prepared(tmp_path, *options(q=f", entropy: {entropy}"))
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    td_error = values[:, ESTIMATES.index("td_error")]
    kinds = set()
    for row in recorded(rollouts).nonzero().flatten().tolist():
        prompt = rollouts.samples[row].prompt
        step = prompt.metadata["tail"].transition(len(prompt.metadata["actions"]), 0.5, 1.0)
        bootstrapped = 0.0 if step.terminated else -step.discount * weight * logp
        assert float(td_error[row]) == pytest.approx((step.reward + bootstrapped) ** 2, rel=1e-4, abs=1e-7)
        kinds.add(step.terminated)
    assert kinds == {False, True}
    assert values[recorded(rollouts), ESTIMATES.index("value")].isnan().all()
    release(trainer)


def test_targets_bootstrap_from_the_least_q_of_the_next_action(tmp_path, monkeypatch):
    """Target networks that add up what they read; the smaller of two counts, at the next observation's own action."""
    ensembles = []

    def target(self, x):
        ensembles.append(x.clone())
        return x.double().sum(1)

    def sample(access, observations, seeds, *, logp):
        assert not logp
        chunks = torch.tensor([0.123, -0.4, 1.0, 1.0]).expand(len(observations), 4)
        return SampledActions(access.encode_observations(observations), chunks, None)

    trainer, *_ = prepared(tmp_path, *options(q=", entropy: null"))
    monkeypatch.setattr(QEnsemble, "target", target)
    monkeypatch.setattr(OffPolicyAccess, "sample", sample)
    rollouts = trainer.collector.next(1, Metrics(trainer.engine))
    trainer.preparation.minibatches(rollouts, 1, torch.Generator().manual_seed(1), Metrics(trainer.engine))
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    rows = {rollouts.samples[i].prompt.id: i for i in recorded(rollouts).nonzero().flatten().tolist()}
    following, policy = ensembles[0], trainer.policy
    assert len(following) == len(rows)
    observed = 0
    for position, row in enumerate(rows.values()):
        prompt = rollouts.samples[row].prompt
        step = prompt.metadata["tail"].transition(len(prompt.metadata["actions"]), 0.5, 1.0)
        if step.next_observation is None:
            continue
        encoded = policy.off_policy.encode_observations([step.next_observation])[0]
        close(following[position, : len(encoded)], encoded)
        close(following[position, len(encoded) :], [0.123, -0.4, 1.0, 1.0])
        observed += 1
    assert observed > 3
    release(trainer)


def test_each_update_of_q_draws_steps_anew(tmp_path, monkeypatch):
    """Three updates on five of at most twelve steps each, which differ, and other ones in the next training step."""
    read = []
    forward = QEnsemble.forward

    def spied(self, x):
        read.append([tuple(row) for row in x.tolist()])
        return forward(self, x)

    monkeypatch.setattr(QEnsemble, "forward", spied)
    trainer, rollouts, _ = prepared(tmp_path, *options(q=", updates: 3, batch: 5"), steps=3)
    assert [len(rows) for rows in read] == [5] * 6  # nothing is stored in the first training step
    drawn = [frozenset(rows) for rows in read]
    assert len(set(drawn)) == 6
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    errors = values[recorded(rollouts), ESTIMATES.index("td_error")]
    assert 0 < int((~errors.isnan()).sum()) <= 12 and len(errors) == 12
    release(trainer)


def test_actions_are_those_that_the_robot_executes(tmp_path):
    """Of a wide Gaussian about half are beyond -1 and 1, and count as -1 and 1; each seed has its own."""
    trainer, rollouts, _ = prepared(tmp_path, *options("{type: gaussian, layers: 0, std: 1.5}"))
    observation = rollouts.samples[int(recorded(rollouts).nonzero()[0])].prompt.metadata["observation"]
    sampled = trainer.policy.off_policy.sample([observation] * 50, range(50), logp=True)
    actions = sampled.chunks[:, :2]
    assert float(actions.abs().max()) == 1.0 and 30 < int((actions.abs() == 1).sum()) < 70
    assert len(actions[actions.abs() < 1].unique()) == int((actions.abs() < 1).sum())
    assert sampled.logp.shape == (50,) and len(sampled.logp.unique()) == 50
    release(trainer)


# --- from the YAML key to the policy's gradient ---


@pytest.mark.parametrize(("of", "expected"), [("least", -3.0), ("mean", -2.0)])
def test_the_policy_climbs_q_by_hand(tmp_path, monkeypatch, of, expected):
    """Q networks are -3 a_1 and -a_1 of positive actions of about 0.5, so that the least has the slope -3 and the mean
    -2 by the first action of a chunk. The slope by the bias of its mean is that of the loss -Q: their negatives."""

    def fixed(self, x):
        first = x[:, -4].double()
        return torch.stack([-3.0 * first, -1.0 * first])

    trainer, rollouts, minibatches = prepared(
        tmp_path, *options("linear", q=", entropy: {temperature: 0.5, target: null}", more=f", of: {of}")
    )
    monkeypatch.setattr(QEnsemble, "fixed", fixed)
    head = trainer.policy.module.head
    with torch.no_grad():
        head.layers[0].weight.zero_()
        head.layers[0].bias.copy_(torch.tensor([0.5, 0.2]))
    (micro,) = minibatches[0]
    totals = trainer.algorithm.denominators(micro)
    stored = recorded(micro)
    assert int(totals["decisions"]) == int(micro.mask[stored].sum()) < int(micro.mask.sum())
    parts, stats = trainer.losses(micro, totals)
    assert len(parts) == 1
    trainer.engine.backward(sum(parts.values()))
    weights = micro.mask[stored].sum(1) / totals["decisions"]  # a mean over decisions
    close(head.layers[0].bias.grad, [-expected * float(weights.sum()), 0.0], atol=1e-4)
    # by the logarithm of the deviation: the entropy's part is -temperature for each number
    q_part = head.log_std.grad.flatten() + 0.5
    assert abs(float(q_part[1])) < 1e-4 and abs(float(q_part[0])) < 0.3
    action = stats["q_gradient/q"][stored][:, 0] / expected
    assert action.mean() == pytest.approx(0.5, abs=0.15) and len(action.unique()) > 6
    close(stats["q_gradient/temperature"][stored][:, 0], [0.5] * int(stored.sum()))
    release(trainer)


def test_q_is_of_the_step_s_own_observation(tmp_path, monkeypatch):
    """Q networks that return the state, the last number of an observation before the four of a chunk."""
    monkeypatch.setattr(QEnsemble, "fixed", lambda self, x: torch.stack([x[:, -5].double()] * 2))
    trainer, rollouts, minibatches = prepared(tmp_path, *options())
    (micro,) = minibatches[0]
    found = trainer.losses(micro, trainer.algorithm.denominators(micro))[1]["q_gradient/q"][:, 0]
    rows = recorded(micro).nonzero().flatten().tolist()
    states = [float(micro.samples[row].prompt.metadata["observation"].state[0, 0]) for row in rows]
    close(found[rows], states)
    assert len(set(states)) > 4
    release(trainer)


WHOLE = "engine.micro_batch=200"


def test_a_term_has_its_coefficient(tmp_path, monkeypatch):
    monkeypatch.setattr(QEnsemble, "fixed", lambda self, x: torch.stack([x[:, -4].double()] * 2))
    sums = []
    for coefficient in (1.0, 0.25):
        settings = [option for option in options() if not option.startswith("algorithm=")]
        term = f"algorithm.terms=[{{type: q_gradient, coefficient: {coefficient}, {Q}}}}}]"
        trainer, rollouts, minibatches = prepared(
            tmp_path / str(coefficient), *settings, term, "engine.micro_batch=200"
        )
        (micro,) = minibatches[0]
        replay = trainer.policy.replay(micro, trainer.policy.module)
        measurement = trainer.algorithm.terms[0].values_of_actions
        context = ReplayedContext(trainer.policy, None, trainer.step, trainer.config.seed, trainer.preparation.modules)
        replay.extras[measurement.name] = measurement.measure(micro, context)
        values, _ = trainer.algorithm.terms[0].values(micro, replay)
        sums.append(float(values[micro.mask].sum().detach()))
        release(trainer)
    assert sums[1] == pytest.approx(0.25 * sums[0], rel=1e-5) and sums[0] != 0


def test_fresh_episodes_teach_nothing(tmp_path):
    trainer, rollouts, minibatches = prepared(tmp_path, *options())
    (micro,) = minibatches[0]
    parts = [
        trainer.losses(part, trainer.algorithm.denominators(part))[0]
        for part in (micro, micro.select(recorded(micro).nonzero().flatten()))
    ]
    losses = [float(sum(part.values()).detach()) for part in parts]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and losses[0] != 0
    fresh = micro.select((micro.origin == FRESH).nonzero().flatten())
    assert len(fresh) == 8
    (loss,) = trainer.losses(fresh, trainer.algorithm.denominators(fresh))[0].values()
    assert float(loss.detach()) == 0
    release(trainer)


# --- whole runs ---


@pytest.mark.parametrize("head", ["squashed", "gaussian"])
def test_it_goes_on_exactly(tmp_path, head):
    settings = [*options(head, q=", updates: 2, batch: 6", more=", minibatches: 3"), "engine.zero_stage=1"]
    train(tmp_path / "whole", *settings, "steps=6", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=3", "checkpoint.every=3", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=6", "checkpoint.every=3", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 6
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    assert len({row["q_gradient/temperature"] for row in rows[0][1:]}) == 5
    assert rows[0][0]["grad_norm"] == 0 and all(row["grad_norm"] > 0 for row in rows[0][1:])


@pytest.mark.parametrize("head", ["steered", "residual"])
def test_heads_around_another_head_learn_from_proposals(tmp_path, head):
    base = FLOW if head == "steered" else HEADS["gaussian"]
    settings = options(
        f"{{type: {head}, width: 16, base: {base}}}", source="{type: action_proposals, steps: 6, group_size: 2}"
    )
    model = with_head(tmp_path / "base", base)
    start = ["model.build=null", f"model.path={model}", "steps=3", "action.chunk=4"]
    train(tmp_path / "run", *settings, *start, base=ROBOTS)
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert all(row["grad_norm"] > 0 and "q_gradient/q" in row for row in rows[1:])


def test_beside_ppo_it_is_a_term(tmp_path):
    settings = [
        "rollout.extras=[{type: stored_steps, steps: 6}]",
        f"algorithm.terms=[{{type: q_gradient, coefficient: 0.5, {Q}}}}}]",
        "algorithm.type=ppo",
        "engine.micro_batch=32",
        "task.train_size=60",
        "action.chunk=2",
        f"action.head={HEADS['gaussian']}",
    ]
    train(tmp_path, *settings, "steps=3", base=ROBOTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert "q_gradient/q" not in rows[0] and all("q_gradient/q" in row for row in rows[1:])


def run(folder):
    train(
        folder,
        *options(q=", entropy: {target: -1.0, lr: 0.05}"),
        "steps=3",
        "optim.lr=1e-12",
        "checkpoint.every=3",
        base=ROBOTS,
    )


def test_two_ranks_move_the_networks_together(tmp_path):
    """Their rings differ, but the networks and the weight of the entropy learn from both and stay equal."""
    call(run, tmp_path / "two", log=tmp_path / "two.log", ranks=2)
    rows = [row for row in metrics(tmp_path / "two") if "loss" in row]
    assert len(rows) == 3 and all(row["q/td_error"] > 0 for row in rows[1:])
    weights = [row["q_gradient/temperature"] for row in rows[1:]]
    assert weights == pytest.approx([0.1 * math.exp(0.05 * sign) for sign in (-1, -2)], rel=0.02)
    ranks = [torch.load(tmp_path / "two/checkpoints/step-000003" / f"rank-{i}.pt")["own"] for i in range(2)]
    first, second = (rank["modules"] for rank in ranks)
    assert first.keys() == second.keys() and {name.rpartition(" ")[2] for name in first} == {"q", "temperature"}
    for name, state in first.items():
        for key, values in state["module"].items():
            assert torch.equal(values, second[name]["module"][key]), key
        assert state["updates"] == second[name]["updates"] == 2


def test_on_a_line_it_reaches_the_goal(tmp_path):
    """From a policy that hardly moves: the sum of positions is the reward, so the best action is the largest one."""
    settings = options("squashed", q=", updates: 40, batch: 64", more=", minibatches: 8")
    settings[0] = "rollout={prompts: 8, extras: [{type: stored_steps, steps: 256}]}"
    train(tmp_path, *settings, "engine.micro_batch=32", "steps=12", "optim.lr=0.01", base=ROBOTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert rows[-1]["accuracy"] >= 0.9 > rows[0]["accuracy"], [row["accuracy"] for row in rows]


# --- demonstrations beside stored steps (RLPD) ---

BOTH = "{type: stored_steps, steps: 6}, {type: demonstrations, prompts: 6}"
EXPERT = "task.demonstrations={type: expert, episodes: 4, noise: 0.3, successful: false"


def test_demonstrated_steps_are_learned_from_as_stored_ones_are(tmp_path):
    settings = [*options(source=BOTH, more=", of: mean"), EXPERT + ", actions: executed}"]
    trainer, rollouts, minibatches = prepared(tmp_path, *settings)
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    kinds = rollouts.origin[recorded(rollouts)]
    assert kinds.tolist().count(DEMONSTRATION) == kinds.tolist().count(REPLAYED) == 6
    assert not values[recorded(rollouts), 0].isnan().any() and values[~recorded(rollouts), 0].isnan().all()
    (micro,) = minibatches[0]
    found = trainer.losses(micro, trainer.algorithm.denominators(micro))[1]["q_gradient/logp"]
    assert not found[recorded(micro)].isnan().any() and found[~recorded(micro)].isnan().all()
    release(trainer)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        (f"algorithm={{type: soft_actor_critic, {Q}}}}}", "algorithm.type=soft_actor_critic"),
        (f"algorithm.terms=[{{type: q_weighted, of: demonstrations, {Q}}}}}]", r"algorithm.terms \(q_weighted\)"),
        (
            "algorithm={type: ppo, terms: [{type: advantage_weighted, of: demonstrations}]}",
            r"algorithm.terms \(advantage_weighted\)",
        ),
    ],
)
def test_demonstrations_that_do_not_say_what_they_earned_are_named(tmp_path, algorithm, key):
    settings = [option for option in options(source=BOTH) if not option.startswith("algorithm=")]
    with pytest.raises(UserError, match=rf"{key}: the recorded episode of .* has no reward"):
        prepared(tmp_path, *settings, EXPERT + "}", algorithm, steps=1)


# --- refusals ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "rollout.extras=[]",
            r"algorithm.type=soft_actor_critic learns from rollouts of rollout.extras.* no source",
        ),
        ("engine.zero_stage=3", "engine.zero_stage=3 does not go with action.head.type=gaussian"),
        ("action.head={type: token, bins: 8}", "differentiable function"),
        ("algorithm.minibatches=5", r"12 rollouts per rank \(the sum over rollout.extras / ranks\)"),
    ],
)
def test_jobs_that_it_can_not_train_are_refused(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        release(make(tmp_path, *options(), change, base=ROBOTS))


def test_models_without_actions_are_refused(given):
    table = Table([[-1.0]], group=[0], rewards=[0.0])
    with pytest.raises(UserError, match=r"algorithm.terms.0 \(q_gradient\) needs .*differentiable function"):
        given(table, "algorithm.terms=[q_gradient]")
