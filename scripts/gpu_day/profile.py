"""`python -m scripts.gpu_day.profile OUT train RECIPE OVERRIDES`: profiles the update of a job's second step.

Writes into OUT how the time of the update is spent: operators by time on the device and on the host, and for which
share of the time the device was busy. If this is below one half, the update waits for the host.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmrl.cli.main import main
from mmrl.trainer import Trainer

PROFILED = 1  # steps before it: the first one loads and tunes kernels
ROWS = 18


def table(done: Any, seconds: float) -> list[str]:
    """Returns the lines of a profile."""
    events = done.events()
    on_device = sum(event.self_device_time_total for event in events if event.device_type == DeviceType.CUDA) / 1e6
    launches = sum(event.name in ("cudaLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernel") for event in events)
    waits = sum(event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize") for event in events)
    averages = done.key_averages()
    lines = [
        f"update: {seconds:.2f} s under the profiler; the device worked {on_device:.2f} s ({on_device / seconds:.0%})"
    ]
    lines += [f"launches: {launches}; waits of the host for the device: {waits}", ""]
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        lines += averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=48).splitlines()
    return lines


def install(out: Path) -> None:
    """Profiles the update of the second step of whatever is trained in this process."""
    update = Trainer.update

    def profiled(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.step != PROFILED:
            return update(trainer, *args, **kwargs)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        begun = time.perf_counter()
        with profile(activities=activities) as done:
            result = update(trainer, *args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        out.write_text("\n".join(table(done, time.perf_counter() - begun)) + "\n")
        return result

    Trainer.update = profiled  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    main(sys.argv[2:])
