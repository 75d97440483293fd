import math
import os

import pytest
import torch

from mmrl.kernels import compiled, hidden_logprob, token_logprob, use

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def brute(logits, targets, temperature=1.0):
    """logp, entropy, sum of squares from float64 probabilities."""
    z = logits.double().cpu() / temperature
    p = z.softmax(-1)
    terms = torch.where(p > 0, p * z.log_softmax(-1).clamp(min=-1e9), 0)
    logp = z.log_softmax(-1).gather(-1, targets.cpu()[..., None]).squeeze(-1)
    return torch.stack([logp, -terms.sum(-1), p.square().sum(-1)])


def both(logits, targets, weights, **kwargs):
    """Values and gradient of the operator, and of float64."""
    leaf, exact = logits.clone().requires_grad_(), logits.double().cpu().requires_grad_()
    got = torch.stack(token_logprob(leaf, targets, **kwargs))
    (weights * got).sum().backward()
    want = brute(exact, targets, **kwargs)
    (weights.double().cpu() * want).sum().backward()
    return got.detach().double().cpu(), want.detach(), leaf.grad, exact.grad


def test_known_values(device):
    logits = torch.log(torch.tensor([[1.0, 2, 1], [8, 1, 1]], device=device))
    got = token_logprob(logits, torch.tensor([1, 0], device=device))
    torch.testing.assert_close(got.logp.exp().cpu(), torch.tensor([0.5, 0.8]))
    torch.testing.assert_close(got.square_sum.cpu(), torch.tensor([0.375, 0.66]))
    entropy = [1.5 * math.log(2), -0.8 * math.log(0.8) - 0.2 * math.log(0.1)]
    torch.testing.assert_close(got.entropy.cpu(), torch.tensor(entropy))
    # temperature 0.5 squares the odds: 1 : 4 : 1
    half = token_logprob(logits[:1], torch.tensor([1], device=device), temperature=0.5)
    assert half.logp.item() == pytest.approx(math.log(4 / 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 17, 2048, 2049, 8193, 30011])
def test_against_float64(device, vocabulary, dtype):
    logits = (torch.randn(4, vocabulary, device=device) * 3).to(dtype)
    targets = torch.randint(vocabulary, (4,), device=device)
    weights = torch.randn(3, 4, device=device)
    got, want, grad, exact = both(logits, targets, weights, temperature=0.7)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(grad.double().cpu(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_shift_of_all_logits_costs_nothing(device, shift):
    coarse = torch.randn(3, 5000, device=device).mul(64).round().div(64)  # exact in fp32 at 1e4
    targets = torch.randint(5000, (3,), device=device)
    weights = torch.randn(3, 3, device=device)
    got, want, grad, exact = both(coarse + shift, targets, weights)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-6)
    torch.testing.assert_close(grad.double().cpu(), exact, atol=1e-6, rtol=1e-4)


def test_extreme_logits(device):
    infinite = torch.full((4, 3000), -math.inf, device=device)
    infinite[0, 2999] = -5000.0  # one possible token
    infinite[1, [0, 2500]] = 3e38  # two equal ones
    infinite[2] = 3e38
    infinite[3] = -90.0  # all far below 0
    infinite[3, 7] = -80.0
    targets = torch.tensor([2999, 2500, 11, 7], device=device)
    weights = torch.ones(3, 4, device=device)
    got, _, grad, _ = both(infinite, targets, weights)
    rest = 2999 * math.exp(-10)
    want = torch.tensor(
        [
            [0.0, -math.log(2), -math.log(3000), -math.log1p(rest)],
            [0.0, math.log(2), math.log(3000), math.log1p(rest) + 10 * rest / (1 + rest)],
            [1.0, 0.5, 1 / 3000, (1 + 2999 * math.exp(-20)) / (1 + rest) ** 2],
        ]
    )
    torch.testing.assert_close(got.float(), want, atol=1e-5, rtol=1e-5)
    assert grad.isfinite().all()
    assert torch.equal(grad[0, :2999], torch.zeros(2999, device=device))  # nothing to the impossible
    logits = torch.randn(2, 40, device=device)
    logits[1, 30] = math.nan
    bad = token_logprob(logits, torch.tensor([0, 0], device=device))
    assert all(t.isnan().tolist() == [False, True] for t in bad)


def test_an_impossible_target_has_no_likelihood(device):
    logits = torch.zeros(1, 4, device=device)
    logits[0, 2] = -math.inf
    got = token_logprob(logits, torch.tensor([2], device=device))
    assert got.logp.item() == -math.inf and got.entropy.item() == pytest.approx(math.log(3))


def test_a_slice_of_a_batch_is_read_in_place_and_a_row_stands_alone(device):
    batch = torch.randn(3, 5, 700, device=device)
    targets = torch.randint(700, (3, 4), device=device)
    leaf = batch.clone().requires_grad_()
    got = token_logprob(leaf[:, :-1], targets)
    torch.stack(got).sum().backward()
    assert got.logp.shape == (3, 4)
    assert torch.equal(leaf.grad[:, -1], torch.zeros(3, 700, device=device))
    single = batch[1, 2:3].clone().requires_grad_()
    one = token_logprob(single, targets[1, 2:3])
    torch.stack(one).sum().backward()
    assert all(torch.equal(a[1, 2:3], b) for a, b in zip(got, one, strict=True))
    assert torch.equal(leaf.grad[1, 2:3], single.grad)
    # other memory layouts of the same numbers
    columns_first = batch[:, 0].t().contiguous().t()
    for other in (columns_first, batch.flatten(1)[:, :700]):
        assert torch.equal(token_logprob(other, targets[:, 0]).logp, got.logp[:, 0])


def test_threads_change_nothing(device):
    logits, targets = torch.randn(64, 4000, device=device), torch.randint(4000, (64,), device=device)
    before = torch.stack(token_logprob(logits, targets))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    after = torch.stack(token_logprob(logits, targets))
    torch.set_num_threads(threads)
    assert torch.equal(before, after)


def test_columns_are_a_distribution_of_their_own(device):
    logits = torch.randn(3, 2, 50, device=device)
    targets = torch.randint(20, 37, (3, 2), device=device)
    leaf = logits.clone().requires_grad_()
    got = token_logprob(leaf, targets, columns=(20, 37))
    want = brute(logits[..., 20:37], targets - 20)
    torch.testing.assert_close(torch.stack(got).detach().double().cpu(), want, atol=2e-6, rtol=1e-6)
    got.logp.sum().backward()
    outside = torch.cat([leaf.grad[..., :20], leaf.grad[..., 37:]], -1)
    assert torch.equal(outside, torch.zeros_like(outside)) and leaf.grad[..., 20:37].abs().min() > 0


@pytest.mark.parametrize("chunk", [None, 1, 3, 64])
@pytest.mark.parametrize("columns", [None, (5, 90)])
def test_hidden_states_give_what_their_logits_give(device, chunk, columns):
    hidden, weight = torch.randn(2, 5, 32, device=device), torch.randn(101, 32, device=device) / 5
    targets = torch.randint(5, 90, (2, 5), device=device)
    mix = torch.randn(3, 2, 5, device=device)

    def run(function):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = torch.stack(function(h, w))
        (mix * out).sum().backward()
        return out.detach(), h.grad, w.grad

    got = run(lambda h, w: hidden_logprob(h, w, targets, temperature=1.3, columns=columns, chunk=chunk))
    want = run(lambda h, w: token_logprob(h @ w.t(), targets, temperature=1.3, columns=columns))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_excluded_tokens_are_impossible(device):
    hidden, weight = torch.randn(9, 32, device=device), torch.randn(50, 32, device=device)
    targets, excluded = torch.randint(10, 50, (9,), device=device), torch.tensor([9, 0, 3], device=device)
    mix = torch.randn(3, 9, device=device)
    kept = torch.tensor([i for i in range(50) if i not in (0, 3, 9)], device=device)

    def run(w, t, **kwargs):
        h, w = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        out = torch.stack(hidden_logprob(h, w, t, chunk=4, **kwargs))
        (mix * out).sum().backward()
        return out.detach(), h.grad, w.grad

    got = run(weight, targets, excluded=excluded)
    want = run(weight[kept], targets - 3)
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[2][kept], want[2], atol=1e-5, rtol=1e-5)
    assert got[2][excluded].count_nonzero() == 0
    with pytest.raises(ValueError, match="columns or excluded"):
        hidden_logprob(hidden, weight, targets, columns=(0, 50), excluded=excluded)


def test_hidden_states_in_bf16_add_the_chunks_of_the_matrix_gradient_in_fp32(device):
    torch.manual_seed(0)  # the errors told apart here are of one size over seeds, not of another
    hidden = torch.randn(300, 16, device=device).bfloat16()
    weight = torch.randn(40, 16, device=device).bfloat16()
    targets = torch.randint(40, (300,), device=device)

    def gradient(chunk):
        w = weight.clone().requires_grad_()
        hidden_logprob(hidden, w, targets, chunk=chunk).logp.sum().backward()
        return w.grad.double()

    exact = weight.double().requires_grad_()
    brute(hidden.double().cpu() @ exact.cpu().t(), targets)[0].sum().backward()
    error = (gradient(10) - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 0.02  # bf16 logits; a sum of 30 chunks in bf16 would give 0.03 and more


def test_a_frozen_matrix_gets_no_gradient(device):
    hidden, weight = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(11, 8, device=device)
    hidden_logprob(hidden, weight, torch.arange(4, device=device)).logp.sum().backward()
    assert hidden.grad.abs().sum() > 0 and weight.grad is None


def test_reference_gradient_by_differences():
    use("torch")
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(4, (2, 3), generator=g)
    assert torch.autograd.gradcheck(lambda z: tuple(token_logprob(z, targets, temperature=0.6)), (logits,))


def test_bad_input_is_named(device):
    logits, targets = torch.zeros(2, 5, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for change, message in [
        ({"logits": logits.int()}, "logits must be float32 or"),
        ({"targets": targets.int()}, "targets must be int64"),
        ({"targets": targets[:1]}, r"targets have shape \[1\], but logits have \[2, 5\]"),
        ({"logits": logits[:, :0]}, "logits is empty"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"columns": (3, 6)}, "columns 3..6 must lie within the 5 columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            token_logprob(**{"logits": logits, "targets": targets} | change)
    with pytest.raises(ValueError, match=r"weight must have shape \[7, 5\], got \[7, 4\]"):
        hidden_logprob(logits, torch.zeros(7, 4, device=device), targets)


@pytest.mark.parametrize("target", [-1, 5])
def test_target_out_of_range(device, target):
    logits = torch.zeros(2, 5, device=device)
    targets = torch.tensor([0, target], device=device)
    if device == "cuda":
        assert token_logprob(logits, targets).logp.isnan().tolist() == [False, True]
    else:
        with pytest.raises(RuntimeError, match=r"targets must be in \[0, 5\)"):
            token_logprob(logits, targets)


@pytest.mark.slow
def test_more_elements_than_an_int32_counts(device):
    rows, vocabulary = 3, 2**30 + 8
    free = (
        torch.cuda.mem_get_info()[0] if device == "cuda" else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    )
    if not compiled.uses_compiled(torch.zeros(1, device=device)) or free < 4 * rows * vocabulary:
        pytest.skip("needs 13 GB of free memory and a kernel that makes no copies")
    torch.use_deterministic_algorithms(False)  # no time for filling
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=device)
    logits[2, -1] = 30.0
    got = token_logprob(logits, torch.full((rows,), vocabulary - 1, device=device))
    rest = math.exp(-30) * (vocabulary - 1)
    want = [-math.log(vocabulary)] * 2 + [-math.log1p(rest)]
    assert got.logp.tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)
