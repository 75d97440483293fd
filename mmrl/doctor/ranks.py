"""`python -m mmrl.doctor.ranks FILE`: one rank of the check of ranks; rank 0 writes the report of all."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mmrl.engine import Ranks, select_device

ROUNDS = 5


def main() -> None:
    """Checks sums and gathers over ranks, and measures their speed: bus bandwidth in GB/s as in nccl-tests. Rank 0
    writes the report."""
    select_device()
    ranks = Ranks(timeout=60)
    on_gpu = ranks.device.type == "cuda"
    mebibytes = 256 if on_gpu else 4
    identity = {"gpu": "cpu", "name": "CPU"}
    if on_gpu:
        properties = torch.cuda.get_device_properties(ranks.device)
        identity = {"gpu": str(properties.uuid), "name": properties.name}
    identities = ranks.gather({**identity, "host": os.uname().nodename, "process": os.getpid()})
    value = torch.full((mebibytes * 2**18,), float(ranks.rank + 1), device=ranks.device)
    summed = ranks.sum(value[:8])
    wanted = ranks.world * (ranks.world + 1) / 2
    if not bool((summed == wanted).all()):
        sys.exit(f"{dist.get_backend()} sums {summed[0]:g} over ranks, not {wanted:g}")
    took = best(lambda: ranks.sum(value), on_gpu)
    objects = best(lambda: ranks.gather({"a": [1.0] * 64}), False)
    if ranks.rank == 0:
        speed = 2 * (ranks.world - 1) / ranks.world * value.nbytes / took / 1e9  # bus bandwidth as in nccl-tests
        report = {"ranks": identities, "backend": dist.get_backend(), "mebibytes": mebibytes}
        report |= {"gigabytes_per_second": speed, "objects_ms": objects * 1000}
        Path(sys.argv[1]).write_text(json.dumps(report))
    ranks.close()


def best(work: object, on_gpu: bool) -> float:
    """Returns the seconds of the fastest of ROUNDS runs."""
    assert callable(work)
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


if __name__ == "__main__":
    main()
