import math

import pytest
import torch

from mmrl.core.reduce import MODES, denominator, reduce

NAN = math.nan
LENGTH = 5


def segments(like):
    """Two decisions a segment."""
    return torch.arange(like.shape[1]).expand(like.shape) // 2


def run(values, mask, mode, **kwargs):
    length = LENGTH if mode == "constant" else None
    return reduce(values, mask, mode=mode, length=length, segments=segments(mask), **kwargs)


def test_known_values():
    # rollouts: (1, 2, 3), (10), nothing counted. 16 / 4; (1.5 + 3 + 10) / 3; (2 + 10) / 2; (6 + 10) / 2; 16 / (2 * 5)
    values = torch.tensor([[1.0, 2, 3], [10, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    want = {"token_mean": 4.0, "segment_mean": 14.5 / 3, "sequence_mean": 6.0, "sequence_sum": 8.0, "constant": 1.6}
    for mode in MODES:
        assert run(values, mask, mode).item() == pytest.approx(want[mode])
    assert denominator(mask, mode="token_mean") == 4
    assert denominator(mask, mode="segment_mean", segments=segments(mask)) == 3
    assert all(denominator(mask, mode=mode) == 2 for mode in MODES[2:])


@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up_to_the_whole(mode):
    g = torch.Generator().manual_seed(0)
    values = torch.randn(7, 6, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.rand(7, 6, generator=g) < 0.5
    mask[2] = False
    mask[5:] = False  # the last part counts nothing at all
    whole = run(values, mask, mode)
    (grad,) = torch.autograd.grad(whole, values)
    parts = [slice(0, 1), slice(1, 5), slice(5, 7)]
    total = sum(denominator(mask[p], mode=mode, segments=segments(mask[p])) for p in parts)
    split = sum(run(values[p], mask[p], mode, total=total) for p in parts)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(torch.autograd.grad(split, values)[0], grad)
    order = torch.randperm(7, generator=g)
    torch.testing.assert_close(run(values[order], mask[order], mode), whole)


@pytest.mark.parametrize("mode", MODES)
def test_masked_garbage_changes_nothing(mode):
    g = torch.Generator().manual_seed(1)
    clean = torch.randn(3, 4, generator=g)
    mask = torch.rand(3, 4, generator=g) < 0.6
    dirty = clean.masked_fill(~mask, NAN)
    results = []
    for values in (clean, dirty):
        values.requires_grad_()
        loss = run(values, mask, mode)
        results.append((loss.detach(), *torch.autograd.grad(loss, values)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("total", [None, 0])
def test_nothing_counts(mode, total):
    values = torch.full((2, 3), NAN, requires_grad=True)
    loss = run(values, torch.zeros(2, 3), mode, total=total)
    assert loss.item() == 0
    loss.backward()
    assert (values.grad == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    g = torch.Generator().manual_seed(2)
    values = torch.randn(3, 4, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    assert torch.autograd.gradcheck(lambda v: run(v, mask, mode), values)


def test_bad_options():
    x = torch.ones(1, 2)
    for call in (lambda: reduce(x, x, mode="mean", total=3), lambda: denominator(x, mode="mean")):
        with pytest.raises(ValueError, match="token_mean, segment_mean, sequence_mean, sequence_sum, constant"):
            call()
    for length in (None, 0):
        with pytest.raises(ValueError, match="length"):
            reduce(x, x, mode="constant", length=length)
