"""Ranks under the launcher that started them: they end with it, take a GPU each and form their group."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mmrl.runtime import devices

STARTED_BY = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # what torchrun and DeepSpeed's launcher tell their ranks
ANY_PORT = "0"  # the system gives a free one when it is opened, so that no other process can take it in between
INIT_METHOD = "mmrl://"  # see `_rendezvous`
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_launcher() -> None:
    """Has the system kill this process when its launcher ends, however that ends: a rank that is left behind would
    train on beside the job that takes its place. Does nothing to a process that no launcher started."""
    if sys.platform == "linux" and any(name in os.environ for name in STARTED_BY):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_device() -> None:
    """Takes this rank's GPU, where there are any, before anything is built on one: the GPU of its local rank.
    Raises UserError where there are fewer than ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(devices.claim(torch.cuda.device_count()))


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Rendezvous handler for torch.distributed: the launcher's store, under a prefix of its own at each start.

    Ranks that torchrun starts again (--max-restarts) find in its store the addresses of those that ended, and one that
    is quicker than another tries to reach a process that is gone.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"  # several launchers count their restarts apart
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    for store, rank, world in dist.rendezvous("env://", **options):
        if os.environ["MASTER_PORT"] == ANY_PORT:
            os.environ["MASTER_PORT"] = str(store.port)
        yield dist.PrefixStore(f"start-{start}", store), rank, world


dist.register_rendezvous_handler("mmrl", _rendezvous)
