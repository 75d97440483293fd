"""Processes on the hosts of a Ray cluster. Ray allocates the resources, and carries commands, environments and the last
lines of logs; the caller talks to the process over its own connection."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmrl.children.processes import LocalProcess, end_with_parent, free_port, tail
from mmrl.errors import UserError
from mmrl.runtime.installation import extra_command

NOTICE_S = 10.0  # seconds of waiting for resources, after which the user is warned
STOP_S = 10.0  # seconds for an actor to stop its process
TAIL = 1 << 16  # bytes at the end of a process's output that are returned
RETRY_S = 0.5  # seconds between two calls of an actor that cannot be reached at present
THREADS = 8  # threads of an actor: one awaits the process, the others answer calls
_log = logging.getLogger(__name__)
_joined: str | None = None  # address of the cluster of this process, which can be in one only


class Cluster:
    """A running Ray cluster that this host belongs to.

    host: the address of this host, as the other hosts know it. Raises UserError if Ray is not installed or does not run
    at the address, and if this process is already in another cluster.
    """

    def __init__(self, address: str, key: str) -> None:
        """address: HOST:PORT of the head; "auto": the cluster that runs on this host. key: the configuration key that
        holds the address, for messages."""
        global _joined
        self.name = f"{key}={address}"
        if importlib.util.find_spec("ray") is None:
            raise UserError(f"{self.name} needs Ray; install it with: {extra_command('ray')}")
        import ray

        if not ray.is_initialized():
            self._join(address)
            _joined = address
        elif _joined not in (None, address):
            raise UserError(
                f"{self.name}: this process is already in the Ray cluster {_joined} and can join no other; set that "
                "address"
            )
        self.host: str = ray.util.get_node_ip_address()

    def _join(self, address: str) -> None:
        """Connects to the Ray cluster at HOST:PORT or auto, and keeps this process's own handler of SIGTERM. Raises
        UserError if there is none."""
        import ray

        before, configured = signal.getsignal(signal.SIGTERM), address
        try:
            address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address  # as Ray itself does
            if address != "auto":  # if nothing listens there, Ray would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except ValueError:
            source = self.name if address == configured else f"the environment variable RAY_ADDRESS={address}"
            raise UserError(f"{source} is not an address of a Ray cluster; write HOST:PORT or auto") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: the cluster has another version of Ray or Python
            raise UserError(
                f"{self.name}: there is no Ray cluster to join ({' '.join(str(error).split())[:200]}); Ray has to run "
                "on all hosts, this one too: ray start --head on one, ray start --address=HEAD:6379 on the others"
            ) from None
        finally:
            if (
                signal.getsignal(signal.SIGTERM) is not before
            ):  # Ray's handler would end a run before it saves a checkpoint
                signal.signal(signal.SIGTERM, before)

    def allocate(self, *, gpus: int = 0, log: Path | None = None) -> RayProcess:
        """Requests one CPU and `gpus` GPUs for a process, and returns without waiting for them; processes are spread
        over the hosts. log: a file on this host to which the end of the output is appended."""
        return RayProcess(self, gpus, log)

    def shortage(self, gpus: int) -> str:
        """Returns the message that no host has the resources."""
        import ray

        free = ray.available_resources()
        return (
            f"{self.name}: no host of the Ray cluster has 1 CPU and {gpus} GPUs free; all hosts together have "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"
        )


class RayProcess:
    """A process on a host that Ray chose, with the interface of a `subprocess.Popen`. If Ray loses the host or the
    actor of the process, its return code is -SIGKILL. It ends with this process, also if that crashes."""

    def __init__(self, cluster: Cluster, gpus: int, log: Path | None) -> None:
        """Requests one CPU and `gpus` GPUs of the cluster, without waiting for them. log: file to which output is
        appended."""
        import ray

        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self.cluster, self.gpus, self.log = cluster, gpus, log
        self.returncode: int | None = None
        actor: Any = ray.remote(RayActor)
        actor = actor.options(num_cpus=1, num_gpus=gpus, max_concurrency=THREADS, scheduling_strategy="SPREAD")
        self._actor = actor.remote()
        self._address = self._actor.free_address.remote()
        self._end: Any = None  # once it runs: Ray's reference to its return code and output

    def await_resources(self, patience_s: float) -> tuple[str, int]:
        """Waits for the resources. Returns the address of the host and a free port on it.

        Raises UserError if no host has the resources within `patience_s` seconds, ConnectionError if the host is lost.
        """
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

        began = time.monotonic()
        warned = False
        while (waited := time.monotonic() - began) < patience_s:
            if waited > NOTICE_S and not warned:
                _log.warning("%s; waiting for up to %g s", self.cluster.shortage(self.gpus), patience_s)
                warned = True
            try:
                return ray.get(self._address, timeout=min(NOTICE_S, patience_s - waited))
            except GetTimeoutError:
                continue
            except ActorUnavailableError:  # Ray does not know yet whether the actor is lost
                time.sleep(RETRY_S)
                self._address = self._actor.free_address.remote()
            except RayError as error:
                self.kill()
                raise ConnectionError(f"Ray lost a host ({_first_line(error)})") from None
        self.kill()
        raise UserError(f"{self.cluster.shortage(self.gpus)}; add hosts, or start fewer processes")

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], python: str | None = None) -> None:
        """Starts `python ARGUMENTS` as soon as a host has the resources. python: None for the interpreter that runs Ray
        there. environment: variables that differ from those of Ray there."""
        self._end = self._actor.run.remote(python, list(arguments), dict(environment))

    @property
    def pid(self) -> int:
        """The id of the process on its host."""
        import ray

        return ray.get(self._actor.pid.remote())

    def poll(self) -> int | None:
        """Returns the return code; None if the process still runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process and returns its code. Raises TimeoutExpired after `timeout` seconds."""
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

        while self.returncode is None:
            try:
                self._finish(*ray.get(self._end, timeout=timeout))
            except GetTimeoutError:
                raise subprocess.TimeoutExpired("a process placed by Ray", timeout or 0) from None
            except ActorUnavailableError:  # Ray does not know yet whether the actor is lost
                time.sleep(RETRY_S)
                self._end = self._actor.outcome.remote()
            except RayError as error:
                self._finish(-signal.SIGKILL, f"Error: Ray lost the host or the actor ({_first_line(error)})\n")
        return self.returncode

    def kill(self) -> None:
        """Kills the process with all processes that it started, and frees its resources."""
        import ray
        from ray.exceptions import RayError

        if self.returncode is None:
            with suppress(RayError):  # the host does not answer, or has gone
                if ray.wait([self._address], timeout=0)[0]:
                    ray.get(self._actor.stop.remote(), timeout=STOP_S)
            self._finish(-signal.SIGKILL, "")

    def _finish(self, code: int, output: str) -> None:
        """Records the return code, kills the actor and appends its last output to the log."""
        import ray

        self.returncode = code
        ray.kill(self._actor)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(output)


class RayActor:
    """The Ray actor that starts, awaits and ends one process."""

    def __init__(self) -> None:
        self.process: LocalProcess | None = None
        self.finished, self.result = threading.Event(), (0, "")

    def free_address(self) -> tuple[str, int]:
        """Returns the address of this host and a free port on it."""
        import ray

        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def run(self, python: str | None, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Runs the process to its end; returns its `outcome`."""
        self.result = self._run(python, arguments, environment)
        self.finished.set()
        return self.result

    def outcome(self) -> tuple[int, str]:
        """Waits for the end of the process. Returns its return code and the end of its output."""
        self.finished.wait()
        return self.result

    def _run(self, python: str | None, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Runs `python ARGUMENTS` to its end. Returns the return code and the last TAIL bytes of the output."""
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, "-m", "mmrl.children.ray", python or sys.executable, *arguments]  # see `guard`
            self.process = LocalProcess(command, os.environ | environment, log=Path(file.name))
            code = self.process.wait()
            self.process.kill()  # also the processes that it started
            return code, tail(Path(file.name), TAIL)

    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()


def guard(command: list[str]) -> int:
    """Runs `command`; this process runs between an actor and the command. When an actor ends, Ray kills its children,
    such as this process, but not their children; the command notices that this process has ended, and ends with all its
    processes. Returns the return code, 127 if the command cannot be started."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        code = subprocess.Popen(command, stdin=subprocess.PIPE).wait()
    except OSError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 127
    if code < 0:  # a signal's number: this process ends by the same signal
        os.kill(os.getpid(), -code)
    return code


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
