"""How much two boxes share, by hand and as torchvision computes it."""

import random

import pytest
import torch
from torchvision.ops import box_iou, generalized_box_iou

from mmrl.rewards.overlap import giou, iou, to_box


@pytest.mark.parametrize(
    ("one", "other", "shared", "generalised"),
    [
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7, 1 / 7 - 2 / 9),  # of a hull of 9 two belong to neither
        ((0, 0, 1, 1), (2, 2, 3, 3), 0.0, -7 / 9),
        ((0, 0, 1, 1), (2, 0, 3, 1), 0.0, -1 / 3),  # beside one another: nothing is shared in either direction
        ((0, 0, 4, 4), (1, 1, 3, 2), 2 / 16, 2 / 16),  # within
        ((0, 0, 1, 1), (0, 0, 1, 1), 1.0, 1.0),
    ],
)
def test_by_hand(one, other, shared, generalised):
    for a, b in ((one, other), (other, one)):
        assert iou(a, b) == pytest.approx(shared, abs=1e-15)
        assert giou(a, b) == pytest.approx(generalised, abs=1e-15)


def test_as_torchvision_computes_it():
    chance = random.Random(0)
    boxes = [(x, y, x + chance.random() + 0.01, y + chance.random() + 0.01)
             for x, y in ((chance.random(), chance.random()) for _ in range(30))]  # fmt: skip
    table = torch.tensor(boxes, dtype=torch.float64)
    for ours, theirs in ((iou, box_iou), (giou, generalized_box_iou)):
        found = torch.tensor([[ours(a, b) for b in boxes] for a in boxes], dtype=torch.float64)
        assert torch.equal(found, theirs(table, table))


@pytest.mark.parametrize("numbers", [(1, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (0, 1, 1, 0)])
def test_a_box_without_an_area_is_none(numbers):
    assert to_box(numbers) is None


def test_a_box_is_read_from_words():
    assert to_box(("0", "1e0", "2", "3.5")) == (0.0, 1.0, 2.0, 3.5)
