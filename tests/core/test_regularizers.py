import math

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from mmrl.core.regularizers import gaussian_kl, kl_estimate, token_divergence

NAN = math.nan


def policies():
    g = torch.Generator().manual_seed(0)
    return (torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))


def test_kl_known_values():
    logp, ref = torch.tensor([[math.log(2.0)]]), torch.zeros(1, 1)
    for kind, want in {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 + math.log(2) - 1}.items():
        assert kl_estimate(logp, ref, kind=kind).item() == pytest.approx(want)
    assert kl_estimate(torch.tensor([[90.0]]), ref, kind="k1").item() == 20


def test_k1_and_k3_are_unbiased():
    p, q = policies()
    exact = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_estimate(p, q, kind=kind)).sum(), exact)


def test_expected_gradients():
    # samples come from fixed p, as in training: k2 has the gradient of KL(p || q), k1 none, k3 that of KL(q || p)
    p, q = policies()
    logits = p.clone().requires_grad_()
    wanted = {
        "k1": torch.zeros(6, dtype=torch.float64),
        "k2": torch.autograd.grad(kl_divergence(Categorical(logits=logits), Categorical(logits=q)), logits)[0],
        "k3": torch.autograd.grad(kl_divergence(Categorical(logits=q), Categorical(logits=logits)), logits)[0],
    }
    for kind, want in wanted.items():
        loss = (p.exp() * kl_estimate(logits.log_softmax(0), q, kind=kind)).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], want)


def test_k3_is_accurate_near_zero():
    # d^2 / 2 for small d; in fp32 exp(-d) + d - 1 would round to 0 or to 6e-8
    got = kl_estimate(torch.tensor([1e-3]), torch.tensor([0.0]))
    assert got.item() == pytest.approx(5e-7, rel=2e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_masked_garbage(kind):
    logp = torch.tensor([[0.5, NAN]], requires_grad=True)
    values = kl_estimate(logp, torch.tensor([[0.1, math.inf]]), kind=kind, mask=torch.tensor([[1, 0]]))
    values.sum().backward()
    assert values[0, 1] == 0 and logp.grad[0, 1] == 0 and logp.grad[0, 0] != 0


def test_gaussian_kl_against_distributions():
    g = torch.Generator().manual_seed(1)
    mean, ref = (torch.randn(3, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    std = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    exact = kl_divergence(Normal(mean, std[:, None, None]), Normal(ref, std[:, None, None]))
    torch.testing.assert_close(gaussian_kl(mean, ref, std), exact.mean((1, 2)))
    torch.testing.assert_close(gaussian_kl(mean, ref, std, reduction="sum"), exact.sum((1, 2)))
    full = torch.rand(3, 2, 4, generator=g, dtype=torch.float64) + 0.5
    exact = kl_divergence(Normal(mean, full), Normal(ref, full))
    torch.testing.assert_close(gaussian_kl(mean, ref, full), exact.mean((1, 2)))
    # 3^2 / (2 * 2^2) for a scalar std and no further axis
    assert gaussian_kl(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor(2.0)).tolist() == [9 / 8]
    mean.requires_grad_()
    assert torch.autograd.gradcheck(lambda m: gaussian_kl(m, ref, std), mean)


def test_token_divergence():
    p, q = (torch.tensor([0.7, 0.2, 1.0, 0.5], dtype=torch.float64), torch.tensor([0.4, 0.2, 0.9, 1.0]).double())
    torch.testing.assert_close(token_divergence(p.log(), q.log()), (p - q).abs())
    exact = kl_divergence(Bernoulli(q[:2]), Bernoulli(p[:2]))
    torch.testing.assert_close(token_divergence(p.log(), q.log(), kind="kl")[:2], exact)
    edge = token_divergence(p.log(), q.log(), kind="kl")[2:]  # p = 1 with q < 1 is far away; q = 1 costs log(1 / p)
    assert edge[0] > 10 and edge[1].item() == pytest.approx(math.log(2))


def test_bad_options():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(x, x, kind="kl")
    with pytest.raises(ValueError, match="mean, sum"):
        gaussian_kl(x, x, torch.ones(2), reduction="none")
    with pytest.raises(ValueError, match="3 entries for 2"):
        gaussian_kl(x, x, torch.ones(3))
    with pytest.raises(ValueError, match="tv, kl"):
        token_divergence(x, x, kind="js")
