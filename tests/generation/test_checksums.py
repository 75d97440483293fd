"""Checksums of tensors and of their parts."""

import pytest
import torch

from mmrl.generation.weight_sync.checksums import BLOCK, Checksum, checksum

WHOLE = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("cuts", [(1,), (BLOCK,), (5, BLOCK + 3, 3 * BLOCK)])
def test_parts_that_begin_anywhere_sum_to_the_whole(dtype, cuts):
    whole = WHOLE.mul(50).to(dtype)
    bounds = [0, *cuts, len(whole)]
    parts = [checksum(whole[a:b], (a, (1,))) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert sum(parts[1:], parts[0]) == checksum(whole)


def test_columns_sum_to_the_matrix_that_they_are_parts_of():
    matrix = WHOLE[: 300 * 160].view(300, 160)
    left, right = checksum(matrix[:, :70], (0, (160, 1))), checksum(matrix[:, 70:], (70, (160, 1)))
    assert left + right == checksum(matrix)
    assert checksum(matrix.t(), (0, (1, 160))) == checksum(matrix) != checksum(matrix.t().contiguous())


def test_one_bit_and_two_places_change_it():
    swapped, changed = WHOLE.clone(), WHOLE.clone()
    swapped[[3, 2 * BLOCK + 3]] = swapped[[2 * BLOCK + 3, 3]]  # of one place in two blocks
    changed.view(torch.int32)[BLOCK + 1] ^= 1
    assert len({checksum(values).value for values in (WHOLE, swapped, changed)}) == 3
    assert checksum(WHOLE[:0]) == Checksum(0, 0) and checksum(torch.tensor(2.5)).count == 1
