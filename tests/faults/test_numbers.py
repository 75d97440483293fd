"""Numbers that say something else than they seem to: a metric that averages the ranks wrongly, and a filter that looks
at another reward than the advantages do. What is planted here is what other systems had; the checks name it."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from mmrl.algorithms.scales.components import Components
from mmrl.collection.collector import Collector
from mmrl.config import load
from mmrl.protocols.batch import Batch
from mmrl.rollouts import Rollouts, Sample
from mmrl.training.metrics import Metrics
from tests.whole_runs.parts import TINY

# --- a mean over ranks ---

SHARES = ([1.0, 0.0, 0.0, 0.0, 0.0, float("nan")], [1.0])  # of two ranks: unequal counts, and one that is not known


@dataclass
class Rank:
    """One of two ranks; what it gathers is what both have."""

    number: int
    world: int = 2
    everyone: list = field(default_factory=list)

    def gather(self, value):
        return self.everyone


def measured(make=Metrics):
    """What rank 0 says of `reward/mark`, with the values of both ranks."""
    ranks = [Rank(0), Rank(1)]
    found = [make(rank) for rank in ranks]
    for own, values in zip(found, SHARES, strict=True):
        own.add("reward/mark", torch.tensor(values))
    ranks[0].everyone = [(*own.read(), {}, {}) for own in found]
    return found[0].result()


def check_mean(values):
    known = [value for share in SHARES for value in share if value == value]
    want = sum(known) / len(known)
    assert values["reward/mark"] == pytest.approx(want), f"reward/mark is {values['reward/mark']}, of all ranks {want}"


class MeanOfMeans(Metrics):
    """The mean of what the ranks' means are."""

    def result(self):
        means = [
            {name: total / count for name, (total, count) in sums.items()} for sums, *_ in self.engine.gather(None)
        ]
        return {name: sum(mean[name] for mean in means) / len(means) for name in means[0]}


def test_a_mean_of_the_ranks_means():
    check_mean(measured())
    with pytest.raises(AssertionError, match="reward/mark is 0.6, of all ranks 0.33"):
        check_mean(measured(MeanOfMeans))


# --- a filter ---

WEIGHTS = [1.0, -1.0]
# Groups of two: of the first the totals are equal though both rewards differ, of the second they differ though the
# first reward does not, of the third everything is equal.
REWARDS = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.0], [0.5, 1.0], [0.3, 0.3], [0.3, 0.3]])


def kept():
    """The groups that dynamic sampling keeps of three, before it fills up with others; and their advantages."""
    sampling = ["rollout.prompts=3", "rollout.group_size=2", "rollout.dynamic_sampling.max_rounds=1"]
    config = load(TINY, ["run_dir=r", *sampling])
    task = SimpleNamespace(train=range(3), reward_names=["first", "second"], reward_weights=WEIGHTS)
    ranks = SimpleNamespace(rank=0, world=1, max=int)
    made = Collector(config, None, task, ranks, None)
    group = torch.arange(3).repeat_interleave(2)
    made._round = lambda step, metrics: Rollouts(
        [Sample(None)] * 6, [None] * 6, group, torch.ones(6, 1, dtype=torch.bool), REWARDS, accuracy=REWARDS[:, 0]
    )
    batch = made.collect(0, Metrics(ranks))
    values = config.algorithm.advantages(Batch(batch, task.reward_names, task.reward_weights))
    return batch.group[~batch.filler], values[~batch.filler]


def check_kept(group, advantages):
    """A group that is kept has something to teach."""
    idle = [number for number in group.unique().tolist() if not advantages[group == number].abs().max() > 0]
    assert not idle, f"dynamic sampling kept groups {idle}, whose advantages are 0"
    assert 1 in group.tolist(), "dynamic sampling dropped group 1, whose advantages are not 0"


def test_a_filter_that_looks_at_another_reward(monkeypatch):
    group, advantages = kept()
    check_kept(group, advantages)
    assert group.tolist() == [1, 1]
    usual = Components.varied

    def of_the_first(self, rewards, group, weights, names):
        return usual(self, rewards[:, :1], group, weights[:1], names[:1])

    monkeypatch.setattr(Components, "varied", of_the_first)
    with pytest.raises(AssertionError, match=r"kept groups \[0\], whose advantages are 0"):
        check_kept(*kept())
