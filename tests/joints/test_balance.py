"""Two ranks exchange groups, from `engine.balance` to the gradient."""

import pytest

from mmrl.errors import UserError
from tests.helpers.threads import together
from tests.joints.parts import Table, close
from tests.joints.test_ranks import Exchange, Rank

# Decisions of a group: 6, 5, 2 and 3. The first rank draws the long ones.
LOGP = [[-0.5, -1.0, -0.2], [-2.0, -0.3, -1.0], [-1.0, -0.4, -0.9], [-3.0, -0.1], [-1.5], [-0.2], [-0.7], [-0.8, -0.6]]
REWARDS = [1.0, 2.0, 6.0, 0.0, 4.0, 9.0, 3.0, 5.0]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
TABLE = {"logp": LOGP, "rewards": REWARDS, "group": GROUPS}
RANKS = ([0, 1, 2, 3], [4, 5, 6, 7])


class Exchanging(Rank):
    sent: list

    def gather(self, value):
        return self.meeting.gather(self.rank, value)

    def exchange(self, parcels, instead):
        self.sent = [parcel for parcel in parcels if parcel is not None]
        return [told[self.rank] for told in self.gather(parcels)]


def learned(given, *overrides, step=0, recorded=()):
    """Both ranks, each in a thread, prepared and after an update with every minibatch. recorded: rows of the table that
    are steps of recorded episodes."""
    meeting, jobs = Exchange(), []
    for rank in range(2):
        made = given(Table(**TABLE), "rollout.prompts=4", *overrides, world=2, rank=rank)
        engine = made.trainer.engine
        engine.__class__, engine.meeting, engine.sent = Exchanging, meeting, []
        jobs.append(made)

    def work(made):
        rows = RANKS[made.trainer.engine.rank]
        rollouts = made.table.rollouts(rows)
        for row, sample in zip(rows, rollouts.samples, strict=True):
            if row in recorded:
                sample.prompt.metadata["tail"] = None
        made.prepare(rollouts, step)
        for number in range(len(made.minibatches)):
            made.learn(number)
        made.values = made.metrics.result()

    together(work, jobs, meeting.barrier)
    return jobs


def rows(made):
    return [[micro.inputs for micro in minibatch] for minibatch in made.minibatches]


def gradient(jobs, update=0):
    """Summed over ranks, as the engine does it."""
    return sum(made.gradient(update=update) for made in jobs)


def test_a_group_of_each_rank_changes_places(given):
    # 11 against 5: 6 for 3 leaves 8 and 8.
    one, two = learned(given)
    assert one.batch.rollouts.inputs == [6, 7, 2, 3] and two.batch.rollouts.inputs == [4, 5, 0, 1]
    for made in (one, two):
        assert made.values["balance/heaviest_rank_before"] == pytest.approx(11 / 8)
        assert made.values["balance/heaviest_rank"] == 1.0


def test_recorded_steps_stay_on_their_rank(given):
    """What they earned refers to the whole episode: the long groups of the first rank cannot leave it."""
    one, two = learned(given, recorded=[0, 1, 2, 3])
    assert one.batch.rollouts.inputs == [0, 1, 2, 3] and two.batch.rollouts.inputs == [4, 5, 6, 7]
    assert one.values["balance/heaviest_rank"] == pytest.approx(11 / 8)


@pytest.mark.parametrize(
    "case",
    [
        [],
        ["algorithm.epochs=2"],
        ["algorithm.reduce=sequence_mean", "engine.micro_batch=1"],
        ["algorithm.scale=batch_std", "engine.micro_batch=3"],
        ["engine.micro_tokens=3"],
        ["algorithm.terms=[{type: kl, coefficient: 0.1}]", "algorithm.baseline=leave_one_out"],
    ],
)
def test_the_gradient_is_that_of_ranks_that_exchange_nothing(given, case):
    balanced, alone = learned(given, *case), learned(given, *case, "engine.balance=none")
    assert any(made.trainer.engine.sent for made in balanced)
    assert not any(made.trainer.engine.sent for made in alone)
    for update in range(len(alone[0].minibatches)):
        expected = gradient(alone, update)
        close(gradient(balanced, update), expected)
        assert float(expected.abs().max()) > 0.01
        close(*(sum(made.trainer.engine.losses[update] for made in jobs) for jobs in (balanced, alone)))
    own = ("time/", "memory/", "grad_norm")  # nobody sums gradients over ranks here
    names = [name for name in alone[0].values if not name.startswith(own)]
    close(*([jobs[0].values[name] for name in names] for jobs in (balanced, alone)), atol=1e-5)


def test_advantages_stay_with_their_rollouts(given):
    found = {}
    for made in learned(given, "algorithm.scale=none"):
        batch = made.batch.rollouts
        found |= dict(zip(batch.inputs, batch.advantages[:, 0].tolist(), strict=True))
    close([found[row] for row in range(8)], [-0.5, 0.5, 3.0, -3.0, -2.5, 2.5, -1.0, 1.0])


def test_similar_lengths_are_replayed_together(given):
    one, two = learned(given, "engine.micro_batch=2")
    assert rows(one) == [[[2, 3], [7, 6]]] and rows(two) == [[[0, 1], [4, 5]]]


def test_micro_batches_of_so_many_tokens(given):
    # The first rank: rows of 3, 3, 3 and 2 tokens, two of which make 6. The second: 2, 1, 1, 1, in one of four.
    tokens = ["engine.balance=none", "engine.micro_tokens=8"]
    one, two = learned(given, *tokens)
    assert rows(one) == [[[0, 1], [2, 3]]] and rows(two) == [[[7, 6], [4, 5]]]  # two in halves, for ranks meet
    one, two = learned(given, *tokens, "engine.micro_batch=1")
    assert rows(one) == [[[0], [1], [2], [3]]] and rows(two) == [[[7], [6], [4], [5]]]


def test_micro_batches_of_so_many_tokens_with_one_rank(given):
    made = given(Table(**TABLE), "rollout.prompts=4", "engine.micro_tokens=8")
    made.prepare()
    # Groups by their longest: 3, 3, then 3, 2, then 2, 1, then 1, 1. A third rollout beside one of 3 would make 9.
    assert rows(made) == [[[0, 1], [2, 3], [7, 6, 4, 5]]]


def test_whole_groups_are_not_cut(given):
    whole = "algorithm={type: preference}"
    with pytest.raises(UserError, match="engine.micro_tokens splits groups.*set engine.micro_tokens=null"):
        given(Table(**TABLE), "rollout.prompts=4", "engine.micro_tokens=8", whole)


def test_groups_that_a_table_shows_stay(given):
    # The first group of each rank, of 6 and 2 decisions: then 5 for 3 leaves 9 and 7.
    shown = ["log.samples_every=2", "log.samples=1"]
    one, two = learned(given, *shown, step=1)
    assert one.batch.rollouts.inputs == [0, 1, 6, 7] and two.batch.rollouts.inputs == [4, 5, 2, 3]
    one, two = learned(given, *shown, step=2)
    assert one.batch.rollouts.inputs == [6, 7, 2, 3]


def test_one_rank_replays_similar_lengths_together_too(given):
    made = given(Table(**TABLE), "rollout.prompts=4", "engine.micro_batch=2")
    made.prepare()
    assert rows(made) == [[[0, 1], [2, 3], [7, 6], [4, 5]]]
    assert made.batch.rollouts.inputs == list(range(8)) and "balance/heaviest_rank" not in made.metrics.result()
    drawn = given(Table(**TABLE), "rollout.prompts=4", "engine.micro_batch=2", "engine.balance=none")
    drawn.prepare()
    assert rows(drawn) != rows(made) and sorted(sum(rows(drawn)[0], [])) == list(range(8))
    made.learn()
    drawn.learn()
    close(made.gradient(), drawn.gradient())
