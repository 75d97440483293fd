"""The operators as torch sees them: opcheck, torch.compile, and the emulated CUDA blocks."""

import operator

import pytest
import torch

from mmrl import kernels
from mmrl.kernels import ops, toolchain


def samples():
    """Arguments of every operator in the namespace mmrl."""
    n, d, v = 3, 40, 50
    x, u, noise, grad = (torch.randn(n, d) for _ in range(4))
    a_x, a_v, std = torch.rand(n), -torch.rand(n), torch.rand(n) + 0.1
    rows = torch.randn(3, n)
    logits, targets = torch.randn(n, v), torch.tensor([0, 7, 49])
    batch = torch.randn(2, n, v)[:, 1:]
    saved = torch.ops.mmrl.token_logprob(logits, targets, 1.0)[1:]
    hidden, weight = torch.randn(n, 8), torch.randn(v, 8)
    group, flags = torch.tensor([1, 0, 1]), torch.zeros(n, d, dtype=torch.bool)
    mask, advantages = torch.rand(n, d) < 0.5, torch.randn(n, 1).expand(n, d)
    leaf = [t.clone().requires_grad_() for t in (u, logits, hidden, weight, grad)]
    total = torch.tensor(9.0, dtype=torch.float64)
    return {
        "denoise_step": [(x, u, noise, a_x, a_v, std, False, keep) for keep in (True, False)],
        "denoise_logprob": [
            (x, leaf[0], noise, a_x, a_v, std, None, None, None, True),
            (x, leaf[0], noise, a_x, a_v, std, grad, None, x, False),
            (x, u.bfloat16(), noise, a_x, a_v, std, None, u.bfloat16(), None, False),
        ],
        "denoise_logprob_backward": [(*rows, x, u, noise, a_x, a_v, std, ref, False) for ref in (None, grad)],
        "token_logprob": [(leaf[1], targets, 0.5), (batch, targets[:2].repeat(2), 1.0), (logits.half(), targets, 1.0)],
        "token_logprob_backward": [(*rows, logits, targets, *saved, 1.0)],
        "token_logprob_backward_": [(*rows, logits.clone(), targets, *saved, 1.0)],
        "hidden_logprob": [(leaf[2], w, targets, e, 1.0, 2) for w, e in ((leaf[3], targets[:1] + 1), (weight, None))],
        "hidden_logprob_backward": [
            (*rows, hidden, weight, targets, None, *saved, 1.0, 2, full) for full in (True, False)
        ],
        "group_advantage": [(x, torch.ones(d), group, 2, 0, 0, 1e-6)],
        "gae": [(x, u, flags, flags, mask, bootstrap, 0.9, 0.9) for bootstrap in (noise,)],
        "clipped_surrogate": [(leaf[4], advantages, mask, 0.2, 0.28, 1, t, 1.0) for t in (None, total)],
        "clipped_surrogate_backward": [(total.float(), x, advantages, mask, std, 0.2, 0.28)],
    }


@pytest.mark.parametrize("schema", ops.SCHEMAS, ids=lambda schema: schema.split("(")[0])
def test_opcheck(schema):
    kernels.use("cpu")
    name = schema.split("(")[0]
    for args in samples()[name]:
        torch.library.opcheck(operator.attrgetter(f"{name}.default")(torch.ops.mmrl), args)


def test_under_torch_compile():
    kernels.use("cpu")
    x, v, noise = (torch.randn(3, 4, 10) for _ in range(3))
    a_x, a_v, std = torch.rand(3), -torch.rand(3), torch.rand(3) + 0.1
    logits, targets = torch.randn(3, 6, 20), torch.randint(20, (3, 5))

    def loss(u, z):
        ratio = kernels.denoise_logprob(x, u, noise, a_x, a_v, std, v_old=x).log_ratio
        tokens = kernels.token_logprob(z[:, :-1], targets, temperature=0.9)
        values, _ = kernels.clipped_surrogate(ratio[:, None] + tokens.logp, std, torch.ones(3, 5))
        return values + tokens.entropy.mean()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = v.clone().requires_grad_(), logits.clone().requires_grad_()
        out = function(*leaves)
        out.backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def faces():
    """Calls of every operator as users make them, each of one tensor [3, 5, 8]."""
    x, noise = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    a_x, a_v, std = torch.rand(3), -torch.rand(3), torch.rand(3) + 0.1
    targets, weight = torch.randint(8, (3, 5)), torch.randn(20, 8)
    ends, group, mask = torch.rand(3, 5) < 0.2, torch.tensor([1, 0, 1]), torch.rand(3, 5) < 0.7
    return {
        "denoise_step": lambda u: kernels.denoise_step(x, u, noise, a_x, a_v, std, keep_mean=True),
        "denoise_logprob": lambda u: kernels.denoise_logprob(x, u, noise, a_x, a_v, std, v_old=x, v_ref=noise),
        "token_logprob": lambda u: kernels.token_logprob(u, targets.clamp(1, 6) - 1, columns=(0, 7)),
        "hidden_logprob": lambda u: kernels.hidden_logprob(u, weight, targets, temperature=0.7, chunk=4),
        "group_advantage": lambda u: kernels.group_advantage(u[:, 0].detach(), group, 2, baseline="leave_one_out"),
        "gae": lambda u: kernels.gae(
            u[..., 0].detach(), x[..., 0], ends, ~ends, gamma=0.9, lam=0.8, bootstrap=noise[..., 0].contiguous()
        ),
        "clipped_surrogate": lambda u: kernels.clipped_surrogate(u[..., 0], std, mask, mode="sequence_mean")[:1],
    }


INDUCTOR = [n if n == "denoise_logprob" else pytest.param(n, marks=pytest.mark.slow) for n in faces()]


@pytest.mark.parametrize("name", faces())
def test_traced_equals_eager(name):
    equals_eager(name, "aot_eager")


@pytest.mark.parametrize("name", INDUCTOR)
def test_compiled_equals_eager(name):
    equals_eager(name, "inductor")


def equals_eager(name, backend):
    kernels.use("cpu")
    torch.compiler.reset()
    face, leaf = faces()[name], torch.randn(3, 5, 8)

    def run(function):
        u = leaf.clone().requires_grad_()
        out = [t for t in function(u * 1.5) if t is not None]
        if any(t.requires_grad for t in out):
            sum(t.square().sum() for t in out).backward()
        return [t.detach() for t in out], u.grad

    torch.testing.assert_close(run(torch.compile(face, fullgraph=True, backend=backend)), run(face))


@pytest.fixture(scope="module")
def emulated():
    torch.ops.load_library(str(toolchain.library("emulated")))
    return torch.ops.mmrl_emulated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 255, 2049, 8192, 8193, 20000])
def test_emulated_denoise_block(emulated, size, dtype):
    x, noise = torch.randn(3, size), torch.randn(3, size)
    v, v_old, v_ref = (torch.randn(3, size).to(dtype) for _ in range(3))
    c = torch.rand(3, 3) + 0.1
    got = emulated.denoise(x, v, noise, v_old, v_ref, c, False)
    kernels.use("torch")
    wide = [t.double() for t in (x, v, noise, *c.unbind(1))]
    want = kernels.denoise_logprob(*wide, v_old=v_old.double(), v_ref=v_ref.double())
    torch.testing.assert_close(got.double(), torch.stack(want, 1), atol=1e-5, rtol=2e-6)
    if size % 8 == 0:  # 16-byte loads: the same bits
        assert torch.equal(emulated.denoise(x, v, noise, v_old, v_ref, c, True), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 4095, 4097, 8192, 8193, 40000])
def test_emulated_token_block(emulated, vocabulary, dtype):
    logits = (torch.randn(3, vocabulary) * 3).to(dtype)
    logits[1] -= 2048  # all far below 0
    logits[2, 1:] = -torch.inf
    targets = torch.tensor([vocabulary - 1, vocabulary // 2, 0])
    got = emulated.token(logits, targets, 0.5, False)
    kernels.use("torch")
    want = kernels.token_logprob(logits.double(), targets, temperature=2.0)
    torch.testing.assert_close(got[:, :3].double(), torch.stack(want, 1), atol=1e-5, rtol=3e-6)
    if vocabulary % 8 == 0:
        assert torch.equal(emulated.token(logits, targets, 0.5, True), got)


@pytest.mark.parametrize("steps", [1, 31, 32, 33, 500])
def test_emulated_gae_warp(emulated, steps):
    rewards, values, bootstrap = (torch.randn(4, steps) for _ in range(3))
    terminated, truncated, mask = (torch.rand(4, steps) < share for share in (0.05, 0.05, 0.9))
    rewards[0, steps // 2] = torch.nan  # stays in its episode
    got = emulated.gae(rewards, values, terminated, truncated, mask, bootstrap, 0.98, 0.95)
    kernels.use("torch")
    wide = [t.double() for t in (rewards, values)]
    want, _ = kernels.gae(*wide, terminated, truncated, gamma=0.98, lam=0.95, mask=mask, bootstrap=bootstrap.double())
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5, equal_nan=True)
