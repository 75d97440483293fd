"""Ranks that exchange rollouts learn what ranks that do not learn, with less to wait for."""

import json
from functools import cache

import pytest

from tests.core.test_sharing_out import best
from tests.whole_runs import balance_workers
from tests.whole_runs.parts import call, distance, final, metrics, timeless

# Ranks and ZeRO stage.
RUNS = [(2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0), (4, 2)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("balance")
    call(balance_workers.two_ranks, path, log=path / "two.log", ranks=2, timeout=300)
    call(balance_workers.selective, path, "selective-1", log=path / "one.log")
    return path


@pytest.fixture(scope="module")
def trained(folder):
    """Makes the runs of so many ranks under a ZeRO stage, once; those of two under 3 are there."""

    @cache
    def make(ranks, stage):
        if (ranks, stage) != (2, 3):
            runs, log = balance_workers.trained, folder / f"{ranks}-{stage}.log"
            call(runs, folder, stage, "steps=1", log=log, ranks=ranks, timeout=300)
        return folder

    return make


def steps(run):
    return [row for row in timeless(metrics(run)) if "loss" in row]


@pytest.mark.parametrize("kind", ["lengths", "tokens"])
@pytest.mark.parametrize(("ranks", "stage"), RUNS)
@pytest.mark.slow
def test_weights_and_metrics_are_those_of_ranks_that_exchange_nothing(trained, ranks, stage, kind):
    folder = trained(ranks, stage)
    alone, balanced = folder / f"none-{stage}", folder / f"{kind}-{stage}"
    assert distance(final(alone), final(balanced)) < 1e-5
    for one, other in zip(steps(alone), steps(balanced), strict=True):
        assert set(other) - set(one) == {"balance/heaviest_rank", "balance/heaviest_rank_before"}
        assert {name: other[name] for name in one} == pytest.approx(one, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("ranks", "stage"), RUNS)
def test_the_rank_with_most_has_about_as_little_as_can_be(trained, ranks, stage):
    """Tokens that ranks really replayed, against all ways to give each of them as many groups."""
    folder = trained(ranks, stage)
    told = {
        name: [json.loads((folder / f"{name}-{stage}-rank{r}.json").read_text()) for r in range(ranks)]
        for name in ("none", "lengths")
    }
    before, after, least, mean = 0, 0, 0, 0.0
    for update in range(len(told["none"][0])):
        shares = [told["lengths"][r][update] for r in range(ranks)]
        every = [cost for share in shares for cost in share]
        before += max(sum(told["none"][r][update]) for r in range(ranks))
        after += max(map(sum, shares))
        least += best(every, ranks, len(shares[0]))
        mean += sum(every) / ranks
    assert least <= after < 1.03 * least < 0.95 * before
    rows = steps(folder / f"lengths-{stage}")
    assert sum(row["balance/heaviest_rank"] for row in rows) / len(rows) == pytest.approx(after / mean, rel=0.05)
    assert sum(row["balance/heaviest_rank_before"] for row in rows) / len(rows) == pytest.approx(
        before / mean, rel=0.05
    )


@pytest.mark.parametrize(("ranks", "stage"), RUNS)
def test_micro_batches_of_at_most_so_many_tokens_as_many_on_every_rank(trained, ranks, stage):
    folder = trained(ranks, stage)
    told = [json.loads((folder / f"tokens-{stage}-sizes{r}.json").read_text()) for r in range(ranks)]
    for shares in zip(*told, strict=True):
        assert len({len(share) for share in shares}) == 1
        assert all(rows * longest <= 250 for share in shares for rows, longest in share)
        assert ranks == 4 or max(rows for share in shares for rows, _ in share) > 3  # of four a rank has four in all


def test_a_run_that_stopped_goes_on_with_the_same_numbers(folder):
    assert distance(final(folder / "stopped"), final(folder / "lengths-3")) == 0.0
    assert [row["step"] for row in steps(folder / "stopped")] == [1, 2]


def test_dynamic_sampling_on_two_ranks_is_that_of_one(folder):
    """The same groups, of which some changed ranks, and the same weights."""
    alone, one, two = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("selective-1-rank0", "selective-2-rank0", "selective-2-rank1")
    )
    moved = 0
    for every, first, second in zip(alone, one, two, strict=True):
        assert every == sorted(first + second) and len(first) == len(second) == 8
        moved += sum(place % 16 >= 8 for place in first)  # of sixteen places a rank draws eight
        moved += sum(place % 16 < 8 for place in second)
    assert moved
    assert distance(final(folder / "selective-1"), final(folder / "selective-2")) < 1e-5


@pytest.mark.parametrize("rank", [0, 1])
def test_parcels(folder, rank):
    found = json.loads((folder / f"parcels-{rank}.json").read_text())
    assert found["got"] == [[0, rank, [10, 11, 12]], [1, rank, [11, 12, 13]]]
    assert found["shared"] == [True, True]
    assert found["bytes"] < 2000
    assert "set here=none" in found["said"] and "holds a _thread.lock, which" in found["said"]
