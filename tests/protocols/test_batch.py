"""What is known of a step is known of all ranks, in their order: two of them, whose gathering is done by hand."""

import math
import threading

import pytest
import torch

from mmrl.errors import UserError
from mmrl.protocols.batch import Batch
from mmrl.rollouts import DEMONSTRATION, FRESH, Prompt, Rollouts, Sample

NAN = math.nan


class Ranks:
    """Gathers among threads: everyone waits until all have given something."""

    def __init__(self, world):
        self.world, self.given = world, [None] * world
        self.barrier = threading.Barrier(world, timeout=10)

    def gather(self, rank):
        def gathered(value):
            self.given[rank] = value
            self.barrier.wait()
            everyone = list(self.given)
            self.barrier.wait()
            return everyone

        return gathered


def together(ask, *parts, **given):
    """ask(batch) on every rank, each in a thread of its own."""
    ranks, found, failed = Ranks(len(parts)), [None] * len(parts), []

    def work(rank):
        batch = Batch(
            parts[rank], ["right", "short"], [1.0, 0.5], gather=ranks.gather(rank), rank=rank, seed=given.get("seed", 0)
        )
        try:
            found[rank] = ask(batch)
        except Exception as error:
            failed.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
    return found


def rollouts(lengths, first, width, **metadata):
    count = len(lengths)
    samples = [
        Sample(Prompt(str(i), "?", metadata={name: values[i] for name, values in metadata.items()}), truncated=i == 0)
        for i in range(count)
    ]
    numbers = torch.arange(first, first + count)
    made = Rollouts(samples, list(range(count)), numbers // 2, torch.arange(width) < torch.tensor(lengths)[:, None])
    made.rewards = torch.stack([numbers.float(), -numbers.float()], 1)
    made.accuracy, made.prompt = numbers / 10, numbers + 100
    return made


@pytest.fixture
def parts():
    """Two ranks with two and three rollouts, of different widths."""
    kinds = {"level": [1, 2.5], "topic": ["sum", "colour"]}, {"level": [3, 4, 5], "topic": ["sum", "where", "sum"]}
    one, other = rollouts([2, 1], 0, 2, **kinds[0]), rollouts([3, 1, 2], 2, 3, **kinds[1])
    other.rewards[1, 0] = NAN
    return one, other


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rewards", [[0, 0], [1, -1], [2, -2], [NAN, -3], [4, -4]]),
        ("reward/right", [0, 1, 2, NAN, 4]),
        ("reward/short", [0, -1, -2, -3, -4]),
        ("group", [0, 0, 1, 1, 2]),
        ("prompt", [100, 101, 102, 103, 104]),
        ("length", [2, 1, 3, 1, 2]),
        ("truncated", [1, 0, 1, 0, 0]),
        ("accuracy", [0.0, 0.1, 0.2, 0.3, 0.4]),
        ("origin", [FRESH] * 5),
        ("level", [1, 2.5, 3, 4, 5]),
        ("topic", [1, 0, 1, 2, 1]),  # colour, sum, where
    ],
)
def test_a_fact_is_that_of_all_rollouts_in_the_order_of_ranks(parts, name, expected):
    found = together(lambda batch: batch.column(name), *parts)
    for values in found:
        torch.testing.assert_close(values.double(), torch.tensor(expected).double(), equal_nan=True, atol=1e-6, rtol=0)


def test_a_fact_of_one_rank_is_the_fact_of_the_whole_batch(parts):
    whole = Rollouts.concat(parts)
    alone = Batch(whole, ["right", "short"], [1.0, 0.5])
    for name in ("rewards", "group", "length", "topic"):
        for shared in together(lambda batch, name=name: batch.column(name), *parts):
            torch.testing.assert_close(shared, alone.column(name), equal_nan=True)


def test_the_mean_of_a_group_is_that_of_its_known_members(parts):
    """Group 1 is known of one rollout of two, group 2 of none."""
    parts[1].accuracy = torch.tensor([NAN, 0.3, NAN])
    for values in together(lambda batch: batch.column("group/accuracy"), *parts):
        torch.testing.assert_close(values, torch.tensor([0.05, 0.05, 0.3, 0.3, NAN]), equal_nan=True)


def test_what_is_missing_is_unknown(parts):
    for part in parts:
        part.accuracy = part.prompt = None
    parts[0].origin = torch.tensor([FRESH, DEMONSTRATION])
    accuracy, prompt, origin = together(lambda b: [b.column(n) for n in ("accuracy", "prompt", "origin")], *parts)[0]
    assert accuracy.isnan().all() and prompt.tolist() == [-1] * 5 and origin.tolist() == [0, 1, 0, 0, 0]


def test_what_no_prompt_or_not_every_prompt_has_is_no_fact(parts):
    del parts[1].samples[2].prompt.metadata["level"]
    for name in ("levels", "level"):
        with pytest.raises(UserError, match=f"{name} is not a column of rollouts"):
            together(lambda batch, name=name: batch.column(name), *parts)


def test_the_combined_reward_weighs_components_and_knows_not_what_one_of_them_does_not(parts):
    for found in together(lambda batch: batch.combined_rewards(), *parts):
        torch.testing.assert_close(found, torch.tensor([0, 0.5, 1, NAN, 2]), equal_nan=True)


def test_rollouts_that_a_mask_left_out_leave_the_rewards_of_everyone(parts):
    def ask(batch):
        batch.rollout_mask = torch.arange(len(batch.rollouts)) != 0  # the first of each rank
        return batch.column("rewards")[:, 1], batch.combined_rewards(), batch.column("group")

    for rewards, combined, group in together(ask, *parts):
        torch.testing.assert_close(rewards, torch.tensor([NAN, -1, NAN, -3, -4]), equal_nan=True)
        torch.testing.assert_close(combined, torch.tensor([NAN, 0.5, NAN, NAN, 2]), equal_nan=True)
        assert group.tolist() == [0, 0, 1, 1, 2]


def test_each_rank_finds_its_own_part_again(parts):
    for part, found in zip(parts, together(lambda b: b.local(b.column("prompt")), *parts), strict=True):
        assert torch.equal(found, part.prompt)


def test_decisions_are_those_that_count(parts):
    def ask(batch):
        mask = batch.rollouts.mask
        numbered = (batch.rollouts.prompt[:, None] * 10 + torch.arange(mask.shape[1])).float()
        return (
            batch.gather_decisions(numbered),
            batch.gather_decisions(batch.rollouts.prompt[:, None]),
            batch.gather_steps(numbered, mask),
        )

    for by_decision, by_rollout, by_step in together(ask, *parts):
        assert by_decision.tolist() == [1000, 1001, 1010, 1020, 1021, 1022, 1030, 1040, 1041]
        assert by_rollout.tolist() == [100, 100, 101, 102, 102, 102, 103, 104, 104]
        assert torch.equal(by_step, by_decision)


def test_statistics_are_means_over_the_decisions_that_count(parts):
    """Of -1, 0, 1, as far as a rollout goes: two, one, three, one and two decisions."""
    for part in parts:
        part.old_logp = (torch.arange(part.mask.shape[1]) - 1.0).expand(part.mask.shape)
        part.old_entropy = 4 + 2 * part.old_logp
    for logp, entropy in together(lambda batch: (batch.column("logp"), batch.column("entropy")), *parts):
        assert logp.tolist() == [-0.5, -1, 0, -1, -0.5] and entropy.tolist() == [3, 2, 4, 2, 3]


def test_chance_is_of_the_rank_and_the_seed_alone(parts):
    def draw(seed, name=""):
        return [f.tolist() for f in together(lambda b: torch.rand(4, generator=b.generator(name)), *parts, seed=seed)]

    first, again, other = draw(3), draw(3), draw(4)
    assert first == again and first[0] != first[1] and first[0] != other[0] and other[0] != first[1]
    assert draw(3, "band") == draw(3, "band") != draw(3, "perturbation")  # each part that names itself has its own


def test_reports_are_kept_together(parts):
    batch = Batch(parts[0], ["right", "short"], [1.0, 0.5])
    batch.report({"a": 1.0})
    batch.report({"b": 2.0})
    assert batch.reports == {"a": 1.0, "b": 2.0}


def test_what_was_not_scored_and_what_fills_up_a_batch_is_not_learned_from(parts):
    """Of the first rank's two rollouts one is unscored; of the second's three one is a filler and one is masked."""
    parts[0].rewards = torch.tensor([[1.0, NAN], [0.0, 2.0]])
    parts[1].rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [5.0, 1.0]])
    parts[1].filler = torch.tensor([True, False, False])

    def scored(batch):
        if len(batch.rollouts) == 3:
            batch.rollout_mask[2] = False
        return batch.scored().tolist()

    assert together(scored, *parts) == [[False, True], [False, True, False]]
