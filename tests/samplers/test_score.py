"""The scorer of chains and matchings by value, for latents of every shape."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mmrl.samplers import score
from mmrl.samplers.chain import Sampler, gaussian_noise
from mmrl.samplers.settings import CPS, DDIM, AllSteps, DanceSDE, FlowSDE
from mmrl.samplers.sigmas import Grid, ddim_grid, shifted

SHAPES = {"image": (3, 4, 4), "clip": (2, 3, 4, 2), "chunk": (6, 8)}  # 48 numbers each
ROLLOUTS, STEPS = 2, 3


def flow(steps=5, transition=None):
    sigmas = shifted(steps, 2.0)
    return Sampler(Grid(sigmas, sigmas[:-1]), transition or FlowSDE())


def latents(seed, shape=(48,), decisions=STEPS):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ROLLOUTS, decisions, 48, generator=random).view(ROLLOUTS, decisions, *shape)


def steps(sampler):
    return sampler.stochastic_coefficients(torch.tensor([[0, 1, 2], [1, 2, 3]]))


def chain(shape, *, old=True, reference=True, **options):
    made = flow()
    x, x_next, v = latents(1, shape), latents(2, shape), latents(3, shape).requires_grad_()
    more = {"old": latents(4, shape) if old else None, "reference": latents(5, shape) if reference else None}
    return score.chain_likelihood(v, x, x_next, steps(made), **more, **options), v


class TestChains:
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_by_torchs_distributions(self, shape, reduction):
        found, _ = chain(shape, reduction=reduction)
        step = steps(flow())
        for b in range(ROLLOUTS):
            for t in range(STEPS):
                a_x, a_v, std = (float(part[b, t]) for part in step)
                x, x_next, v, old, ref = (latents(seed, shape)[b, t].double() for seed in range(1, 6))
                now, before, home = (Normal(a_x * x + a_v * p, std) for p in (v, old, ref))
                logp, old_logp = now.log_prob(x_next), before.log_prob(x_next)
                expected = {
                    "logp": logp,
                    "log_ratio": logp - old_logp,
                    "divergence": kl_divergence(now, before),
                    "reference_kl": kl_divergence(now, home),
                    "reference_log_ratio": logp - home.log_prob(x_next),
                    "reference_error": (v - ref) ** 2,
                }
                for name, values in expected.items():
                    value = values.mean() if reduction == "mean" else values.sum()
                    assert float(found.columns[name][b, t].detach()) == pytest.approx(float(value), rel=1e-3), name
                assert float(found.std[b, t]) == pytest.approx(std)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_an_unscaled_step_is_scored_by_its_squared_error(self, reduction):
        """Flow-CPS: logp = -(x_next - mean)^2; its divergences stay those of the Gaussians."""
        found, v = chain((48,), reduction=reduction, unscaled=True)
        density, _ = chain((48,), reduction=reduction)
        x, x_next, prediction, old, ref = (latents(seed).double() for seed in range(1, 6))
        a_x, a_v, std = (c[..., None].double() for c in steps(flow()))

        def logp(velocity):
            squared = (x_next - a_x * x - a_v * velocity).square()
            return -(squared.mean(2) if reduction == "mean" else squared.sum(2))

        expected = {
            "logp": logp(prediction),
            "log_ratio": logp(prediction) - logp(old),
            "reference_log_ratio": logp(prediction) - logp(ref),
        }
        for name, values in expected.items():
            torch.testing.assert_close(found.columns[name].detach().double(), values, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.log_ratio, density.log_ratio * 2 * std[..., 0].float().square())
        assert torch.equal(found.divergence, density.divergence) and torch.equal(found.std, density.std)
        assert torch.equal(found.reference_kl, density.reference_kl)
        (gradient,) = torch.autograd.grad(found.log_ratio.sum(), v)
        by_hand = 2 * a_v * (x_next - a_x * x - a_v * prediction) / (48 if reduction == "mean" else 1)
        torch.testing.assert_close(gradient.double(), by_hand, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("counted", [False, True])
    def test_every_shape_is_scored_alike(self, counted):
        """The same numbers as an image, a clip and a chunk: values and gradients, bit for bit."""
        mask = (torch.arange(48) % 3 > 0).expand(ROLLOUTS, STEPS, 48)
        seen = []
        for shape in SHAPES.values():
            options = {"element_mask": mask.reshape(ROLLOUTS, STEPS, *shape)} if counted else {}
            found, v = chain(shape, **options)
            total = found.log_ratio.sum() + found.logp.sum() + found.reference_kl.sum() + found.divergence.sum()
            (gradient,) = torch.autograd.grad(total + found.reference_error.sum(), v)
            values = [value.detach().flatten() for name, value in found.columns.items()]
            seen.append([*values, gradient.flatten()])
        for other in seen[1:]:
            assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))

    def test_what_does_not_count_changes_nothing_but_the_constant(self):
        """A third of the elements: the ratio and the divergences are sums over the rest, over all 48."""
        shape, mask = (48,), torch.arange(48) % 3 > 0
        found, v = chain(shape, element_mask=mask)
        spoilt = latents(2, shape).masked_fill(~mask, 99.0)
        moved = latents(3, shape).masked_fill(~mask, -7.0)
        again = score.chain_likelihood(
            moved, latents(1, shape), spoilt, steps(flow()), old=latents(4, shape), element_mask=mask
        )
        assert torch.equal(found.log_ratio, again.log_ratio) and torch.equal(found.logp, again.logp)
        part, _ = chain(shape, reduction="sum")
        step = steps(flow())
        x, x_next, prediction, old, ref = (latents(seed, shape)[..., mask].double() for seed in range(1, 6))
        a_x, a_v, std = (c[..., None].double() for c in step)
        m = a_v * (prediction - old)
        ratio = (m * (2 * (x_next - a_x * x - a_v * old) - m) / (2 * std**2)).sum(-1) / 48
        torch.testing.assert_close(found.log_ratio.double(), ratio, rtol=1e-3, atol=1e-6)
        kl = (a_v * (prediction - ref) / std).square().sum(-1) / 2 / 48
        torch.testing.assert_close(found.reference_kl.double(), kl, rtol=1e-4, atol=1e-6)
        error = (prediction - ref).square().sum(-1) / 48
        torch.testing.assert_close(found.reference_error.double(), error, rtol=1e-4, atol=1e-6)
        (gradient,) = torch.autograd.grad(found.log_ratio.sum() + found.reference_kl.sum(), v)
        assert not gradient[..., ~mask].any() and gradient[..., mask].abs().min() > 0
        assert not torch.equal(part.log_ratio, found.log_ratio)

    @pytest.mark.parametrize("transition", [FlowSDE(), DanceSDE(noise=0.3), CPS()])
    def test_the_first_ratio_is_exactly_one(self, transition):
        made = flow(transition=transition)
        v = latents(3).requires_grad_()
        for old in (None, v.detach().clone()):
            found = score.chain_likelihood(v, latents(1), latents(2), steps(made), old=old)
            assert not found.log_ratio.any() and not found.divergence.any()
            assert found.log_ratio.requires_grad and found.reference_kl is None and found.reference_error is None


class TestMatchings:
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_by_hand(self, shape, reduction):
        v, target, old, ref = (latents(seed, shape).double() for seed in (1, 2, 3, 4))
        weight = torch.tensor([[1.0, 2.0, 0.5], [3.0, 1.0, 4.0]]).double()
        found = score.matching_likelihood(v, target, weight, old=old, reference=ref, reduction=reduction)

        def size(values):
            rows = values.square().flatten(2)
            return rows.mean(2) if reduction == "mean" else rows.sum(2)

        torch.testing.assert_close(found.logp, -weight * size(v - target))
        torch.testing.assert_close(found.log_ratio, weight * (size(old - target) - size(v - target)))
        torch.testing.assert_close(found.reference_error, size(v - ref))
        torch.testing.assert_close(found.reference_log_ratio, weight * (size(ref - target) - size(v - target)))
        assert found.reference_kl is found.divergence is found.std is None

    def test_elements_that_do_not_count_add_nothing(self):
        mask = torch.arange(48) % 4 > 0
        v = latents(1).requires_grad_()
        options = {"old": latents(3), "reference": latents(4), "element_mask": mask}
        found = score.matching_likelihood(v, latents(2), **options)
        again = score.matching_likelihood(v, latents(2).masked_fill(~mask, 50.0), **options)
        assert torch.equal(found.logp, again.logp) and torch.equal(found.log_ratio, again.log_ratio)
        expected = -(v - latents(2))[..., mask].square().sum(-1) / 48
        torch.testing.assert_close(found.logp, expected)
        total = found.logp.sum() + found.log_ratio.sum() + found.reference_error.sum()
        (gradient,) = torch.autograd.grad(total, v)
        assert not gradient[..., ~mask].any() and gradient[..., mask].any()

    def test_the_first_ratio_is_exactly_one(self):
        v = latents(1).requires_grad_()
        for old in (None, v.detach().clone()):
            assert not score.matching_likelihood(v, latents(2), old=old).log_ratio.any()
        assert not score.matching_likelihood(v, latents(2), reference=v.detach().clone()).reference_log_ratio.any()


class TestNoise:
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_noisy_samples_by_hand(self, shape):
        data, noise = latents(1, shape, 1), latents(2, shape)
        sigma = torch.tensor([[0.1, 0.6, 0.8], [0.6, 0.6, 0.28]])
        x, target = score.noisy_samples(data, noise, sigma, "velocity")
        torch.testing.assert_close(x[1, 2], 0.72 * data[1, 0] + 0.28 * noise[1, 2])
        torch.testing.assert_close(target[0, 1], noise[0, 1] - data[0, 0])
        x, target = score.noisy_samples(data, noise, sigma, "noise")  # 0.6 and 0.8: a Pythagorean triple
        torch.testing.assert_close(x[0, 2], 0.6 * data[0, 0] + 0.8 * noise[0, 2])
        assert torch.equal(target, noise)

    def test_draws_are_each_seeds_own_and_none_of_a_chain(self):
        found = score.draw_noises([7, 8], 3, (5,))
        assert torch.equal(found[1], score.draw_noises([8], 3, (5,))[0])
        assert torch.equal(found[1, 2], gaussian_noise([8], -4, (5,))[0])
        assert len({float(value) for value in found.flatten()}) == 30
        assert not torch.equal(found[0, 0], gaussian_noise([7], -1, (5,))[0])

    def test_levels_are_stratified(self):
        for number in (0, 1):
            found = score.stratified(5, 8, number)
            assert (found * 8).long().tolist() == list(range(8))
        assert not torch.equal(score.stratified(5, 8), score.stratified(5, 8, 1))


class TestWeights:
    def test_by_hand(self):
        """Sigmas 1, 0.75, 0.5, 0.25, 0 and dance's std: 0.3 sqrt(0.25) everywhere, so all weigh 1. Then steps of 1/2,
        1/4 and 1/4: 2, 4 and 4, of mean 3 over the first two."""
        sigmas = shifted(4, 1.0)
        made = Sampler(Grid(sigmas, sigmas[:-1]), DanceSDE(noise=0.3))
        torch.testing.assert_close(score.step_weights("std", made, AllSteps()), torch.ones(4))
        assert score.step_weights("none", made, AllSteps()) is None
        uneven = torch.tensor([1.0, 0.5, 0.25, 0.0])
        made = Sampler(Grid(uneven, uneven[:-1]), DanceSDE(noise=0.3))
        found = score.step_weights("inverse_dt", made, AllSteps())
        torch.testing.assert_close(found, torch.tensor([2 / 3, 4 / 3, 4 / 3]))

    def test_of_models_that_predict_noise(self):
        alphas = torch.linspace(0.999, 0.98, 100, dtype=torch.float64).cumprod(0)
        made = Sampler(ddim_grid(alphas, torch.tensor([90, 60, 30, 5])), DDIM(), space="noise")
        found = score.step_weights("std", made, AllSteps())
        torch.testing.assert_close(found, made.std / made.std[:3].mean())
        assert found[:3].mean().item() == pytest.approx(1)
