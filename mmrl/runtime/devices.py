"""Which GPU is this rank's own, and how the processes that it starts are told of theirs.

No torch here: workers of simulators may run under an interpreter that lacks it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from mmrl.errors import UserError

VISIBLE, EGL = "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID"
# What launchers tell the ranks of a training; a child that reads it would take itself for one of them.
LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LAUNCHER |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}  # of torchrun
LAUNCHER |= {"CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}  # of DeepSpeed's
ELASTIC = "TORCHELASTIC_"  # how further ones begin

_own: int | None = None


def local_rank() -> int:
    """The number of this process among those of its host, as its launcher says; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Ranks of the training on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def claim(count: int) -> int:
    """This rank's GPU out of the `count` that the process sees, which it then owns: the one with the number of its
    local rank. MuJoCo is told to render there, unless the user has said where.

    Raises UserError where there are fewer GPUs than ranks on this host.
    """
    global _own
    number = local_rank()
    if number >= count:
        raise UserError(
            f"rank {number} of this host finds {count} GPU{'s' * (count != 1)} "
            f"({VISIBLE}={os.environ.get(VISIBLE, 'unset')}); start as many ranks as there are GPUs, or, where each "
            "rank is shown one GPU of its own, start each with LOCAL_RANK=0"
        )
    _own = number
    if (name := names([number])).isdigit():  # EGL knows no UUIDs, and MIG slices can not render
        os.environ.setdefault(EGL, name)
    return number


def own() -> int | None:
    """The number of this rank's GPU as torch counts, None before it has one."""
    return _own


def disown() -> None:
    """As if nothing had been claimed."""
    global _own
    _own = None


def named(kind: str) -> str:
    """`kind` ("cuda", "physx_cuda") with the number of this rank's GPU, where it has one."""
    return kind if _own is None else f"{kind}:{_own}"


def names(numbers: Iterable[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a child that is to see these GPUs alone, numbered as this process counts them: numbers,
    UUIDs or MIG ids, as this process was itself given them.

    Raises UserError for a GPU that this process does not see.
    """
    given = os.environ.get(VISIBLE)
    if given is None:
        return ",".join(map(str, numbers))
    seen = [name.strip() for name in given.split(",") if name.strip()]
    numbers = list(numbers)
    if beyond := [number for number in numbers if number >= len(seen)]:
        raise UserError(f"GPU {beyond[0]} is asked for, and {VISIBLE}={given} shows {len(seen)}")
    return ",".join(seen[number] for number in numbers)


def of_children() -> dict[str, str]:
    """The environment by which a child sees this rank's GPU alone; empty where the rank has none."""
    return {} if _own is None else {VISIBLE: names([_own])}


def without_launcher(environment: dict[str, str]) -> dict[str, str]:
    """An environment for a child that is no rank of the training."""
    return {name: value for name, value in environment.items() if name not in LAUNCHER and not name.startswith(ELASTIC)}
