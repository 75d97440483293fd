"""Ranks under the launcher that started them: they end with it, take a GPU each and form their group."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mmrl.runtime import devices

STARTED_BY = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # what torchrun and DeepSpeed's launcher tell their ranks
ANY_PORT = "0"  # of a single process, which no other one joins
LOOPBACK = ("127.0.0.1", "localhost")
INIT_METHOD = "mmrl://"  # see `_rendezvous`
NOT_MET = (dist.DistStoreError, dist.DistNetworkError)  # what torch raises for ranks that do not meet
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_launcher() -> None:
    """Has the system kill this process when its launcher ends, however that ends: a rank that is left behind would
    train on beside the job that takes its place. Does nothing to a process that no launcher started."""
    if sys.platform == "linux" and any(name in os.environ for name in STARTED_BY):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def select_device() -> None:
    """Takes this rank's GPU, where there are any, before anything is built on one: the GPU of its local rank.
    Raises UserError where there are fewer than ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(devices.select_gpu(torch.cuda.device_count()))


def meeting_place() -> str:
    """Returns the address of the store at which ranks meet."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Rendezvous handler for torch.distributed: the launcher's store, under a prefix of its own at each start.

    Ranks that torchrun starts again (--max-restarts) find in its store the addresses of those that ended, and one that
    is quicker than another tries to reach a process that is gone.
    """
    if os.environ["MASTER_PORT"] == ANY_PORT:  # one process without a launcher: its store opens no port
        yield dist.HashStore(), 0, 1
        return
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"  # several launchers count their restarts apart
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    for store, rank, world in _on_loopback(**options) or dist.rendezvous("env://", **options):
        yield dist.PrefixStore(f"start-{start}", store), rank, world


def _on_loopback(timeout: timedelta, **options: Any) -> list[tuple[dist.Store, int, int]]:
    """Returns the store of ranks that meet at a loopback address, where no launcher keeps one; else nothing. torch's
    own listens on all interfaces, whatever the address, and lets anybody read and write."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host not in LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return []
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = None if rank else socket.create_server((LOOPBACK[0], port), backlog=max(128, world)).detach()
    store = dist.TCPStore(LOOPBACK[0], port, world, rank == 0, timeout, master_listen_fd=listening)
    return [(store, rank, world)]


def store_at(host: str, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """Returns a store that listens at one address of this host; torch's own listens at all of them. Nobody needs a key
    for it. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Has gloo listen on loopback only for groups that are made in the block, where all ranks are on this host. By
    default it takes the address of the host's name."""
    name = "GLOO_SOCKET_IFNAME"
    one_host = os.environ["MASTER_ADDR"] in LOOPBACK or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if not one_host or sys.platform != "linux" or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]  # engines on other hosts are started from here


dist.register_rendezvous_handler("mmrl", _rendezvous)
