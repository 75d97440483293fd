import math

import pytest
import torch

from mmrl.core.ratios import log_ratio
from mmrl.core.surrogates import KINDS, surrogate

# ratios below, inside and beyond the default bounds [0.8, 1.28], and far away
RATIOS = (0.5, 1.1, 1.5, 4.0)
EXTRA = {"divergence_mask": {"divergence": torch.tensor([[1.0, 0.0, 1.0, 1.0]] * 2), "bound": 0.5}}


def evaluate(kind, ratios=RATIOS, **options):
    """Values, gradient and statistics for A = +2 (row 0) and A = -2 (row 1)."""
    lr = torch.tensor([ratios] * 2, dtype=torch.float64).log().requires_grad_()
    values, stats = surrogate(lr, torch.tensor([2.0, -2.0], dtype=torch.float64), kind=kind, **options)
    (grad,) = torch.autograd.grad(values.sum(), lr)
    return values.detach(), grad, stats


def close(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_clip():
    values, grad, stats = evaluate("clip")
    # A = 2: -min(2 r, 2 clamp(r)) stops at 1.28; A = -2: max(2 r, 2 clamp(r)) stops at 0.8; dr / dlog r = r
    close(values, [[-1.0, -2.2, -2.56, -2.56], [1.6, 2.2, 3.0, 8.0]])
    close(grad, [[-1.0, -2.2, 0, 0], [0, 2.2, 3.0, 8.0]])
    close(stats["clip_high"], [[0, 0, 1.0, 1.0], [0, 0, 0, 0]])
    close(stats["clip_low"], [[0.0, 0, 0, 0], [1.0, 0, 0, 0]])
    close(stats["ratio"], [list(RATIOS)] * 2)


def test_clip_bounds_are_used():
    values, _, _ = evaluate("clip", clip_low=0.4, clip_high=1.0)
    close(values, [[-1.0, -2.2, -3.0, -4.0], [1.2, 2.2, 3.0, 8.0]])


def test_dual_clip():
    values, grad, stats = evaluate("dual_clip")
    # as clip, but the loss of A = -2 is at most 3 * 2 = 6; A = 2 is untouched
    close(values, [[-1.0, -2.2, -2.56, -2.56], [1.6, 2.2, 3.0, 6.0]])
    close(grad, [[-1.0, -2.2, 0, 0], [0, 2.2, 3.0, 0]])
    close(stats["dual_clip"], [[0, 0, 0, 0.0], [0, 0, 0, 1.0]])
    values, _, _ = evaluate("dual_clip", cap=1.25)
    close(values, [[-1.0, -2.2, -2.56, -2.56], [1.6, 2.2, 2.5, 2.5]])


def test_cispo():
    _, grad, stats = evaluate("cispo")
    # the weight stops at the bounds, the gradient never does: -clamp(r) A for both signs
    close(grad, [[-1.6, -2.2, -2.56, -2.56], [1.6, 2.2, 2.56, 2.56]])
    close(stats["weight"], [[0.8, 1.1, 1.28, 1.28]] * 2)


def test_unclipped():
    values, grad, _ = evaluate("unclipped")
    close(values, [[-1.0, -2.2, -3.0, -8.0], [1.0, 2.2, 3.0, 8.0]])  # -r A on both sides, however far
    close(grad, [[-1.0, -2.2, -3.0, -8.0], [1.0, 2.2, 3.0, 8.0]])


def test_reinforce():
    values, grad, _ = evaluate("reinforce")
    close(grad, [[-2.0] * 4, [2.0] * 4])
    close(values, [[-2.0] * 4, [2.0] * 4])


def test_soft():
    values, grad, _ = evaluate("soft", ratios=(1.0, 1.0 + math.log(3)), tau_positive=1.0, tau_negative=2.0)
    # sigmoid(log 3) = 3/4, sigmoid(2 log 3) = 9/10
    # A = 2, tau 1: -2 * 4 * (1/2, 3/4); A = -2, tau 2: 2 * 2 * (1/2, 9/10)
    close(values, [[-4.0, -6.0], [2.0, 3.6]])
    # derivative -A 4 s (1 - s) r, which is -A at r = 1 for every tau
    r = 1 + math.log(3)
    close(grad, [[-2.0, -2 * 4 * 3 / 16 * r], [2.0, 2 * 4 * 9 / 100 * r]])


def test_divergence_mask():
    values, grad, stats = evaluate("divergence_mask", **EXTRA["divergence_mask"])
    # divergence is over the bound except in column 1; dropped are A > 0 with r > 1 and A < 0 with r < 1
    close(stats["dropped"], [[0, 0, 1.0, 1.0], [1.0, 0, 0, 0]])
    close(values, [[-1.0, -2.2, 0, 0], [0, 2.2, 3.0, 8.0]])
    close(grad, [[-1.0, -2.2, 0, 0], [0, 2.2, 3.0, 8.0]])


def test_gaussian_weight():
    # sigma = 1/2 and log r = 1: w = exp(-2), detached, so the gradient is -w r A = -2 e^-1
    values, grad, stats = evaluate("gaussian_weight", ratios=(1.0, math.e), sigma=0.5)
    close(grad, [[-2.0, -2 / math.e], [2.0, 2 / math.e]])
    close(values, [[-2.0, -2 / math.e], [2.0, 2 / math.e]])
    close(stats["weight"], [[1.0, math.exp(-2)]] * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_gradient_is_the_policy_gradient(kind):
    g = torch.Generator().manual_seed(0)
    logp = (-5 * torch.rand(3, 4, generator=g)).requires_grad_()
    advantages = torch.randn(3, 4, generator=g)
    extra = {"divergence": torch.zeros(3, 4), "bound": 0.1} if kind == "divergence_mask" else {}
    lr = log_ratio(logp, logp.detach(), torch.ones(3, 4))
    values, stats = surrogate(lr, advantages, kind=kind, **extra)
    values.sum().backward()
    torch.testing.assert_close(logp.grad, -advantages)
    assert (stats["ratio"] == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_detached_and_advantages_get_no_gradient(kind):
    lr = torch.tensor([RATIOS] * 2).log().requires_grad_()
    advantages = torch.tensor([2.0, -2.0], requires_grad=True)
    values, stats = surrogate(lr, advantages, kind=kind, **EXTRA.get(kind, {}))
    assert values.shape == lr.shape
    assert all(s.shape == lr.shape and not s.requires_grad and s.dtype == values.dtype for s in stats.values())
    values.sum().backward()
    assert advantages.grad is None


@pytest.mark.parametrize("kind", ["clip", "dual_clip", "soft"])
def test_gradcheck(kind):
    # these three have no detached part, so the gradient is that of the value
    lr = torch.tensor([RATIOS] * 2, dtype=torch.float64).log().requires_grad_()
    a = torch.tensor([0.7, -1.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: surrogate(x, a, kind=kind)[0], lr)


def test_bad_options():
    lr, a = torch.zeros(1, 2), torch.ones(1)
    with pytest.raises(ValueError, match="clip, dual_clip, cispo"):
        surrogate(lr, a, kind="ppo")
    with pytest.raises(ValueError, match="takes cap; got sigma"):
        surrogate(lr, a, kind="dual_clip", sigma=1.0)
    with pytest.raises(ValueError, match="takes no options; got cap"):
        surrogate(lr, a, kind="clip", cap=3.0)
    with pytest.raises(ValueError, match="needs divergence"):
        surrogate(lr, a, kind="divergence_mask", bound=0.1)
