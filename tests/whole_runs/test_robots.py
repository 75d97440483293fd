"""Robot runs: what ranks, resuming, the critic and lost episodes do."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mmrl.algorithms.algorithm import Reduction
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.evaluation.evaluate import evaluate
from mmrl.policies.vla.saved import WEIGHTS
from mmrl.protocols.batch import Batch
from mmrl.rollouts import Replay, Steps
from tests.whole_runs import workers
from tests.whole_runs.parts import IMAGES, ROBOTS, call, distance, final, make, metrics, release, timeless, train, under

pytestmark = pytest.mark.usefixtures("alone")
PPO = "algorithm={type: ppo, simulator_reward: 0.5, gamma: 0.9, lam: 0.8}"


BASE = "{type: gaussian, width: 16, layers: 1}"
FLOW = "{type: flow, width: 32, depth: 1, evaluation_steps: 4}"
HEADS = {
    "token": "{type: token, bins: 8}",
    "autoregressive": "{type: token, bins: 8, decoding: autoregressive, level: chunk}",
    "chain": "{type: flow, width: 32, depth: 1, steps: 4, evaluation_steps: 4}",
    "window": "{type: flow, width: 32, depth: 1, steps: 4, likelihood: {window: {type: random, size: 1}}}",
    "matching": "{type: flow, width: 32, depth: 1, steps: 4, likelihood: {type: matching, draws: 2}}",
    "learned": "{type: flow, width: 32, depth: 1, steps: 4, likelihood: {type: learned}}",
    "regression": "{type: regression, level: action}",
    "bridge": "{type: bridge, width: 32, depth: 2, queries: 4}",
    "gaussian": "{type: gaussian, width: 16, layers: 1}",
    "invertible": "{type: invertible, width: 16, layers: 1, last_gain: 0.1}",
    "latent": "{type: latent, width: 16, layers: 1, latent: 3}",
    "latent, by chunk": "{type: latent, width: 16, layers: 1, latent: 3, early_exit: false, level: chunk, fixed: true}",
    "horizons": "{type: horizons, width: 16, layers: 1}",
    "steered": f"{{type: steered, width: 16, layers: 1, base: {FLOW}}}",
    "residual": f"{{type: residual, experts: 2, width: 16, base: {BASE}}}",
}


def weights(folder):
    return {**final(folder), **load_file(folder / "final" / WEIGHTS)}


METHODS = ["ppo", pytest.param("grpo", marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_as_one(tmp_path, method):
    one, two = tmp_path / "one", tmp_path / "two"
    call(workers.robots, one, method, log=tmp_path / "one.log")
    call(workers.robots, two, method, log=tmp_path / "two.log", ranks=2)
    assert distance(weights(one), weights(two)) < 1e-5
    for name in ("loss", "grad_norm", "accuracy", "episode/length"):
        alone, shared = ([row[name] for row in metrics(run) if "loss" in row] for run in (one, two))
        assert alone == pytest.approx(shared, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("method", METHODS)
def test_four_steps_equal_two_and_two(tmp_path, method):
    options = [f"algorithm={{type: {method}, epochs: 2, minibatches: 2}}"]
    train(tmp_path / "whole", *options, base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=2", "checkpoint.every=2", base=ROBOTS)
    train(tmp_path / "parts", *options, "checkpoint.every=2", resume=True, base=ROBOTS)
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0
    rows = [[r for r in timeless(metrics(tmp_path / n)) if "loss" in r] for n in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1])


@pytest.fixture
def options():
    """Overrides of `trainer`, which a test may replace."""
    return ()


@pytest.fixture
def trainer(tmp_path, options):
    made = make(tmp_path, PPO, *options, base=ROBOTS)
    yield made
    release(made)


def set_advantages(trainer, batch):
    """As a step does it, of a batch that one rank has."""
    task = trainer.task
    batch.advantages = trainer.algorithm.advantages(Batch(batch, task.reward_names, task.reward_weights))
    return batch.advantages


@pytest.mark.parametrize(
    ("options", "decisions"), [((), 4), ((f"action.head={HEADS['chain']}",), 3)], ids=["token", "chain"]
)
def test_advantages_of_the_critic_by_hand(trainer, decisions):
    """Two looks, then solved; one look, then cut off. The task's reward comes last, the simulator's with each look. All
    decisions of a look, which are tokens or stochastic denoising steps, have its advantage."""
    made = trainer.policy.rollout([trainer.task.train[i] for i in range(2)], 1, [1, 2])
    batch = replace(
        made,
        rewards=torch.tensor([[1.0], [0.0]]),
        mask=torch.ones(2, 2 * decisions, dtype=torch.bool),
        extras={
            "steps": Steps(
                mask=torch.tensor([[True, True], [True, False]]),
                rewards=torch.tensor([[0.2, 0.4], [0.6, 9.0]]),
                values=torch.tensor([[0.5, 0.7], [0.1, 9.0]]),
                terminated=torch.tensor([[False, True], [False, False]]),
                bootstrap=torch.tensor([[0.0, 0.0], [0.3, 9.0]]),
            )
        },
    )
    found = set_advantages(trainer, batch)
    last = (0.5 * 0.4 + 1.0) - 0.7
    first = 0.5 * 0.2 + 0.9 * 0.7 - 0.5 + 0.9 * 0.8 * last
    cut = 0.5 * 0.6 + 0.9 * 0.3 - 0.1
    values = torch.tensor([first, last, cut])
    scaled = (values - values.mean()) / values.std()
    expected = scaled[:, None].expand(3, decisions)
    torch.testing.assert_close(found[0], expected[:2].flatten(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1, :decisions], expected[2], rtol=1e-4, atol=1e-5)
    assert (found[1, decisions:] == 0).all()
    assert made.mask.shape[1] == decisions * made.extras["steps"].mask.shape[1]  # as many as the head has
    torch.testing.assert_close(batch.extras["steps"].returns[0], torch.tensor([first + 0.5, last + 0.7]))


def configured(*overrides):
    return load(ROBOTS, ["run_dir=r", PPO, *overrides])


def gradients(trainer, batch, *overrides):
    probe = under(trainer, configured(*overrides))
    trainer.policy.module.zero_grad()
    losses, stats = probe.losses(batch, probe.algorithm.denominators(batch))
    torch.stack(list(losses.values())).sum().backward()
    return {n: p.grad.clone() for n, p in trainer.policy.module.named_parameters() if p.grad is not None}, stats


def test_the_critic_learns_returns_and_its_terms_change_the_gradient(trainer):
    batch = trainer.collector.rounds.make(0, 0)
    set_advantages(trainer, batch)
    one, stats = gradients(trainer, batch)
    two, _ = gradients(trainer, batch, "algorithm.value_coefficient=1.0")
    name, steps = "critic.layers.2.bias", batch.extras["steps"]
    known = steps.mask
    expected = 2 * (steps.values - steps.returns)[known].mean()  # d of the mean square, the bias adds to all
    assert one[name].item() == pytest.approx(0.5 * expected.item(), rel=1e-3)
    assert two[name].item() == pytest.approx(expected.item(), rel=1e-3)
    assert stats["critic/error"][known].mean().item() == pytest.approx(
        (steps.values - steps.returns)[known].square().mean().item(), rel=1e-3
    )


def test_the_value_clip_takes_the_worse_error(trainer):
    """A value that went from 0 to 0.9: near what it was it is 0.2."""
    batch = trainer.collector.rounds.make(0, 0).select(torch.tensor([0, 1]))
    nothing = torch.zeros(2, 1)
    batch.extras["steps"] = Steps(
        mask=torch.ones(2, 1, dtype=torch.bool),
        rewards=nothing,
        values=nothing,
        terminated=nothing.bool(),
        bootstrap=nothing,
        returns=torch.tensor([[1.0], [0.0]]),
    )
    batch.advantages = torch.zeros(batch.mask.shape)
    replay = Replay(logp=torch.zeros(batch.mask.shape), value=torch.tensor([[0.9], [0.9]]))
    algorithm = configured("algorithm.value_clip=0.2", "algorithm.value_coefficient=0.3").algorithm
    totals = algorithm.denominators(batch)
    loss, stats = algorithm.objective(batch, replay, Reduction(algorithm.reduce_mode, batch.mask, totals, 4))
    torch.testing.assert_close(stats["critic/error"], torch.tensor([[0.8**2], [0.9**2]]))
    assert float(loss) == pytest.approx(0.3 * (0.8**2 + 0.9**2) / 2)  # without advantages nothing else is left


def test_lost_episodes_are_counted_and_the_run_goes_on(tmp_path):
    broken = f"task.options={{unstartable: [{(1 << 32) + 1}, {(1 << 32) + 2}]}}"
    for method in ("grpo", "ppo"):
        with pytest.warns(RuntimeWarning, match="lost its episode"):
            train(tmp_path / method, f"algorithm={{type: {method}}}", "task.train_size=6", broken, base=ROBOTS)
        rows = metrics(tmp_path / method)
        assert len(rows) >= 4 and max(row.get("episode/lost", 0) for row in rows) > 0
        assert all(row["updates_skipped"] == 0 for row in rows if "loss" in row) and rows[0]["grad_norm"] > 0
        assert max(row.get("unscored", 0) for row in rows) > 0


ALONE = {
    "token": ["algorithm.terms=[{type: entropy, coefficient: 0.01}]"],
    "gaussian": ["algorithm={surrogate: {type: trajectory_trust_region}, terms: [{type: kl}]}"],
    "chain": ["algorithm.terms=[{type: kl, coefficient: 0.1}]"],
    "horizons": ["algorithm.terms=[{type: head_cost, of: imbalance, coefficient: 0.1}]"],
    "invertible": ["algorithm={type: ppo, minibatches: 2, shuffle: steps}"],
    "matching": ["algorithm.terms=[{type: kl, coefficient: 0.1, estimator: velocity}]"],
    "latent": ["algorithm={type: ppo, minibatches: 2, critic: separate}"],
}


@pytest.mark.parametrize(
    "head", [h if h in ("token", "gaussian", "horizons") else pytest.param(h, marks=pytest.mark.slow) for h in ALONE]
)
def test_a_lost_episode_alone_in_its_micro_batch_changes_nothing(tmp_path, head):
    """Large policies learn from one episode at a time."""
    broken = f"task.options={{unstartable: [{(1 << 32) + 1}, {(1 << 32) + 2}]}}"
    for size in (1, 16):
        options = [f"action.head={HEADS[head]}", "algorithm.minibatches=2", *ALONE[head], f"engine.micro_batch={size}"]
        with pytest.warns(RuntimeWarning, match="lost its episode"):
            train(tmp_path / f"{size}", *options, "task.train_size=6", broken, "steps=2", base=ROBOTS)
    alone, together = ([row for row in metrics(tmp_path / f"{size}") if "loss" in row] for size in (1, 16))
    assert max(row["episode/lost"] for row in alone) > 0 and min(row["grad_norm"] for row in alone) > 0
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in alone] == pytest.approx([row[name] for row in together], rel=1e-4, abs=1e-6), name
    assert distance(weights(tmp_path / "1"), weights(tmp_path / "16")) < 1e-5


def test_the_reference_is_asked_where_the_old_policy_is_known_of_half_the_episodes_only(tmp_path):
    """Of two minibatches the first is not asked for its old likelihoods. Chunks are cut short by ends of episodes."""
    options = ["algorithm={minibatches: 2, terms: [{type: kl, coefficient: 0.1}]}", "optim.lr=1e-12", "steps=2"]
    train(tmp_path, f"action.head={HEADS['chain']}", *options, "task.train_size=6", base=ROBOTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert [row["updates_skipped"] for row in rows] == [0, 0] and min(row["grad_norm"] for row in rows) > 0
    assert [row["kl"] for row in rows] == pytest.approx([0, 0], abs=1e-6)


def test_workers_change_nothing_and_a_dead_one_costs_its_episodes(tmp_path):
    train(tmp_path / "here", "steps=2", base=ROBOTS)
    train(tmp_path / "workers", "steps=2", "task.workers=2", base=ROBOTS)
    assert distance(weights(tmp_path / "here"), weights(tmp_path / "workers")) == 0
    trainer = make(tmp_path / "killed", "steps=3", "task.workers=2", base=ROBOTS)
    sim = trainer.policy.sim
    usual, killed = sim.step, []

    def step(*arguments):
        if trainer.step == 1 and not killed:
            killed.append(sim.simulator._workers[0].child.process)
            killed[0].kill()
        return usual(*arguments)

    sim.step = step
    with pytest.warns(RuntimeWarning, match="lost its episode"):
        trainer.train()
    release(trainer)
    rows = [row for row in metrics(tmp_path / "killed") if "loss" in row]
    lost = [row["episode/lost"] for row in rows]
    assert lost[0] == lost[2] == 0 and 0 < lost[1] < 1
    assert [row["simulator/restarts"] for row in rows] == [0, 1, 0]
    assert [row["simulator/dropped"] for row in rows] == [16 * share for share in lost]


def test_numbers_that_no_robot_can_move_by_are_counted_where_they_happened(tmp_path):
    """Two in the second step, three in the evaluation behind it."""
    trainer = make(tmp_path, "steps=3", "evaluation.every=2", base=ROBOTS)
    head, spoilt = trainer.policy.module.head, []
    usual = head.act

    def act(reading, state, how):
        chosen = usual(reading, state, how)
        if trainer.step == (1 if how.training else 2) and how.training not in spoilt:
            spoilt.append(how.training)
            bad = [math.nan, math.inf] if how.training else [math.nan, math.inf, -math.inf]
            chosen["actions"].view(-1)[: len(bad)] = torch.tensor(bad)
        return chosen

    head.act = act
    trainer.train()
    release(trainer)
    rows = metrics(tmp_path)
    assert [row["simulator/nan_actions"] for row in rows if "loss" in row] == [0, 2, 0]
    assert [row["evaluation/simulator/nan_actions"] for row in rows if "loss" not in row] == [3, 0]
    assert all(row["simulator/dropped"] == row["simulator/restarts"] == 0 for row in rows if "loss" in row)


def test_what_does_not_fit_a_robot_is_refused(tmp_path):
    for options, message in [
        (["engine.zero_stage=3"], "engine.zero_stage=3"),
        (["model.activation_checkpointing=true"], "unknown key model.activation_checkpointing"),
        (
            ["action.head={type: flow}", "algorithm.terms=[{type: entropy, coefficient: 0.1}]"],
            r"algorithm.terms.0 \(entropy\) needs an entropy of each decision .*which action.head.type=flow does not",
        ),
        (["action.hed=flow"], "unknown key action.hed; did you mean action.head"),
        (["task.tasks=[fly]"], "task.tasks.*fly"),
        (["task.simulator=tabeltop"], "tabletop"),
        (["task.demonstration={}"], "demonstrations"),
    ]:
        with pytest.raises(UserError, match=message):
            make(tmp_path, *options, base=ROBOTS)


def test_ppo_is_refused_where_there_is_no_critic():
    said = "algorithm.type=ppo needs a critic, which denoising.likelihood.type=chain does not"
    with pytest.raises(UserError, match=said):
        load(IMAGES, ["run_dir=r", "algorithm={type: ppo}"])


STAGES = {head: place % 3 for place, head in enumerate(HEADS)}
QUICK = ("token", "chain", "matching", "bridge")


def with_head(folder, head):
    """A model with a head that could have been trained."""
    trainer = make(folder, f"action.head={head}", base=ROBOTS)
    trainer.policy.save(folder / "final", trainer.policy.module.state_dict())
    release(trainer)
    return folder / "final"


def of_head(head, stage, folder):
    """Options of its run, at a temperature where the head has one. Of a head around another one, that one is made in
    `folder`."""
    options = [f"action.head={HEADS[head]}", f"engine.zero_stage={stage}"]
    options += [] if HEADS[head].startswith("{type: flow") else ["rollout.temperature=0.7"]
    base = next((base for base in (BASE, FLOW) if f"base: {base}" in HEADS[head]), None)
    return options if base is None else [*options, "model.build=null", f"model.path={with_head(folder, base)}"]


def assert_trained(found, folder, head):
    """Before the first of two updates the ratio to what the policy said when it was asked is exactly 1."""
    assert found["first"] == [0, 0] and min(found["second"]) > 0
    held = {"backbone", "head.base"} if "base" in HEADS[head] else set()
    held |= {"head.log_std"} if "fixed: true" in HEADS[head] else set()
    assert found["still"] == sorted(held), f"of {found['still']} nothing has learned"
    rows = [row for row in metrics(folder) if "loss" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 and row["updates_skipped"] == 0 for row in rows)


@pytest.mark.parametrize("head", [h if h in QUICK else pytest.param(h, marks=pytest.mark.slow) for h in HEADS])
def test_every_head_trains(tmp_path, head):
    options = of_head(head, STAGES[head], tmp_path / "base")
    assert_trained(workers.head(tmp_path, *options), tmp_path, head)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_heads_train_at_each_stage_on_two_ranks(tmp_path, stage):
    options = {h: of_head(h, stage, tmp_path / f"base-{h}") for h in HEADS if STAGES[h] != stage}
    call(workers.heads, tmp_path, options, log=tmp_path / "log", ranks=2, timeout=500)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == options.keys()
        for head in options:
            assert_trained(found[head], tmp_path / head, head)


def test_evaluation_counts_each_start_once(trainer):
    result, samples, _ = evaluate(trainer.policy, trainer.task, trainer.engine, 4, trainer.config)
    assert [s.prompt.metadata["seed"] for s in samples] == [0, 1, 2, 3]
    assert result["evaluation/accuracy/go"] == result["evaluation/accuracy"]
    assert result["evaluation/episode/length"] <= 6
