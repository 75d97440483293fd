"""What a run remembers goes on as it was on two ranks, from two ranks to one, and with weights in bfloat16."""

import json
import shutil

import pytest
import torch

from mmrl.config import load
from mmrl.errors import UserError
from tests.checkpoints import ranks
from tests.checkpoints.test_every_state import JOBS, differences, remembered, stopped
from tests.whole_runs.parts import TINY, call, distance, final, make, metrics, release, timeless

pytestmark = pytest.mark.usefixtures("alone")
# Jobs that keep what each rank saw, and what names it where there are fewer ranks: a reward, and stored steps.
BY_RANK = {
    "samplers and memories": "reward 'tests.checkpoints.*:Falling' has a state for each rank",
    "actions": r"rollout.extras.0 has a state for each rank, .* was written by 2 ranks, not 1",
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Returns a function that gives the folder of a job that two ranks trained, whole and in two halves."""
    known = {}

    def folder(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp("two")
            call(ranks.goes_on, known[name], name, log=known[name] / "log.txt", ranks=2, timeout=240)
        return known[name]

    return folder


@pytest.mark.quick("passed over", "actions")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_go_on_to_the_bit(on_two_ranks, name):
    folder = on_two_ranks(name)
    by_rank = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [one["world"] for one in by_rank] == [2, 2]
    assert all(one["restored"] for one in by_rank)  # there was something to restore on each
    assert [one["differ"] for one in by_rank] == [[], []]
    assert timeless(metrics(folder / "whole")) == timeless(metrics(folder / "halves"))
    assert {row["updates"] for row in metrics(folder / "whole") if "loss" in row} == {1.0}  # of both ranks together
    a, b = final(folder / "whole"), final(folder / "halves")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.quick("passed over")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in JOBS if name not in BY_RANK])
def test_one_rank_goes_on_from_two(on_two_ranks, tmp_path, name):
    """Rounding apart: one step behind the checkpoint, before it has grown."""
    base, options, _ = JOBS[name]
    folder = on_two_ranks(name)
    shutil.copytree(folder / "stopped", tmp_path / "one")
    one = make(tmp_path / "one", *options, *ranks.ON_TWO, base=base)
    one.resume()
    assert (one.step, one.engine.world) == (2, 1)
    saved, after = copied(one), ranks.weights_after(one, 3)
    one.train()
    release(one)
    assert distance(saved, after) > 1e-4  # it went on to learn
    assert distance(torch.load(folder / "after-3-0.pt"), after) < 1e-6


@pytest.mark.timeout(300)
def test_averages_of_slices_are_put_together(tmp_path):
    """Under ZeRO-3 each of two ranks has half of every average; one rank without it goes on with the whole."""
    name, decay = "passed over", 0.5
    base, options, _ = JOBS[name]
    call(ranks.goes_on, tmp_path, name, "engine.zero_stage=3", log=tmp_path / "log.txt", ranks=2, timeout=240)
    one = make(tmp_path / "stopped", *options, *ranks.ON_TWO, "engine.zero_stage=0", base=base)
    start = copied(one)
    one.resume()
    assert (one.step, one.engine.world) == (2, 1)
    (average,) = [copy.state() for copy in one._copies().values()]
    trained = [key for key, value in one.policy.module.named_parameters() if value.requires_grad]
    now, first = copied(one), torch.load(tmp_path / "after-1-0.pt")
    for i, key in enumerate(trained):  # by hand: from the start, half of the way to the weights of each step
        expected = start[key].lerp(first[key], 1 - decay).lerp(now[key], 1 - decay)
        assert average[str(i)].shape == now[key].shape
        torch.testing.assert_close(average[str(i)], expected, rtol=1e-5, atol=1e-6)
    assert max(float((average[str(i)] - now[key]).abs().max()) for i, key in enumerate(trained)) > 1e-4
    release(one)


@pytest.mark.quick("actions")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BY_RANK)
def test_what_is_of_each_rank_is_not_divided_anew(on_two_ranks, tmp_path, name):
    base, options, _ = JOBS[name]
    shutil.copytree(on_two_ranks(name) / "stopped", tmp_path / "one")
    one = make(tmp_path / "one", *options, *ranks.ON_TWO, base=base)
    with pytest.raises(UserError, match=BY_RANK[name]):
        one.resume()
    release(one)


@pytest.mark.quick("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_in_bfloat16_go_on_from_where_they_were(tmp_path, stage):
    """The optimizer has weights of its own, in fp32: without them the next update starts from those of the model."""
    base, options, _ = JOBS["samplers and memories"]
    options = [*options, "model.dtype=bfloat16", f"engine.zero_stage={stage}"]
    whole = make(tmp_path / "whole", *options, base=base)
    start = copied(whole)
    whole.train()
    expected = remembered(whole)
    release(whole)
    stopped(tmp_path / "halves", base, options)
    halves = make(tmp_path / "halves", *options, base=base)
    halves.resume()
    saved = copied(halves)
    halves.train()
    after = copied(halves)
    assert differences(expected, remembered(halves)) == []
    release(halves)
    assert torch.bfloat16 in {value.dtype for value in after.values()}
    assert norm(start, saved) > 0 and norm(saved, after) < norm(start, after)  # on from there, not from the start
    assert timeless(metrics(tmp_path / "whole")) == timeless(metrics(tmp_path / "halves"))
    a, b = final(tmp_path / "whole"), final(tmp_path / "halves")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_weights_in_bfloat16_without_a_copy_in_fp32_are_refused():
    """DeepSpeed's optimizer of stage 0 has one, but begins each start with a step of its own."""
    with pytest.raises(UserError, match="model.dtype=bfloat16 does not go with engine.zero_stage=0"):
        load(TINY, ["run_dir=r", "model.dtype=bfloat16", "engine.zero_stage=0"])


def copied(trainer):
    return {name: value.clone() for name, value in trainer.engine.state().items()}


def norm(one, other):
    """How far two sets of weights are apart."""
    return sum(float((one[key].double() - other[key].double()).square().sum()) for key in one) ** 0.5
