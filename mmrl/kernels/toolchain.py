"""The toolchain of the kernels: the compilers of this machine, their flags and targets, and the names of libraries.

A library is named by a hash of its sources, flags and architecture, so an outdated one is never loaded. It is built
under a file lock into a temporary name, so any number of ranks may request it at once. The stable ABI of LibTorch lets
one library serve torch 2.11 and later, with any Python.
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

import torch

_log = logging.getLogger("mmrl.kernels")
SOURCES = Path(__file__).parent / "csrc"
FILES = {"cpu": "cpu.cpp", "cuda": "cuda.cu", "emulated": "emulated.cpp"}  # the last one is for tests
SHIPPED = Path(__file__).parent / "prebuilt"  # where a wheel carries libraries
CUDA_ARCHITECTURES = ("80", "90", "100", "120")  # machine code for these, and PTX of the last one for newer GPUs
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3", "DEFAULT": ""}  # instruction set by torch's name -> -march
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


class KernelError(RuntimeError):
    """Raised if a backend that was requested by name is not available. The message is one line with the reason."""


def build(kinds: Sequence[str] | None = None, into: Path | None = None) -> list[Path]:
    """Builds the libraries that this machine has compilers for, and returns their paths.

    "cpu" needs g++ (or $CXX), "cuda" nvcc but no GPU. `into` is a folder other than the cache. Raises KernelError if a
    compiler fails, or if one of the requested `kinds` has none.
    """
    available = [kind for kind in ("cpu", "cuda") if compiler(kind)]
    return [library(kind, into) for kind in (available if kinds is None else kinds)]


def library(kind: str, into: Path | None = None) -> Path:
    """Returns the path of the library "cpu" or "cuda", which is built if it does not exist yet. Raises KernelError with
    the reason if that fails. into: a folder other than the cache."""
    return built(kind, into or cache())


def built(kind: str, folder: Path, for_level: str | None = None) -> Path:
    """Returns the path of a library in a folder, which is built if it does not exist yet. for_level: instruction set, a
    key of LEVELS; None: this processor's."""
    if not compiler(kind):
        raise KernelError(f"no {'nvcc' if kind == 'cuda' else 'C++ compiler'} found")
    target = folder / file_name(kind, for_level)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # another rank may have built it while this one waited
            _compile(kind, target, for_level)
    return target


def cache() -> Path:
    """Returns the folder of built libraries: $MMRL_KERNEL_CACHE, or mmrl/kernels in the user's cache folder."""
    if chosen_by_user := os.environ.get("MMRL_KERNEL_CACHE"):
        return Path(chosen_by_user)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / "kernels"


def compiler(kind: str) -> str | None:
    """Returns the path of nvcc for "cuda", of the C++ compiler otherwise; None if it is not installed."""
    if kind != "cuda":
        return shutil.which(os.environ.get("CXX", "g++"))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def level() -> str:
    """Returns the instruction set of this processor by torch's name, a key of LEVELS."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in LEVELS else "DEFAULT"


def architectures() -> list[str]:
    """Returns the CUDA_ARCHITECTURES that nvcc supports; an older nvcc does not support the newest."""
    listed = subprocess.run([str(compiler("cuda")), "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    return [a for a in CUDA_ARCHITECTURES if f"sm_{a}" in listed]


def toolkit() -> str:
    """Returns the version of nvcc, such as 13.0."""
    output = subprocess.run([str(compiler("cuda")), "--version"], capture_output=True, text=True).stdout
    return output.partition("release ")[2].partition(",")[0]


def sources() -> str:
    """Returns a hash of the sources of all libraries."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _flags(kind: str, for_level: str | None = None) -> list[str]:
    """Returns the compiler's flags for "cpu" (an x86-64 level) or "cuda" (all supported architectures, and PTX of the
    last). Raises KernelError."""
    if kind != "cuda":
        march = LEVELS[for_level or level()] if platform.machine() == "x86_64" else ""
        return [*CPU_FLAGS, *DEFINES, *([f"-march={march}"] if march else [])]
    supported = architectures()
    if not supported:
        raise KernelError(f"nvcc supports none of sm_{', sm_'.join(CUDA_ARCHITECTURES)}; install another CUDA toolkit")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in supported]
    return [*CUDA_FLAGS, *DEFINES, *targets, f"-gencode=arch=compute_{supported[-1]},code=compute_{supported[-1]}"]


def file_name(kind: str, for_level: str | None = None) -> str:
    """Returns the file name of a library, with a hash of its flags and sources."""
    digest = hashlib.sha256(" ".join([*_flags(kind, for_level), sources()]).encode())
    return f"mmrl_{kind}-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def _compile(kind: str, target: Path, for_level: str | None = None) -> None:
    """Compiles the kernels "cpu" or "cuda" to the library `target`. for_level: as in `built`. Raises
    KernelError with the compiler's message."""
    root = Path(torch.__file__).parent
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / target.name
        command = [str(compiler(kind)), *_flags(kind, for_level), "-isystem", str(root / "include")]
        # The symbols of LibTorch come from the libraries named here, which the process has loaded before this one.
        command += [str(SOURCES / FILES[kind]), "-Xlinker", "--no-as-needed", *libraries, "-o", str(out)]
        length = {"cuda": "two minutes"}.get(kind, "10 seconds")
        _log.warning("compiling the %s kernels, once, in about %s: %s", kind, length, target)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
            raise KernelError(f"{command[0]} failed: {problem}")
        os.replace(out, target)
