"""Weights and masks for decisions of another engine, against sums and products written out in Python."""

import math

import pytest
import torch

from mmrl.core.correction import LEVELS, correction_weight, effective_sample_size, log_weight

NAN, INF = math.nan, math.inf


def example(seed: int = 0, rows: int = 6, columns: int = 9):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    behaviour = old + 0.7 * torch.randn(rows, columns, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=g) < 0.7
    mask[0] = False  # a rollout of which nothing counts
    return old, behaviour, mask


def written_out(old, behaviour, mask, level) -> list[list[float]]:
    """exp(log_weight) of every counted decision, from probabilities."""
    found = []
    for row in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[row, t]]
        ratio = {t: math.exp(float(old[row, t])) / math.exp(float(behaviour[row, t])) for t in places}
        product = math.prod(ratio.values())
        unit = {"sequence": product, "geometric": product ** (1 / max(1, len(places)))}
        found.append([unit.get(level, ratio.get(t, 0.0)) if t in places else 0.0 for t in range(mask.shape[1])])
    return found


@pytest.mark.parametrize("cap", [0.8, 2.0])
@pytest.mark.parametrize("weight", [None, *LEVELS])
@pytest.mark.parametrize("reject", [None, *LEVELS])
def test_against_brute_force(weight, reject, cap):
    old, behaviour, mask = example()
    got, stats = correction_weight(old, behaviour, mask, weight=weight, cap=cap, reject=reject, low=0.8, high=1.2)
    raw = mask.double().tolist() if weight is None else written_out(old, behaviour, mask, weight)
    compared = None if reject is None else written_out(old, behaviour, mask, reject)
    want, clipped, rejected = (torch.zeros_like(old) for _ in range(3))
    for i in range(len(mask)):
        for t in range(mask.shape[1]):
            if not mask[i, t]:
                continue
            clipped[i, t] = raw[i][t] > cap
            rejected[i, t] = compared is not None and not 0.8 <= compared[i][t] <= 1.2
            want[i, t] = 0.0 if rejected[i, t] else min(raw[i][t], cap)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(stats["clipped"], clipped)
    torch.testing.assert_close(stats["rejected"], rejected)
    torch.testing.assert_close(stats["weight"], torch.tensor(raw, dtype=torch.float64))
    if reject is not None:
        assert 0 < float(rejected.sum()) < int(mask.sum())  # the bounds do cut something


def test_known_values():
    # Weights 1/2, 1, 3 and a masked garbage entry; ESS = 4.5^2 / (3 (1/4 + 1 + 9)) = 20.25 / 30.75.
    old = torch.tensor([[0.5, 1.0, 3.0, NAN]], dtype=torch.float64).log().requires_grad_()
    behaviour = torch.tensor([[0.0, 0.0, 0.0, -INF]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0]])
    weights, stats = correction_weight(old, behaviour, mask)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1, 2, 0]], dtype=torch.float64))
    assert not weights.requires_grad
    means = {name: float(value[0, :3].mean()) for name, value in stats.items()}
    assert means["logp_gap"] == pytest.approx((math.log(2) + math.log(3)) / 3)
    assert means["clipped"] == pytest.approx(1 / 3)
    assert effective_sample_size(means["weight"], means["weight_squared"]) == pytest.approx(20.25 / 30.75)
    assert all(value[0, 3] == 0 for value in stats.values())


@pytest.mark.parametrize("level", LEVELS)
def test_engines_that_agree_change_nothing(level):
    old, _, mask = example()
    weights, stats = correction_weight(old, old.clone(), mask, weight=level, reject=level)
    assert torch.equal(weights, mask.double())
    assert stats["logp_gap"].max() == 0 and stats["rejected"].max() == 0
    assert effective_sample_size(1.0, 1.0) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_padding_and_order_do_not_matter(level):
    old, behaviour, mask = example(1)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(2))
    plain = log_weight(old, behaviour, mask, level=level)
    wide = [torch.nn.functional.pad(x[order], (0, 3), value=v) for x, v in ((old, NAN), (behaviour, INF), (mask, 0))]
    torch.testing.assert_close(log_weight(*wide, level=level)[:, :-3], plain[order])


def test_a_ratio_that_would_overflow_is_bounded():
    old, behaviour = torch.zeros(1, 3), torch.full((1, 3), -100.0)
    assert log_weight(old, behaviour, torch.ones(1, 3), level="sequence").max() == 20.0


def test_an_unknown_level_is_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        log_weight(x, x, x, level="decision")
