"""Batches of rollouts are taken apart and put together without mixing rows."""

from dataclasses import fields, replace

import pytest
import torch
from PIL import Image

from mmrl.collection.extra_sources import with_records
from mmrl.rollouts import (
    Column,
    DecisionColumn,
    Prompt,
    Rollouts,
    Sample,
    Steps,
    Video,
    fill_in_columns,
    fill_in_nodes,
    pad_to_longest,
)

TENSORS = [f.name for f in fields(Rollouts) if f.default is None]


def batch(lengths, first=0, full=True):
    """Rollouts whose every field says which rollout it belongs to."""
    count, width = len(lengths), max(lengths)
    number = torch.arange(first, first + count)
    decision = torch.arange(width)
    mask = decision < torch.tensor(lengths)[:, None]
    samples = [Sample(Prompt(str(i), f"question {i}"), f"answer {i}", 1, False, 9) for i in number.tolist()]
    made = Rollouts(samples=samples, inputs=number.tolist(), group=number // 2, mask=mask)
    if full:
        made.rewards = torch.stack([number, number + 0.5], 1)
        made.accuracy, made.advantages = number.float(), -number.float()
        made.old_logp = (number[:, None] * 100.0 + decision) * mask
        made.ref_logp, made.behaviour_logp = -made.old_logp, made.old_logp / 2
        made.old_entropy, made.old_square_sum = made.old_logp / 4, made.old_logp / 8
        made.old_prediction = made.old_logp[:, :, None, None] + torch.arange(3.0)
        made.ref_prediction = -made.old_prediction
        made.origin, made.prompt, made.version = number % 3, number + 50, number + 70
        made.filler = number % 2 == 0
        made.nodes = number[:, None] * 10 + torch.arange(2)
        made.extras = {"steps": steps(number, mask)}
        assert all(vars(made)[name] is not None for name in TENSORS)
    return made


def steps(number, mask):
    values = number[:, None] * 10.0 + torch.arange(mask.shape[1])
    return Steps(mask, values, -values, mask, values / 2)


def assert_equal(a, b):
    for f in fields(a):
        left, right = vars(a)[f.name], vars(b)[f.name]
        if isinstance(left, dict):
            assert left.keys() == right.keys()
            for name in left:
                assert_equal(left[name], right[name])
        else:
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, f.name


def test_select_keeps_the_fields_of_a_rollout_together_in_the_order_asked():
    whole = batch([3, 1, 4, 2])
    chosen = whole.select(torch.tensor([2, 0, 2]))
    assert len(chosen) == 3 and chosen.inputs == [2, 0, 2] and [s.prompt.id for s in chosen.samples] == ["2", "0", "2"]
    assert chosen.mask.sum(1).tolist() == [4, 3, 4] and chosen.group.tolist() == [1, 0, 1]
    assert chosen.rewards.tolist() == [[2, 2.5], [0, 0.5], [2, 2.5]] and chosen.advantages.tolist() == [-2, 0, -2]
    assert chosen.old_logp[:, 1].tolist() == [201, 1, 201] and chosen.ref_logp[0, 3] == -203
    assert chosen.extras["steps"].rewards[:, 2].tolist() == [22, 2, 22]
    assert chosen.extras["steps"].mask.sum(1).tolist() == [4, 3, 4] and chosen.extras["steps"].returns is None


def test_select_by_mask_equals_select_by_index():
    whole = batch([3, 1, 4, 2])
    keep = torch.tensor([False, True, False, True])
    assert_equal(whole.select(keep), whole.select(torch.tensor([1, 3])))
    assert len(whole.select(torch.zeros(4, dtype=torch.bool))) == 0


def test_concat_undoes_select():
    whole = batch([3, 1, 4, 2])
    assert_equal(Rollouts.concat([whole.select(index) for index in torch.arange(4).split(3)]), whole)
    empty = whole.select(torch.zeros(4, dtype=torch.bool))
    assert_equal(Rollouts.concat([empty, whole, empty]), whole)


def test_concat_pads_decisions_that_do_not_count():
    joined = Rollouts.concat([batch([1, 2]), batch([4], first=2)])
    assert joined.mask.dtype == torch.bool
    assert joined.mask.tolist() == [[True, False, False, False], [True, True, False, False], [True] * 4]
    assert joined.old_logp.tolist() == [[0, 0, 0, 0], [100, 101, 0, 0], [200, 201, 202, 203]]
    assert torch.equal(joined.ref_logp, -joined.old_logp)
    assert joined.old_prediction[:, :, 0, 1].tolist() == [[1, 1, 0, 0], [101, 102, 0, 0], [201, 202, 203, 204]]
    assert joined.old_prediction.shape == (3, 4, 1, 3)
    assert joined.extras["steps"].rewards.tolist() == [[0, 1, 0, 0], [10, 11, 0, 0], [20, 21, 22, 23]]
    assert joined.nodes.tolist() == [[0, 1], [10, 11], [20, 21]]  # these have the same length in every batch


def test_fields_that_are_not_filled_stay_so():
    bare = Rollouts.concat([batch([1, 2], full=False).select(torch.tensor([1, 0])), batch([4], full=False)])
    assert [vars(bare)[name] for name in TENSORS] == [None] * len(TENSORS)
    assert bare.extras == {}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("swap", [False, True])
def test_concat_refuses_a_field_that_only_some_parts_fill(name, swap):
    parts = [batch([2]), replace(batch([2]), **{name: None})]
    with pytest.raises(ValueError, match=f"^{name} is set in some"):
        Rollouts.concat(parts[::-1] if swap else parts)


def test_widened_fills_up_the_second_dimension_alone():
    one, other = pad_to_longest([torch.ones(2, 1, 3), torch.ones(1, 3, 3)], -1)
    assert one.shape == (2, 3, 3) and one[:, 1:].eq(-1).all() and one[:, :1].eq(1).all() and other.eq(1).all()
    flags = pad_to_longest([torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)], 0)
    assert flags[0].tolist() == [[True, False]]


def test_a_record_of_another_kind_is_told():
    with pytest.raises(TypeError, match="^the rollouts have no Column as steps; they have steps$"):
        batch([2]).extra("steps", Column)
    with pytest.raises(TypeError, match="no Steps as steps; they have no extras"):
        batch([2], full=False).extra("steps", Steps)


def test_who_shares_no_decision_has_the_id_of_its_row_among_all():
    fresh, one, other = (batch([2] * count, full=False) for count in (2, 1, 2))
    forked = replace(batch([2], full=False), nodes=torch.tensor([[0, 9]]))
    found = [part.nodes.tolist() for part in fill_in_nodes(fresh, [one, forked, other])]
    assert fresh.nodes.tolist() == [[0, 0], [1, 1]]
    assert found == [[[2, 2]], [[0, 9]], [[4, 4], [5, 5]]]


def test_what_a_part_knows_it_keeps_and_the_rest_is_unknown():
    fresh, part = batch([2, 1], full=False), batch([1], full=False)
    fresh.prompt, fresh.filler = torch.tensor([3, 4]), torch.tensor([True, False])
    fresh.extras = {"a": Column(torch.ones(2)), "b": Column(torch.ones(2)), "c": DecisionColumn(torch.ones(2, 2))}
    part.extras = {"a": Column(torch.tensor([7.0]))}
    found = fill_in_columns(part, fresh)
    assert found.prompt.tolist() == [-1] and found.filler.tolist() == [False] and found.rewards is None
    assert found.extras["a"].values.tolist() == [7.0] and found.extras["b"].values.isnan().tolist() == [True]
    assert found.extras["c"].values.tolist() == [[0.0]]


def test_fresh_rollouts_keep_what_is_known_of_them_beside_added_ones():
    fresh, part = batch([2, 1], full=False), batch([1], full=False)
    fresh.extras = {"a": Column(torch.tensor([1.0, 2.0]))}
    part.extras = {"a": Column(torch.tensor([7.0])), "b": Column(torch.tensor([8.0]))}
    found = with_records(fresh, [part]).extras
    assert found["a"].values.tolist() == [1.0, 2.0] and found["b"].values.isnan().tolist() == [True, True]


def test_padding_is_no_shared_decision():
    parts = [batch([1, 2]), batch([2, 1], first=2)]
    parts[1].nodes = torch.tensor([[0, 21, 22], [0, 31, 32]])
    assert Rollouts.concat(parts).nodes.tolist() == [[0, 1, -1], [10, 11, -1], [0, 21, 22], [0, 31, 32]]


def test_all_decisions_of_a_step_have_its_value():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    by_decision = Steps(mask, values, values, mask, values).by_decision(values, 6)
    assert by_decision.tolist() == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]


def test_a_clip_lasts_as_long_as_all_of_its_frames():
    """Six frames, four a second: the last one is shown for a quarter of a second too."""
    times = Video((Image.new("RGB", (2, 2)),) * 6, fps=4.0).times()
    assert times == {"total_num_frames": 6, "fps": 4.0, "duration": 1.5, "frames_indices": [0, 1, 2, 3, 4, 5]}
