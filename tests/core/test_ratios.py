import math

import pytest
import torch

from mmrl.core.ratios import LEVELS, log_ratio

NAN, INF = math.nan, math.inf
SEGMENTS = torch.tensor([[7, 7, -1, 7], [3, 3, 7, 7]])


def example():
    logp = torch.tensor([[0.1, 0.5, -0.3, NAN], [0.2, INF, 0.4, 0.6]], dtype=torch.float64)
    old = torch.tensor([[0.0, 0.1, 0.0, 1.0], [NAN, 0.0, 0.1, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    return logp, old, mask


def test_known_values():
    # differences: row 0: 0.1 0.4 -0.3 | row 1: 0.3 0.5. Segments of row 0: (0.1 + 0.4) / 2 and -0.3; row 1: 0.8 / 2.
    # Sequences: 0.2 / 3 and 0.4.
    want = {
        "decision": [[0.1, 0.4, -0.3, 0], [0, 0, 0.3, 0.5]],
        "segment": [[0.25, 0.25, -0.3, 0], [0, 0, 0.4, 0.4]],
        "sequence": [[0.2 / 3] * 3 + [0], [0, 0, 0.4, 0.4]],
    }
    for level in LEVELS:
        got = log_ratio(*example(), level=level, segments=SEGMENTS)
        torch.testing.assert_close(got, torch.tensor(want[level], dtype=torch.float64))


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_is_clean_and_flows_through_the_mean(level):
    logp, old, mask = example()
    logp.requires_grad_()
    upstream = torch.tensor([[1.0, 2, 4, 8], [16, 32, 64, 128]], dtype=torch.float64)
    (log_ratio(logp, old, mask, level=level, segments=SEGMENTS) * upstream).sum().backward()
    # every counted logp gets the upstream gradients of its unit, divided by the unit's size
    want = {
        "decision": [[1, 2, 4, 0], [0, 0, 64, 128]],
        "segment": [[1.5, 1.5, 4, 0], [0, 0, 96, 96]],
        "sequence": [[7 / 3] * 3 + [0], [0, 0, 96, 96]],
    }
    torch.testing.assert_close(logp.grad, torch.tensor(want[level], dtype=torch.float64))


@pytest.mark.parametrize("level", LEVELS)
def test_exactly_zero_on_policy(level):
    g = torch.Generator().manual_seed(0)
    logp = -10 * torch.rand(4, 7, generator=g)
    mask, segments = torch.rand(4, 7, generator=g) < 0.8, torch.randint(0, 3, (4, 7), generator=g)
    assert (log_ratio(logp, logp.clone(), mask, level=level, segments=segments) == 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_permutation_and_segment_names(level):
    g = torch.Generator().manual_seed(1)
    logp, old = torch.randn(5, 6, generator=g), torch.randn(5, 6, generator=g)
    mask, segments = torch.rand(5, 6, generator=g) < 0.7, torch.randint(0, 3, (5, 6), generator=g)
    order = torch.randperm(5, generator=g)
    whole = log_ratio(logp, old, mask, level=level, segments=segments)
    moved = log_ratio(logp[order], old[order], mask[order], level=level, segments=2**40 - 3 * segments[order])
    torch.testing.assert_close(moved, whole[order])


def test_clamp():
    logp = torch.tensor([[50.0, -50.0, 3.0]])
    assert log_ratio(logp, torch.zeros(1, 3), torch.ones(1, 3)).tolist() == [[20, -20, 3]]


def test_bad_options():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="decision, segment, sequence"):
        log_ratio(x, x, x, level="token")
    with pytest.raises(ValueError, match="segments"):
        log_ratio(x, x, x, level="segment")
