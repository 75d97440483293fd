"""Ranks and their launcher (torchrun or DeepSpeed's): ranks end with it, select a GPU and connect to one another."""

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

STARTED_BY = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # environment variables of torchrun and of DeepSpeed's launcher
ANY_PORT = "0"  # MASTER_PORT of a single process, which needs no port
LOOPBACK = ("127.0.0.1", "localhost")
INIT_METHOD = "mmrl://"  # see `_rendezvous`
NOT_MET = (dist.DistStoreError, dist.DistNetworkError)  # errors of torch for ranks that do not connect in time
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_launcher() -> None:
    """Has the kernel kill this process when its launcher ends, even if the launcher is killed. Otherwise an orphaned
    rank would continue training beside the restarted job. Does nothing in a process without a launcher."""
    if sys.platform == "linux" and any(name in os.environ for name in STARTED_BY):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def select_device() -> None:
    """Makes the GPU with the number of the local rank this process's default device, if there are GPUs. To be called
    before anything is put on a GPU. Raises UserError where there are fewer GPUs than ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(devices.select_gpu(torch.cuda.device_count()))


def meeting_place() -> str:
    """Returns MASTER_ADDR:MASTER_PORT, the address of the store through which ranks connect."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Rendezvous handler for torch.distributed: yields (store, rank, world size), with the launcher's store under a
    prefix for each restart.

    Without the prefix, ranks that torchrun restarts (--max-restarts) would find the addresses of ended processes in the
    store and try to connect to them.
    """
    if os.environ["MASTER_PORT"] == ANY_PORT:  # one process without a launcher: its store opens no port
        yield dist.HashStore(), 0, 1
        return
    one_launcher = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"  # several count their restarts independently
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_launcher else "0"
    for store, rank, world in _on_loopback(**options) or dist.rendezvous("env://", **options):
        yield dist.PrefixStore(f"start-{start}", store), rank, world


def _on_loopback(timeout: timedelta, **options: Any) -> list[tuple[dist.Store, int, int]]:
    """Returns [(store, rank, world size)] with a store that listens on loopback only, where MASTER_ADDR is a loopback
    address and the launcher has no store; otherwise []. torch's own store listens on all interfaces, and anybody may
    read and write it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host not in LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return []
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = None if rank else socket.create_server((LOOPBACK[0], port), backlog=max(128, world)).detach()
    store = dist.TCPStore(LOOPBACK[0], port, world, rank == 0, timeout, master_listen_fd=listening)
    return [(store, rank, world)]


def store_at(host: str, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """Returns a store that listens on one address of this host (torch's own listens on all), on a free port. It has no
    authentication. Raises OSError where it cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """A context in which new gloo groups listen on the loopback interface only, if all ranks are on this host. By
    default gloo listens on the address that the host's name resolves to."""
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
