"""The Vulkan driver that SAPIEN needs even if nothing is rendered: that of the GPU, or Mesa's software driver."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import sapien
import torch

from mmrl.errors import UserError
from mmrl.runtime.devices import device_name

COMMAND = "bash scripts/install_renderer.sh"
CHOSEN_BY_USER = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES")  # environment variables that name a driver


def folder() -> Path:
    """Returns the folder into which scripts/install_renderer.sh unpacks the software driver."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MMRL_VULKAN") or caches / "mmrl" / "vulkan")


@cache
def choose_device() -> str:
    """Returns SAPIEN's name of the device to render with: 'cuda' (of a rank such as 'cuda:3'), or 'pci:0' for any
    other.

    The machine's own driver is used if there is a CUDA device, or the user has set one of CHOSEN_BY_USER; otherwise
    the unpacked software driver. Call it before anything of SAPIEN renders, since a driver cannot be replaced
    afterwards. Raises UserError, with the command that installs a driver, if none works.
    """
    manifest = folder() / "icd.json"
    if (
        not torch.cuda.is_available()
        and not any(os.environ.get(name) for name in CHOSEN_BY_USER)
        and manifest.is_file()
    ):
        _preload(folder())
        os.environ["VK_ICD_FILENAMES"] = str(manifest)
    reasons = []
    for name in (device_name("cuda"), "pci:0"):
        try:
            if sapien.Device(name).can_render():
                return name
            reasons.append(f"{name} cannot render")
        except RuntimeError as error:
            reasons.append(str(error))
    raise UserError(f"ManiSkill finds no Vulkan driver ({'; '.join(reasons)}); get a software one with: {COMMAND}")


def describe() -> str:
    """Returns the name of the device that ManiSkill renders with, for `mmrl doctor`. Raises as `choose_device`."""
    return sapien.Device(choose_device()).name


def _preload(libraries: Path) -> None:
    """Loads the libraries of the driver from the folder `libraries`: LD_LIBRARY_PATH only counts when a process starts.
    Their order is not known, so a library that fails is tried again after the rest."""
    waiting = [path for path in sorted(libraries.glob("*.so*")) if not path.name.startswith("libvulkan")]
    while waiting:
        failed = []
        for path in waiting:
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                failed.append((path, error))
        if len(failed) == len(waiting):
            raise UserError(
                f"the software Vulkan driver is incomplete ({failed[0][1]}); delete {libraries}, then {COMMAND}"
            )
        waiting = [path for path, _ in failed]
