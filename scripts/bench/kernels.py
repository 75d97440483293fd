"""Time, peak memory and bandwidth of every fused operator, of eager PyTorch and of torch.compile, side by side.

    .venv/bin/python scripts/bench/kernels.py [--threads 1,2] [--rounds 5] [--scale 1] [--only token] [--block 0.01]

Runs on the GPU if there is one, else on the CPU, once for each number of threads. Arms take turns within a round; the
time is the best of the rounds, forward and backward together unless the name says forward. Extra memory is the peak
above what the inputs hold. Bandwidth is the bytes that must be moved (inputs read, results written, once for each
pass), over the time, as a share of a copy measured in the same run. Eager is `mmrl.kernels.reference`, which reads like
the equations, entropy and sum of squares too; "logp alone" are forms without these. Of hidden states eager makes all
logits at once, and over the steps of gae it loops with all rows at once; "python loop" goes over episodes and steps
with Python's numbers, "loop over rollouts" over rollouts and their groups. torch.compile would unroll the loop of gae
over its steps and is not run there. Liger's fused linear losses run on a GPU where liger-kernel is installed: the GRPO
loss returns no entropy and clips in the same pass, cross-entropy likewise returns the mean loss alone.
"""

import argparse
import importlib.util
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl import kernels
from mmrl.kernels import reference

SCALE = {"cpu": 1, "cuda": 4}  # rows, relative to the CPU's


class Case(NamedTuple):
    name: str
    kernel: Callable[[], object]
    eager: Callable[..., object]
    arguments: tuple
    moved: int  # bytes
    compiled: bool = True
    others: dict[str, Callable[[], object]] = {}


def cases(device: str, scale: float = 1.0) -> list[Case]:
    """`scale` changes the number of rows."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    def rows_of(number: int) -> int:
        return max(1, int(number * SCALE[device] * scale) // 16) * 16  # whole groups

    found = []
    n, d = rows_of(64), 65536
    x, v, noise = (normal(n, d) for _ in range(3))
    old = v + 0.01 * noise
    a_x, a_v, std = (torch.rand(n, device=device) + 0.1 for _ in range(3))
    found.append(
        Case(
            f"denoise_step {n}x{d} forward",
            lambda: kernels.denoise_step(x, v, noise, a_x, a_v, std),
            lambda x, v, n, a, b, s: reference.denoise_step(x, v, n, a, b, s, False)[:2],
            (x, v, noise, a_x, a_v, std),
            16 * n * d,
        )
    )
    u = v.clone().requires_grad_()
    found.append(
        Case(
            f"denoise_logprob {n}x{d}, log-ratio",
            lambda: back(kernels.denoise_logprob(x, u, noise, a_x, a_v, std, v_old=old)[:2], u),
            lambda u, a, b, s: back(reference.denoise_logprob(x, u, noise, a, b, s, None, old, None, False)[:2], u),
            (u, a_x, a_v, std),
            32 * n * d,
        )
    )
    rows, vocabulary = rows_of(1024), 32768
    logits, targets = normal(rows, vocabulary), torch.randint(vocabulary, (rows,), device=device)
    leaf = logits.clone().requires_grad_()
    found.append(
        Case(
            f"token_logprob {rows}x{vocabulary} forward",
            lambda: kernels.token_logprob(logits, targets),
            lambda z: reference.token_logprob(z, targets, 1.0),
            (logits,),
            4 * rows * vocabulary,
            others={f"{name}, logp alone": partial(form, logits, targets) for name, form in PLAIN.items()},
        )
    )
    found.append(
        Case(
            f"token_logprob {rows}x{vocabulary}",
            lambda: back(kernels.token_logprob(leaf, targets)[:2], leaf),
            lambda z: back(reference.token_logprob(z, targets, 1.0)[:2], z),
            (leaf,),
            12 * rows * vocabulary,
            others={f"{name}, logp alone": partial(gradient, form, leaf, targets) for name, form in PLAIN.items()},
        )
    )
    hidden, weight = normal(rows, 512).requires_grad_(), normal(vocabulary, 512).mul_(0.04).requires_grad_()
    found.append(
        Case(
            f"hidden_logprob {rows}x512 by 512x{vocabulary}",
            lambda: back(kernels.hidden_logprob(hidden, weight, targets)[:2], hidden, weight),
            lambda h, w: back(reference.token_logprob(h @ w.t(), targets, 1.0)[:2], h, w),
            (hidden, weight),
            0,
            others=liger(device, hidden, weight, targets),
        )
    )
    many = rows_of(65536) if device == "cpu" else 65536
    rewards, group = normal(many), torch.arange(many, device=device) // 16
    one = torch.ones(1, device=device)
    found.append(
        Case(
            f"group_advantage {many} in groups of 16",
            lambda: kernels.group_advantage(rewards, group, many // 16),
            lambda r: reference.group_advantage(r, one, group, many // 16, 0, 0, 1e-6),
            (rewards[:, None],),
            16 * many,
            others={"loop over rollouts": lambda: looped_group_advantage(rewards, group)},
        )
    )
    episodes = rows_of(256) if device == "cpu" else 256
    reward, value, bootstrap = (normal(episodes, 2048) for _ in range(3))
    ended, cut, mask = reward > 2, reward < -2, torch.ones_like(reward, dtype=torch.bool)
    found.append(
        Case(
            f"gae {episodes}x2048",
            lambda: kernels.gae(reward, value, ended, cut, gamma=0.99, lam=0.95, bootstrap=bootstrap),
            lambda r, v, e, c, m, b: reference.gae(r, v, e, c, m, b, 0.99, 0.95),
            (reward, value, ended, cut, mask, bootstrap),
            23 * reward.numel(),
            compiled=False,
            others={"python loop": lambda: looped_gae(reward, value, ended, cut, bootstrap)},
        )
    )
    rollouts = rows_of(2048)
    ratio, advantage = (normal(rollouts, 4096) * 0.2).requires_grad_(), normal(rollouts)
    counted = torch.rand_like(ratio) < 0.8
    found.append(
        Case(
            f"clipped_surrogate {rollouts}x4096",
            lambda: back(kernels.clipped_surrogate(ratio, advantage, counted)[:1], ratio),
            lambda r: back(
                reference.clipped_surrogate(r, advantage[:, None].expand_as(r), counted, 0.2, 0.28, 0, None, 1.0)[:1], r
            ),
            (ratio,),
            14 * ratio.numel(),
        )
    )
    return found


def log_softmax_gather(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets[:, None])


def selective_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes what trainers of language models now have in place of `log_softmax_gather`: the logit less the
    normaliser, which is taken a row at a time, so that no second matrix of all logits exists in the forward pass."""
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    return chosen - torch.stack([row.logsumexp(-1) for row in logits])


PLAIN = {"log_softmax and gather": log_softmax_gather, "selective log-softmax": selective_log_softmax}


def looped_group_advantage(rewards: Tensor, group: Tensor) -> Tensor:
    """Advantages as trainers of language models mostly compute them: scores are gathered by id, one after the other,
    and each is centred and scaled by its group's mean and standard deviation."""
    scores: dict[int, list[Tensor]] = {}
    ids = group.tolist()
    for i, reward in zip(ids, rewards, strict=True):
        scores.setdefault(i, []).append(reward)
    known = {i: torch.stack(own) for i, own in scores.items()}
    line = {i: (own.mean(), own.std()) for i, own in known.items()}
    found = torch.empty_like(rewards)
    for row, i in enumerate(ids):
        mean, std = line[i]
        found[row] = (rewards[row] - mean) / (std + 1e-6)
    return found


def looped_gae(reward: Tensor, value: Tensor, ended: Tensor, cut: Tensor, bootstrap: Tensor) -> Tensor:
    """Generalised advantage estimation as it is mostly written: episode by episode, step by step."""
    rows = []
    for r, v, e, c, b in zip(*(t.tolist() for t in (reward, value, ended, cut, bootstrap)), strict=True):
        row, later = [0.0] * len(r), 0.0
        for t in reversed(range(len(r))):
            last = t + 1 == len(r)
            ahead = 0.0 if e[t] else b[t] if c[t] or last else v[t + 1]
            later = 0.0 if e[t] or c[t] else later
            row[t] = later = r[t] + 0.99 * ahead - v[t] + 0.99 * 0.95 * later
        rows.append(row)
    return torch.tensor(rows, device=reward.device)


def liger(device: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
    """Liger's losses from hidden states, forward and backward, with 16 rollouts; nothing where they cannot run."""
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    grpo, entropy = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False), LigerFusedLinearCrossEntropyLoss()
    ids = targets.view(16, -1)
    mask, advantages = torch.ones_like(ids), torch.randn(16, device=device)
    return {
        "Liger GRPO": lambda: back((grpo(hidden.view(16, -1, 512), weight, ids, mask, advantages)[0],), hidden, weight),
        "Liger cross-entropy": lambda: back((entropy(weight, hidden, targets),), hidden, weight),
    }


def gradient(form: Callable[[Tensor, Tensor], Tensor], leaf: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return back((form(leaf, targets),), leaf)


def back(outputs: Sequence[Tensor | None], *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad([out.sum() for out in outputs if out is not None], leaves)


clock = time.perf_counter


def timed(call: Callable[[], object], device: str, times: int = 1) -> float:
    """Seconds of a call, of so many one after the other."""
    start = clock()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / times


def extra_memory(call: Callable[[], object], device: str) -> int:
    """Bytes at the peak of a call above those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    seen, done = [resident()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = call()
    seen.append(resident())
    done.set()
    watcher.join()
    del kept
    return max(seen) - seen[0]


def resident() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")


def copy_bandwidth(device: str) -> float:
    """Bytes read and written in a second."""
    source = torch.randn(2**26, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / min(timed(lambda: target.copy_(source), device) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma-separated; one table for each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="number of rows, relative to the default")
    parser.add_argument("--only", default="", help="measure the operators whose name has this part")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--block", type=float, default=0, help="least seconds of one measurement: short calls are repeated"
    )
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time: for one thread on a busy machine")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = time.process_time
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels.use("cuda" if device == "cuda" else "cpu")
    if importlib.util.find_spec("liger_kernel") is None:
        print("Liger: not installed")
    elif device == "cpu":
        print("Liger: needs a GPU")
    for threads in map(int, options.threads.split(",")) if device == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        torch.compiler.reset()  # what was compiled for another number of threads
        table(device, threads, options)


def table(device: str, threads: int, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    copy = copy_bandwidth(device)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {threads} thread(s)"
    print(f"\n{where}, torch {torch.__version__}; a copy moves {copy / 1e9:.1f} GB/s\n")
    heads = ["operator", "kernel ms", "eager ms", "compiled ms", "eager / kernel", "compiled / kernel"]
    heads += ["extra MiB: kernel, eager, compiled", "copy bandwidth"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)
    for case in cases(device, options.scale):
        if options.only not in case.name:
            continue
        arms: dict[str, Callable[[], object]] = {"kernel": case.kernel, "eager": partial(case.eager, *case.arguments)}
        if case.compiled and not options.no_compile:
            arms["compiled"] = partial(torch.compile(case.eager), *case.arguments)
        arms |= case.others
        for arm in arms.values():
            arm()
        times = {name: max(1, math.ceil(options.block / timed(arm, device))) for name, arm in arms.items()}
        best = dict.fromkeys(arms, float("inf"))
        for _ in range(options.rounds):
            for name, arm in arms.items():
                best[name] = min(best[name], timed(arm, device, times[name]))
        extra = {name: extra_memory(arm, device) / 2**20 for name, arm in arms.items()}
        shown = ("kernel", "eager", "compiled")
        memory = [f"{extra[name]:.1f}" if name in arms else "-" for name in shown]
        spent = [f"{1000 * best[name]:.2f}" if name in arms else "-" for name in shown]
        ratios = [f"{best[name] / best['kernel']:.1f}x" if name in arms else "-" for name in shown[1:]]
        share = f"{case.moved / best['kernel'] / copy:.0%}" if case.moved else "-"
        print("| " + " | ".join([case.name, *spent, *ratios, ", ".join(memory), share]) + " |", flush=True)
        for name in case.others:
            cells = [f"{1000 * best[name]:.2f}", "-", f"{best[name] / best['kernel']:.1f}x", "-", f"{extra[name]:.1f}"]
            print("| " + " | ".join([f"{case.name}, {name}", "-", *cells, "-"]) + " |", flush=True)


if __name__ == "__main__":
    main()
