import math

import pytest
import torch

from mmrl.core.controllers import AdaptiveKL
from mmrl.core.credit import from_step_rewards, per_decision
from mmrl.core.filters import keep_informative_groups

NAN = math.nan


def test_keep_informative_groups():
    # 8: 0 1 | 5: all 0.1 | -1: one scored | 6: equal once NaN is ignored | 3: 0 0 1 with a NaN | 2: 0.8 1
    rewards = torch.tensor([0, 1, 0.1, 0.1, 0.1, 3, NAN, 2, NAN, 2, 0, NAN, 0, 1, 0.8, 1])
    group = torch.tensor([8, 8, 5, 5, 5, -1, -1, 6, 6, 6, 3, 3, 3, 3, 2, 2])

    def kept(**bounds):
        return set(group[keep_informative_groups(rewards, group, **bounds)[0]].tolist())

    assert kept() == {8, 3, 2}
    assert kept(low=0.4) == {8, 2}  # means 1/2, 1/3, 0.9
    assert kept(high=0.8) == {8, 3}
    assert kept(low=0.5, high=0.5) == {8}  # the bounds belong to the range
    keep, stats = keep_informative_groups(rewards, group, low=0.4)
    assert {k: round(6 * v.item()) for k, v in stats.items()} == {
        "kept_groups": 2,
        "equal_groups": 2,
        "small_groups": 1,
        "out_of_range_groups": 1,
    }
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_informative_groups(rewards[order], group[order], low=0.4)[0], keep[order])
    with pytest.raises(ValueError, match="must both be"):
        keep_informative_groups(rewards, group[:3])


def test_per_decision():
    got = per_decision(torch.tensor([2.0, -1.0]), torch.tensor([[1, 1, 0], [0, 1, 1]]))
    assert got.tolist() == [[2, 2, 0], [0, -1, -1]]


def test_from_step_rewards():
    # gamma 1/2: 4; a masked step; 1 + 4/4 = 2; 8 + 2/2 = 9
    got = from_step_rewards(torch.tensor([[8.0, 1, NAN, 4]]), torch.tensor([[1, 1, 0, 1]]), gamma=0.5)
    assert got.tolist() == [[9, 2, 0, 4]]
    got = from_step_rewards(torch.tensor([[1.0, 2, 3]]), torch.ones(1, 3))
    assert got.tolist() == [[6, 5, 3]]


def test_adaptive_kl():
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    # far above: the error is clipped to 0.2, so 0.1 * (1 + 0.2 * 100 / 1000) = 0.102; on target: unchanged
    assert controller.update(60.0, 100) == pytest.approx(0.102)
    assert controller.update(6.0, 100) == pytest.approx(0.102)
    # 5.4 / 6 - 1 = -0.1
    assert controller.update(5.4, 100) == pytest.approx(0.102 * 0.99)
    resumed = AdaptiveKL(1.0, target=6.0, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.update(0.0, 100) == controller.update(0.0, 100) == pytest.approx(0.102 * 0.99 * 0.98)
    with pytest.raises(ValueError, match="positive"):
        AdaptiveKL(0.1, target=0.0, horizon=10)
