"""Demonstrations beside episodes: what an expert did, scored with the same head as what the policy did."""

import json

import numpy as np
import pytest
import torch

from mmrl.collection.expert_labels import ExpertLabels
from mmrl.collection.extra_sources import SourceContext
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.rollouts import DEMONSTRATION, FRESH
from mmrl.training.metrics import Metrics
from tests.sims.line_simulator import Line
from tests.whole_runs.parts import ROBOTS, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
BESIDE = [
    "rollout.extras=[{type: demonstrations, prompts: 6}]",
    "task.demonstrations={type: expert, episodes: 6, successful: false}",
    "algorithm.terms=[{type: likelihood, coefficient: 0.5}]",
    "task.rewards=[{name: tests.whole_runs.test_robot_demonstrations:equal}]",
    "engine.micro_batch=22",
]
HEADS = {
    "token": "{type: token, bins: 8}",
    "gaussian": "{type: gaussian, width: 16, layers: 1}",
    "matching": "{type: flow, width: 32, depth: 1, steps: 4, likelihood: {type: matching, draws: 2}}",
}


def equal(sample) -> float:
    return 0.5


@pytest.mark.parametrize(
    "head", ["token", *(pytest.param(head, marks=pytest.mark.slow) for head in ("gaussian", "matching"))]
)
def test_the_loss_is_that_of_cloning_where_all_episodes_earn_the_same(tmp_path, head):
    """On the line the expert moves by 0.25 whatever it sees. Half of the mean -logp of its decisions, as a share of all
    that are learned from."""
    trainer = make(tmp_path, *BESIDE, "steps=1", f"action.head={HEADS[head]}", base=ROBOTS)
    policy, batches, usual = trainer.policy, [], trainer.collector.next

    def following(step, measured):
        batches.append(usual(step, measured))
        return batches[-1]

    trainer.collector.next = following
    with torch.no_grad():
        shown = [trainer.task.demonstrations[i] for i in range(len(trainer.task.demonstrations))]
        alone = policy.demonstrate(shown, list(range(len(shown))))
        known = policy.replay(alone, policy.module).logp
    trainer.train()
    release(trainer)
    batch = batches[0]
    taught = batch.origin == DEMONSTRATION
    assert taught.tolist() == 16 * [False] + 6 * [True] and (batch.origin[:16] == FRESH).all()
    assert batch.rewards[taught].isnan().all() and (batch.advantages == 0).all()
    for episode in batch.inputs[16:]:
        assert len(episode) == 1 and episode[0].sampled["actions"][episode[0].valid].tolist() == [[0.25]] * int(
            episode[0].valid.sum()
        )
    row = next(row for row in metrics(tmp_path) if "loss" in row)
    share = batch.mask[taught].sum() / batch.mask.sum()
    assert 0.05 < share < 0.6
    assert row["loss"] == pytest.approx(-0.5 * share.item() * row["likelihood"], rel=1e-3)
    if head != "matching":  # whose errors are at noise levels that follow the draw
        low, high = (known[alone.mask].mean().item() + apart for apart in (-0.3, 0.3))
        assert low < row["likelihood"] < high


def test_a_critic_learns_nothing_from_them(tmp_path):
    options = ["algorithm.type=ppo", "algorithm.simulator_reward=1.0", "steps=2"]
    rows = {}
    for name, more in (("beside", BESIDE), ("without", BESIDE[3:])):
        train(tmp_path / name, *options, *more, "algorithm.epochs=1", base=ROBOTS)
        rows[name] = next(row for row in metrics(tmp_path / name) if "loss" in row)
    assert rows["beside"]["critic/error"] == pytest.approx(rows["without"]["critic/error"], rel=1e-4)
    assert rows["beside"]["likelihood"] < 0 and "likelihood" not in rows["without"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BESIDE[1:2], "task.demonstrations is set, but nothing learns from it: add rollout.extras="),
        ([*BESIDE, "action.head={type: flow}"], "needs known answers that it can be trained on beside its rollouts"),
        ([*BESIDE, "action.head={type: steered}"], "needs known answers that it can be trained on beside its rollouts"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_loaded(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        load(ROBOTS, [f"run_dir={tmp_path}", *options])


def test_demonstrations_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match=r"needs task.demonstrations, such as \{type: expert\}"):
        make(tmp_path, BESIDE[0], *BESIDE[2:], base=ROBOTS)


class Moving(Line):
    """An expert that turns round behind the middle, and says so of a whole chunk."""

    def expert(self, rows, length):
        places = [self.position[row] for row in rows]
        return np.array([[[0.5 - place + 0.01 * k] for k in range(length)] for place in places], np.float32)


LABELS = [
    "rollout.extras=[{type: expert_labels, episodes: 2, prompts: 4, keep: 5}]",
    *BESIDE[2:4],
    "task.simulator=tests.whole_runs.test_robot_demonstrations:Moving",
    "engine.micro_batch=20",
    "task.train_size=60",
    "steps=4",
]


def test_the_expert_says_what_to_do_where_the_policy_came(tmp_path):
    """Each of its looks is at a place where an episode of the policy was, and its chunk begins from there."""
    trainer = make(tmp_path, *LABELS, base=ROBOTS)
    trainer.train()
    source, policy = trainer.collector.extras.sources[0], trainer.policy
    kept = source._kept
    assert len(kept) == 5
    places = [float(label.metadata["observation"].state[0, 0]) for label in kept]
    for place, label in zip(places, kept, strict=True):
        assert label.metadata["actions"][:, 0].tolist() == pytest.approx([0.5 - place + 0.01 * k for k in range(4)])
    again = policy.label_with_expert([trainer.task.train[3]], [7])
    played = policy.rollout([trainer.task.train[3]], 1, [7])
    assert [float(one.metadata["observation"].state[0, 0]) for one in again] == [
        float(step.state[0]) for step in played.inputs[0]
    ]
    batch = trainer.collector.next(4, Metrics(trainer.engine))
    taught = batch.origin == DEMONSTRATION
    assert taught.sum() == 4 and len(batch.group.unique()) == 8
    release(trainer)


def test_ranks_play_episodes_of_their_own(tmp_path):
    """Four a step: two of each rank, which begin at prompts of their own and with seeds of their own."""
    trainer, played = make(tmp_path, *LABELS, base=ROBOTS), []
    with_expert = trainer.policy.label_with_expert

    def label(starts, seeds):
        played.append(([prompt.id for prompt in starts], seeds))
        return with_expert(starts, seeds)

    trainer.policy.label_with_expert = label
    for rank in range(2):
        source = ExpertLabels(episodes=4, prompts=4)
        source.start(SourceContext(trainer.policy, trainer.task.train, trainer.task, 0, (rank, 2), int, tmp_path, 1))
        source._play()
        source._play()
    assert [seeds for _, seeds in played] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert len({number for ids, _ in played for number in ids}) == 8
    release(trainer)


def test_labels_go_on_exactly(tmp_path):
    train(tmp_path / "whole", *LABELS, base=ROBOTS)
    train(tmp_path / "parts", *LABELS, "steps=2", "checkpoint.every=2", base=ROBOTS)
    train(tmp_path / "parts", *LABELS, "checkpoint.every=2", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 4
    assert rows[0][-1]["likelihood"] > rows[0][0]["likelihood"]
