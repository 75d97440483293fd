"""cuda.cu itself, compiled by the C++ compiler with `host/cuda_runtime.h`: its kernels, merging of warps and blocks,
launch geometry and host code run on the CPU. As a plugin of pytest it takes the place of the C++ kernels:

    python -m pytest -p tests.kernels.on_host tests/kernels/test_tokens.py

With MMRL_SANITIZE=address,undefined the library is built so; python needs the sanitizer's runtime preloaded then.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from mmrl.kernels import toolchain

HERE = Path(__file__).parent / "host"
LAUNCH = re.compile(r"([\w:]+(?:<[\w, ]+>)?)<<<(.*?), THREADS, 0, stream>>>\(", re.DOTALL)
FLAGS = ("-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wno-psabi")
FLAGS += ("-ffp-contract=off", "-fno-math-errno")


def translated(source):
    """The CUDA source with launches as calls, registered for the CPU. Raises AssertionError where a launch is left."""
    text, launches = LAUNCH.subn(r"host::launch(\2, THREADS, &\1, ", source)
    assert "<<<" not in text and launches == source.count("<<<"), "a launch that is written in another way"
    text = text.replace("aoti_torch_get_current_cuda_stream(t.", "host::current_stream(t.")
    text, registered = re.subn(
        r"STABLE_TORCH_LIBRARY_IMPL\(mmrl, CUDA, m\)", "STABLE_TORCH_LIBRARY_IMPL(mmrl, CPU, m)", text
    )
    assert registered == 1
    return text, launches


def library(folder, sanitize=""):
    """Path of the library."""
    folder.mkdir(parents=True, exist_ok=True)
    source, out = folder / "cuda_on_host.cpp", folder / "cuda_on_host.so"
    source.write_text(translated((toolchain.SOURCES / "cuda.cu").read_text())[0])
    root = Path(torch.__file__).parent
    command = [
        "g++",
        *FLAGS,
        *toolchain.DEFINES,
        f"-I{HERE}",
        f"-I{toolchain.SOURCES}",
        "-isystem",
        str(root / "include"),
    ]
    if sanitize:
        command += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    command += [
        str(source),
        "-Wl,--no-as-needed",
        f"-L{root / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def runtime(sanitizer):
    """The shared library of a sanitizer of g++'s."""
    return subprocess.run(["g++", f"-print-file-name=lib{sanitizer}.so"], capture_output=True, text=True).stdout.strip()


def pytest_configure(config):
    """The library stands where the C++ kernels' would."""
    if not shutil.which("g++"):
        return
    folder = Path(os.environ["MMRL_ON_HOST"])
    built = library(folder, os.environ.get("MMRL_SANITIZE", ""))
    toolchain.library = lambda kind, into=None: built
    toolchain.SHIPPED = built.parent / "none"
