"""`python -m mmrl.doctor.ranks FILE`: one rank of the check that ranks can communicate. Rank 0 writes FILE."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mmrl.engine import Ranks, select_device

ROUNDS = 5  # repetitions of each measurement


def main() -> None:
    """Checks an all-reduce over ranks and measures the speed of all-reduce (bus bandwidth in GB/s, as in nccl-tests)
    and of gathering objects (milliseconds). Rank 0 writes the report as JSON."""
    select_device()
    ranks = Ranks(timeout=60)
    on_gpu = ranks.device.type == "cuda"
    mebibytes = 256 if on_gpu else 4
    gpu = {"gpu": "cpu", "name": "CPU"}
    if on_gpu:
        properties = torch.cuda.get_device_properties(ranks.device)
        gpu = {"gpu": str(properties.uuid), "name": properties.name}
    identities = ranks.gather({**gpu, "host": os.uname().nodename, "process": os.getpid()})
    # 2^18 numbers of 4 bytes are a mebibyte; rank r sends the number r + 1
    value = torch.full((mebibytes * 2**18,), float(ranks.rank + 1), device=ranks.device)
    total = ranks.sum(value[:8])
    expected = ranks.world * (ranks.world + 1) / 2
    if not bool((total == expected).all()):
        sys.exit(f"{dist.get_backend()} sums {total[0]:g} over ranks, not {expected:g}")
    seconds = fastest_run(lambda: ranks.sum(value), on_gpu)
    objects = fastest_run(lambda: ranks.gather({"a": [1.0] * 64}), False)
    if ranks.rank == 0:
        speed = 2 * (ranks.world - 1) / ranks.world * value.nbytes / seconds / 1e9  # bus bandwidth as in nccl-tests
        report = {"ranks": identities, "backend": dist.get_backend(), "mebibytes": mebibytes}
        report |= {"gigabytes_per_second": speed, "objects_ms": objects * 1000}
        Path(sys.argv[1]).write_text(json.dumps(report))
    ranks.close()


def fastest_run(work: object, on_gpu: bool) -> float:
    """Returns the seconds of the fastest of ROUNDS calls of `work`. on_gpu: whether to wait for the GPU."""
    assert callable(work)
    durations = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - started)
    return min(durations)


if __name__ == "__main__":
    main()
