"""Robot runs: what ranks, resuming, the critic and lost episodes do."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.metrics import Metrics
from mmrl.policies.vla.policy import WEIGHTS
from mmrl.trainer import evaluate
from tests.engine import workers
from tests.engine.parts import ROBOTS, call, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")


def weights(folder):
    return {**final(folder), **load_file(folder / "final" / WEIGHTS)}


def test_two_ranks_train_as_one(tmp_path):
    call(workers.robots, tmp_path, "one", log=tmp_path / "one.log")
    call(workers.robots, tmp_path, "two", log=tmp_path / "two.log", ranks=2)
    for method in ("grpo", "ppo"):
        one, two = (tmp_path / f"{name}-{method}" for name in ("one", "two"))
        assert distance(weights(one), weights(two)) < 1e-5
        for name in ("loss", "grad_norm", "accuracy", "episode/length"):
            alone, shared = ([row[name] for row in metrics(run) if "loss" in row] for run in (one, two))
            assert alone == pytest.approx(shared, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_four_steps_equal_two_and_two(tmp_path, method):
    options = [f"algorithm.method={method}", "algorithm.epochs=2", "algorithm.minibatches=2"]
    train(tmp_path / "whole", *options, base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=2", "checkpoint.every=2", base=ROBOTS)
    train(tmp_path / "parts", *options, "checkpoint.every=2", resume=True, base=ROBOTS)
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0
    rows = [[r for r in timeless(metrics(tmp_path / n)) if "loss" in r] for n in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1])


@pytest.fixture
def trainer(tmp_path):
    made = make(
        tmp_path, "algorithm.method=ppo", "algorithm.ppo={simulator_reward: 0.5, gamma: 0.9, lam: 0.8}", base=ROBOTS
    )
    yield made
    release(made)


def test_advantages_of_the_critic_by_hand(trainer):
    """Two looks, then solved; one look, then cut off. The task's reward comes last, the simulator's with each look."""
    made = trainer.policy.rollout([trainer.batches.prompts[i] for i in range(2)], 1, [1, 2])
    batch = replace(
        made,
        rewards=torch.tensor([[1.0], [0.0]]),
        mask=torch.ones(2, 8, dtype=torch.bool),
        step_mask=torch.tensor([[True, True], [True, False]]),
        step_rewards=torch.tensor([[0.2, 0.4], [0.6, 9.0]]),
        step_values=torch.tensor([[0.5, 0.7], [0.1, 9.0]]),
        step_terminated=torch.tensor([[False, True], [False, False]]),
        step_bootstrap=torch.tensor([[0.0, 0.0], [0.3, 9.0]]),
    )
    found = trainer.estimated_advantages(batch, Metrics(trainer.engine))
    last = (0.5 * 0.4 + 1.0) - 0.7
    first = 0.5 * 0.2 + 0.9 * 0.7 - 0.5 + 0.9 * 0.8 * last
    cut = 0.5 * 0.6 + 0.9 * 0.3 - 0.1
    values = torch.tensor([first, last, cut])
    scaled = (values - values.mean()) / values.std()
    expected = torch.stack([scaled[0].expand(4), scaled[1].expand(4)]).flatten(), scaled[2].expand(4)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1, :4], expected[1], rtol=1e-4, atol=1e-5)
    assert (found[1, 4:] == 0).all()
    torch.testing.assert_close(batch.step_returns[0], torch.tensor([first + 0.5, last + 0.7]))


def gradients(trainer, batch, **ppo):
    algorithm = trainer.config.algorithm
    changed = algorithm.model_copy(update={"ppo": algorithm.ppo.model_copy(update=ppo)})
    kept = trainer.config, trainer.engine
    trainer.config = trainer.config.model_copy(update={"algorithm": changed})
    trainer.engine = trainer.policy.module  # gradients are looked at, not stepped with
    trainer.policy.module.zero_grad()
    loss, stats = trainer.loss(batch, torch.tensor(float(batch.mask.sum())), torch.tensor(float(batch.step_mask.sum())))
    trainer.config, trainer.engine = kept
    loss.backward()
    return {n: p.grad.clone() for n, p in trainer.policy.module.named_parameters() if p.grad is not None}, stats


def test_the_critic_learns_returns_and_its_terms_change_the_gradient(trainer):
    batch = trainer.batches.sample_round(0)
    batch.advantages = trainer.advantages(batch, Metrics(trainer.engine))
    one, stats = gradients(trainer, batch)
    two, _ = gradients(trainer, batch, value_coefficient=1.0)
    name = "critic.layers.2.bias"
    known = batch.step_mask
    expected = 2 * (batch.step_values - batch.step_returns)[known].mean()  # d of the mean square, the bias adds to all
    assert one[name].item() == pytest.approx(0.5 * expected.item(), rel=1e-3)
    assert two[name].item() == pytest.approx(expected.item(), rel=1e-3)
    assert stats["critic/error"][known].mean().item() == pytest.approx(
        (batch.step_values - batch.step_returns)[known].square().mean().item(), rel=1e-3
    )


def test_the_value_clip_takes_the_worse_error(trainer):
    """A value that went from 0 to 0.9: near what it was it is 0.2."""
    batch = trainer.batches.sample_round(0).select(torch.tensor([0, 1]))
    batch.step_mask = torch.tensor([[True], [True]])
    batch.step_values, batch.step_returns = torch.zeros(2, 1), torch.tensor([[1.0], [0.0]])
    ppo = trainer.config.algorithm.ppo.model_copy(update={"value_clip": 0.2})
    algorithm = trainer.config.algorithm.model_copy(update={"ppo": ppo})
    trainer.config = trainer.config.model_copy(update={"algorithm": algorithm})
    error, known = trainer.value_error(batch, torch.tensor([[0.9], [0.9]]))
    torch.testing.assert_close(error, torch.tensor([[0.8**2], [0.9**2]]))
    assert known.all()


def test_lost_episodes_are_counted_and_the_run_goes_on(tmp_path):
    broken = f"task.options={{unstartable: [{(1 << 32) + 1}, {(1 << 32) + 2}]}}"
    for method in ("grpo", "ppo"):
        with pytest.warns(RuntimeWarning, match="lost its episode"):
            train(tmp_path / method, f"algorithm.method={method}", "task.train_size=6", broken, base=ROBOTS)
        rows = metrics(tmp_path / method)
        assert len(rows) >= 4 and max(row.get("episode/lost", 0) for row in rows) > 0
        assert all(row["updates_skipped"] == 0 for row in rows if "loss" in row) and rows[0]["grad_norm"] > 0
        assert max(row.get("unscored", 0) for row in rows) > 0


def test_workers_change_nothing_and_a_dead_one_costs_its_episodes(tmp_path):
    train(tmp_path / "here", "steps=2", base=ROBOTS)
    train(tmp_path / "workers", "steps=2", "task.workers=2", base=ROBOTS)
    assert distance(weights(tmp_path / "here"), weights(tmp_path / "workers")) == 0
    trainer = make(tmp_path / "killed", "steps=3", "task.workers=2", base=ROBOTS)
    sim = trainer.policy.sim
    usual, killed = sim.step, []

    def step(*arguments):
        if trainer.step == 1 and not killed:
            killed.append(sim.simulator._workers[0].process)
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

    def act(*arguments, training, **options):
        chosen = usual(*arguments, training=training, **options)
        if trainer.step == (1 if training else 2) and training not in spoilt:
            spoilt.append(training)
            bad = [math.nan, math.inf] if training else [math.nan, math.inf, -math.inf]
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
        (["model.activation_checkpointing=true"], "model.activation_checkpointing"),
        (["action.head=flow", "algorithm.entropy_coefficient=0.1"], "entropy_coefficient"),
        (["model.kind=vision_language", "algorithm.method=ppo"], "algorithm.method=ppo"),
        (["task.tasks=[fly]"], "task.tasks.*fly"),
        (["task.simulator=tabeltop"], "tabletop"),
        (["action.hed=flow"], "did you mean action.head"),
        (["task.demonstration={}"], "demonstrations"),
    ]:
        with pytest.raises(UserError, match=message):
            make(tmp_path, *options, base=ROBOTS)


def test_evaluation_counts_each_start_once(trainer):
    result, samples = evaluate(trainer.policy, trainer.task, trainer.engine, 4, trainer.config)
    assert [s.prompt.metadata["seed"] for s in samples] == [0, 1, 2, 3]
    assert result["evaluation/accuracy/go"] == result["evaluation/accuracy"]
    assert result["evaluation/episode/length"] <= 6
