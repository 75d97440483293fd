"""Known values, densities and invariances of one denoising step."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch.distributions import Normal, kl_divergence

from mmrl import kernels
from mmrl.core.regularizers import gaussian_kl
from mmrl.samplers import sigmas
from mmrl.samplers.transitions import KINDS, coefficients, compare_steps, gaussian_step, step_kl

NOISY = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8, "ddim": 1.0}
SHAPE = (5, 3, 4, 4)


@pytest.fixture(autouse=True, params=["torch", "cpu"])
def backend(request):
    """Every test runs on the torch reference and on the C++ kernels."""
    kernels.use(request.param)
    yield
    kernels.use("auto")


def normal(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(kind, s=0.6, after=0.45):
    return coefficients(kind, s, after, noise=NOISY[kind])


@pytest.mark.parametrize("kind", ["ode", "flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize(("s", "after"), [(1.0, 0.9), (0.913, 0.858), (0.3, 0.1), (0.25, 0.0)])
def test_without_noise_a_step_is_euler_bit_for_bit(kind, s, after):
    s, after = torch.tensor(s), torch.tensor(after)
    x, v = normal(0), normal(1)
    found, _, mean = gaussian_step(x, v, coefficients(kind, s, after), noise=normal(2))
    assert torch.equal(found, x + (after - s) * v) and torch.equal(mean, found)


def test_flow_sde_by_hand():
    """s = 1/2, s' = 1/4, a = 1: g = 1, so a_x = 1 - 1/4, a_v = -(1 + 1/2) / 4, std = 1/2."""
    a_x, a_v, std = coefficients("flow_sde", 0.5, 0.25, noise=1.0)
    assert (float(a_x), float(a_v), float(std)) == (0.75, -0.375, 0.5)


def test_flow_sde_takes_the_second_sigma_at_pure_noise_only_inside_g():
    """s = 1, s' = 3/4 = the second sigma: g^2 = a^2 * 1 / (1/4), and the factor of v keeps 1 - s = 0."""
    a_x, a_v, std = coefficients("flow_sde", 1.0, 0.75, noise=0.5, sigma_second=0.75)
    assert (float(a_x), float(a_v), float(std)) == (1 - 0.5 * 0.25, -0.25, 0.5)
    with pytest.raises(ValueError, match="sigma_second"):
        coefficients("flow_sde", 1.0, 0.75, noise=0.5)


def test_dance_sde_by_hand():
    a_x, a_v, std = coefficients("dance_sde", 0.5, 0.25, noise=0.5)
    torch.testing.assert_close(torch.stack([a_x, a_v, std]), torch.tensor([1 - 0.0625, -0.25 * 1.125, 0.25]))


def test_cps_by_hand_and_at_full_noise():
    """eta = 1/3: sin(30 degrees) = 1/2, so std = s'/2 and q = s' sqrt(3) / 2."""
    a_x, a_v, std = coefficients("cps", 0.5, 0.4, noise=1 / 3)
    q = 0.4 * math.sqrt(3) / 2
    torch.testing.assert_close(torch.stack([a_x, a_v, std]), torch.tensor([0.6 + q, -0.5 * 0.6 + 0.5 * q, 0.2]))
    x, v, z = normal(0), normal(1), normal(2)
    found, _, _ = gaussian_step(x, v, coefficients("cps", 0.5, 0.4, noise=1.0), noise=z)
    torch.testing.assert_close(found, 0.6 * (x - 0.5 * v) + 0.4 * z)  # data estimate, noised anew


@pytest.mark.parametrize("kind", NOISY)
def test_replay_equals_sampling_bit_for_bit(kind):
    x, v = normal(0), normal(1)
    x_next, logp, mean = gaussian_step(x, v, step(kind), noise=normal(2))
    _, logp_again, _ = gaussian_step(x, v, step(kind), x_next=x_next)
    assert torch.equal(logp, logp_again)
    a_x, a_v, std = step(kind)
    assert torch.equal(mean, a_x * x + a_v * v) and torch.equal(x_next, mean + std * normal(2))
    alone = gaussian_step(x[3:4], v[3:4], step(kind), x_next=x_next[3:4])[1]
    assert torch.equal(logp[3:4], alone)


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logp_is_the_density_of_torch(kind, reduction):
    x, v = normal(0), normal(1)
    x_next, logp, mean = gaussian_step(x, v, step(kind), noise=normal(2), reduction=reduction)
    want = Normal(mean.double(), step(kind).std.double()).log_prob(x_next.double()).flatten(1)
    want = want.mean(1) if reduction == "mean" else want.sum(1)
    torch.testing.assert_close(logp.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", NOISY)
def test_gradient_is_the_closed_form(kind):
    x, v = normal(0), normal(1).requires_grad_()
    a_x, a_v, std = step(kind)
    x_next, _, mean = gaussian_step(x, v, step(kind), noise=normal(2))
    (found,) = torch.autograd.grad(gaussian_step(x, v, step(kind), x_next=x_next)[1].sum(), v)
    torch.testing.assert_close(found, ((x_next - mean) * a_v / (std**2 * x[0].numel())).detach())


@pytest.mark.parametrize("kind", NOISY)
def test_direct_log_ratio(kind):
    x, old = normal(0).double(), normal(1).double()
    x_next = gaussian_step(x, old, step(kind), noise=normal(2))[0].double()
    v = old + 1e-3 * normal(3)
    _, a_v, std = (c.double() for c in step(kind))
    mean, old_mean = (step(kind).a_x.double() * x + a_v * u for u in (v, old))
    want = (Normal(mean, std).log_prob(x_next) - Normal(old_mean, std).log_prob(x_next)).flatten(1).mean(1)
    found = compare_steps(x.float(), v.float(), old.float(), step(kind), x_next.float()).log_ratio
    torch.testing.assert_close(found.double(), want, rtol=2e-3, atol=1e-9)  # fp32 inputs move x_next - mean itself
    in_double = compare_steps(x, v, old, step(kind), x_next).log_ratio
    torch.testing.assert_close(in_double, want, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("kind", NOISY)
def test_direct_log_ratio_on_policy_is_0_and_has_the_gradient_of_logp(kind):
    x, v = normal(0), normal(1).requires_grad_()
    x_next = gaussian_step(x, v, step(kind), noise=normal(2))[0]
    ratio = compare_steps(x, v, v.detach(), step(kind), x_next).log_ratio
    assert torch.equal(ratio, torch.zeros(5))
    logp = gaussian_step(x, v, step(kind), x_next=x_next)[1]
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), v)[0] for value in (ratio, logp)))


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_step_kl_is_exact(kind, reduction):
    x, v, ref = normal(0), normal(1), normal(2)
    means = [gaussian_step(x, u, step(kind), noise=x)[2] for u in (v, ref)]
    std = step(kind).std
    elements = kl_divergence(*(Normal(m.double(), std.double()) for m in means)).flatten(1)
    want = elements.mean(1) if reduction == "mean" else elements.sum(1)
    found = step_kl(v, ref, step(kind), reduction=reduction)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gaussian_kl(*means, std, reduction=reduction), found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", NOISY)
def test_under_the_old_policy_the_log_ratio_has_mean_minus_kl(kind):
    n = 20_000
    x, old = normal(0, (1, 4)).expand(n, 4), normal(1, (1, 4)).expand(n, 4)
    v = old + 0.1 * normal(2, (1, 4))
    x_next = gaussian_step(x, old, step(kind), noise=normal(3, (n, 4)))[0]
    ratio = compare_steps(x, v, old, step(kind), x_next, reduction="sum").log_ratio
    kl = step_kl(v, old, step(kind), reduction="sum")[0]
    assert kl > 1e-4
    assert abs(float(ratio.mean() + kl)) < 4 * float(ratio.std()) / n**0.5


@pytest.mark.parametrize("kind", NOISY)
def test_the_sampled_residual_is_standard_normal(kind):
    """Kolmogorov-Smirnov: D sqrt(n) stays below 1.95 with probability 0.999."""
    n = 20_000
    from mmrl.samplers.chain import gaussian_noise

    x, v = normal(0, (n // 20, 20)), normal(1, (n // 20, 20))
    x_next, _, mean = gaussian_step(x, v, step(kind), noise=gaussian_noise(list(range(n // 20)), 3, (20,)))
    residual = ((x_next - mean) / step(kind).std).flatten().double().sort().values
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = (Normal(0.0, 1.0).cdf(residual) - ranks).abs().max()
    assert float(distance) * n**0.5 < 1.95


def variance_after(kind, noise, steps, data_variance=0.3):
    """Exact variance of a linear chain that starts at noise of variance 1 and follows the velocity of
    one-dimensional Gaussian data: v = c x with c = (s - (1 - s) q) / ((1 - s)^2 q + s^2)."""
    grid, variance = sigmas.linear(steps).double(), 1.0
    for s, after in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        a_x, a_v, std = (float(c) for c in coefficients(kind, s, after, noise=noise, sigma_second=float(grid[1])))
        c = (s - (1 - s) * data_variance) / ((1 - s) ** 2 * data_variance + s**2)
        variance = (a_x + a_v * c) ** 2 * variance + std**2
    return variance


@pytest.mark.parametrize(("kind", "noise"), [("ode", 0.0), ("flow_sde", 0.7), ("flow_sde", 1.2), ("dance_sde", 0.3)])
def test_the_sdes_keep_the_variance_of_gaussian_data_as_steps_grow(kind, noise):
    few, many = (abs(variance_after(kind, noise, steps) - 0.3) for steps in (20, 3200))
    assert many < 0.002 and few > 4 * many


def test_cps_does_not_and_is_not_expected_to():
    assert abs(variance_after("cps", 0.8, 3200) - 0.3) > 0.03


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_ddim_is_that_of_diffusers(eta, spacing):
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1 if spacing == "leading" else 0,
        timestep_spacing=spacing,
    )
    scheduler.set_timesteps(10)
    final = float(scheduler.final_alpha_cumprod)
    grid = sigmas.ddim_grid(scheduler.alphas_cumprod, scheduler.timesteps, final)
    x, e, z = normal(0), normal(1), normal(2)
    for i, time in enumerate(scheduler.timesteps):
        ours = gaussian_step(x, e, coefficients("ddim", grid.sigmas[i], grid.sigmas[i + 1], noise=eta), noise=z)[0]
        theirs = scheduler.step(e, time, x, eta=eta, variance_noise=z).prev_sample
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4 if i == 0 else 2e-5)


def test_ode_is_the_euler_scheduler_of_diffusers():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    grid = sigmas.shifted(10, 3.0)
    scheduler.set_timesteps(sigmas=grid[:-1].tolist())
    assert torch.equal(scheduler.sigmas, grid)
    x, v = normal(0), normal(1)
    for i, time in enumerate(scheduler.timesteps):
        ours = gaussian_step(x, v, coefficients("ode", grid[i], grid[i + 1]), noise=x)[0]
        assert torch.equal(ours, scheduler.step(v, time, x).prev_sample)
        x = ours


def test_rows_have_their_own_coefficients():
    s, after = torch.tensor([0.9, 0.6, 0.3, 0.2, 0.1]), torch.tensor([0.8, 0.4, 0.2, 0.1, 0.0])
    x, v, z = normal(0), normal(1), normal(2)
    together = gaussian_step(x, v, coefficients("flow_sde", s, after, noise=0.7), noise=z)
    for i in range(5):
        one = coefficients("flow_sde", float(s[i]), float(after[i]), noise=0.7)
        alone = gaussian_step(x[i : i + 1], v[i : i + 1], one, noise=z[i : i + 1])
        for whole, part in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[i : i + 1], part, rtol=1e-6, atol=1e-6)


def test_half_precision_inputs_are_computed_in_fp32():
    x, v = normal(0).bfloat16(), normal(1).bfloat16()
    x_next, logp, mean = gaussian_step(x, v, step("flow_sde"), noise=normal(2))
    assert x_next.dtype == logp.dtype == mean.dtype == torch.float32
    assert torch.equal(mean, gaussian_step(x.float(), v.float(), step("flow_sde"), noise=normal(2))[2])


def test_a_deterministic_step_is_no_decision():
    x, v = normal(0), normal(1).requires_grad_()
    euler = coefficients("ode", 0.5, 0.4)
    assert torch.equal(gaussian_step(x, v, euler, noise=normal(2))[1], torch.zeros(5))
    logp = gaussian_step(x, v, euler, x_next=normal(2))[1]
    assert torch.equal(logp, torch.zeros(5)) and torch.equal(step_kl(v, x, euler), torch.zeros(5))
    assert torch.equal(torch.autograd.grad(logp.sum(), v)[0], torch.zeros(SHAPE))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "euler"}, "unknown transition 'euler'; use one of ode, flow_sde"),
        ({"kind": "cps", "noise": 1.5}, "cps takes noise from 0 to 1, got 1.5"),
        ({"kind": "flow_sde", "noise": -0.1}, "takes noise of at least 0"),
        ({"kind": "ode", "sigma_next": 0.5}, "sigmas must decrease"),
    ],
)
def test_bad_transitions(arguments, message):
    arguments = {"sigma": 0.5, "sigma_next": 0.4, **arguments}
    with pytest.raises(ValueError, match=message):
        coefficients(**arguments)


def test_a_step_is_sampled_or_replayed():
    x = normal(0)
    for given in ({}, {"noise": x, "x_next": x}):
        with pytest.raises(ValueError, match="either noise"):
            gaussian_step(x, x, step("cps"), **given)
    with pytest.raises(ValueError, match="reduction"):
        gaussian_step(x, x, step("cps"), noise=x, reduction="max")


def test_every_kind_is_tested():
    assert set(KINDS) == {"ode", *NOISY}
