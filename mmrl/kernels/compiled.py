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
_state: dict[str, str] = {}  # "cpu", "cuda" -> "" once loaded, or the reason why loading failed
loaded: dict[str, Path] = {}  # "cpu", "cuda" -> path of the library


def use(backend: Backend) -> None:
    """Selects the backend that computes from now on in this process.

    auto    the compiled kernels of each tensor's device, where they can be built; elsewhere the torch reference, with
            one line in the log that says so
    cuda    the CUDA kernels for CUDA tensors, the torch reference for all others
    cpu     the C++ kernels for CPU tensors, the torch reference for all others
    torch   the torch reference

    For "cuda" and "cpu" the kernels are built and loaded at once. Raises KernelError if that fails, and ValueError for
    any other name. The reference always computes float64.
    """
    global _backend
    if backend not in get_args(Backend):
        raise ValueError(f"kernels.backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    if backend in ("cuda", "cpu"):
        if backend == "cuda" and not torch.cuda.is_available():
            raise KernelError("kernels.backend=cuda: torch sees no CUDA device; set kernels.backend=auto")
        _load(backend)
        if _state[backend]:
            raise KernelError(
                f"kernels.backend={backend}: {_state[backend]}; correct this, or set kernels.backend=auto"
            )
    _backend = backend


def uses_compiled(*tensors: torch.Tensor) -> bool:
    """Returns whether the compiled kernels compute for these tensors of one device; builds them on first use."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or _backend not in ("auto", device):
        return False
    if any(t.dtype == torch.float64 for t in tensors):
        return False
    return _ready(device)


def _ready(device: str) -> bool:
    """Returns whether the kernels of a device are loaded; tries to load them in the first call."""
    if device not in _state:
        _load(device)
        if _state[device] and os.environ.get("RANK", "0") == "0":  # once for all ranks
            _log.warning("no compiled kernels for %s, plain PyTorch is used instead: %s", device, _state[device])
    return not _state[device]


# What torch.compiler.assume_constant_result does, without importing the whole compiler here: when a graph is traced,
# the function is called, and its result is a constant of the graph.
_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load(kind: str) -> None:
    """Loads the kernels "cpu" or "cuda": those that came with mmrl, else compiled ones. Stores the reason of a failure
    in `_state`."""
    if kind in _state and not _state[kind]:
        return None
    shipped, reason = prebuilt.fitting(kind)
    if shipped is not None:
        try:
            return _load_library(kind, shipped)
        except OSError as error:
            reason = " ".join(str(error).split())
    if reason and os.environ.get("RANK", "0") == "0":  # once for all ranks
        _log.warning("the %s kernels that came with mmrl are not used, but compiled here: %s", kind, reason)
    try:
        _load_library(kind, toolchain.library(kind))
    except (KernelError, OSError) as error:
        _state[kind] = " ".join(str(error).split())


def _load_library(kind: str, path: Path) -> None:
    """Loads a library, which registers its kernels, and records it as loaded."""
    torch.ops.load_library(str(path))
    _state[kind], loaded[kind] = "", path


def find(kind: str) -> Path | None:
    """Returns the path of the library "cpu" or "cuda" if it came with the package or was built here, else None."""
    shipped, _ = prebuilt.fitting(kind)
    if shipped is not None or not toolchain.compiler(kind):
        return shipped
    built = toolchain.cache() / toolchain.file_name(kind)
    return built if built.exists() else None
