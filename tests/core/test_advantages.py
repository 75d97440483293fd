import math
import statistics

import pytest
import torch

from mmrl.core.advantages import (
    combined_reward,
    divide_by_std,
    finite_gae,
    gae,
    gated_reward,
    group_advantages,
    has_singleton_group,
    moments,
    reward_statistics,
    subtract_james_stein_baseline,
    subtract_leave_one_out_mean,
    subtract_length_weighted_mean,
    subtract_mean,
    whiten,
)

NAN = math.nan
PAIRS = torch.tensor([0, 0, 1, 1, 2, 2])


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def less(baseline, rewards, index, *columns):
    """[rollout] rewards less a baseline, where index counts the groups from 0."""
    index = torch.as_tensor(index)
    return baseline(rewards, index, moments(rewards, index, int(index.max()) + 1), *columns)


def test_advantages_of_groups():
    # group 7: mean 1, deviations -1 0 1, unbiased std 1; group -2: mean 3, deviations -1 1, std sqrt(2)
    rewards, group = t(0, 2, 1, 4, 2), torch.tensor([7, -2, 7, -2, 7])
    found, within = group_advantages(rewards, group)
    half = 1 / math.sqrt(2)
    torch.testing.assert_close(found, t(-1, -half, 0, half, 1), atol=2e-6, rtol=0)
    assert within.mean.tolist() == [3, 1] and within.scored.tolist() == [2, 3]  # in the order of the ids
    torch.testing.assert_close(group_advantages(rewards, group, scale="none")[0], t(-1, -1, 0, 1, 1))
    # 0 + 2 x 1 and 3 - 2 x 1 around 1.5: a component of weight 0 is not looked at
    table = torch.tensor([[0.0, 1.0, NAN], [3.0, -1.0, NAN]])
    found, _ = group_advantages(table, torch.tensor([5, 5]), weights=torch.tensor([1.0, 2.0, 0.0]), scale="none")
    assert found.tolist() == [0.5, -0.5]


def test_integer_and_half_rewards_become_fp32():
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        found, _ = group_advantages(torch.tensor([0, 1, 1], dtype=dtype), torch.zeros(3, dtype=torch.int64))
        assert found.dtype == torch.float32 and found[0] < 0 < found[1]


def test_what_does_not_fit_is_refused():
    for wrong, message in (
        ({"group": torch.zeros(3, dtype=torch.int64)}, "group must have shape"),
        ({"weights": torch.ones(2)}, "weights must have shape"),
        ({"scale": "mad"}, "scale one of"),
    ):
        with pytest.raises(ValueError, match=message):
            group_advantages(**{"rewards": t(0, 1), "group": torch.zeros(2, dtype=torch.int64)} | wrong)
    with pytest.raises(ValueError, match="rewards have 2 components"):
        combined_reward(torch.zeros(3, 2), torch.ones(1))


# --- several rewards as one ---


def test_the_weighted_sum_does_not_look_at_what_has_no_weight():
    table = t(0, NAN, 2, NAN, 4, 1).view(3, 2)
    assert combined_reward(table, torch.tensor([0.5, 0.0])).tolist() == [0, 1, 2]
    torch.testing.assert_close(combined_reward(table, t(1, -1)), t(NAN, NAN, 3), equal_nan=True)


def test_gated_reward():
    # gate, accuracy, style with weights (ignored), 1, 2: 0, 1 x (1 + 2), 0.5 x (0 + 4); a closed gate needs no score
    table, weights = t(0, NAN, 3, 1, 1, 1, 0.5, 0, 2).view(3, 3), t(9, 1, 2)
    torch.testing.assert_close(gated_reward(table, weights, [0]), t(0, 3, 2))
    torch.testing.assert_close(gated_reward(table[:, [1, 2, 0]], weights[[1, 2, 0]], [2]), t(0, 3, 2))
    # two gates, of which one is closed: the others need no score either
    assert gated_reward(table[:1], weights, [0, 2]).tolist() == [0]
    # two gates: 0, 1 x 1 x 2, 0
    torch.testing.assert_close(gated_reward(table.nan_to_num(1), weights, [1, 0]), t(0, 2, 0))
    for gates in ([], [0, 1, 2]):
        with pytest.raises(ValueError, match="of the 3 rewards are gates"):
            gated_reward(table, weights, gates)


# --- less a baseline ---


def test_baselines_known_values():
    # mean 2; others' means 3, 2.5, 0.5; lengths 1 1 2: (0 + 1 + 10) / 4 = 2.75
    rewards, lengths = t(0, 1, 5), torch.tensor([1, 1, 2])
    torch.testing.assert_close(less(subtract_mean, rewards, [0] * 3), t(-2, -1, 3))
    torch.testing.assert_close(less(subtract_leave_one_out_mean, rewards, [0] * 3), t(-3, -1.5, 4.5))
    torch.testing.assert_close(less(subtract_length_weighted_mean, rewards, [0] * 3, lengths), t(-2.75, -1.75, 2.25))


def test_baselines_leave_out_what_is_not_scored():
    # 0 and 5 are left: mean 2.5, each other's; lengths 1 and 3: 15 / 4 = 3.75
    rewards, lengths = t(0, NAN, 5), torch.tensor([1, 8, 3])
    for baseline, columns, first, last in (
        (subtract_mean, (), -2.5, 2.5),
        (subtract_leave_one_out_mean, (), -5.0, 5.0),
        (subtract_length_weighted_mean, (lengths,), -3.75, 1.25),
        (subtract_james_stein_baseline, (), -5.0, 5.0),  # no other group: nothing to shrink towards
    ):
        torch.testing.assert_close(less(baseline, rewards, [0] * 3, *columns), t(first, NAN, last), equal_nan=True)


def test_shrinkage_known_value():
    # Groups a = (0, 2), b = (1, 3), c = (4, 6): every variance 2, n = 2, means 1, 2, 5.
    # For a: v = 2 / 1 = 2; the other means 2, 5 have variance 4.5, noise 2 / 2 = 1, tau2 = 3.5; q = 2 / 5.5 = 4/11;
    # the others' mean is 3.5. Rollout 0: b = 7/11 * 2 + 4/11 * 3.5 = 28/11, A = -28/11. Rollout 2: b = 14/11, A = 8/11.
    got = less(subtract_james_stein_baseline, t(0, 2, 1, 3, 4, 6), PAIRS)
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
        got = less(subtract_james_stein_baseline, rewards, group)
        torch.testing.assert_close(got.nan_to_num(0.0), slow_shrinkage(rewards.tolist(), group.tolist()))


def test_shrinkage_baseline_does_not_see_its_own_reward():
    rewards, group = t(0, 2, 5, 1, 3, 3, 4, 6, 9), [0, 0, 0, 1, 1, 1, 2, 2, 2]
    moved = rewards.clone()
    moved[1] = 40
    before, after = (
        less(subtract_james_stein_baseline, rewards, group),
        less(subtract_james_stein_baseline, moved, group),
    )
    torch.testing.assert_close(rewards[1] - before[1], moved[1] - after[1])


# --- over a scale ---


def test_differences_over_the_std_of_their_unit():
    # Units 0 2 1 4 and 2.5 0.5: stds by the standard library; the third one's values are equal
    rewards, units = [0.0, 2.0, 1.0, 4.0, 2.5, 0.5, 3.0, 3.0], torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    differences, eps = [-1.0, 1.0, 7.0, 0.0, 2.0, -2.0, 5.0, 6.0], 0.1
    first, second = statistics.stdev(rewards[:4]) + eps, statistics.stdev(rewards[4:6]) + eps
    found = divide_by_std(t(*differences), t(*rewards), units, 3, eps=eps)
    torch.testing.assert_close(found, t(-1 / first, 1 / first, 7 / first, 0, 2 / second, -2 / second, 0, 0))


def test_whitened():
    # 1, 3, 5 around 3 with a std of 2
    torch.testing.assert_close(whiten(t(1, NAN, 3, 5), eps=0.0), t(-1, NAN, 0, 1), equal_nan=True)
    torch.testing.assert_close(whiten(t(1, 3, 5), eps=2.0), t(-0.5, 0, 0.5))
    assert whiten(t(0.1, 0.1, 0.1)).tolist() == [0, 0, 0]


# --- what is told of them ---


def test_statistics_of_rewards():
    # 0 and 2 with a std of sqrt(2), 7 and 7, 5 alone; all five around 4.2: squares 17.64 + 4.84 + 7.84 x 2 + 0.64
    rewards, index = t(0, NAN, 2, 7, NAN, 7, 5), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    stats = reward_statistics(rewards, index == 0, index, 3)
    expected = {
        "groups": 3,
        "zero_variance_groups": 1 / 3,
        "small_groups": 1 / 3,
        "reward_nan_rate": 2 / 7,
        "reward_mean": 4.2,
        "reward_std": math.sqrt(38.8 / 4),
        "reward_std_within": math.sqrt(2) / 2,
    }
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected)


@pytest.mark.parametrize(("rewards", "lone"), [([1.0, 2, 3], True), ([1, 2, NAN], False), ([NAN, 2, 3], True)])
def test_a_group_of_one_counts_where_it_is_scored(rewards, lone):
    assert bool(has_singleton_group(t(*rewards), torch.tensor([0, 0, 1]))) is lone
    assert not has_singleton_group(t(*rewards), torch.tensor([0, 0, 0]))


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
