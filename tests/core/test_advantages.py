import math
import statistics

import pytest
import torch

from mmrl.core.advantages import BASELINES, COMPONENTS, SCALES, finite_gae, gae, group_advantages

NAN = math.nan


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def advantages(rewards, group, **options):
    return group_advantages(rewards, torch.as_tensor(group), **options)[0]


def test_grpo_known_value():
    # group 7: mean 1, deviations -1 0 1, unbiased std 1; group -2: mean 3, deviations -1 1, std sqrt(2)
    got = advantages(t(0, 2, 1, 4, 2), [7, -2, 7, -2, 7], eps=0.0)
    half = 1 / math.sqrt(2)
    torch.testing.assert_close(got, t(-1, -half, 0, half, 1))


def test_baselines_known_values():
    rewards, group = t(0, 1, 5), [3, 3, 3]
    # mean 2; others' means 3, 2.5, 0.5; lengths 1 1 2: (0 + 1 + 10) / 4 = 2.75
    torch.testing.assert_close(advantages(rewards, group, scale="none"), t(-2, -1, 3))
    torch.testing.assert_close(advantages(rewards, group, scale="none", baseline="leave_one_out"), t(-3, -1.5, 4.5))
    got = advantages(rewards, group, scale="none", baseline="length_weighted", lengths=torch.tensor([1, 1, 2]))
    torch.testing.assert_close(got, t(-2.75, -1.75, 2.25))
    torch.testing.assert_close(advantages(rewards, group, scale="none", baseline="none"), rewards)


def test_shrinkage_known_value():
    # Groups a = (0, 2), b = (1, 3), c = (4, 6): every variance 2, n = 2, means 1, 2, 5.
    # For a: v = 2 / 1 = 2; the other means 2, 5 have variance 4.5, noise 2 / 2 = 1, tau2 = 3.5; q = 2 / 5.5 = 4/11;
    # the others' mean is 3.5. Rollout 0: b = 7/11 * 2 + 4/11 * 3.5 = 28/11, A = -28/11. Rollout 2: b = 14/11, A = 8/11.
    got = advantages(t(0, 2, 1, 3, 4, 6), [0, 0, 1, 1, 2, 2], baseline="shrinkage", scale="none")
    torch.testing.assert_close(got[:2], t(-28 / 11, 8 / 11))


def slow_shrinkage(rewards, group):
    """The documented formula, one rollout at a time."""
    rows = {g: [r for r, h in zip(rewards, group, strict=True) if h == g and not math.isnan(r)] for g in set(group)}
    rows = {g: r for g, r in rows.items() if len(r) > 1}
    result = []
    for r, g in zip(rewards, group, strict=True):
        if math.isnan(r) or g not in rows or len(set(rows[g])) == 1:
            result.append(0.0)
            continue
        mine, others = rows[g], [values for h, values in rows.items() if h != g]
        own = (sum(mine) - r) / (len(mine) - 1)
        q, grand = 0.0, 0.0
        if len(others) > 1:
            means = [statistics.mean(o) for o in others]
            grand = statistics.mean(means)
            v = statistics.mean([statistics.variance(o) for o in others]) / (len(mine) - 1)
            noise = statistics.mean([statistics.variance(o) / len(o) for o in others])
            tau2 = max(0.0, statistics.variance(means) - noise)
            q = v / (v + tau2) if v > 0 else 0.0
        result.append(r - (1 - q) * own - q * grand)
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_shrinkage_against_loop(groups):
    g = torch.Generator().manual_seed(groups)
    for spread in (0.0, 3.0):
        centre = spread * torch.randn(groups, generator=g, dtype=torch.float64)
        group = torch.arange(groups).repeat_interleave(4)
        rewards = centre[group] + torch.randn(4 * groups, generator=g, dtype=torch.float64)
        rewards[0], rewards[-4:] = NAN, rewards[-1]
        got = advantages(rewards, group, baseline="shrinkage", scale="none")
        torch.testing.assert_close(got, slow_shrinkage(rewards.tolist(), group.tolist()))


def test_shrinkage_baseline_does_not_see_its_own_reward():
    rewards, group = t(0, 2, 5, 1, 3, 3, 4, 6, 9), [0, 0, 0, 1, 1, 1, 2, 2, 2]
    moved = rewards.clone()
    moved[1] = 40
    kwargs = {"baseline": "shrinkage", "scale": "none"}
    before, after = advantages(rewards, group, **kwargs), advantages(moved, group, **kwargs)
    torch.testing.assert_close(rewards[1] - before[1], moved[1] - after[1])


def test_scales_against_statistics():
    rewards, group = [0.0, 2.0, 1.0, 4.0, 2.5, 0.5], [0, 0, 1, 1, 2, 2]
    buckets = [9, 9, 9, 9, 4, 4]
    mean = [1.0, 1.0, 2.5, 2.5, 1.5, 1.5]
    whole, shared, last = (statistics.stdev(x) for x in (rewards, rewards[:4], rewards[4:]))
    eps = 0.1
    got = advantages(t(*rewards), group, scale="batch_std", eps=eps)
    torch.testing.assert_close(got, t(*[(r - m) / (whole + eps) for r, m in zip(rewards, mean, strict=True)]))
    got = advantages(t(*rewards), group, scale="bucket_std", buckets=torch.tensor(buckets), eps=eps)
    std = [shared] * 4 + [last] * 2
    torch.testing.assert_close(got, t(*[(r - m) / (s + eps) for r, m, s in zip(rewards, mean, std, strict=True)]))


def test_gdpo_known_value_and_resolution():
    # One group, component columns (0 0 1 1) and (0 1 0 1) with weights 1, 2: each normalises to -+c with the same c
    # (mean 1/2, deviations 1/2, std sqrt(1/3)); S = c (-3, 1, -1, 3), whose mean is 0 and unbiased std c sqrt(20 / 3).
    table = t(0, 0, 0, 1, 1, 0, 1, 1).view(4, 2)
    got = advantages(table, [5] * 4, components="normalise_each", weights=[1, 2], eps=0.0)
    torch.testing.assert_close(got, t(-3, 1, -1, 3) / math.sqrt(20 / 3))
    # The scale of a component does not matter here, but it does for a sum.
    scaled = table * t(1, 100)
    torch.testing.assert_close(advantages(scaled, [5] * 4, components="normalise_each", weights=[1, 2], eps=0.0), got)
    a, b = (advantages(x, [5] * 4, weights=[1, 2]) for x in (table, scaled))
    assert (a - b).abs().max() > 0.1


def test_gdpo_against_loop():
    g = torch.Generator().manual_seed(0)
    table, group = torch.randn(12, 3, generator=g, dtype=torch.float64), [0, 1, 2] * 4
    group_rows = [[i for i in range(12) if group[i] == j] for j in range(3)]
    w, eps, mixed = [1.0, -0.5, 2.0], 1e-3, [0.0] * 12
    for k in range(3):
        for rows in group_rows:
            column = [table[i, k].item() for i in rows]
            for i in rows:
                mixed[i] += w[k] * (table[i, k].item() - statistics.mean(column)) / (statistics.stdev(column) + eps)
    want = [(x - statistics.mean(mixed)) / (statistics.stdev(mixed) + eps) for x in mixed]
    got = advantages(table, group, components="normalise_each", weights=w, eps=eps)
    torch.testing.assert_close(got, t(*want))


def test_gated():
    # gate, accuracy, style with weights (ignored), 1, 2: 0, 1 * (1 + 2), 0.5 * (0 + 4); a closed gate needs no score
    table = t(0, NAN, 3, 1, 1, 1, 0.5, 0, 2).view(3, 3)
    got = advantages(table, [0] * 3, components="gated", weights=[9, 1, 2], baseline="none", scale="none")
    torch.testing.assert_close(got, t(0, 3, 2))
    # two gates: 0, 1 * 1 * 2, 0
    got = advantages(table.nan_to_num(1), [0] * 3, components="gated", weights=[9, 1, 2], gates=2, **RAW)
    torch.testing.assert_close(got, t(0, 2, 0))
    with pytest.raises(ValueError, match="gates"):
        advantages(table, [0] * 3, components="gated", gates=3)


RAW = {"baseline": "none", "scale": "none"}


def test_nan_left_out():
    got, stats = group_advantages(t(0, NAN, 2, 7, NAN, 7), torch.tensor([0, 0, 0, 1, 1, 1]), eps=0.0)
    half = 1 / math.sqrt(2)  # 0 and 2: mean 1, std sqrt(2)
    torch.testing.assert_close(got, t(-half, 0, half, 0, 0, 0))
    assert stats["reward_nan_rate"] == pytest.approx(2 / 6)
    assert stats["zero_variance_groups"] == 0.5
    assert stats["groups"] == 2
    assert stats["reward_mean"] == 4
    # weight 0 means the component is not looked at
    table = t(0, NAN, 2, NAN, 4, 1).view(3, 2)
    torch.testing.assert_close(advantages(table, [0] * 3, weights=[1, 0], scale="none"), t(-2, 0, 2))
    torch.testing.assert_close(advantages(table, [0] * 3, components="normalise_each", weights=[1, 1]), t(0, 0, 0))


def options(baseline, scale, rollouts):
    return {
        "baseline": baseline,
        "scale": scale,
        "lengths": torch.arange(rollouts) % 5 + 1 if baseline == "length_weighted" else None,
        "buckets": torch.arange(rollouts) // 4 % 2 if scale == "bucket_std" else None,
    }


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", [b for b in BASELINES if b != "none"])
def test_equal_rewards_give_exactly_zero(baseline, scale, components):
    # 0.1 seven times: the fp32 mean rounds away from 0.1; the other groups differ so that every scale is positive
    rewards = torch.tensor([0.1] * 7 + [0.3, 0.9, 0.2, 0.7, 1.3, 0.4])
    group = torch.tensor([4] * 7 + [1, 1, 1, 2, 2, 2])
    table = torch.stack([rewards, rewards], 1)
    got = advantages(table, group, components=components, **options(baseline, scale, 13))
    assert got[:7].tolist() == [0.0] * 7
    assert (got[7:] != 0).any()
    assert got.isfinite().all()
    flat = torch.full_like(table, 0.1)
    assert advantages(flat, group, components=components, **options(baseline, scale, 13)).tolist() == [0.0] * 13


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_permutation(baseline, scale, components):
    g = torch.Generator().manual_seed(1)
    table, order = torch.randn(9, 2, generator=g, dtype=torch.float64), torch.randperm(9, generator=g)
    table[2, 1] = NAN
    group = torch.tensor([5, -3, 5, 2**40, -3, 5, 2**40, -3, 2**40])
    chosen = options(baseline, scale, 9)
    straight = advantages(table, group, components=components, **chosen)
    moved = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in chosen.items()}
    torch.testing.assert_close(advantages(table[order], group[order], components=components, **moved), straight[order])
    assert straight[2] == 0 and straight.isfinite().all() and straight.abs().sum() > 1


def test_group_of_one():
    with pytest.warns(UserWarning, match="group of one"):
        got, stats = group_advantages(t(5, 1, 3), torch.tensor([0, 1, 1]), scale="none")
    torch.testing.assert_close(got, t(0, -1, 1))
    assert stats["small_groups"] == 0.5


def test_integer_and_half_rewards_become_fp32():
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        assert advantages(torch.tensor([0, 1, 1], dtype=dtype), [0, 0, 0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"baseline": "median"}, "leave_one_out"),
        ({"scale": "mad"}, "batch_std"),
        ({"components": "max"}, "gated"),
        ({"baseline": "length_weighted"}, "lengths"),
        ({"scale": "bucket_std"}, "buckets"),
        ({"weights": [1, 2]}, "weights"),
    ],
)
def test_bad_options(wrong, message):
    with pytest.raises(ValueError, match=message):
        advantages(t(0, 1), [0, 0], **wrong)
    with pytest.raises(ValueError, match="group"):
        advantages(t(0, 1), [0, 0, 0])


# ---------------------------------------------------------------------------------------------------------------- GAE


def flags(*values):
    return torch.tensor([values], dtype=torch.bool)


def test_gae_known_values():
    # gamma 0.5, lam 0.5, rewards 1, values 2, three steps. Terminated at the end: delta = (0, 0, -1), so
    # A = (-1/16, -1/4, -1). Truncated there with bootstrap 8: delta_2 = 1 + 4 - 2 = 3, A = (3/16, 3/4, 3).
    one, no, last = torch.ones(1, 3), flags(0, 0, 0), flags(0, 0, 1)
    kwargs = {"gamma": 0.5, "lam": 0.5}
    a, returns = gae(one, 2 * one, last, no, **kwargs)
    torch.testing.assert_close(a, torch.tensor([[-1 / 16, -1 / 4, -1.0]]))
    torch.testing.assert_close(returns, a + 2)
    a, _ = gae(one, 2 * one, no, last, bootstrap=torch.tensor([[NAN, NAN, 8.0]]), **kwargs)
    torch.testing.assert_close(a, torch.tensor([[3 / 16, 3 / 4, 3.0]]))
    both, _ = gae(one, 2 * one, last, last, bootstrap=8 * one, **kwargs)  # termination wins
    assert both[0, 2] == -1
    # an episode that the array cuts off is truncated, and says so when it cannot bootstrap
    a_cut, _ = gae(one, 2 * one, no, no, bootstrap=8 * one, **kwargs)
    torch.testing.assert_close(a_cut, a)
    with pytest.raises(RuntimeError, match="bootstrap"):
        gae(one, 2 * one, no, no, **kwargs)


def slow_gae(r, v, term, trunc, mask, boot, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the rest of the episode, written out for one row."""
    steps = len(r)

    def goes_on(i):
        return mask[i] and i + 1 < steps and mask[i + 1] and not term[i] and not trunc[i]

    def delta(i):
        after = 0.0 if term[i] else v[i + 1] if goes_on(i) else boot[i]
        return r[i] + gamma * after - v[i]

    result = []
    for start in range(steps):
        total, weight, i = 0.0, 1.0, start
        while mask[start]:
            total += weight * delta(i)
            if not goes_on(i):
                break
            weight, i = weight * gamma * lam, i + 1
        result.append(total)
    return result


def test_gae_against_explicit_sum_with_masked_garbage():
    g = torch.Generator().manual_seed(2)
    shape = (16, 9)
    r, v, boot = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    term, trunc, hidden = (torch.rand(shape, generator=g) < 0.2 for _ in range(3))
    mask = ~hidden
    r[hidden], v[hidden], boot[hidden] = NAN, math.inf, NAN
    a, returns = gae(r, v, term, trunc, gamma=0.9, lam=0.7, mask=mask, bootstrap=boot)
    rows = zip(r, v, term, trunc, mask, boot, strict=True)
    want = torch.tensor([slow_gae(*[x.tolist() for x in row], 0.9, 0.7) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(a, want)
    torch.testing.assert_close(returns[mask], (want + v)[mask])
    assert (returns[hidden] == 0).all()


def slow_finite_gae(r, v, term, trunc, mask, boot, gamma, lam):
    """The weighted mean of the estimates over 1, 2, ... steps of the rest of the episode, written out for one row."""
    found = []
    for t in range(len(r)):
        if not mask[t]:
            found.append(0.0)
            continue
        estimates, earned = [], 0.0
        for k in range(t, len(r)):
            earned += gamma ** (k - t) * r[k]
            last = k + 1 == len(r) or not mask[k + 1] or term[k] or trunc[k]
            after = (0.0 if term[k] else boot[k]) if last else v[k + 1]
            estimates.append(earned + gamma ** (k - t + 1) * after - v[t])
            if last:
                break
        weights = [lam**n for n in range(len(estimates))]
        found.append(sum(w * e for w, e in zip(weights, estimates, strict=True)) / sum(weights))
    return found


def test_finite_gae_against_the_mean_of_its_estimates():
    g = torch.Generator().manual_seed(4)
    shape = (16, 9)
    r, v, boot = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    term, trunc, hidden = (torch.rand(shape, generator=g) < 0.2 for _ in range(3))
    mask = ~hidden
    r[hidden], v[hidden], boot[hidden] = NAN, math.inf, NAN
    a, returns = finite_gae(r, v, term, trunc, gamma=0.9, lam=0.7, mask=mask, bootstrap=boot)
    rows = zip(r, v, term, trunc, mask, boot, strict=True)
    want = torch.tensor([slow_finite_gae(*[x.tolist() for x in row], 0.9, 0.7) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(a, want)
    torch.testing.assert_close(returns[mask], (want + v)[mask])
    assert (returns[hidden] == 0).all()


def test_gae_limits():
    # lam 1: returns are the discounted rewards to go, whatever the values; lam 0: the one-step error
    g = torch.Generator().manual_seed(3)
    r, v = torch.randn(1, 4, generator=g), torch.randn(1, 4, generator=g)
    end, no = flags(0, 0, 0, 1), flags(0, 0, 0, 0)
    _, returns = gae(r, v, end, no, gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns[0, 1], r[0, 1] + 0.5 * r[0, 2] + 0.25 * r[0, 3])
    a, _ = gae(r, v, end, no, gamma=0.5, lam=0.0)
    torch.testing.assert_close(a[0, 1], r[0, 1] + 0.5 * v[0, 2] - v[0, 1])
