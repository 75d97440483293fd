"""Starts the processes of vLLM servers, on this host or by Ray on another one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmrl.children.processes import LocalProcess
from mmrl.children.ray import Cluster, RayProcess
from mmrl.errors import UserError
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm.api_key import KEY
from mmrl.generation.vllm.engine import ENVIRONMENT, EngineOptions, describe_versions, last_error
from mmrl.runtime import devices

NAME = "mmrl"  # name of the model in requests to servers
MIDDLEWARE = "mmrl.generation.vllm.api_key.Keyed"


@dataclass
class Process:
    """A server process on this host."""

    options: EngineOptions
    key: str = field(repr=False)  # API key of requests
    log: Path
    address: str = ""
    device: int = 0  # the first of its GPUs, as torch counts in this process
    running: LocalProcess | RayProcess | None = None
    failures: int = 0  # how often the process ended since all engines last got new weights
    loading: dict[str, Any] = field(default_factory=dict)  # vLLM's arguments for loading weights

    def start(self, model: Path) -> None:
        """Starts the server. model: folder from which it reads the configuration, and weights if it has any."""
        host, port = self.address.removeprefix("http://").rsplit(":", 1)
        environment = devices.without_launcher(dict(os.environ)) | self.environment()
        if torch.cuda.is_available():
            gpus = range(self.device, self.device + self.options.tensor_parallel)
            environment[devices.VISIBLE] = devices.visible_devices(gpus)
        command = [sys.executable, *self.arguments(model, host, int(port))]
        self.running = LocalProcess(command, environment, log=self.log)

    def arguments(self, model: Path, host: str, port: int) -> list[str]:
        """Returns the arguments of Python that run the server."""
        options = {"model": str(model), "served_model_name": NAME, "host": host, "port": port}
        options |= {"enable_scale_out": True, "disable_uvicorn_access_log": True, "middleware": MIDDLEWARE}
        if self.options.tensor_parallel == 1:
            options["distributed_executor_backend"] = "uni"  # saves a process
        return ["-m", "mmrl.generation.vllm.serve", *command_line(options | self.options.arguments() | self.loading)]

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the server."""
        variables = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING", KEY: self.key}
        if torch.cuda.is_available():
            # Only for GPUs: on a CPU it would add a process between engine and model.
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if self.options.lora_rank:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return variables

    def ended(self) -> bool:
        """Returns whether the process has ended. If so, counts a failure, and kills the processes that it started."""
        if self.running is None or self.running.poll() is None:
            return False
        self.failures += 1
        self.running.kill()
        return True

    def stop(self) -> None:
        if self.running is not None:
            self.running.kill()

    def state(self) -> str:
        """Returns a message about a server that ended, with the reason if its log has one."""
        text = self.log.read_text(errors="replace")
        if self.running is not None and self.running.poll() is None:
            return f"it ended, was started again and does not answer yet, see {self.log}"
        if "rror" not in text:  # neither Error nor error
            return f"it ended without an error message, see {self.log}"
        return f"{self.log} says: {last_error(text)}; {describe_versions()}"


@dataclass(kw_only=True)
class PlacedProcess(Process):
    """A server process on a host that Ray chooses at each start."""

    cluster: Cluster
    publish: Callable[[str], None]  # publishes its address to the other ranks
    patience: float  # seconds to wait for free GPUs

    def start(self, model: Path) -> None:
        """Starts the server. Raises UserError if no host has free GPUs, ConnectionError if the host is lost."""
        gpus = self.options.tensor_parallel if torch.cuda.is_available() else 0
        self.running = placed = self.cluster.allocate(gpus=gpus, log=self.log)
        host, port = placed.await_resources(self.patience)
        self.address = f"http://{host}:{port}"
        self.publish(self.address)
        placed.run(self.arguments(model, host, port), self.environment())


def devices_of(settings: VLLMServer, gather: Callable[[Any], list[Any]]) -> list[int]:
    """Returns the index of the first GPU of each engine on the host of rank 0. All ranks must call it.

    Raises UserError, on all ranks, if there are too few GPUs or a rank trains on one of them.
    """
    count, first, size = settings.servers, settings.first_device, settings.tensor_parallel
    problem = None
    if torch.cuda.is_available():
        ranks, available = devices.local_ranks(), torch.cuda.device_count()
        if first < ranks:
            problem = (
                f"rollout.generator.first_device={first} is a GPU that a rank trains on; set it to {ranks} or more, or "
                "use rollout.generator.type=vllm_colocated"
            )
        elif first + count * size > available:
            problem = (
                f"{count} engines of {size} GPUs from rollout.generator.first_device={first} on need "
                f"{first + count * size} GPUs, but this host has {available}"
            )
    if problem := gather(problem)[0]:  # rank 0's, since the engines run on its host
        raise UserError(problem)
    return [first + i * size for i in range(count)]


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Converts keyword arguments to command-line options of vLLM, without those that are None."""
    parts: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            parts += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return parts
