"""A process group of the trainer and the workers of vLLM's servers, through which rank 0 broadcasts weights.

It is separate from torch's default group, which trainer and engines use for themselves. vLLM's own NCCL transfer is not
used: it bypasses the checksums, needs all shapes in advance (ZeRO-3 gathers one module at a time), waits forever for a
lost member, and does not run on a CPU.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, Work

from mmrl.generation.weight_sync.buckets import Bucket, padded_bytes, read_header, unpacked

GLOO, NCCL = "gloo", "nccl"
CPU = torch.device("cpu")
POLL = 0.0005  # seconds between two checks whether a broadcast is completed
END, ABORTED = "end", "aborted"  # published in place of a header
GRACE = 1.0  # seconds after the deadline in which gloo ends a pending broadcast
WATCHDOG = 60.0  # seconds after the deadline after which NCCL's watchdog ends a process with a pending broadcast


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a group. size: the number of members; rank 0 is the trainer. timeout: seconds
    for each wait of a member."""

    host: str
    port: int
    name: str
    size: int
    backend: str
    timeout: float


class BroadcastTimeout(Exception):
    """Raised when a peer does not answer within the timeout."""


class BroadcastGroup:
    """One member of a group. Methods raise RuntimeError if another member is lost, and BroadcastTimeout."""

    def __init__(self, rendezvous: Rendezvous, rank: int, store: Store | None = None) -> None:
        """store: on rank 0, the store that listens at the rendezvous's address; None on other ranks, which connect to
        it."""
        self.rendezvous, self.rank = rendezvous, rank
        self.processes: Any = None
        wait = timedelta(seconds=rendezvous.timeout)
        if store is None:
            store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=wait)
        self.store = PrefixStore(rendezvous.name, store)
        self.store.set(f"here/{rank}", "")

    @property
    def device(self) -> torch.device:
        """The device of the tensors that are broadcast."""
        return torch.device("cuda", torch.cuda.current_device()) if self.rendezvous.backend == NCCL else CPU

    def absent(self) -> list[int]:
        """Returns the ranks that have not joined yet."""
        return [rank for rank in range(self.rendezvous.size) if not self.store.check([f"here/{rank}"])]

    def form(self) -> None:
        """Connects to the other members. All members must call it."""
        wait = timedelta(seconds=self.rendezvous.timeout)
        options: Any
        if self.rendezvous.backend == NCCL:
            wait += timedelta(seconds=WATCHDOG)
            kind: Any = torch.distributed.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = torch.distributed.ProcessGroupGloo
            options = kind._Options()
            # By default gloo listens at the address of the host's name, which other hosts may not reach
            options._devices = [kind.create_device(hostname=local_address(self.rendezvous.host))]
        options._timeout = wait
        self.processes = kind(self.store, self.rank, self.rendezvous.size, options)

    def broadcast(self, payload: Tensor, until: float) -> Work:
        """Starts a broadcast from rank 0 to all members, and returns it for `wait`.

        until: the deadline, in seconds of time.monotonic. Soon after it the broadcast also times out in torch, since
        gloo cannot leave a group while a broadcast is pending.
        """
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(0.0, until - time.monotonic()) + GRACE / 2)
        return self.processes.broadcast([payload], options)

    def leave(self) -> None:
        """Leaves the group. Members that wait for this one get an error."""
        if self.processes is not None:
            self.processes.abort()
            self.processes = None


def wait(work: Work, until: float, check: Callable[[], None] = lambda: None) -> None:
    """Waits for a broadcast. until: the deadline, in seconds of time.monotonic. check: is called repeatedly, and may
    raise. Raises BroadcastTimeout after the deadline."""
    while not work.is_completed():
        check()
        if time.monotonic() > until + GRACE:
            raise BroadcastTimeout
        time.sleep(POLL)
    if time.monotonic() > until:
        raise BroadcastTimeout
    work.wait()  # raises the error of a broadcast that failed


def publish_header(group: BroadcastGroup, base: str, number: int, bucket: Bucket) -> None:
    """Publishes the header of bucket `number` of the weights `base`, before it is broadcast."""
    group.store.set(f"{base}/{number}", bucket.header())


def publish_end(group: BroadcastGroup, base: str, number: int, header: str) -> None:
    """Publishes that no bucket `number` follows. header: END, or ABORTED after an error."""
    group.store.set(f"{base}/{number}", header)


def remove_headers(group: BroadcastGroup, base: str, buckets: int) -> None:
    """Removes the published headers of the weights `base`. buckets: their number."""
    for number in range(buckets + 1):  # the last one says that no bucket follows
        group.store.delete_key(f"{base}/{number}")
    for rank in range(1, group.rendezvous.size):
        group.store.delete_key(f"{base}/reached/{rank}")


def num_received(group: BroadcastGroup, base: str, rank: int) -> int:
    """Returns the number of buckets that the member `rank` has received."""
    key = f"{base}/reached/{rank}"
    return int(group.store.get(key)) if group.store.check([key]) else 0


def local_address(other: str) -> str:
    """Returns the address of this host in the network of another host. Nothing is sent."""
    # Connecting a UDP socket only selects a route; the port, 9 (discard), has no effect.
    family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


class Receiver:
    """A member of a group that receives weights, in a worker of an engine."""

    def __init__(self) -> None:
        self.group: BroadcastGroup | None = None
        self.base: str | None = None  # name of the last weights that were received completely

    def standing(self) -> dict[str, Any]:
        """Returns the state of this worker: the type of its device, the name of its group, and the name of the weights
        that it has."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return {"device": device, "group": self.group and self.group.rendezvous.name, "base": self.base}

    def join(self, rendezvous: dict[str, Any], rank: int) -> None:
        """Joins a group and leaves the previous one; does nothing if it is already a member."""
        wanted = Rendezvous(**rendezvous)
        if self.group is not None and self.group.rendezvous == wanted:
            return
        self.leave()
        group = BroadcastGroup(wanted, rank)
        group.form()
        self.group = group

    def leave(self) -> None:
        """Leaves the group, if this worker is in one."""
        if self.group is not None:
            self.group.leave()
        self.group = self.base = None

    def weights(self, base: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that rank 0 broadcasts under the name `base`. Raises RuntimeError or BroadcastTimeout if
        the broadcast is not completed."""
        group = self.group
        assert group is not None
        for number in count():
            header = group.store.get(f"{base}/{number}").decode()
            if header == END:
                return
            if header == ABORTED:
                raise RuntimeError("the trainer aborted this broadcast")
            entries = read_header(header)
            payload = torch.empty(sum(map(padded_bytes, entries)), dtype=torch.uint8, device=group.device)
            until = time.monotonic() + group.rendezvous.timeout
            wait(group.broadcast(payload, until), until)
            group.store.set(f"{base}/reached/{group.rank}", str(number + 1))
            yield from unpacked(entries, payload)


def rendezvous_arguments(rendezvous: Rendezvous) -> dict[str, Any]:
    """Returns a rendezvous as the mapping that `Receiver.join` takes."""
    return asdict(rendezvous)
