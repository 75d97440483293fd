"""Assigns a GPU to this rank, and builds the environment that shows GPUs to its child processes.

Does not import torch: workers of simulators may run under an interpreter without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from mmrl.errors import UserError

VISIBLE, EGL = "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID"
# Variables by which launchers number ranks; a child that reads them would act as a rank.
LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LAUNCHER |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}  # of torchrun
LAUNCHER |= {"CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}  # of DeepSpeed's
ELASTIC = "TORCHELASTIC_"  # prefix of further ones

_device_index: int | None = None


def local_rank() -> int:
    """Returns the rank of this process on its host, from its launcher; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Returns the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def select_gpu(count: int) -> int:
    """Assigns the GPU with the number of the local rank, out of `count`, to this process, and returns that number.
    MuJoCo renders there too, unless the user has chosen a GPU for it.

    Raises UserError where there are fewer GPUs than ranks on this host.
    """
    global _device_index
    number = local_rank()
    if number >= count:
        raise UserError(
            f"rank {number} of this host finds {count} GPU{'s' * (count != 1)} "
            f"({VISIBLE}={os.environ.get(VISIBLE, 'unset')}); start as many ranks as there are GPUs, or, where each "
            "rank is shown one GPU of its own, start each with LOCAL_RANK=0"
        )
    _device_index = number
    if (name := visible_devices([number])).isdigit():  # EGL knows no UUIDs, and MIG slices cannot render
        os.environ.setdefault(EGL, name)
    return number


def device_index() -> int | None:
    """Returns the index of this rank's GPU, as torch counts; None before `select_gpu`."""
    return _device_index


def release_device() -> None:
    """Undoes `select_gpu`; for tests."""
    global _device_index
    _device_index = None


def device_name(kind: str) -> str:
    """Returns `kind` ("cuda", "physx_cuda") with the index of this rank's GPU, if it has one."""
    return kind if _device_index is None else f"{kind}:{_device_index}"


def visible_devices(numbers: Iterable[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a child that shall see only some of this process's GPUs.

    numbers: indices of these GPUs, as this process counts its own. The entries of the result are indices, UUIDs or MIG
    ids, as in this process's own variable.

    Raises UserError for a GPU that this process does not see.
    """
    variable = os.environ.get(VISIBLE)
    if variable is None:
        return ",".join(map(str, numbers))
    visible = [name.strip() for name in variable.split(",") if name.strip()]
    numbers = list(numbers)
    if beyond := [number for number in numbers if number >= len(visible)]:
        raise UserError(
            f"GPU {beyond[0]} was requested, but {VISIBLE}={variable} lists {len(visible)}, counted from 0; list more, "
            "or request fewer"
        )
    return ",".join(visible[number] for number in numbers)


def child_environment() -> dict[str, str]:
    """Returns environment variables that show a child only this rank's GPU; empty where the rank has none."""
    return {} if _device_index is None else {VISIBLE: visible_devices([_device_index])}


def without_launcher(environment: dict[str, str]) -> dict[str, str]:
    """Returns the environment without launcher variables, for a child that is not a rank."""
    return {name: value for name, value in environment.items() if name not in LAUNCHER and not name.startswith(ELASTIC)}
