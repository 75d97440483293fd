"""Time, peak memory and bandwidth of every fused operator, of eager PyTorch and of torch.compile, side by side.

    .venv/bin/python scripts/bench/kernels.py [--threads 2] [--rounds 5] [--only token] [--no-compile]

Runs on the GPU if there is one, else on the CPU. Arms take turns within a round; the time is the best of the rounds,
forward and backward together unless the name says forward. Extra memory is the peak above what the inputs hold.
Bandwidth is the bytes that must be moved (inputs read, results written, once for each pass), over the time, as a share
of a copy measured in the same run. Eager is `mmrl.kernels.reference`, which reads like the equations; of hidden states
it makes all logits at once. torch.compile would unroll the loop of gae over its steps and is not run there.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
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


def cases(device: str) -> list[Case]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    k, found = SCALE[device], []
    n, d = 64 * k, 65536
    x, v, noise = (normal(n, d) for _ in range(3))
    old = v + 0.01 * noise
    a_x, a_v, std = (torch.rand(n, device=device) + 0.1 for _ in range(3))
    found.append(
        Case(
            f"denoise_step {n}x{d} forward",
            lambda: kernels.denoise_step(x, v, noise, a_x, a_v, std),
            lambda *args: reference.denoise_step(*args, False)[:2],
            (x, v, noise, a_x, a_v, std),
            16 * n * d,
        )
    )
    u = v.clone().requires_grad_()
    found.append(
        Case(
            f"denoise_logprob {n}x{d}, log-ratio",
            lambda: back(kernels.denoise_logprob(x, u, noise, a_x, a_v, std, v_old=old)[:2], u),
            lambda u, *args: back(reference.denoise_logprob(x, u, noise, *args, None, old, None, False)[:2], u),
            (u, a_x, a_v, std),
            32 * n * d,
        )
    )
    rows, vocabulary = 1024 * k, 32768
    logits, targets = normal(rows, vocabulary), torch.randint(vocabulary, (rows,), device=device)
    leaf = logits.clone().requires_grad_()
    found.append(
        Case(
            f"token_logprob {rows}x{vocabulary} forward",
            lambda: kernels.token_logprob(logits, targets),
            lambda z: reference.token_logprob(z, targets, 1.0),
            (logits,),
            4 * rows * vocabulary,
        )
    )
    found.append(
        Case(
            f"token_logprob {rows}x{vocabulary}",
            lambda: back(kernels.token_logprob(leaf, targets)[:2], leaf),
            lambda z: back(reference.token_logprob(z, targets, 1.0)[:2], z),
            (leaf,),
            12 * rows * vocabulary,
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
        )
    )
    rewards, group = normal(65536), torch.arange(65536, device=device) // 16
    one = torch.ones(1, device=device)
    found.append(
        Case(
            "group_advantage 65536 in groups of 16",
            lambda: kernels.group_advantage(rewards, group, 4096),
            lambda r: reference.group_advantage(r, one, group, 4096, 0, 0, 1e-6),
            (rewards[:, None],),
            16 * 65536,
        )
    )
    reward, value, bootstrap = (normal(256, 2048) for _ in range(3))
    ended, cut, mask = reward > 2, reward < -2, torch.ones_like(reward, dtype=torch.bool)
    found.append(
        Case(
            "gae 256x2048",
            lambda: kernels.gae(reward, value, ended, cut, gamma=0.99, lam=0.95, bootstrap=bootstrap),
            lambda *args: reference.gae(*args, 0.99, 0.95),
            (reward, value, ended, cut, mask, bootstrap),
            23 * reward.numel(),
            compiled=False,
        )
    )
    ratio, advantage = (normal(2048 * k, 4096) * 0.2).requires_grad_(), normal(2048 * k)
    counted = torch.rand_like(ratio) < 0.8
    found.append(
        Case(
            f"clipped_surrogate {2048 * k}x4096",
            lambda: back(kernels.clipped_surrogate(ratio, advantage, counted)[:1], ratio),
            lambda r: back(
                reference.clipped_surrogate(r, advantage[:, None].expand_as(r), counted, 0.2, 0.28, 0, None, 1.0)[:1], r
            ),
            (ratio,),
            14 * ratio.numel(),
        )
    )
    return found


def back(outputs: tuple[Tensor, ...], *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad([out.sum() for out in outputs], leaves)


clock = time.perf_counter


def timed(call: Callable[[], object], device: str) -> float:
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


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
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of an operator's name")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--cpu-time", action="store_true", help="processor time: for one thread on a busy machine")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = time.process_time
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels.use("cuda" if device == "cuda" else "cpu")
    copy = copy_bandwidth(device)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {options.threads} threads"
    print(f"{where}, torch {torch.__version__}; a copy moves {copy / 1e9:.1f} GB/s\n")
    heads = ["operator", "kernel ms", "eager ms", "compiled ms", "eager / kernel", "compiled / kernel"]
    heads += ["extra MiB: kernel, eager, compiled", "copy bandwidth"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)
    for case in cases(device):
        if options.only not in case.name:
            continue
        arms = {"kernel": case.kernel, "eager": lambda case=case: case.eager(*case.arguments)}
        if case.compiled and not options.no_compile:
            fused = torch.compile(case.eager)
            arms["compiled"] = lambda case=case, fused=fused: fused(*case.arguments)
        for arm in arms.values():
            arm()
        best = dict.fromkeys(arms, float("inf"))
        for _ in range(options.rounds):
            for name, arm in arms.items():
                best[name] = min(best[name], timed(arm, device))
        memory = [f"{extra_memory(arm, device) / 2**20:.1f}" for arm in arms.values()]
        times = [f"{1000 * best[name]:.2f}" if name in best else "-" for name in ("kernel", "eager", "compiled")]
        ratios = [f"{best[name] / best['kernel']:.1f}x" if name in best else "-" for name in ("eager", "compiled")]
        share = f"{case.moved / best['kernel'] / copy:.0%}" if case.moved else "-"
        print("| " + " | ".join([case.name, *times, *ratios, ", ".join(memory), share]) + " |", flush=True)


if __name__ == "__main__":
    main()
