"""Averages of the weights, by hand."""

import json

import pytest
import torch
from torch import nn

from mmrl.engine.ema import EMA, ema_warmup, ramp, reshard
from tests.whole_runs import workers
from tests.whole_runs.parts import call, distance, final


def module(*values, dtype=torch.float32):
    made = nn.ParameterList(nn.Parameter(torch.tensor([float(v)], dtype=dtype)) for v in values)
    made[-1].requires_grad_(False)
    return made


def set_to(made, value):
    with torch.no_grad():
        for p in made:
            p.fill_(value)


def test_update_by_hand_and_of_trained_parameters_only():
    made = module(1, 2, 3)
    shadow = EMA(made, lambda updates: [0.0, 0.75][updates])
    assert [float(a) for a in shadow.average] == [1, 2]
    set_to(made, 8.0)
    shadow.update()  # no weight on the past
    assert [float(a) for a in shadow.average] == [8, 8]
    set_to(made, 16.0)
    shadow.update()  # 0.75 8 + 0.25 16
    assert [float(a) for a in shadow.average] == [10, 10]
    assert [float(p) for p in made] == [16, 16, 16]


@pytest.mark.parametrize("sharded", [False, True])
def test_an_average_of_other_ranks_goes_on_at_its_update(sharded):
    """Two ranks hold the whole average each, or a half of it."""
    halves = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    held = halves if sharded else [torch.cat(halves)] * 2
    states = [{"0": values, "updates": torch.tensor(7)} for values in held]
    found = reshard(states, sharded, [nn.Parameter(torch.zeros(2, 2))])
    assert found["0"].tolist() == [[1, 2], [3, 4]] and int(found["updates"]) == 7


def test_schedules():
    assert [ema_warmup(0.9)(n) for n in (0, 8, 1000)] == [0.1, 0.5, 0.9]
    assert [ramp(0.1, 0.5, 2)(n) for n in (0, 2, 4, 1000)] == pytest.approx([0, 0, 0.2, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_puts_every_bit_back_also_after_an_error(dtype):
    made = module(0.1, 1 / 3, 7, dtype=dtype)
    shadow = EMA(made, lambda updates: 0.5)
    set_to(made, 1 / 7)
    shadow.update()
    before = [p.detach().clone() for p in made]
    average = [a.clone() for a in shadow.average]
    with pytest.raises(RuntimeError, match="stop"), shadow.applied():
        assert [p.dtype for p in made] == [dtype] * 3
        assert all(torch.equal(p, a.to(dtype)) for p, a in zip(made, average, strict=False))
        assert torch.equal(made[2], before[2])
        raise RuntimeError("stop")
    assert all(torch.equal(p, b) for p, b in zip(made, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(shadow.average, average, strict=True))
    assert shadow.average[0].dtype == torch.float32 and shadow.updates == 1


def test_an_average_sees_changes_that_bfloat16_weights_round_away():
    """0.999 of the past: in bfloat16 the average of 1 and 1.01 would stay where it is."""
    made = module(1, 1, dtype=torch.bfloat16)
    shadow = EMA(made, lambda updates: 0.999)
    set_to(made, 1.0078125)
    for _ in range(10):
        shadow.update()
    assert float(shadow.average[0]) == pytest.approx(1 + 0.0078125 * (1 - 0.999**10), rel=1e-6)


def test_state_round_trip_goes_on_with_the_same_decay():
    made = module(1, 2, 3)
    one = EMA(made, ema_warmup(0.9))
    set_to(made, 2.0)
    one.update()
    state = {k: v.clone() for k, v in one.state().items()}
    other = EMA(made, ema_warmup(0.9))
    other.load(state)
    set_to(made, 5.0)
    for shadow in (one, other):
        shadow.update()
    assert one.updates == other.updates == 2
    assert all(torch.equal(a, b) for a, b in zip(one.average, other.average, strict=True))
    assert not torch.equal(one.average[0], state["0"])


@pytest.mark.slow
def test_averages_under_zero_3_are_what_a_forward_pass_computes_with(tmp_path):
    """DeepSpeed keeps small parameters whole on every rank between steps, beside the slices that averages are of."""
    call(workers.averages, tmp_path, log=tmp_path / "log", ranks=2)
    found = json.loads((tmp_path / "averages.json").read_text())
    assert len(found) == 4 and all(step["kept"] > 0 and step["moved"] > 1e-4 for step in found)
    assert all(step["inside"] < 1e-6 and step["after"] == 0 for step in found)
    assert distance(final(tmp_path / "averages"), final(tmp_path / "plain")) == 0
