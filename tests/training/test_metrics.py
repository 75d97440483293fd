"""A step's numbers, worked out by hand; and over which group of ranks objects travel."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mmrl.engine import Ranks
from mmrl.engine.deepspeed import objects_group
from mmrl.training.metrics import Metrics

NAN = math.nan


class Two:
    """One of two ranks that hold the same."""

    world, waited = 2, 0.0

    def gather(self, value):
        return [value, value]


def test_only_what_counts_is_averaged():
    metrics = Metrics(Two())
    metrics.add("gap", torch.tensor([[1.0, 2.0], [NAN, 9.0]]), where=torch.tensor([[True, True], [True, False]]))
    metrics.add("gap", torch.tensor([6.0]))
    metrics.add("nothing", torch.tensor([5.0]), where=torch.tensor([False]))
    metrics.add("unknown", torch.tensor([NAN]))
    found = metrics.result()
    assert found["gap"] == pytest.approx((1 + 2 + 6) / 3)
    assert "nothing" not in found and "unknown" not in found


def test_several_names_at_once_are_averaged_each_over_its_own_values():
    metrics = Metrics(Two())
    where = torch.tensor([[True, True], [True, False]])
    columns = {
        "gap": torch.tensor([[1.0, 2.0], [NAN, 9.0]]),
        "a_gap": torch.tensor([[-3.0, NAN], [-5.0, 7.0]]),
        "share": torch.tensor([[True, False], [True, True]]),
        "none": torch.full((2, 2), NAN),
    }
    metrics.add_all(columns, where=where)
    metrics.add_all({"gap": torch.tensor([6.0]), "share": torch.tensor([False])})
    metrics.add_all({"left": torch.zeros(0), "share": torch.zeros(0)})
    metrics.add_all({"loss": torch.tensor([1.0, 2.5]), "updates": torch.tensor([1.0, 1.0])}, sums=True)
    found = metrics.result()
    assert found["gap"] == pytest.approx((1 + 2 + 6) / 3) and found["a_gap"] == pytest.approx(-4)
    assert found["share"] == pytest.approx(2 / 4) and not {"none", "left"} & found.keys()
    assert found["a_gap_max"] == 0.0  # of what is below 0
    assert found["loss"] == pytest.approx(2 * 3.5) and found["updates"] == pytest.approx(2 * 2)


def test_parts_of_a_total_are_added_over_ranks_and_the_largest_value_is_told():
    metrics = Metrics(Two())
    for part in (0.25, 0.5):
        metrics.add("loss", torch.tensor([part]), sums=True)
    metrics.add(
        "correction/logp_gap", torch.tensor([0.1, 0.7, NAN, 5.0]), where=torch.tensor([True, True, True, False])
    )
    metrics.add("correction/logp_gap", torch.tensor([0.4]))
    metrics.add("unknown_gap", torch.tensor([NAN]))
    found = metrics.result()
    assert found["loss"] == pytest.approx(2 * 0.75)
    assert found["correction/logp_gap_max"] == pytest.approx(0.7)
    assert "unknown_gap_max" not in found
    assert found["correction/logp_gap"] == pytest.approx((0.1 + 0.7 + 0.4) / 3)


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_value_is_told_whichever_rank_has_it(monkeypatch, order):
    metrics = Metrics(Two())
    metrics.add("correction/logp_gap", torch.tensor([0.7, 0.1]))
    other = {"correction/logp_gap": 0.25}
    monkeypatch.setattr(Two, "gather", lambda self, value: [value, (value[0], other, *value[2:])][::order])
    assert metrics.result()["correction/logp_gap_max"] == pytest.approx(0.7)


def test_memory_is_that_of_the_rank_that_holds_most(monkeypatch):
    held = np.ones(2**27)  # 1 GiB: the process holds at least as much from now on
    found = Metrics(Two()).result()["memory/host_gib"]
    assert 1.0 < found < 64 and held[-1] == 1
    ranks = [{"memory/gpu_gib": gib} for gib in (2.0, 5.0)]
    monkeypatch.setattr(Two, "gather", lambda self, value: [(*value[:3], rank, *value[4:]) for rank in ranks])
    assert Metrics(Two()).result()["memory/gpu_gib"] == 5.0


def test_what_a_rank_waits_for_others_is_no_work(monkeypatch):
    """Of a phase of 8 seconds it waits 3."""
    now, engine = [100.0], Two()
    monkeypatch.setattr("mmrl.training.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine.mark, engine.waited = (lambda phase: None), 7.0
    metrics = Metrics(engine)
    with metrics.phase("rollout"):
        now[0] += 8.0
        engine.waited += 3.0
    found = metrics.result()
    assert (found["time/rollout"], found["time/rollout_max"], found["time/rollout_median"]) == (8.0, 5.0, 5.0)


def test_a_loss_that_is_not_finite_is_told_as_it_is():
    metrics = Metrics(Two())
    metrics.add("loss", torch.tensor([NAN]), sums=True)
    assert math.isnan(metrics.result()["loss"])


@pytest.mark.usefixtures("alone")
def test_objects_travel_over_the_hosts_where_tensors_travel_over_gpus(monkeypatch):
    ranks = Ranks()
    assert ranks._objects is None and ranks.gather({"a": 1}) == [{"a": 1}]  # everything does
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    group = objects_group(60.0)
    monkeypatch.undo()
    assert dist.get_backend(group) == "gloo"
    ranks._objects, asked = group, []
    gather = dist.all_gather

    def two(parts, part, **how):  # the other rank sends what this one does
        asked.append(how)
        gather(parts[:1], part, **how)
        parts[1].copy_(parts[0])

    monkeypatch.setattr(dist, "all_gather", two)
    monkeypatch.setattr(Ranks, "world", 2)  # alone it asks nobody
    assert ranks.gather({"a": 1}) == [{"a": 1}, {"a": 1}] and asked == [{"group": group}] * 2
