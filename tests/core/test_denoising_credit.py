"""Trees, normalised log-ratios, chunks and the contrastive objective: known values and brute force."""

import math

import pytest
import torch

from mmrl.core.advantages import group_advantages
from mmrl.core.contrast import contrast
from mmrl.core.credit import branch_advantages
from mmrl.core.ratios import BOUND, aggregate_log_ratio, regulate_log_ratio
from mmrl.samplers.transitions import Coefficients, coefficients, compare_steps, gaussian_step, step_kl

NAN = math.nan


# --- trees ---


def test_a_tree_of_two_by_two_by_hand():
    """Leaves 1 2 | 3 6. At the first step the nodes are worth 1.5 and 4.5: mean 3, unbiased std 3 / sqrt 2. At the
    second the four leaves: mean 3, variance (4 + 1 + 0 + 9) / 3."""
    nodes = torch.tensor([[0, 0], [0, 1], [1, 2], [1, 3]])
    rewards = torch.tensor([1.0, 2, 3, 6])
    group = torch.zeros(4, dtype=torch.long)
    plain = branch_advantages(rewards, group, nodes, scale="none")
    assert plain.tolist() == [[-1.5, -2], [-1.5, -1], [1.5, 0], [1.5, 3]]
    scaled = branch_advantages(rewards, group, nodes)
    wanted = plain / torch.tensor([3 / math.sqrt(2), math.sqrt(14 / 3)])
    torch.testing.assert_close(scaled, wanted, atol=1e-5, rtol=1e-5)


def brute_force(rewards, group, nodes):
    result = torch.zeros(nodes.shape)
    for b, t in torch.cartesian_prod(torch.arange(len(rewards)), torch.arange(nodes.shape[1])).tolist():
        leaves = {}
        for r, g, n in zip(rewards.tolist(), group.tolist(), nodes[:, t].tolist(), strict=True):
            if g == int(group[b]) and not math.isnan(r):
                leaves.setdefault(n, []).append(r)
        worth = {n: sum(rs) / len(rs) for n, rs in leaves.items()}
        mine = worth.get(int(nodes[b, t]))
        if mine is None or len(worth) < 2:
            continue
        mean = sum(worth.values()) / len(worth)
        std = math.sqrt(sum((w - mean) ** 2 for w in worth.values()) / (len(worth) - 1))
        result[b, t] = (mine - mean) / (std + 1e-6)
    return result


def random_trees():
    """Two shuffled trees of 2 x 3 leaves, some unscored: among them all leaves of one node."""
    nodes = torch.stack([torch.arange(6) // 3, torch.arange(6)], 1).repeat(2, 1)
    group = torch.tensor([4] * 6 + [9] * 6)
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    rewards[[1, 6, 7, 8]] = NAN
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    return rewards[order], group[order], nodes[order]


def test_trees_equal_brute_force_and_unscored_leaves_are_left_out():
    rewards, group, nodes = random_trees()
    found = branch_advantages(rewards, group, nodes)
    torch.testing.assert_close(found, brute_force(rewards, group, nodes), atol=1e-5, rtol=1e-5)
    assert not found.isnan().any()
    assert not found[rewards.isnan(), 1].any()  # an unscored leaf has no credit at a step of its own ...
    lone = (group == 4) & rewards.isnan()
    assert found[lone, 0].item() != 0  # ... but its shared step has that of the scored leaves


@pytest.mark.parametrize("scale", ["group_std", "none"])
def test_a_tree_that_shares_nothing_is_a_group(scale):
    rewards = torch.tensor([1.0, 4, 2, 2, 0, NAN, 5, 5])
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    nodes = torch.arange(4).repeat(2)[:, None].expand(8, 3)
    found = branch_advantages(rewards, group, nodes, scale=scale)
    plain, _ = group_advantages(rewards[:, None], group, scale=scale)
    torch.testing.assert_close(found, plain.nan_to_num(0.0)[:, None].expand(8, 3), atol=1e-5, rtol=1e-5)


def test_equal_worth_is_exactly_zero_and_other_scales_are_refused():
    nodes, group = torch.tensor([[0], [0], [1], [1]]), torch.zeros(4, dtype=torch.long)
    assert not branch_advantages(torch.tensor([0.1, 0.3, 0.3, 0.1]), group, nodes).any()
    with pytest.raises(ValueError, match="group_std or none; got 'batch_std'"):
        branch_advantages(torch.zeros(4), group, nodes, scale="batch_std")


# --- log-ratios of Gaussian steps ---


def test_by_unit_over_chunks():
    ratio = torch.tensor([[1.0, 3, 5, 7], [2, NAN, 4, 60]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])
    chunks = torch.tensor([[0, 0, 1, 1]] * 2)
    assert aggregate_log_ratio(ratio, mask, level="segment", segments=chunks).tolist() == [
        [2, 2, 6, 6],
        [2, 0, BOUND, BOUND],
    ]
    assert aggregate_log_ratio(ratio, mask, level="sequence").tolist() == [[4] * 4, [BOUND, 0, BOUND, BOUND]]
    assert aggregate_log_ratio(ratio, mask).tolist() == [[1, 3, 5, 7], [2, 0, 4, BOUND]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_normalised_ratios_are_centred_and_spread_alike_at_every_step(reduction):
    """20000 draws from the old policy at four steps whose stds differ tenfold, the mean of the new policy equally far.

    With e standard normal and m the shift of the mean, the log-ratio of an element is m e / std - m^2 / (2 std^2): the
    centred one times std is m e, which knows no std."""
    n, size = 20000, (3,)
    stds, spread, raw_means = [0.05, 0.1, 0.2, 0.5], [], []
    for i, std in enumerate(stds):
        random = torch.Generator().manual_seed(i)
        step = tuple(torch.full((n,), c) for c in (0.9, -0.1, std))
        step = coefficients("ode", 0.5, 0.4)._replace(a_x=step[0], a_v=step[1], std=step[2])
        x, old = torch.randn(n, *size, generator=random), torch.randn(n, *size, generator=random)
        v = old + 0.5
        x_next, _, _ = gaussian_step(x, old, step, noise=torch.randn(n, *size, generator=random))
        ratio = compare_steps(x, v, old, step, x_next, reduction=reduction).log_ratio
        kl = step_kl(v, old, step, reduction=reduction)
        found = regulate_log_ratio(ratio[:, None], kl[:, None], step.std[:, None])
        error = float(found.std()) / math.sqrt(n)
        assert abs(float(found.mean())) < 4 * error
        raw_means.append(float(ratio.mean()))
        spread.append(float(found.std()))
    expected = 0.05 * math.sqrt(3) / (3 if reduction == "mean" else 1)
    assert spread == pytest.approx([expected] * 4, rel=0.03)
    assert raw_means[0] < 10 * raw_means[-1] < 0  # what was taken out


def test_the_gradient_of_the_normalised_ratio_is_that_of_its_value():
    """Through steps of the sampler in float64, against central differences in every number of the prediction; and the
    ratio is linear in it, so that the gradient is the same wherever the policy has moved to."""
    random = torch.Generator().manual_seed(3)
    x, old, noise = (torch.randn(2, 5, generator=random, dtype=torch.float64) for _ in range(3))
    step = Coefficients(*(torch.full((2,), c, dtype=torch.float64) for c in (0.9, -0.2, 0.15)))
    x_next = 0.9 * x - 0.2 * old + 0.15 * noise

    def value(v):
        found = compare_steps(x, v, old, step, x_next)
        return regulate_log_ratio(found.log_ratio[:, None], found.kl[:, None], step.std[:, None]).sum()

    gradients = []
    for moved in (0.3, -1.5):
        v = (old + moved).requires_grad_()
        (exact,) = torch.autograd.grad(value(v), v)
        gradients.append(exact)
        for row, i in ((0, 0), (0, 3), (1, 4)):
            h = torch.zeros_like(old)
            h[row, i] = 1e-4
            with torch.no_grad():
                difference = (value(v + h) - value(v - h)) / 2e-4
            assert float(exact[row, i]) == pytest.approx(float(difference), rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    # By hand: the mean moves by a_v, the residual is x' - old mean, and the ratio is their product / std, per element.
    torch.testing.assert_close(gradients[0], -0.2 * noise / 5, rtol=1e-9, atol=1e-12)


# --- contrast ---


def errors(v, old, target, b):
    return (b * v + (1 - b) * old - target) ** 2, ((1 + b) * old - b * v - target) ** 2


def test_contrast_by_hand():
    """v = 3, old = 1, target = 2, b = 1/2: the positive policy says 2, error 0; the negative one 0, error 4. With A = 1
    and bound 2, r = 1 / 4 + 1 / 2: bound / b (r 0 + (1 - r) 4) = 4."""
    v = torch.tensor([[3.0]], requires_grad=True)
    positive, negative = errors(v, 1.0, 2.0, 0.5)
    values, stats = contrast(positive, negative, torch.tensor([1.0]), strength=0.5, bound=2.0)
    assert float(values) == 4 and float(stats["optimality"]) == 0.75
    values.sum().backward()
    # d positive / dv = 2 (0) b = 0; d negative / dv = -2 b (0 - 2) = 2; times bound / b (1 - r) = 1
    assert float(v.grad) == 2


@pytest.mark.parametrize("strength", [0.1, 1.0])
@pytest.mark.parametrize("advantage", [-10.0, -1.0, 0.0, 1.0, 10.0])
def test_contrast_moves_towards_the_data_where_the_advantage_is_positive(advantage, strength):
    old, target = torch.tensor([[1.0]]), 2.0
    v = old.clone().requires_grad_()
    contrast(*errors(v, old, target, strength), torch.tensor([advantage]), strength=strength)[0].sum().backward()
    # at v = old: bound / b (r 2 b (old - target) - (1 - r) 2 b (old - target)) = 2 bound (2 r - 1) (old - target)
    r = min(1.0, max(0.0, advantage / 10 + 0.5))
    assert float(v.grad) == pytest.approx(2 * 5 * (2 * r - 1) * (1.0 - target), rel=1e-5, abs=1e-6)
    assert (float(-v.grad) > 0) == (advantage > 0)
