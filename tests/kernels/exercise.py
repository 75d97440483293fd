"""`python -m tests.kernels.exercise`: every operator forward and backward at odd shapes, strides and dtypes, by cuda.cu
on the host against the reference. A process of its own, so that it can run under sanitizers: `test_on_host.py`."""

import itertools

import torch

from mmrl import kernels
from tests.kernels import on_host

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 256, 8193)  # of a row; the last one has two chunks, of which the second is a single element
COLUMNS = (1, 3, 31, 8200)


def laid_out(t, how):
    """The same numbers elsewhere in memory. how: contiguous, a slice whose rows begin at odd places, or rows that lie
    among others."""
    if how == "odd":
        room = torch.zeros(t.shape[0], t.shape[-1] + 3, dtype=t.dtype)
        room[:, 1:-2] = t
        return room[:, 1:-2]
    if how == "apart":
        return torch.stack([t, t], 1)[:, 0]
    return t


def both(call, differentiable):
    """Results, and gradients by `differentiable` of a sum with weights of its own, by cuda.cu and by the reference."""
    found = []
    for backend in ("cpu", "torch"):
        kernels.use(backend)
        given = differentiable.detach().requires_grad_(True) if differentiable is not None else None
        results = [r for r in call(given) if r is not None]
        gradient = None
        if given is not None:
            loss = sum(
                (r.float() * torch.linspace(1, 2, r.numel()).view(r.shape)).sum() for r in results if r.requires_grad
            )
            (gradient,) = torch.autograd.grad(loss, given)
        found.append(([r.detach().float() for r in results], gradient))
    kernels.use("cpu")
    return found


def agree(name, call, differentiable=None, tolerance=2e-5):
    (ours, gradient), (theirs, expected) = both(call, differentiable)
    assert len(ours) == len(theirs) > 0, name
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}"
        )
    if gradient is not None:
        # Both round to the dtype of what they are the gradient of
        loose = tolerance if gradient.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(gradient, expected, rtol=loose, atol=loose, msg=lambda m: f"{name}, gradient: {m}")


def denoising(rows, size, dtype, how):
    draw = torch.Generator().manual_seed(rows * size)
    x, noise, old = (laid_out(torch.randn(rows, size, generator=draw), how) for _ in range(3))
    v, v_old, v_ref = (laid_out(torch.randn(rows, size, generator=draw).to(dtype), how) for _ in range(3))
    a_x, a_v, std = (torch.rand(rows, generator=draw) + 0.5 for _ in range(3))
    name = f"denoise {rows} x {size} {dtype} {how}"
    for keep in (False, True):
        agree(name, lambda _, keep=keep: [*kernels.denoise_step(x, v, noise, a_x, a_v, std, keep_mean=keep)])
    for extra in ({}, {"mean_old": old, "v_ref": v_ref}, {"v_old": v_old, "reduction": "sum"}):
        tolerance = 2e-5 if extra.get("reduction") != "sum" else 2e-3

        def call(given, extra=extra):
            return [*kernels.denoise_logprob(x, given, noise, a_x, a_v, std, **extra)]

        agree(f"{name} {list(extra)}", call, v, tolerance)


def tokens(rows, size, dtype, how):
    draw = torch.Generator().manual_seed(rows + size)
    logits = laid_out((3 * torch.randn(rows, size, generator=draw)).to(dtype), how)
    targets = torch.randint(size, (rows,), generator=draw)
    for temperature in (1.0, 0.7):
        agree(
            f"tokens {rows} x {size} {dtype} {how}",
            lambda given, t=temperature: [*kernels.token_logprob(given, targets, temperature=t)],
            logits,
            1e-4,
        )


def hidden(rows, size, dtype, how):
    draw = torch.Generator().manual_seed(size)
    states = torch.randn(rows, 5, generator=draw).to(dtype)
    matrix = torch.randn(size, 5, generator=draw).to(dtype)
    targets = torch.randint(size, (rows,), generator=draw)
    loose = 1e-4 if dtype == torch.float32 else 3e-2  # logits themselves are rounded
    agree(
        f"hidden {rows} x {size} {dtype}",
        lambda given: [*kernels.hidden_logprob(given, matrix, targets, chunk=2)],
        states,
        loose,
    )


def groups(rows):
    draw = torch.Generator().manual_seed(rows)
    rewards, group = torch.rand(rows, 2, generator=draw), torch.randint(3, (rows,), generator=draw)
    rewards[0, 0] = torch.nan
    for baseline, scale in itertools.product(("mean", "leave_one_out"), ("group_std", "batch_std", "none")):
        agree(
            f"groups {rows}",
            lambda _, b=baseline, s=scale: [*kernels.group_advantage(rewards, group, 4, baseline=b, scale=s)],
        )


def returns(rows, steps):
    draw = torch.Generator().manual_seed(rows * steps)
    rewards, values, after = (torch.randn(rows, steps, generator=draw) for _ in range(3))
    ended, cut, mask = (torch.rand(rows, steps, generator=draw) < chance for chance in (0.1, 0.1, 0.8))
    whole = ended.clone()
    whole[:, -1] = True
    cases = (
        {"terminated": ended, "truncated": cut & ~ended, "mask": mask, "bootstrap": after},
        {
            "terminated": whole,
            "truncated": torch.zeros_like(cut),
        },  # nothing is cut off, so no value is needed behind it
    )
    for own in cases:
        given = {"rewards": rewards, "values": values, "gamma": 0.9, "lam": 0.8, **own}
        agree(f"returns {rows} x {steps}", lambda _, g=given: kernels.gae(**g), tolerance=1e-4)


def surrogates(rows, steps):
    draw = torch.Generator().manual_seed(rows * steps)
    ratios, by_step = (torch.randn(rows, steps, generator=draw) / 3 for _ in range(2))
    mask = torch.rand(rows, steps, generator=draw) < 0.7
    for advantages, mode in itertools.product(
        (by_step, by_step[:, 0], laid_out(by_step, "odd")), ("token_mean", "sequence_mean")
    ):

        def call(given, advantages=advantages, mode=mode):
            loss, stats = kernels.clipped_surrogate(given, advantages, mask, mode=mode)
            return [loss, *stats.values()]

        agree(f"surrogate {rows} x {steps} {mode}", call, ratios)


def main():
    on_host.pytest_configure(None)
    done = 0
    for rows, dtype, how in itertools.product((1, 3), DTYPES, ("contiguous", "odd", "apart")):
        for size in SIZES:
            denoising(rows, size, dtype, how)
        for size in COLUMNS:
            tokens(rows, size, dtype, how)
            if how == "contiguous":
                hidden(rows, size, dtype, how)
        done += 1
    for rows in (1, 5, 300):
        groups(rows)
    for rows, steps in itertools.product((1, 9), (1, 31, 33, 65)):
        returns(rows, steps)
    for rows, steps in itertools.product((1, 3), (1, 17, 8195)):
        surrogates(rows, steps)
    print(f"every operator agrees, at {done} layouts of rows")


if __name__ == "__main__":
    main()
