"""Libraries that a wheel carries, so that a machine without compilers has the kernels too.

`python -m mmrl.kernels build --prebuilt` fills the package's folder `prebuilt`: the C++ kernels for each level of the
processor, and one CUDA library for all architectures where there is nvcc. The manifest beside them says what each was
made for and what it holds. A library that does not fit this machine, or is not what the manifest says, is not loaded,
and a line says why; then the kernels are compiled here, as without a wheel.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from mmrl.kernels import toolchain

MANIFEST = "manifest.json"
OLDEST_TORCH = "2.11"  # whose stable ABI the libraries are made for: toolchain.DEFINES


def build(into: Path | None = None) -> tuple[list[Path], str]:
    """Builds every library that this machine can, in place of what lies in the folder. Returns their paths, and a line
    about those that it can not build. Raises KernelError if a compiler fails, or if there is none."""
    folder = into or toolchain.SHIPPED
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("mmrl_*.so"), *folder.glob("mmrl_*.lock"), folder / MANIFEST]:
        old.unlink(missing_ok=True)
    manifest: dict[str, dict[str, Any]] = {}
    for level in toolchain.LEVELS:
        path = toolchain.built("cpu", folder, level)
        manifest[path.name] = {"kind": "cpu", "level": level}
    missing = "no nvcc here: only the C++ kernels were built"
    if toolchain.compiler("cuda"):
        architectures = toolchain.architectures()
        path = toolchain.built("cuda", folder)
        manifest[path.name] = {"kind": "cuda", "cuda": toolchain.toolkit(), "architectures": list(architectures)}
        absent = [f"sm_{a}" for a in toolchain.CUDA_ARCHITECTURES if a not in architectures]
        missing = f"this nvcc does not support {', '.join(absent)}" if absent else ""
    for lock in folder.glob("*.lock"):
        lock.unlink()
    for name, facts in manifest.items():
        facts |= {"sha256": _digest(folder / name), "machine": platform.machine(), "sources": toolchain.sources()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return [folder / name for name in manifest], missing


def fitting(kind: str) -> tuple[Path | None, str]:
    """The shipped library for this machine; without one why none of those that are there can be used, "" where none
    is there."""
    folder = toolchain.SHIPPED
    if not (folder / MANIFEST).is_file():
        return None, ""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        wanted = {name: facts for name, facts in manifest.items() if facts["kind"] == kind}
        reasons = {name: _unfit(folder / name, facts) for name, facts in wanted.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{folder / MANIFEST} cannot be read: {error}"
    good = [name for name, reason in reasons.items() if not reason]
    if good:
        return folder / good[0], ""
    return None, next((reason for reason in reasons.values()), "")


def _unfit(path: Path, facts: dict[str, Any]) -> str:
    """The reason why a shipped library is not for this machine; "" where it is."""
    if facts["machine"] != platform.machine():
        return f"it is for {facts['machine']}, this is {platform.machine()}"
    if facts["sources"] != toolchain.sources():
        return "it was built from other source files than those installed"
    if Version(torch.__version__) < Version(OLDEST_TORCH):
        return f"it needs torch {OLDEST_TORCH} or later, this is {torch.__version__}"
    if facts["kind"] == "cpu" and facts["level"] != toolchain.level():
        return f"it is for processors with {facts['level']}, this one has {toolchain.level()}"
    if facts["kind"] == "cuda" and (reason := _other_cuda(facts)):
        return reason
    if not path.is_file():
        return f"{path.name} is missing"
    return "" if _digest(path) == facts["sha256"] else f"{path.name} has another checksum than its manifest says"


def _other_cuda(facts: dict[str, Any]) -> str:
    """The reason why the CUDA library can not run with this torch or on this GPU; "" where it can."""
    major = facts["cuda"].split(".")[0]
    if torch.version.cuda is None or torch.version.cuda.split(".")[0] != major:
        return f"it was built with CUDA {facts['cuda']}, this torch with {torch.version.cuda}"
    if not torch.cuda.is_available():
        return ""
    return _other_gpu(torch.cuda.get_device_capability(), facts["architectures"])


def _other_gpu(capability: tuple[int, int], architectures: list[str]) -> str:
    """The reason why code for `architectures` does not run on this GPU; "" where it does: code of the same major and an
    older minor number runs, and of the newest there is PTX, for GPUs that come after it."""
    supported = [(int(a[:-1]), int(a[-1])) for a in architectures]
    if capability >= max(supported) or any(a[0] == capability[0] and a[1] <= capability[1] for a in supported):
        return ""
    return f"it is for sm_{', sm_'.join(architectures)}, this GPU is an sm_{capability[0]}{capability[1]}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
