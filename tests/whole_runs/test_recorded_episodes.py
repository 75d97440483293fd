"""Learning from recorded episodes of a simulator: what they earned, labels in the prompt, and what comes of it."""

import json

import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import small
from mmrl.training.metrics import Metrics
from tests.whole_runs.parts import ROBOTS, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
WORDS = ("go", "from", "Advantage:", "positive", "negative")
# Eleven starts on the line, at 0 to 0.1, from which the expert, pushed about, comes to 1 or does not in six actions.
RECORDED = [
    "task.demonstrations={type: expert, episodes: 11, noise: 0.4, successful: false, actions: executed}",
    "task.train_size=11",
    "rollout={prompts: 20}",
    "engine.micro_batch=7",
    "action.chunk=2",
]
WEIGHTED = [*RECORDED, "algorithm={type: advantage_weighted, returns: {gamma: 0.5}}"]
CONDITIONED = [
    *RECORDED,
    "algorithm={type: advantage_conditioned, returns: {gamma: 0.5}, value_coefficient: 0.1}",
    "action.labels={}",
    "model.build=tests.whole_runs.test_recorded_episodes:build_labelled",
]


def build_labelled(folder, seed):
    small.create(folder, small.SmallActionConfig(WORDS, bins=8, width=32, channels=(4, 8, 8)), seed)


def test_a_recorded_step_says_what_was_executed_and_earned(tmp_path):
    """On the line the reward of an action is the position after it, which the state before the next one shows."""
    trainer = make(tmp_path, *WEIGHTED, base=ROBOTS)
    shown = trainer.task.demonstrations
    outcomes = set()
    for episode in shown.episodes:
        place, moved, earned = episode.state[:, 0], episode.actions[:, 0], episode.rewards
        assert abs(moved - 0.25).max() > 0.01  # not what the expert wanted
        assert place[0] + moved.cumsum() == pytest.approx(earned.rewards, abs=1e-5)
        assert place[1:] == pytest.approx(earned.rewards[:-1], abs=1e-6)
        assert earned.outcome == (earned.rewards[-1] >= 1)
        outcomes.add(earned.outcome)
    assert outcomes == {0.0, 1.0}
    first, second = (shown[i].metadata["tail"].rewards for i in range(2))
    assert second.rewards.tolist() == first.rewards[1:].tolist() and second.elapsed.tolist()[0] == 0
    steps = len(first.rewards)
    assert first.discounted(0.5, 0.0) == first.outcome * 0.5 ** (steps - 1)
    release(trainer)


@pytest.mark.parametrize("options", [WEIGHTED, CONDITIONED], ids=["weighted", "conditioned"])
def test_the_critic_learns_what_episodes_earn_and_goes_on_exactly(tmp_path, options):
    options = [*options, "steps=12", "optim.lr=3e-3"]
    train(tmp_path / "whole", *options, base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=6", "checkpoint.every=6", base=ROBOTS)
    train(tmp_path / "parts", *options, "checkpoint.every=6", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 12
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    errors = [row["critic/error"] for row in rows[0]]
    assert sum(errors[-4:]) < 0.8 * sum(errors[:4])
    losses = [row["loss"] for row in rows[0]]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_labels_say_which_steps_earned_most(tmp_path):
    """A new critic's value is 0, so that the advantage of a step is its return: of 20 steps six are good, but for those
    without a label."""
    trainer = make(tmp_path, *CONDITIONED, base=ROBOTS)
    batch = trainer.collector.next(0, Metrics(trainer.engine))
    prompts = [sample.prompt for sample in batch.samples]
    returns = torch.tensor([prompt.metadata["tail"].rewards.discounted(0.5, 0.0) for prompt in prompts])
    bound = returns.quantile(0.7)
    texts = {"Advantage: positive": [2, 3], "Advantage: negative": [2, 4], "": []}  # ids begin with 1, 0 is unknown
    for prompt, earned, steps in zip(prompts, returns, batch.inputs, strict=True):
        label = prompt.metadata["label"]
        if label:
            assert label == ("Advantage: positive" if earned > bound else "Advantage: negative")
        words = steps[0].observation.words.tolist()
        assert words == [1, 2, 0, *[number + 1 for number in texts[label]]]  # go from PLACE
    labels = [prompt.metadata["label"] for prompt in prompts]
    assert all(labels.count(label) > 1 for label in texts)
    played = trainer.policy.respond  # under the label of good steps
    calls, usual = [], trainer.policy.module.backbone.prepare

    def following(images, asked, state):
        calls.extend(asked)
        return usual(images, asked, state)

    trainer.policy.module.backbone.prepare = following
    played([trainer.task.evaluation[i] for i in range(2)], [0, 1])
    assert calls and all(text.startswith("go from ") and text.endswith(" Advantage: positive") for text in calls)
    release(trainer)


def test_the_share_of_steps_without_a_label(tmp_path):
    trainer = make(tmp_path, *CONDITIONED, "rollout.prompts=400", "algorithm.dropout=0.2", base=ROBOTS)
    shown = trainer.task.demonstrations
    prompts = [shown[i] for i in range(len(shown))]
    unlabelled = torch.zeros(len(prompts))
    for turn in range(8):
        with torch.no_grad():  # the value moves, and another draw with it
            trainer.policy.module.critic.layers[-1].bias += 0.01 * (turn + 1)
        labelled = trainer.algorithm.prepare_demonstrations(prompts)
        unlabelled += torch.tensor([float(not prompt.metadata["label"]) for prompt in labelled])
    count = 8 * len(prompts)
    assert abs(unlabelled.sum() / count - 0.2) < 4 * (0.2 * 0.8 / count) ** 0.5
    # of 8 turns a step has none in 8 x 0.2 on average, with a variance of 8 x 0.2 x 0.8: not in all or in none
    assert unlabelled.var() < 2.5 and unlabelled.max() < 8
    release(trainer)


def test_the_critic_reads_no_label(tmp_path):
    """Its loss is that of the steps without one, a mean over them."""
    trainer = make(tmp_path, *CONDITIONED, "engine.micro_batch=20", base=ROBOTS)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    measured = Metrics(trainer.engine)
    minibatches, _ = trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), measured)
    trainer.update(minibatches[0], measured)
    (micro,) = minibatches[0]
    earned = [
        sample.prompt.metadata["tail"].rewards.discounted(0.5, 0.0)
        for sample in micro.samples
        if not sample.prompt.metadata["label"]
    ]
    assert 1 < len(earned) < 20
    expected = sum(0.5 * one**2 for one in earned) / len(earned)  # the expectile is 0.5, the value 0
    assert measured.result()["critic/error"] == pytest.approx(expected, rel=1e-4)
    release(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*RECORDED, "algorithm=supervised", "action.labels={}"], "action.labels: algorithm.type=supervised does not"),
        (CONDITIONED[:-2], r"needs prompts that say how an action turned out \(action.labels\)"),
        ([*CONDITIONED[:-1], "action.labels={good: fine, bad: poor}"], "does not tell 'fine' from 'poor'"),
    ],
)
def test_labels_that_do_nothing_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        release(make(tmp_path, *options, base=ROBOTS))
