import math

import pytest
import torch

from mmrl.core.reduce import denominator, reduce
from mmrl.core.surrogates import surrogate
from mmrl.kernels import clipped_surrogate, use
from mmrl.kernels.operators import MODES

NAN = math.nan
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


def inputs(b, t, device):
    log_ratio, advantages = torch.randn(b, t) * 0.4, torch.randn(b, t)
    mask = torch.rand(b, t) < 0.7
    mask[0, 0], mask[-1] = True, b == 1
    return [x.to(device) for x in (log_ratio, advantages, mask)]


def test_known_values(device):
    # r = 2, 0.5, 1, 2, 0.5 with A = 1, 1, -1, -1, -1, bounds 0.8 and 1.28:
    # values -1.28 (high), -0.5, 1, 2, 0.8 (low); the last decision does not count
    ratio = torch.tensor([[2.0, 0.5, 1, 2, 0.5, 1]], device=device)
    a = torch.tensor([[1.0, 1, -1, -1, -1, NAN]], device=device)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]], device=device)
    log_ratio = ratio.log().where(mask.bool(), NAN).requires_grad_()
    loss, stats = clipped_surrogate(log_ratio, a, mask, **BOUNDS)
    assert loss.item() == pytest.approx((-1.28 - 0.5 + 1 + 2 + 0.8) / 5, rel=1e-6)
    want = {"ratio": 6 / 5, "clip_low": 1 / 5, "clip_high": 1 / 5}
    assert {name: s.item() for name, s in stats.items()} == pytest.approx(want, rel=1e-6)
    (2 * loss).backward()
    slopes = torch.tensor([[0.0, -0.5, 1, 2, 0, 0]]) * 2 / 5
    torch.testing.assert_close(log_ratio.grad.cpu(), slopes, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (5, 17), (3, 2049), (2, 9000), (300, 8)])
def test_against_the_core(device, rows, steps, mode):
    log_ratio, advantages, mask = inputs(rows, steps, device)
    length = 7.0 if mode == "constant" else None
    for a in (advantages, advantages[:, 0].contiguous()):
        leaf, exact = log_ratio.clone().requires_grad_(), log_ratio.cpu().double().requires_grad_()
        loss, stats = clipped_surrogate(leaf, a, mask, mode=mode, length=length, **BOUNDS)
        values, want_stats = surrogate(exact, a.cpu().double(), **BOUNDS)
        want = reduce(values, mask.cpu(), mode=mode, length=length)
        torch.testing.assert_close(
            loss.detach().cpu().double(), want.detach(), atol=1e-5, rtol=2e-5
        )  # fp32 sums that cancel
        counted = mask.cpu()
        for name, value in stats.items():
            expected = want_stats[name].where(counted, 0).sum() / counted.sum().clamp(min=1)
            torch.testing.assert_close(value.cpu().double(), expected, atol=1e-6, rtol=1e-5)
        loss.backward()
        want.backward()
        torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up_to_the_whole(device, mode):
    log_ratio, advantages, mask = inputs(7, 30, device)
    length = 7.0 if mode == "constant" else None

    def run(rows, total):
        leaf = log_ratio[rows].clone().requires_grad_()
        loss, _ = clipped_surrogate(leaf, advantages[rows], mask[rows], mode=mode, length=length, total=total)
        loss.backward()
        return loss.detach(), leaf.grad

    total = denominator(mask, mode=mode)
    whole, grad = run(slice(None), None)
    parts = [run(rows, total if i else float(total)) for i, rows in enumerate([slice(0, 2), slice(2, 7)])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), grad)


def test_nothing_counted(device):
    log_ratio = torch.full((2, 3), NAN, device=device, requires_grad=True)
    loss, stats = clipped_surrogate(log_ratio, torch.ones(2, device=device), torch.zeros(2, 3, device=device))
    loss.backward()
    assert loss.item() == 0 and log_ratio.grad.count_nonzero() == 0 and not any(s.item() for s in stats.values())


def test_not_a_number_that_counts_is_not_hidden(device):
    log_ratio, mask = torch.zeros(2, 3, device=device), torch.ones(2, 3, device=device)
    log_ratio[1, 2] = NAN
    assert clipped_surrogate(log_ratio, torch.ones(2, device=device), mask)[0].isnan()
    assert clipped_surrogate(torch.zeros_like(log_ratio), torch.full((2,), NAN, device=device), mask)[0].isnan()


def test_large_ratios(device):
    log_ratio = torch.tensor([[-80.0, -20, 20, 80]], device=device, requires_grad=True)
    loss, _ = clipped_surrogate(log_ratio, torch.tensor([1.0], device=device), torch.ones(1, 4, device=device))
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * 1.28 + math.exp(-20)) / 4, rel=1e-6)
    assert log_ratio.grad.tolist() == [pytest.approx([0.0, -math.exp(-20) / 4, 0.0, 0.0], rel=1e-5, abs=1e-14)]


def test_threads_and_batch_size_change_nothing(device):
    log_ratio, advantages, mask = inputs(64, 3000, device)

    def run(rows):
        leaf = log_ratio[rows].clone().requires_grad_()
        out = clipped_surrogate(leaf, advantages[rows], mask[rows], total=1000.0)[0]
        out.backward()
        return out.detach(), leaf.grad

    before = run(slice(None))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    after = run(slice(None))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(run(slice(5, 9))[1], before[1][5:9])


def test_reference_gradient_by_differences():
    use("torch")
    g = torch.Generator().manual_seed(0)
    log_ratio, a = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 4, generator=g) < 0.7
    leaf = log_ratio.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, a, mask, mode="sequence_mean")[0], (leaf,))


def test_bad_input_is_named(device):
    log_ratio, a, mask = inputs(2, 3, device)
    for change, message in [
        ({"log_ratio": log_ratio.bfloat16()}, "log_ratio must be float32"),
        ({"log_ratio": log_ratio[0]}, r"log_ratio must be \[B, T\]"),
        ({"advantages": a[:1]}, r"advantages must be \[B\] or \[B, T\]"),
        ({"advantages": a.double()}, "advantages must be float32"),
        ({"mask": mask[:, :2]}, r"mask must have shape \[2, 3\]"),
        ({"mode": "mean"}, "mode must be one of token_mean"),
        ({"mode": "constant"}, "needs a positive length"),
    ]:
        with pytest.raises(ValueError, match=message):
            clipped_surrogate(**{"log_ratio": log_ratio, "advantages": a, "mask": mask} | change)
