"""Libraries that a wheel carries, so that a machine without compilers has the kernels too.

`python -m mmrl.kernels build --prebuilt` fills the package's folder `prebuilt`: the C++ kernels for each level of the
processor, and, if nvcc is installed, one CUDA library for all architectures. The manifest beside them lists for each
library its machine, instruction set and checksum. A library that does not fit this machine, or whose checksum differs,
is not loaded, and a logged line says why; then the kernels are compiled here, as without a wheel.
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
OLDEST_TORCH = "2.11"  # the libraries use its stable ABI, see toolchain.DEFINES


def build(into: Path | None = None) -> tuple[list[Path], str]:
    """Builds every library that this machine has a compiler for, in place of those in the folder `into` (None: the
    package's). Returns their paths, and a line about libraries that could not be built ("": none). Raises KernelError
    if a compiler fails, or if there is none."""
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
    """Returns the path of a shipped library "cpu" or "cuda" that this machine can use, and "". If there is none,
    returns None and the reason why the shipped libraries cannot be used ("" if none is shipped)."""
    folder = toolchain.SHIPPED
    if not (folder / MANIFEST).is_file():
        return None, ""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        of_kind = {name: facts for name, facts in manifest.items() if facts["kind"] == kind}
        reasons = {name: _unfit(folder / name, facts) for name, facts in of_kind.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{folder / MANIFEST} cannot be read: {error}"
    good = [name for name, reason in reasons.items() if not reason]
    if good:
        return folder / good[0], ""
    return None, next((reason for reason in reasons.values()), "")


def _unfit(path: Path, facts: dict[str, Any]) -> str:
    """Returns the reason why a shipped library cannot be used on this machine; "" if it can. facts: its entry in the
    manifest."""
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
    """Returns the reason why the CUDA library cannot run with this torch or on this GPU; "" if it can."""
    major = facts["cuda"].split(".")[0]
    if torch.version.cuda is None or torch.version.cuda.split(".")[0] != major:
        return f"it was built with CUDA {facts['cuda']}, this torch with {torch.version.cuda}"
    if not torch.cuda.is_available():
        return ""
    return _other_gpu(torch.cuda.get_device_capability(), facts["architectures"])


def _other_gpu(capability: tuple[int, int], architectures: list[str]) -> str:
    """Returns the reason why code for `architectures`, such as "90", does not run on a GPU of this compute capability
    (major, minor); "" if it does. Code for the same major and a lower or equal minor number runs; newer GPUs run the
    PTX of the newest architecture."""
    supported = [(int(a[:-1]), int(a[-1])) for a in architectures]  # "90" is (9, 0)
    if capability >= max(supported) or any(a[0] == capability[0] and a[1] <= capability[1] for a in supported):
        return ""
    return f"it is for sm_{', sm_'.join(architectures)}, this GPU is an sm_{capability[0]}{capability[1]}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
