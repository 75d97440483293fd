"""Loads the libraries of C++ and CUDA kernels, and selects the backend that computes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, get_args

import torch

from mmrl.kernels import prebuilt, toolchain
from mmrl.kernels.toolchain import KernelError

Backend = Literal["auto", "cuda", "cpu", "torch"]
_log = logging.getLogger("mmrl.kernels")
_backend: Backend = "auto"
_state: dict[str, str] = {}  # "cpu", "cuda" -> "" once loaded, or why it could not be
loaded: dict[str, Path] = {}  # "cpu", "cuda" -> path of the library


def use(backend: Backend) -> None:
    """Chooses who computes from now on, in this process.

    auto    the compiled kernels of each tensor's device, where they can be built; elsewhere the torch reference, with
            one line in the log that says so
    cuda    the CUDA kernels for CUDA tensors, the torch reference for all others
    cpu     the C++ kernels for CPU tensors, the torch reference for all others
    torch   the torch reference

    Builds and loads at once what "cuda" and "cpu" need. Raises KernelError if that cannot be done, ValueError for any
    other name. float64 always goes to the reference.
    """
    global _backend
    if backend not in get_args(Backend):
        raise ValueError(f"kernels.backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    if backend in ("cuda", "cpu"):
        if backend == "cuda" and not torch.cuda.is_available():
            raise KernelError("kernels.backend=cuda: torch sees no CUDA device")
        _load(backend)
        if _state[backend]:
            raise KernelError(f"kernels.backend={backend}: {_state[backend]}")
    _backend = backend


def chosen(*tensors: torch.Tensor) -> bool:
    """Returns whether the compiled kernels compute for these tensors of one device; builds them on first use."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or _backend not in ("auto", device):
        return False
    if any(t.dtype == torch.float64 for t in tensors):
        return False
    return _ready(device)


def _ready(device: str) -> bool:
    if device not in _state:
        _load(device)
        if _state[device] and os.environ.get("RANK", "0") == "0":  # once for all ranks
            _log.warning("no compiled kernels for %s, plain PyTorch is used instead: %s", device, _state[device])
    return not _state[device]


# What torch.compiler.assume_constant_result does, without importing the whole compiler here: when a graph is traced,
# the answer is found by calling the function, not by tracing into it.
_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load(kind: str) -> None:
    """Loads the kernels "cpu" or "cuda": those that came with mmrl, else compiled ones. Records why not in `_state`."""
    if kind in _state and not _state[kind]:
        return None
    shipped, why = prebuilt.fitting(kind)
    if shipped is not None:
        try:
            return _take(kind, shipped)
        except OSError as error:
            why = " ".join(str(error).split())
    if why and os.environ.get("RANK", "0") == "0":  # once for all ranks
        _log.warning("the %s kernels that came with mmrl are not used: %s", kind, why)
    try:
        _take(kind, toolchain.library(kind))
    except (KernelError, OSError) as error:
        _state[kind] = " ".join(str(error).split())


def _take(kind: str, path: Path) -> None:
    torch.ops.load_library(str(path))
    _state[kind], loaded[kind] = "", path


def find(kind: str) -> Path | None:
    """Path of the library if it came with the package or was built here, None otherwise."""
    shipped, _ = prebuilt.fitting(kind)
    if shipped is not None or not toolchain.compiler(kind):
        return shipped
    built = toolchain.cache() / toolchain.file_name(kind)
    return built if built.exists() else None
