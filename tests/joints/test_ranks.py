"""Two ranks with different rollouts against one that has all of them."""

import threading

import pytest
import torch

from mmrl.engine.packing import pack, unpack
from tests.helpers.threads import together
from tests.joints.parts import Ledger, Table, close


class Exchange:
    """What two ranks, each in a thread of its own, tell one another."""

    def __init__(self):
        self.slots, self.barrier = [None, None], threading.Barrier(2, timeout=30)

    def gather(self, rank, value):
        self.slots[rank] = pack(value)  # as between processes
        self.barrier.wait()
        found = [unpack(slot) for slot in self.slots]
        self.barrier.wait()
        return found


class Rank(Ledger):
    exchange: Exchange

    def gather(self, value):
        return self.exchange.gather(self.rank, value)

    def sum(self, value):
        return torch.stack([torch.as_tensor(part) for part in self.gather(value)]).sum(0)

    def max(self, value):
        return max(self.gather(int(value)))


LOGP = [[-0.5, -1.0], [-2.0], [-1.0], [-3.0, -0.1, -1.0], [-1.5], [-0.2]]
REWARDS = [1.0, 2.0, 6.0, 0.0, 4.0, 9.0]
ENTROPY = [[0.1, 0.9], [0.5], [0.3], [0.8, 0.7, 0.2], [0.6], [0.4]]
GROUPS = [0, 0, 1, 1, 2, 2]


def table(rows):
    columns = {"logp": LOGP, "entropy": ENTROPY, "rewards": REWARDS, "group": GROUPS}
    return Table(**{name: [values[row] for row in rows] for name, values in columns.items()})


def shared(given, *overrides):
    """Advantages, counted decisions and gradients of both ranks, in the order of their rollouts. The first has two
    groups, the second one."""
    exchange, jobs = Exchange(), []
    for rank, rows in enumerate(([0, 1, 2, 3], [4, 5])):
        made = given(table(rows), "engine.balance=none", *overrides, world=2, rank=rank)
        made.trainer.engine.__class__ = Rank
        made.trainer.engine.exchange = exchange
        jobs.append(made)

    def work(made):
        made.prepare()
        made.learn()

    together(work, jobs, exchange.barrier)
    return gathered(jobs)


def gathered(jobs):
    advantages, masks, gradients = [], [], []
    for made in jobs:
        rollouts = made.batch.rollouts
        for i in range(len(rollouts)):
            n = len(made.table.columns["logp"][i])
            width = (0, 3 - n)
            pad = torch.nn.functional.pad
            advantages.append(float(rollouts.advantages[i, 0]))
            masks.append(pad(rollouts.mask[i], width))
            gradients.append(pad(made.gradient()[i], width))
    return torch.tensor(advantages), torch.stack(masks), torch.stack(gradients)


CASES = {
    "group_std": [],
    "batch_std": ["algorithm.scale=batch_std"],
    "shrinkage": ["algorithm.baseline=shrinkage", "algorithm.scale=none"],
    "length_weighted": ["algorithm.baseline=length_weighted"],
    "sequence_mean": ["algorithm.reduce=sequence_mean"],
    "constant": ["algorithm.reduce=constant"],
    "entropy_share": ["algorithm.masks=[{type: entropy_share, share: 0.5}]"],
    "covariance_clip": ["algorithm.masks=[{type: covariance_clip, share: 0.15, low: 0.75}]"],
    "whitening": ["algorithm.scale=none", "algorithm.shaping=[whitening]"],
    "kl_returns": ["algorithm.shaping=[kl_returns]"],
    "kl_penalty": ["algorithm.transforms=[kl_penalty]"],
    "a term": ["algorithm.terms=[{type: likelihood, of: positive, coefficient: 0.3}]"],
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(given, case):
    alone = given(table(range(6)), "rollout.prompts=4", *CASES[case])
    alone.prepare()
    alone.learn()
    one, two = gathered([alone]), shared(given, "rollout.prompts=4", *CASES[case])
    for expected, found in zip(one, two, strict=True):
        close(found, expected)
    assert float(one[2].abs().max()) > 0.01


def test_standardised_over_both_ranks(given):
    # Of 1, 2, 6, 0, 4, 9 around 11 / 3: the squares are 57.33, over 5. By hand, for one number of each rank.
    advantages, _, _ = shared(given, "rollout.prompts=4", "algorithm.scale=batch_std")
    std = (sum((r - 22 / 6) ** 2 for r in REWARDS) / 5) ** 0.5
    close(advantages[[0, 3, 5]], [-0.5 / std, -3 / std, 2.5 / std])


def test_the_doubtful_half_of_both_ranks(given):
    """Of nine decisions the five from the median on: 0.9, 0.8, 0.7, 0.6, which is the second rank's, and 0.5."""
    _, masks, gradients = shared(given, "rollout.prompts=4", "algorithm.scale=none", CASES["entropy_share"][0])
    assert gradients.nonzero().tolist() == [[0, 1], [1, 0], [3, 0], [3, 1], [4, 0]] and int(masks.sum()) == 9
    close(gradients[[0, 1, 3, 3, 4], [1, 0, 0, 1, 0]], [0.5 / 9, -0.5 / 9, 3 / 9, 3 / 9, 2.5 / 9])


def test_greedy_responses_of_both_ranks(given):
    """Prompt 0 is the first rank's, prompt 1 the second's; its greedy response is the row of its own table with its
    number: 1 of rewards 1, 2 and 4 of rewards 6, 4."""
    order = 'rollout.sampler={type: "tests.joints.test_baselines:Chosen", order: [0, 1]}'
    options = ["algorithm.baseline=greedy", "algorithm.scale=none", "rollout.prompts=2", order]
    exchange, jobs = Exchange(), []
    for rank, rewards in enumerate(([1.0, 2.0], [6.0, 4.0])):
        made = given(Table([[-1.0]] * 2, rewards=rewards), "engine.balance=none", *options, world=2, rank=rank)
        made.trainer.engine.__class__ = Rank
        made.trainer.engine.exchange = exchange
        jobs.append(made)
    found = together(lambda made: made.prepare(made.next()).advantages[:, 0], jobs, exchange.barrier)
    close(torch.cat(found), [0.0, 1.0, 2.0, 0.0])
