"""Transfer of weights from rank 0 to vLLM's servers: through a folder that all read, or broadcast over the network."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import requests
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import TCPStore

from mmrl.engine.launcher import store_at
from mmrl.errors import UserError
from mmrl.generation.vllm.client import LOST, EngineWeights, Server
from mmrl.generation.weight_sync import nccl
from mmrl.generation.weight_sync.buckets import Bucket, packed
from mmrl.generation.weight_sync.folders import Exchange, write_weights
from mmrl.generation.weight_sync.nccl import ABORTED, END, GLOO, NCCL, BroadcastGroup, BroadcastTimeout, Rendezvous
from mmrl.generation.weight_sync.receiver import UNLOADED

LOOPBACK = "127.0.0.1"


class Transfer(Protocol):
    """A way to transfer weights to servers. Rank 0 calls all methods, other ranks only `give`. They raise UserError if
    it fails."""

    def prepare(self, weights: Iterator[tuple[str, Tensor]], coming: EngineWeights) -> None:
        """Writes the files from which engines start. coming: the weights that they should get."""
        ...

    def model(self, weights: EngineWeights) -> Path:
        """Returns the folder of the model that an engine starts from."""
        ...

    def arguments(self) -> dict[str, Any]:
        """Returns options of vLLM for an engine that starts from that folder."""
        ...

    def send(self, weights: Iterator[tuple[str, Tensor]], coming: EngineWeights, alive: Callable[[], bool]) -> None:
        """Sends weights to all engines, which must be running. coming: their name. alive: returns whether engines may
        still answer. An engine that does not receive them gets them by `give`."""
        ...

    def give(self, server: Server, weights: EngineWeights) -> None:
        """Sends weights to one engine, unless it has them. Also raises LOST, after which it may be tried again."""
        ...

    def close(self) -> None: ...


class Folder:
    """Transfer by safetensors files in a folder that all engines can read."""

    def __init__(self, exchange: Exchange, describe: Callable[[Path], None]) -> None:
        self.exchange, self.describe = exchange, describe

    def prepare(self, weights: Iterator[tuple[str, Tensor]], coming: EngineWeights) -> None:
        """Writes the weights and the model's other files into the folder of this version. Raises UserError if that
        fails."""
        try:
            self.exchange.claim()
            write_weights(coming.folder, weights)
            self.describe(coming.folder)
        except (OSError, SafetensorError) as error:
            raise UserError(unwritten(coming.folder, error)) from None

    def model(self, weights: EngineWeights) -> Path:
        return weights.folder

    def arguments(self) -> dict[str, Any]:
        return {}

    def send(self, weights: Iterator[tuple[str, Tensor]], coming: EngineWeights, alive: Callable[[], bool]) -> None:
        """Does nothing: `prepare` has written the weights where engines read them."""

    def give(self, server: Server, weights: EngineWeights) -> None:
        server.call("receive_folder", folder=str(weights.folder))

    def close(self) -> None:
        """Does nothing: the exchange removes the folder."""


class Broadcast:
    """Transfer by broadcast: rank 0 sends buckets of tensors to the workers of all engines through a process group.

    Rank 0 keeps the weights that it sent last in its host's memory. An engine that was restarted or has not received
    all of them gets these through a group of its own, even if training has changed the weights since.
    """

    def __init__(
        self,
        exchange: Exchange,
        describe: Callable[[Path], None],
        servers: Sequence[Server],
        *,
        timeout: float,
        rank: int,
        say: Callable[[str], None],
    ) -> None:
        """timeout: seconds that a transfer may take. say: shows a message to the user."""
        self.exchange, self.describe, self.servers = exchange, describe, list(servers)
        self.timeout, self.rank, self.say = timeout, rank, say
        self.folder = exchange.path / "model"
        self.last_sent: list[Bucket] = []
        self.prepared = False
        self.stores: dict[str, TCPStore] = {}  # stores of rendezvous, by the address at which they listen
        self.group: BroadcastGroup | None = None  # with the workers of all engines

    def prepare(self, weights: Iterator[tuple[str, Tensor]], coming: EngineWeights) -> None:
        """Writes the model's files without weights, at the first call only. Raises UserError if that fails."""
        if self.prepared:
            return
        try:
            self.exchange.claim()
            self.folder.mkdir()
            self.describe(self.folder)
        except OSError as error:
            raise UserError(unwritten(self.folder, error)) from None
        self.prepared = True

    def model(self, weights: EngineWeights) -> Path:
        return self.folder

    def arguments(self) -> dict[str, Any]:
        """Returns vLLM's options for an engine that starts without weights."""
        return {
            "load_format": UNLOADED,
            "worker_extension_cls": "mmrl.generation.weight_sync.dummy_loader.UnloadedArrival",
        }

    def send(self, weights: Iterator[tuple[str, Tensor]], coming: EngineWeights, alive: Callable[[], bool]) -> None:
        """Broadcasts weights to all engines, and stores them for `give`. If the broadcast fails, the user is told, and
        engines get them by `give`."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            standings = list(pool.map(lambda server: server.ask("standing", alive), self.servers))
        self.last_sent = []
        buckets = self._stored(packed(weights))
        try:
            self.group = self._group(self.servers, standings, self.group)
            self._stream(self.group, self.servers, standings, coming.base, buckets)
        except (RuntimeError, LOST) as error:
            self._drop(self.group)
            self.group = None
            self.say(f"the broadcast of weights failed ({brief(error)}); sending them to each engine separately")
        for _ in buckets:  # stores those that an error has left
            pass

    def _stored(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yields buckets, and stores a copy of each on the CPU in `last_sent`."""
        for bucket in buckets:
            self.last_sent.append(Bucket(bucket.entries, bucket.payload.cpu()))
            yield bucket

    def give(self, server: Server, weights: EngineWeights) -> None:
        """Broadcasts the stored weights to one engine, in a group of its own, unless it has them."""
        if self.rank != 0:
            raise requests.ConnectionError("rank 0 has not sent the weights to this server yet")
        standings = server.call("standing")["results"]
        if all(state["base"] == weights.base for state in standings):
            return
        group = None
        try:
            group = self._group([server], [standings], None)
            self._stream(group, [server], [standings], weights.base, self.last_sent)
        except RuntimeError as error:
            raise requests.ConnectionError(brief(error)) from None
        finally:
            self._drop(group)

    def close(self) -> None:
        self._drop(self.group)
        self.group, self.stores, self.prepared = None, {}, False

    def _group(
        self, servers: Sequence[Server], standings: Sequence[Any], last: BroadcastGroup | None
    ) -> BroadcastGroup:
        """Returns the group `last` if all workers are still in it, else a new group that no worker has joined yet.
        standings: for each server, the states of its workers; see `Receiver.standing`."""
        workers = [state for standing in standings for state in standing]
        if last is not None and {state["group"] for state in workers} == {last.rendezvous.name}:
            return last
        self._drop(last)
        gpus = torch.cuda.is_available() and {state["device"] for state in workers} == {"cuda"}
        host = reachable_address([server.address for server in servers])
        if host not in self.stores:
            self.stores[host] = store_at(host, timedelta(seconds=self.timeout))
        store, backend = self.stores[host], NCCL if gpus else GLOO
        rendezvous = Rendezvous(host, store.port, uuid4().hex, 1 + len(workers), backend, self.timeout)
        return BroadcastGroup(rendezvous, 0, store)

    def _stream(
        self,
        group: BroadcastGroup,
        servers: Sequence[Server],
        standings: Sequence[Any],
        base: str,
        buckets: Iterable[Bucket],
    ) -> None:
        """Broadcasts buckets. Raises UserError if it takes too long, and RuntimeError or one of LOST if a server is
        lost."""
        until, sent = time.monotonic() + self.timeout, 0
        firsts = list(accumulate(map(len, standings), initial=1))[:-1]  # rank of each server's first worker
        arguments = {"rendezvous": nccl.rendezvous_arguments(group.rendezvous), "base": base}
        with ThreadPoolExecutor(len(servers)) as pool:
            receiving = [
                pool.submit(server.call, "receive_broadcast", first=first, **arguments)
                for server, first in zip(servers, firsts, strict=True)
            ]
            try:
                self._gather(group, receiving, until)
                for bucket in buckets:
                    nccl.publish_header(group, base, sent, bucket)
                    work = group.broadcast(bucket.payload.to(group.device), until)
                    nccl.wait(work, until, lambda: raise_failure(receiving))
                    sent += 1
                nccl.publish_end(group, base, sent, END)
                for future in receiving:
                    future.result(max(0.0, until - time.monotonic()))
            except (BroadcastTimeout, TimeoutError, RuntimeError, LOST) as error:
                if isinstance(error, (RuntimeError, LOST)) and time.monotonic() < until:
                    raise
                # HTTP requests and gloo have the same time limit, and their errors may come first
                raise UserError(self._timeout_message(group, servers, firsts, base, receiving)) from None
            finally:
                if not all(future.done() and future.exception() is None for future in receiving):
                    for number in (sent, sent + 1):  # a member that has received the last bucket waits for the next one
                        nccl.publish_end(group, base, number, ABORTED)
                    group.leave()  # so that the other members do not wait for rank 0
        nccl.remove_headers(group, base, sent)

    def _gather(self, group: BroadcastGroup, receiving: Sequence[Future[Any]], until: float) -> None:
        """Waits until all workers have joined a new group, and connects to them. receiving: the requests to the
        servers."""
        if group.processes is not None:
            return
        while group.absent():
            raise_failure(receiving)
            if time.monotonic() > until:
                raise BroadcastTimeout
            time.sleep(10 * nccl.POLL)
        group.form()

    def _timeout_message(
        self,
        group: BroadcastGroup,
        servers: Sequence[Server],
        firsts: Sequence[int],
        base: str,
        receiving: Sequence[Any],
    ) -> str:
        """Returns the message of a timeout, which names the server that is furthest behind. First come servers whose
        request (`receiving`) is not done, among these the ones that have not joined the group, among these the ones
        that have received the fewest buckets. firsts: the rank of each server's first worker in the group."""
        reached = [nccl.num_received(group, base, first) for first in firsts]
        absent = set(group.absent())
        behind = min(range(len(servers)), key=lambda i: (receiving[i].done(), firsts[i] not in absent, reached[i]))
        rendezvous = f"{group.rendezvous.host}:{group.rendezvous.port}"
        return (
            f"the vLLM server at {servers[behind].address} did not receive all weights that were broadcast within "
            f"rollout.generator.timeout={self.timeout:g} s; it received {reached[behind]} buckets; check that it is "
            f"running, and that its host can connect to {rendezvous}"
        )

    def _drop(self, group: BroadcastGroup | None) -> None:
        if group is not None:
            group.leave()


def raise_failure(receiving: Sequence[Future[Any]]) -> None:
    """Raises the error of a server that has stopped receiving."""
    for future in receiving:
        if future.done():
            future.result()


def reachable_address(addresses: Sequence[str]) -> str:
    """Returns an address of this host that the hosts of all servers can reach: the loopback address if all run on this
    host."""
    hosts = [urlsplit(address).hostname or LOOPBACK for address in addresses]
    local = [nccl.local_address(host) for host in hosts]
    return next((address for address in local if not ipaddress.ip_address(address).is_loopback), LOOPBACK)


def brief(error: Exception) -> str:
    """Returns the message of an error in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def unwritten(path: Path, error: Exception) -> str:
    """Returns the message for a folder of weights that cannot be written."""
    return f"{path} cannot be written ({error}); set rollout.generator.exchange to another folder"
