import math
import os

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mmrl.core.regularizers import gaussian_kl
from mmrl.kernels import compiled, denoise_logprob, denoise_step, use

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 15, 16, 257, 8192, 8193, 20001)  # around a vector, a CUDA pack, a chunk; several chunks


def transition(n, d, dtype=torch.float32, device="cpu", seed=None):
    """x, v, noise, then a_x, a_v, std: those of n steps of a real sampler's size."""
    g = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
    x, v, noise = (torch.randn(n, d, generator=g) for _ in range(3))
    a_x, a_v, std = (torch.rand(n, generator=g) * s + 0.05 for s in (1.0, -0.5, 0.5))
    return [t.to(device) for t in (x, v.to(dtype), noise, a_x, a_v, std)]


def double(*tensors):
    return [t.detach().double().cpu() for t in tensors]


def close(got, want, atol, rtol=1e-6):
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), atol=atol, rtol=rtol)


def test_known_values(device):
    x, v, x_next = (torch.tensor([t], device=device) for t in ([2.0, 4], [1.0, -1], [3.0, 1.5]))
    a_x, a_v, std = (torch.tensor([c], device=device) for c in (0.5, 2.0, 0.5))
    # mean (3, 0), x' - mean (0, 1.5): logp of the elements -c and -4.5 - c with c = log 0.5 + log sqrt(2 pi)
    c = math.log(0.5) + 0.5 * math.log(2 * math.pi)
    # mean_old (3, 1): moved (0, -1), 2 (x' - mean_old) - moved (0, 2), over 2 * 0.25: (0, -4)
    # v_ref (1, 1): mean_ref (3, 4), 16 / 0.5 = 32
    old, ref = torch.tensor([[3.0, 1]], device=device), torch.tensor([[1.0, 1]], device=device)
    got = denoise_logprob(x, v, x_next, a_x, a_v, std, mean_old=old, v_ref=ref)
    assert [t.item() for t in got] == pytest.approx([-2.25 - c, -2.0, 16.0])
    got = denoise_logprob(x, v, x_next, a_x, a_v, std, mean_old=old, v_ref=ref, reduction="sum")
    assert [t.item() for t in got] == pytest.approx([-4.5 - 2 * c, -4.0, 32.0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_against_torch_distributions(device, size, dtype, reduction):
    x, v, noise, a_x, a_v, std = transition(3, size, dtype, device)
    v_old, v_ref = ((v + 0.1 * torch.randn(3, size, device=device)).to(dtype) for _ in range(2))
    x_next = denoise_step(x, v, noise, a_x, a_v, std).x_next
    weights = torch.randn(3, 3, device=device)
    leaf = v.clone().requires_grad_()
    got = denoise_logprob(x, leaf, x_next, a_x, a_v, std, v_old=v_old, v_ref=v_ref, reduction=reduction)
    (weights * torch.stack(got)).sum().backward()

    exact = v.double().cpu().requires_grad_()
    dx, dn, dax, dav, dstd, dold, dref = double(x, x_next, a_x[:, None], a_v[:, None], std[:, None], v_old, v_ref)
    now, old, ref = (Normal(dax * dx + dav * u, dstd) for u in (exact, dold, dref))
    over = torch.Tensor.mean if reduction == "mean" else torch.Tensor.sum
    scale = 1 if reduction == "mean" else size
    want = now.log_prob(dn), now.log_prob(dn) - old.log_prob(dn), kl_divergence(now, ref)
    want = torch.stack([over(w, 1) for w in want])
    (weights.double().cpu() * want).sum().backward()
    # x' is rounded to fp32, which std magnifies in each residual; over many elements that averages out.
    rounding = 2**-23 * (dn.abs().max() + 1) / dstd.min() * (noise.abs().max().item() + 1) / size**0.5
    for g, w in zip(got, want, strict=True):
        close(g, w, atol=(2e-6 + rounding.item()) * scale)
    tolerance = {torch.float32: 3e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    close(leaf.grad, exact.grad, atol=tolerance * exact.grad.abs().max().item() + 1e-6, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_is_the_equation_and_replay_equals_sampling_bit_for_bit(device, dtype):
    x, v, noise, a_x, a_v, std = transition(4, 8200, dtype, device)
    step = denoise_step(x, v, noise, a_x, a_v, std, keep_mean=True)
    mean = a_x[:, None] * x + a_v[:, None] * v.float()
    assert torch.equal(step.mean, mean)
    assert torch.equal(step.x_next, mean + std[:, None] * noise)
    replay = denoise_logprob(x, v, step.x_next, a_x, a_v, std, mean_old=step.mean, v_ref=v)
    assert torch.equal(replay.logp, step.logp)
    assert torch.equal(replay.log_ratio, torch.zeros_like(replay.logp)) and torch.equal(replay.kl, replay.log_ratio)
    assert torch.equal(denoise_logprob(x, v, step.x_next, a_x, a_v, std, v_old=v).log_ratio, replay.log_ratio)
    close(replay.kl, gaussian_kl(*double(mean, mean), *double(std)), atol=0)


def test_no_noise_is_euler_and_no_decision(device):
    x, v, noise, _, _, _ = transition(2, 33, device=device)
    one, dt = (torch.full((2,), c, device=device) for c in (1.0, -0.1))
    std = torch.tensor([0.0, 0.3], device=device)
    step = denoise_step(x, v, noise, one, dt, std)
    assert torch.equal(step.x_next[0], x[0] - 0.1 * v[0])
    leaf = v.clone().requires_grad_()
    replay = denoise_logprob(x, leaf, noise, one, dt, std, v_old=x, v_ref=noise)
    torch.stack(replay).sum().backward()
    assert step.logp[0] == 0 and [t[0].item() for t in replay] == [0, 0, 0] and leaf.grad[0].count_nonzero() == 0
    assert all(t[1] != 0 for t in replay) and leaf.grad[1].count_nonzero() == 33


def test_log_ratio_is_accurate_where_the_difference_of_logps_is_lost(device):
    x, v, noise, a_x, a_v, std = transition(2, 65536, device=device, seed=0)
    x_next = denoise_step(x, v, noise, a_x, a_v, std).x_next
    v_old = v + 1e-5 * torch.randn(v.shape, device=device)
    got = denoise_logprob(x, v, x_next, a_x, a_v, std, v_old=v_old).log_ratio
    args = double(x, x_next, a_x[:, None], a_v[:, None], std[:, None], v, v_old)
    dx, dn, dax, dav, dstd, dv, dold = args
    want = (Normal(dax * dx + dav * dv, dstd).log_prob(dn) - Normal(dax * dx + dav * dold, dstd).log_prob(dn)).mean(1)
    assert 1e-9 < want.abs().max() < 1e-5
    close(got, want, atol=1e-11, rtol=1e-5)


def test_rows_do_not_depend_on_batch_layout_or_threads(device):
    args = transition(6, 10_000, torch.bfloat16, device)
    x, v, noise, a_x, a_v, std = args
    kwargs = {"mean_old": noise, "v_ref": noise.bfloat16()}

    def run(rows):
        part = [t[rows] for t in (x, v, noise, a_x, a_v, std)]
        leaf = part[1].clone().requires_grad_()
        out = denoise_logprob(part[0], leaf, *part[2:], **{k: t[rows] for k, t in kwargs.items()})
        torch.stack(out).sum().backward()
        return [*out, leaf.grad]

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(2, 5)):
        for part, all_rows in zip(run(rows), whole, strict=True):
            assert torch.equal(part, all_rows[rows])
    # Every second element of a wider tensor, at an address that is not aligned, and rows far apart.
    wide = torch.zeros(6, 20_002, device=device, dtype=torch.bfloat16)
    strided = wide[:, ::2][:, 1:].copy_(v)
    offset = torch.zeros(6, 10_003, device=device)[:, 3:].copy_(x)
    assert torch.equal(denoise_logprob(offset, strided, noise, a_x, a_v, std).logp, whole[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    again = run(slice(None))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))


def test_axes_beyond_two_are_elements_of_the_row(device):
    x, v, noise, a_x, a_v, std = transition(3, 60, device=device)
    cube = [t.view(3, 4, 3, 5) for t in (x, v, noise)]
    step = denoise_step(*cube, a_x, a_v, std, keep_mean=True)
    flat = denoise_step(x, v, noise, a_x, a_v, std)
    assert step.x_next.shape == step.mean.shape == (3, 4, 3, 5)
    assert torch.equal(step.x_next.flatten(1), flat.x_next) and torch.equal(step.logp, flat.logp)


def test_not_a_number_reaches_its_row_and_no_other(device):
    x, v, noise, a_x, a_v, std = transition(3, 100, device=device)
    v[1, 99] = math.nan
    assert denoise_logprob(x, v, noise, a_x, a_v, std).logp.isnan().tolist() == [False, True, False]


def test_reference_gradient_by_differences():
    use("torch")
    x, v, noise, a_x, a_v, std = double(*transition(2, 5, seed=0))
    leaf = v.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda u: tuple(denoise_logprob(x, u, noise, a_x, a_v, std, v_old=noise, v_ref=x)), (leaf,)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"v": a["v"][:, :-1]}, r"v must have shape \[2, 6\], got \[2, 5\]"),
        (lambda a: a | {"x_next": a["x_next"].int()}, "x_next must be float32 or .*, got torch.int32"),
        (lambda a: a | {"a_v": a["a_v"].double()}, "a_v must be float32, got torch.float64"),
        (lambda a: a | {"std": a["std"][:1]}, "std must have shape"),
        (lambda a: a | {"x": a["x"][:0]}, "x is empty"),
        (lambda a: a | {"x": a["x"].to("meta")}, "v is on .*, the other tensors on meta"),
        (lambda a: a | {"v_ref": a["v"].bfloat16()}, "v_ref must be float32, got torch.bfloat16"),
        (lambda a: a | {"v_old": a["v"], "mean_old": a["v"]}, "not both"),
        (lambda a: a | {"reduction": "max"}, "reduction must be one of mean, sum"),
    ],
)
def test_bad_input_is_named(device, change, message):
    names = ("x", "v", "x_next", "a_x", "a_v", "std")
    with pytest.raises(ValueError, match=message):
        denoise_logprob(**change(dict(zip(names, transition(2, 6, device=device), strict=True))))


@pytest.mark.parametrize("std", [-1.0, math.nan])
def test_std_that_is_none(device, std):
    x, v, noise, a_x, a_v, s = transition(2, 6, device=device)
    s[1] = std
    for function in (denoise_logprob, denoise_step):
        if device == "cuda":  # the host does not wait to look
            assert function(x, v, noise, a_x, a_v, s).logp.isnan().tolist() == [False, True]
        else:
            with pytest.raises(RuntimeError, match="std must not be negative"):
                function(x, v, noise, a_x, a_v, s)


@pytest.mark.slow
def test_more_elements_than_an_int32_counts(device):
    """One row many times over, without memory of its own; the gradient has 2^31 elements and 4 GiB."""
    rows, size = 2**15 + 1, 2**16
    free = (
        torch.cuda.mem_get_info()[0] if device == "cuda" else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    )
    if not compiled.uses_compiled(torch.zeros(1, device=device)) or free < 3 * rows * size:
        pytest.skip("needs 6 GB of free memory and a kernel that makes no copies")
    torch.use_deterministic_algorithms(False)  # no time for filling

    def run(n):
        x, v, noise, *coefficients = transition(1, size, torch.bfloat16, device, seed=0)
        x, leaf, noise = (t.expand(n, size) for t in (x, v, noise))
        leaf = leaf.requires_grad_()
        logp = denoise_logprob(x, leaf, noise, *(c.expand(n).contiguous() for c in coefficients)).logp
        return logp.detach(), torch.autograd.grad(logp.sum(), leaf)[0]

    one, many = run(1), run(rows)
    assert torch.equal(many[0], one[0].expand(rows))
    for row in (0, 2**14, 2**15 - 1, 2**15):
        assert torch.equal(many[1][row], one[1][0]), row
