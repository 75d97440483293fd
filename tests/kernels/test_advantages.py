import math

import pytest
import torch

from mmrl.core import advantages as core
from mmrl.kernels import gae, group_advantage, use

NAN = math.nan


def test_known_values(device):
    # group 0: 1, 3 (mean 2, std sqrt 2); group 1: equal; group 2: one NaN, so a single value; group 3: empty
    rewards = torch.tensor([1.0, 5, 3, 5, 7, NAN], device=device)
    group = torch.tensor([0, 1, 0, 1, 2, 2], device=device)
    got = group_advantage(rewards, group, 4, eps=0.0)
    a = 1 / math.sqrt(2)
    torch.testing.assert_close(got.advantages.cpu(), torch.tensor([-a, 0, a, 0, 0, 0]))
    torch.testing.assert_close(got.mean.cpu(), torch.tensor([2.0, 5, 7, 0]))
    torch.testing.assert_close(got.std.cpu(), torch.tensor([math.sqrt(2), 0, 0, 0]))
    assert got.scored.tolist() == [2, 2, 1, 0] and got.equal.tolist() == [False, True, True, True]
    out = group_advantage(rewards, group, 4, baseline="leave_one_out", scale="none").advantages
    assert out.tolist() == [-2, 0, 2, 0, 0, 0]
    assert group_advantage(rewards, group, 4, baseline="none", scale="none").advantages.tolist() == [1, 5, 3, 5, 7, 0]
    double = group_advantage(rewards, group, 4, weights=torch.full((1,), 2.0, device=device), scale="none")
    assert double.advantages.tolist() == [-2, 0, 2, 0, 0, 0]
    # K rewards: a component of weight 0 is not looked at, also where it is NaN
    table = torch.tensor([[1.0, NAN, 2], [2, NAN, 4]], device=device)
    weights = torch.tensor([3.0, 0, 0.5], device=device)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    got = group_advantage(table, zeros, 1, weights=weights, scale="none")
    assert got.mean.item() == 6 and got.advantages.tolist() == [-2, 2]


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_advantages_against_the_reference(device, baseline, scale):
    """Which is what computes in float64."""
    rewards = torch.randn(1500, 2)
    rewards[torch.rand(1500, 2) < 0.05] = NAN
    rewards[:40] = 0.1  # whole groups of equal rewards among them
    group = torch.cat([torch.arange(40) // 8, torch.randint(5, 130, (1460,))])
    order = torch.randperm(1500)
    rewards, group = rewards[order], group[order]
    weights = torch.tensor([1.0, -0.3])
    double = rewards.double(), group, 140
    want = group_advantage(*double, weights=weights.double(), baseline=baseline, scale=scale).advantages
    args = rewards.to(device), group.to(device), 140
    got = group_advantage(*args, weights=weights.to(device), baseline=baseline, scale=scale)
    torch.testing.assert_close(got.advantages.cpu().double(), want, atol=3e-5, rtol=1e-5)
    if baseline != "none":
        assert got.advantages[(group < 5).to(device)].count_nonzero() == 0
    # a rollout's advantage does not depend on which other groups there are, nor on where its group stands
    if scale != "batch_std":
        part = (group % 3 == 0).to(device)
        some = group_advantage(
            args[0][part], args[1][part], 140, weights=weights.to(device), baseline=baseline, scale=scale
        )
        torch.testing.assert_close(some.advantages, got.advantages[part], atol=1e-6, rtol=1e-6)


def test_bad_groups(device):
    rewards, group = torch.zeros(3, device=device), torch.tensor([0, 1, 2], device=device)
    for change, message in [
        ({"group": group[:2]}, r"group must have shape \[3\]"),
        ({"group": group.int()}, "group must be int64"),
        ({"rewards": rewards.bfloat16()}, "rewards must be float32"),
        ({"rewards": rewards[:0]}, "rewards is empty"),
        ({"weights": torch.ones(2, device=device)}, r"weights must have shape \[1\]"),
        ({"groups": 0}, "groups must be positive"),
        ({"baseline": "median"}, "baseline must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            group_advantage(**{"rewards": rewards, "group": group, "groups": 3} | change)
    for wrong in (group - 1, group + 1):
        if device == "cuda":
            assert group_advantage(rewards, wrong, 3).advantages.isnan().sum() == 1
        else:
            with pytest.raises(RuntimeError, match=r"group must be in \[0, 3\)"):
                group_advantage(rewards, wrong, 3)


def episodes(b, t):
    flags = [torch.rand(b, t) < share for share in (0.05, 0.03)]
    lengths = torch.randint(0, t + 1, (b, 1))
    lengths[0] = t
    mask = (torch.arange(t) < lengths) & (torch.rand(b, t) > 0.02)
    return [torch.randn(b, t), torch.randn(b, t), *flags, mask, torch.randn(b, t)]


def test_gae_known_values(device):
    # One row, gamma 0.5, lam 0.5; terminated at 1, cut off at the end with bootstrap 8.
    rewards, values = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[1.0, 2, 1, 2]])
    ends = torch.tensor([[False, True, False, False]])
    none, boot = torch.zeros_like(ends), torch.tensor([[0.0, 0, 0, 8]])
    args = [t.to(device) for t in (rewards, values, ends, none)]
    advantages, returns = gae(*args, gamma=0.5, lam=0.5, bootstrap=boot.to(device))
    # delta: 1 + 1 - 1 = 1; 2 - 2 = 0 (ended); 3 + 1 - 1 = 3; 4 + 4 - 2 = 6
    assert advantages.tolist() == [[1.0, 0.0, 4.5, 6.0]] and returns.tolist() == [[2.0, 2.0, 5.5, 8.0]]


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (3, 31), (7, 33), (9, 128), (17, 129), (2, 1000)])
def test_gae_against_the_core(device, rows, steps):
    rewards, values, terminated, truncated, mask, bootstrap = episodes(rows, steps)
    for t in (rewards, values, bootstrap):
        t[~mask] = NAN  # outside the mask anything may stand
    kwargs = {"gamma": 0.97, "lam": 0.9}
    want = core.gae(
        rewards.double(), values.double(), terminated, truncated, mask=mask, bootstrap=bootstrap.double(), **kwargs
    )
    args = [t.to(device) for t in (rewards, values, terminated, truncated)]
    got = gae(*args, mask=mask.to(device), bootstrap=bootstrap.to(device), **kwargs)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.cpu().double(), w, atol=2e-5, rtol=1e-5)
    alone = gae(*(t[-1:] for t in args), mask=mask[-1:].to(device), bootstrap=bootstrap[-1:].to(device), **kwargs)
    assert all(torch.equal(a, g[-1:]) for a, g in zip(alone, got, strict=True))


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_gae_what_is_not_finite_stays_in_its_episode(device, bad):
    """Two episodes in a row of 40 steps; the second one's reward spoils its own steps up to that one, and no others."""
    rewards, values, ends = torch.randn(1, 40), torch.randn(1, 40), torch.zeros(1, 40, dtype=torch.bool)
    ends[0, [9, 39]] = True
    args = [t.to(device) for t in (rewards, values, ends, torch.zeros_like(ends))]
    clean, _ = gae(*args, gamma=0.9, lam=0.9)
    args[0][0, 30] = bad
    spoiled, _ = gae(*args, gamma=0.9, lam=0.9)
    assert torch.equal(spoiled[0, :10], clean[0, :10]) and torch.equal(spoiled[0, 31:], clean[0, 31:])
    assert not spoiled[0, 10:31].isfinite().any()


def test_gae_cut_off_without_bootstrap(device):
    args = [torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)]
    ended = torch.zeros(2, 3, dtype=torch.bool, device=device)
    ended[:, 2] = True
    advantages, _ = gae(*args, ended, torch.zeros_like(ended), gamma=0.9, lam=0.9)
    assert advantages.count_nonzero() == 0
    ended[1, 2] = False
    if device == "cuda":
        assert gae(*args, ended, torch.zeros_like(ended), gamma=0.9, lam=0.9)[0].isnan().any(1).tolist() == [
            False,
            True,
        ]
    else:
        with pytest.raises(RuntimeError, match="cut off without termination; give bootstrap"):
            gae(*args, ended, torch.zeros_like(ended), gamma=0.9, lam=0.9)
    with pytest.raises(ValueError, match=r"values must have shape \[2, 3\]"):
        gae(args[0], args[1][:1], ended, ended, gamma=0.9, lam=0.9)
    with pytest.raises(ValueError, match="rewards must be float32"):
        gae(args[0].int(), args[1], ended, ended, gamma=0.9, lam=0.9)


def test_float64_is_computed_in_float64():
    use("cpu")
    rewards = torch.randn(6, dtype=torch.float64)
    got = group_advantage(rewards, torch.zeros(6, dtype=torch.int64), 1)
    assert got.advantages.dtype == torch.float64
    torch.testing.assert_close(got.advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-6))
