"""The status of the compiled kernels: whether they are built, loaded, and agree with the torch reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.kernels import compiled, operators, toolchain

BUILD = "python -m mmrl.kernels build"


class Health(NamedTuple):
    """The state of one backend. summary: one line about it. fix: a shell command that repairs it; "" if nothing is
    wrong."""

    summary: str
    fix: str = ""


def health() -> list[Health]:
    """Checks the C++ and the CUDA kernels. Builds and loads them, the CUDA kernels only if there is a GPU, and
    compares every operator with the torch reference on small inputs.
    """
    return [_health("cpu"), _health("cuda") if torch.cuda.is_available() else Health(_without_gpu())]


def status() -> list[str]:
    """Returns one line each on the C++ and the CUDA kernels, see `health`."""
    return [part.summary for part in health()]


def _health(kind: compiled.Backend) -> Health:
    """Checks that a backend loads and agrees with the torch reference."""
    compiled._load(kind)
    if reason := compiled._state[kind]:
        compiler = "sudo apt-get install g++" if kind == "cpu" else "sudo apt-get install nvidia-cuda-toolkit"
        fix = BUILD if toolchain.compiler(kind) else f"{compiler} && {BUILD}"
        return Health(f"{kind}: not usable, plain PyTorch is used instead: {reason}", fix)
    if wrong := [name for name, call in _calls(kind).items() if not _agree(kind, call)]:
        summary = f"{kind}: {', '.join(wrong)} is wrong: differs from plain PyTorch; set kernels.backend=torch"
        return Health(summary, f"rm {compiled.loaded[kind]} && {BUILD}")
    return Health(f"{kind}: built, loaded, numerically right ({compiled.loaded[kind]})")


def _without_gpu() -> str:
    """Returns the line about the CUDA kernels on a machine without a GPU."""
    if built := compiled.find("cuda"):
        return f"cuda: built, no GPU here to load it for ({built})"
    return "cuda: not built, no GPU here" + ("" if toolchain.compiler("cuda") else " and no nvcc")


def _agree(kind: compiled.Backend, call: Callable[[], Iterable[Tensor | None]]) -> bool:
    """Returns whether a backend's results equal the torch reference's, to 1e-4."""
    before, results = compiled._backend, []
    for backend in (kind, "torch"):
        compiled._backend = backend  # type: ignore[assignment]
        results.append([t for t in call() if t is not None])
    compiled._backend = before
    return all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(*results, strict=True))


def _calls(device: str) -> dict[str, Callable[[], Iterable[Tensor | None]]]:
    """Returns a small call of each kernel, by name, whose results are compared with the torch reference."""
    g = torch.Generator().manual_seed(0)
    x, v, noise = (torch.randn(4, 9001, generator=g).to(device) for _ in range(3))
    c = torch.rand(4, generator=g).to(device) + 0.1
    ids, flags = torch.tensor([0, 1, 1, 0], device=device), noise < -1

    def with_gradient(call: Callable[[Tensor], Any], leaf: Tensor) -> tuple[Tensor, ...]:
        leaf = leaf.clone().requires_grad_()
        out = call(leaf)
        return *(t.detach() for t in out), *torch.autograd.grad(sum(t.sum() for t in out), leaf)  # type: ignore[arg-type]

    return {
        "denoise_step": lambda: operators.denoise_step(x, v, noise, c, c, c),
        "denoise_logprob": lambda: with_gradient(
            lambda u: operators.denoise_logprob(x, u, noise, c, c, c, v_old=x, v_ref=noise), v
        ),
        "token_logprob": lambda: with_gradient(lambda z: operators.token_logprob(z, ids), x),
        "group_advantage": lambda: operators.group_advantage(x[:, 0], ids, 2)[:4],
        "gae": lambda: operators.gae(
            x[:, :99], v[:, :99], *[flags[:, :99]] * 2, gamma=0.9, lam=0.9, bootstrap=noise[:, :99]
        ),
        "clipped_surrogate": lambda: with_gradient(lambda r: operators.clipped_surrogate(r, v, flags)[:1], x),
    }
