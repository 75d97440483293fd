"""Micro-batches of so many tokens, by hand."""

import pytest
import torch

from mmrl.core.partition import halved, within_tokens

LENGTH = torch.tensor([5, 9, 4, 4, 4, 1, 2])


def listed(parts):
    return [part.tolist() for part in parts]


def test_a_micro_batch_is_as_full_as_its_longest_rollout_lets_it_be():
    parts = [torch.tensor([1, 0]), torch.tensor([2, 3, 4, 5, 6])]
    # 9 and 5 make 18, and a third would make 27; three of 4 make 12, and with one of 1 they make 16.
    assert listed(within_tokens(parts, LENGTH, tokens=18, rows=8)) == [[1, 0], [2, 3, 4, 5], [6]]
    assert listed(within_tokens(parts, LENGTH, tokens=17, rows=8)) == [[1], [0, 2, 3], [4, 5, 6]]
    assert listed(within_tokens(parts, LENGTH, tokens=1000, rows=3)) == [[1, 0, 2], [3, 4, 5], [6]]


def test_a_longer_rollout_later_in_the_order_counts_for_all():
    assert listed(within_tokens([torch.tensor([5, 6, 1])], LENGTH, tokens=18, rows=8)) == [[5, 6], [1]]


def test_a_rollout_of_too_many_tokens_is_alone():
    assert listed(within_tokens([torch.tensor([1, 5, 0])], LENGTH, tokens=3, rows=8)) == [[1], [5], [0]]


def test_the_one_with_most_tokens_falls_into_halves():
    parts = [torch.tensor([1]), torch.tensor([2, 3, 4]), torch.tensor([5, 6])]
    assert listed(halved(parts, LENGTH, 3)) == listed(parts)
    assert listed(halved(parts, LENGTH, 4)) == [[1], [2, 3], [4], [5, 6]]
    assert listed(halved(parts, LENGTH, 6)) == [[1], [2], [3], [4], [5], [6]]
    # 9 and 5 make 18 tokens, three of at most 4 make 12.
    assert listed(halved([torch.tensor([5, 6, 2]), torch.tensor([1, 0])], LENGTH, 3)) == [[5, 6, 2], [1], [0]]
    with pytest.raises(ValueError, match="6 rollouts can not be cut into 7"):
        halved(parts, LENGTH, 7)
