"""Micro-batches of so many tokens, by hand."""

import pytest
import torch

from mmrl.core.partition import split_by_tokens, split_to_count

LENGTH = torch.tensor([5, 9, 4, 4, 4, 1, 2])


def listed(parts):
    return [part.tolist() for part in parts]


def test_a_micro_batch_is_as_full_as_its_longest_rollout_lets_it_be():
    parts = [torch.tensor([1, 0]), torch.tensor([2, 3, 4, 5, 6])]
    # 9 and 5 make 18, and a third would make 27; three of 4 make 12, and with one of 1 they make 16.
    assert listed(split_by_tokens(parts, LENGTH, max_tokens=18, max_rows=8)) == [[1, 0], [2, 3, 4, 5], [6]]
    assert listed(split_by_tokens(parts, LENGTH, max_tokens=17, max_rows=8)) == [[1], [0, 2, 3], [4, 5, 6]]
    assert listed(split_by_tokens(parts, LENGTH, max_tokens=1000, max_rows=3)) == [[1, 0, 2], [3, 4, 5], [6]]


def test_a_longer_rollout_later_in_the_order_counts_for_all():
    assert listed(split_by_tokens([torch.tensor([5, 6, 1])], LENGTH, max_tokens=18, max_rows=8)) == [[5, 6], [1]]


def test_a_rollout_of_too_many_tokens_is_alone():
    assert listed(split_by_tokens([torch.tensor([1, 5, 0])], LENGTH, max_tokens=3, max_rows=8)) == [[1], [5], [0]]


def test_the_one_with_most_tokens_falls_into_halves():
    parts = [torch.tensor([1]), torch.tensor([2, 3, 4]), torch.tensor([5, 6])]
    assert listed(split_to_count(parts, LENGTH, 3)) == listed(parts)
    assert listed(split_to_count(parts, LENGTH, 4)) == [[1], [2, 3], [4], [5, 6]]
    assert listed(split_to_count(parts, LENGTH, 6)) == [[1], [2], [3], [4], [5], [6]]
    # 9 and 5 make 18 tokens, three of at most 4 make 12.
    assert listed(split_to_count([torch.tensor([5, 6, 2]), torch.tensor([1, 0])], LENGTH, 3)) == [[5, 6, 2], [1], [0]]
    with pytest.raises(ValueError, match="6 rollouts cannot be split into 7"):
        split_to_count(parts, LENGTH, 7)
