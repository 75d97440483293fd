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
FILES = {"cpu": "cpu.cpp", "cuda": "cuda.cu", "emulated": "emulated.cpp"}  # the last one is for tests
SHIPPED = Path(__file__).parent / "prebuilt"  # where a wheel carries libraries
CUDA_ARCHITECTURES = ("80", "90", "100", "120")  # machine code for these, and PTX of the last for what comes after
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3", "DEFAULT": ""}  # -march by what torch found in this processor
DEFINES = ("-DTORCH_TARGET_VERSION=0x020b000000000000",)  # the ABI of torch 2.11
# No contraction into fused multiply-adds: replay must round as sampling did, on every processor.
CPU_FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
CUDA_FLAGS = (
    *("-std=c++20", "-O3", "--fmad=false", "-Werror=all-warnings", "-DUSE_CUDA", "-cudart=static", "--threads=0"),
    *("-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Werror,-Wno-psabi", "-shared"),
)
_log = logging.getLogger("mmrl.kernels")
_backend: Backend = "auto"
_state: dict[str, str] = {}  # "cpu", "cuda" -> "" once loaded, or why it could not be
loaded: dict[str, Path] = {}  # "cpu", "cuda" -> what was loaded


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


def _ready(device: str) -> bool:
    if device not in _state:
        _load(device)
        if _state[device] and os.environ.get("RANK", "0") == "0":  # once for all ranks
            _log.warning("no compiled kernels for %s, the torch reference computes: %s", device, _state[device])
    return not _state[device]


# What torch.compiler.assume_constant_result does, without importing the whole compiler here: when a graph is traced,
# the answer is found by calling the function, not by tracing into it.
_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load(kind: str) -> None:
    if kind in _state and not _state[kind]:
        return None
    from mmrl.kernels import prebuilt  # it builds by what stands here

    shipped, why = prebuilt.fitting(kind)
    if shipped is not None:
        try:
            return _take(kind, shipped)
        except OSError as error:
            why = " ".join(str(error).split())
    if why and os.environ.get("RANK", "0") == "0":  # once for all ranks
        _log.warning("the %s kernels that came with mmrl are not used: %s", kind, why)
    try:
        _take(kind, library(kind))
    except (KernelError, OSError) as error:
        _state[kind] = " ".join(str(error).split())


def _take(kind: str, path: Path) -> None:
    torch.ops.load_library(str(path))
    _state[kind], loaded[kind] = "", path


def build(kinds: Sequence[str] | None = None, into: Path | None = None) -> list[Path]:
    """Build the libraries that this machine has compilers for, and return their paths.

    "cpu" needs g++ (or $CXX), "cuda" nvcc but no GPU. `into` is a folder other than the cache. Raises KernelError if a
    compiler fails, or if one of the `kinds` asked for has none.
    """
    wanted = [kind for kind in ("cpu", "cuda") if _compiler(kind)] if kinds is None else list(kinds)
    return [library(kind, into) for kind in wanted]


def library(kind: str, into: Path | None = None) -> Path:
    """Path of the library "cpu" or "cuda", built if it is not there yet. Raises KernelError with the reason if not."""
    return made(kind, into or cache())


def made(kind: str, folder: Path, for_level: str | None = None) -> Path:
    """The library in a folder, built if it is not there yet; `for_level`: of another processor than this one."""
    if not _compiler(kind):
        raise KernelError(f"no {'nvcc' if kind == 'cuda' else 'C++ compiler'} found")
    target = folder / _name(kind, for_level)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # another rank may have built it while this one waited
            _compile(kind, target, for_level)
    return target


def find(kind: str) -> Path | None:
    """Path of the library if it came with the package or was built here, None otherwise."""
    from mmrl.kernels import prebuilt

    shipped, _ = prebuilt.fitting(kind)
    if shipped is not None or not _compiler(kind):
        return shipped
    built = cache() / _name(kind)
    return built if built.exists() else None


def cache() -> Path:
    """Where libraries are kept: $MMRL_KERNEL_CACHE, or mmrl/kernels in the user's cache folder."""
    if chosen_by_user := os.environ.get("MMRL_KERNEL_CACHE"):
        return Path(chosen_by_user)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / "kernels"


def _compiler(kind: str) -> str | None:
    if kind != "cuda":
        return shutil.which(os.environ.get("CXX", "g++"))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def level() -> str:
    """What this processor can, in torch's words; one of LEVELS."""
    found = torch.backends.cpu.get_cpu_capability()
    return found if found in LEVELS else "DEFAULT"


def architectures() -> list[str]:
    """Those of CUDA_ARCHITECTURES that nvcc knows; an older one lacks the newest."""
    listed = subprocess.run([str(_compiler("cuda")), "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    return [a for a in CUDA_ARCHITECTURES if f"sm_{a}" in listed]


def toolkit() -> str:
    """The version of nvcc, such as 13.0."""
    said = subprocess.run([str(_compiler("cuda")), "--version"], capture_output=True, text=True).stdout
    return said.partition("release ")[2].partition(",")[0]


def sources() -> str:
    """A digest of what all libraries are made of."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _flags(kind: str, for_level: str | None = None) -> list[str]:
    if kind != "cuda":
        march = LEVELS[for_level or level()] if platform.machine() == "x86_64" else ""
        return [*CPU_FLAGS, *DEFINES, *([f"-march={march}"] if march else [])]
    known = architectures()
    if not known:
        raise KernelError(f"nvcc knows none of sm_{', sm_'.join(CUDA_ARCHITECTURES)}")
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in known]
    return [*CUDA_FLAGS, *DEFINES, *codes, f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]


def _name(kind: str, for_level: str | None = None) -> str:
    digest = hashlib.sha256(" ".join([*_flags(kind, for_level), sources()]).encode())
    return f"mmrl_{kind}-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def _compile(kind: str, target: Path, for_level: str | None = None) -> None:
    root = Path(torch.__file__).parent
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / target.name
        command = [str(_compiler(kind)), *_flags(kind, for_level), "-isystem", str(root / "include")]
        # The symbols of LibTorch are found through the libraries named here, which the process has loaded by then.
        command += [str(SOURCES / FILES[kind]), "-Xlinker", "--no-as-needed", *libraries, "-o", str(out)]
        length = {"cuda": "two minutes"}.get(kind, "10 seconds")
        _log.warning("compiling the %s kernels, once, in about %s: %s", kind, length, target)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
            raise KernelError(f"{command[0]} failed: {problem}")
        os.replace(out, target)
