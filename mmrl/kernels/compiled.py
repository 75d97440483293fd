"""The compiled half: building the C++ and CUDA sources into a cache, loading them, and choosing who computes.

A library is named by a hash of its sources, flags and architecture, so a stale one is never loaded, and built under a
file lock into a temporary name, so any number of ranks may ask for it at once. The stable ABI of LibTorch lets one
library serve torch 2.11 and later, with any Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

Backend = Literal["auto", "cuda", "cpu", "torch"]
SOURCES = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / "prebuilt"  # where a wheel carries libraries
CUDA_ARCHITECTURES = ("80", "90")  # machine code for these, and PTX of the last for what comes after
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}  # -march by what torch found in this processor
DEFINES = ("-DTORCH_TARGET_VERSION=0x020b000000000000",)  # the ABI of torch 2.11
# No contraction into fused multiply-adds: replay must round as sampling did, on every processor.
CPU_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
CUDA_FLAGS = (
    *("-std=c++20", "-O3", "--fmad=false", "-Werror=all-warnings", "-DUSE_CUDA", "-cudart=static", "--threads=0"),
    *("-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Werror,-Wno-psabi", "-shared"),
)
_log = logging.getLogger("mmrl.kernels")
_backend: Backend = "auto"
_state: dict[str, str] = {}  # "cpu", "cuda" -> "" once loaded, or why it could not be


class KernelError(RuntimeError):
    """A backend that was asked for by name cannot be had; the text is one line that says why."""


def use(backend: Backend) -> None:
    """Choose who computes from now on, in this process.

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
    """Whether the compiled kernels compute for these tensors of one device; builds them on first use."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or _backend not in ("auto", device):
        return False
    if any(t.dtype == torch.float64 for t in tensors):
        return False
    return _ready(device)


@torch.compiler.assume_constant_result
def _ready(device: str) -> bool:
    if device not in _state:
        _load(device)
        if _state[device]:
            _log.warning("no compiled kernels for %s, the torch reference computes: %s", device, _state[device])
    return not _state[device]


def _load(kind: str) -> None:
    if kind in _state and not _state[kind]:
        return
    try:
        torch.ops.load_library(str(library(kind)))
        _state[kind] = ""
    except (KernelError, OSError) as error:
        _state[kind] = " ".join(str(error).split())


def build(kinds: Sequence[str] | None = None, into: Path | None = None) -> list[Path]:
    """Build the libraries that this machine has compilers for ("cpu" by g++ or $CXX, "cuda" by nvcc; a GPU is not
    needed) and return their paths. `into` is a folder other than the cache; the package's own `prebuilt` is looked at
    first when loading. Raises KernelError if a compiler fails, or if one of the `kinds` asked for has none.
    """
    wanted = [kind for kind in ("cpu", "cuda") if _compiler(kind)] if kinds is None else list(kinds)
    return [library(kind, into) for kind in wanted]


def library(kind: str, into: Path | None = None, architectures: Sequence[str] = CUDA_ARCHITECTURES) -> Path:
    """Path of the library "cpu" or "cuda", built if it is not there yet. Raises KernelError with the reason if not."""
    flags = _flags(kind, architectures)
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    name = f"mmrl_{kind}-{platform.machine()}-{digest.hexdigest()[:16]}.so"
    folder = into or cache()
    for known in (SHIPPED / name, folder / name):
        if known.exists():
            return known
    if not _compiler(kind):
        raise KernelError(f"no {'nvcc' if kind == 'cuda' else 'C++ compiler'} found")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _compile(kind, flags, folder / name)
    return folder / name


def cache() -> Path:
    """Where libraries are kept: $MMRL_KERNEL_CACHE, or mmrl/kernels in the user's cache folder."""
    if chosen_by_user := os.environ.get("MMRL_KERNEL_CACHE"):
        return Path(chosen_by_user)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / "kernels"


def _compiler(kind: str) -> str | None:
    if kind == "cpu":
        return shutil.which(os.environ.get("CXX", "g++"))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _flags(kind: str, architectures: Sequence[str]) -> list[str]:
    if kind == "cpu":
        level = LEVELS.get(torch.backends.cpu.get_cpu_capability())
        return [*CPU_FLAGS, *DEFINES, *([f"-march={level}"] if level else [])]
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    last = architectures[-1]
    return [*CUDA_FLAGS, *DEFINES, *codes, f"-gencode=arch=compute_{last},code=compute_{last}"]


def _compile(kind: str, flags: Sequence[str], target: Path) -> None:
    root = Path(torch.__file__).parent
    sources = ["cpu.cpp"] if kind == "cpu" else ["cuda.cu"]
    linker = ["--no-as-needed", *(["-soname", target.name] if kind == "cpu" else [])]
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / target.name
        command = [str(_compiler(kind)), *flags, "-isystem", str(root / "include")]
        command += [str(SOURCES / source) for source in sources]
        command += [option for name in linker for option in ("-Xlinker", name)] + libraries + ["-o", str(out)]
        _log.info("compiling the %s kernels into %s", kind, target)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
            raise KernelError(f"{command[0]} failed: {problem}")
        os.replace(out, target)
